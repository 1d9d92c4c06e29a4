"""Ranks the models of the catalogue by what a machine can run."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tokenmill.api.options import EngineOptions
from tokenmill.config import Config
from tokenmill.hardware.catalog import THIS, find
from tokenmill.hardware.machine import Machine
from tokenmill.model import catalog
from tokenmill.model.catalog import CatalogEntry
from tokenmill.model.describe import describe
from tokenmill.model.profile import Profile
from tokenmill.native.worker_config import goal_for
from tokenmill.planner.goal import Goal
from tokenmill.planner.make import make
from tokenmill.planner.plan import Plan

DEFAULT_CONTEXT = 8192


@dataclass(frozen=True, slots=True)
class RankedModel:
    """A model that fits, in the largest of its listed quantizations that does."""

    name: str
    quantization: str
    parameters: int  # total
    active_parameters: int  # per token
    bytes: int
    context: int
    decode_tok_s: float | None  # predicted, one sequence; None: unknown
    prefill_tok_s: float | None
    confidence: str | None


@dataclass(frozen=True, slots=True)
class Ranking:
    """The models that fit a machine, most parameters first, and the names of the others."""

    machine: str
    context: int
    fits: tuple[RankedModel, ...]
    too_large: tuple[str, ...]


def rank(machine: str, config: Config, *, context: int | None = None) -> Ranking:
    """Plan every model of the catalogue for one sequence on the native engine.

    Plans have no operating point and no calibration, as those of other machines. Raises `UnknownMachine`.
    """
    found = find(machine)
    tokens = context or DEFAULT_CONTEXT
    options = EngineOptions(context=tokens, sequences=1)
    options = options.reserving(config.reserve) if machine == THIS else options
    goal = goal_for(options.goal_for("llama.cpp"))
    fits: list[RankedModel] = []
    left_out: list[str] = []
    for names in _by_shape():
        planned = _largest(found, catalog.entry(names[0]), goal)
        if planned is None:
            left_out += names
        else:
            fits += [_ranked(name, planned[0], planned[1]) for name in names]
    fits.sort(key=lambda model: (-model.parameters, model.name))
    return Ranking(found.name, tokens, tuple(fits), tuple(sorted(left_out)))


def _by_shape() -> Iterator[list[str]]:
    """The names of the catalogue, those of equal models together."""
    groups: dict[str, list[str]] = {}
    for name in catalog.names():
        entry = catalog.entry(name)
        shape = repr((entry.model.architecture, entry.model.keys, entry.model.extras, entry.listed))
        groups.setdefault(shape, []).append(name)
    yield from groups.values()


def _largest(machine: Machine, entry: CatalogEntry, goal: Goal) -> tuple[str, Plan] | None:
    """The largest listed quantization that fits, with its plan."""
    memory = sum(tier.capacity_bytes or 0 for tier in machine.tiers() if tier.kind != "disk")
    profiles = [(quant, _profile(entry.name, quant)) for quant in entry.listed]
    for quant, profile in sorted(profiles, key=lambda item: -item[1].bytes):
        if profile.bytes > memory:
            continue
        trained = profile.training_context
        tokens = min(goal.context or DEFAULT_CONTEXT, trained) if trained else goal.context
        plan = make(machine, profile, replace(goal, context=tokens))
        if plan.fits:
            return quant, plan
    return None


def _profile(name: str, quant: str) -> Profile:
    return describe((catalog.header(f"{name}:{quant}", words=False),), format="catalog")


def _ranked(name: str, quant: str, plan: Plan) -> RankedModel:
    decode = next((speed for speed in plan.forecast.decode if speed.sequences == 1), None)
    return RankedModel(
        name=name,
        quantization=quant,
        parameters=plan.profile.parameters,
        active_parameters=plan.profile.active_parameters,
        bytes=plan.profile.bytes,
        context=plan.settings.context,
        decode_tok_s=plan.forecast.decode_tok_s,
        prefill_tok_s=plan.forecast.prefill_tok_s,
        confidence=None if decode is None else decode.confidence,
    )
