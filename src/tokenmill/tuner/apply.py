"""Applies earlier measurements on this machine to a new plan.

`operating_point` fills in the settings that `tokenmill tune` found, only where the user left them open. `calibrated`
corrects a plan's forecast by the speeds recorded on this machine.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenmill.config import EngineConfig
from tokenmill.engine import load_history
from tokenmill.hardware.identity import machine_id
from tokenmill.hardware.machine import Machine
from tokenmill.model.identity import identity_of
from tokenmill.model.profile import Profile
from tokenmill.planner.goal import Goal
from tokenmill.planner.make import make
from tokenmill.planner.placement import UNKNOWN, fingerprint
from tokenmill.planner.plan import Decision, Plan
from tokenmill.planner.speed.rates import QuantFamily
from tokenmill.tuner import history
from tokenmill.tuner.calibrate import calibration, main_family
from tokenmill.tuner.point import OperatingPoint
from tokenmill.tuner.point_store import find, has_points
from tokenmill.units import format_tok_s, number_of

_OTHER = (
    "cpu_only",
    "gpus",
    "reserve_ram_bytes",
    "cache_ram_bytes",
    "mlock",
    "allow_disk",
    "own_fit",
    "speculation",
    "moe_cache_bytes",
    "tensor_parallel",
    "gpu_memory_utilization",
    "gpu_margin_bytes",
    "fit_margin_bytes",
    "offload_min_batch",
)
"""Goal fields that an operating point depends on: it applies only with the same values."""
_NAMED = {"gpu_margin_bytes": "margin"}
_ROWS = "--offload-min-batch"


@dataclass(frozen=True, slots=True)
class Overlaid:
    """A goal with the settings of an operating point, or the reason why the point does not apply."""

    goal: Goal
    decisions: tuple[Decision, ...] = ()
    words: str | None = None  # message for the user; None: the point changed nothing
    why_not: str | None = None
    placement: str | None = None  # fingerprint of the point's placement; None: no point applies


def operating_point(
    goal: Goal, machine: Machine, profile: Profile, model_path: Path, config: EngineConfig, state: Path
) -> Overlaid:
    """The goal with the settings of the operating point that applies here; else the goal, perhaps with a reason."""
    if not has_points(state) or not model_path.exists():
        return Overlaid(goal)
    from tokenmill.tuner.point_scope import place_here  # noqa: PLC0415  opens engine libraries, which most plans do not need

    place = place_here(machine, profile.name, model_path, config)
    if place is None:
        return Overlaid(goal)
    found = find(state, place)
    if found.point is None:
        return Overlaid(goal, why_not=found.why_not)
    cores = machine.cpu.cores
    allowed = machine.limits.cgroup_cpus
    return overlay(goal, found.point, cores=cores if cores is None or allowed is None else min(cores, int(allowed)))


def calibrated(plan: Plan, state: Path, model: str, *, engine: str) -> Plan:
    """The plan with its forecast corrected by recorded runs; the same plan if none are recorded."""
    if not plan.fits:
        return plan
    here = machine_id(plan.machine)
    speeds = history.read(state, machine_id=here)
    if not speeds:
        return plan  # the common case; computing a model's identity reads its files
    found = calibration(
        speeds,
        plan,
        machine_id=here,
        model_id=identity_of(model) if Path(model).exists() else None,
        engines=(engine,),
        families=_families(state),
    )
    if found is None:
        return plan
    again = make(plan.machine, plan.profile, plan.goal, calibration=found)
    return replace(again, decisions=(*again.decisions, *_missing_from(again, plan)))


def _missing_from(again: Plan, plan: Plan) -> Iterator[Decision]:
    """Decisions of `plan` that the planner did not make again."""
    own = {decision.name for decision in again.decisions}
    return (decision for decision in plan.decisions if decision.name not in own)


def _families(state: Path) -> Mapping[str, QuantFamily]:
    """Quantization families of the models that were loaded on this machine."""
    found = ((load.model_id, main_family(load.types)) for load in load_history.read(state))
    return {model_id: kind for model_id, kind in found if kind is not None}


def circumstances(goal: Goal) -> tuple[str, ...]:
    """The options of a goal that an operating point depends on, as text."""
    plain = Goal()
    values = {name: getattr(goal, name) for name in _OTHER if getattr(goal, name) != getattr(plain, name)}
    words = {name: _NAMED.get(name, name.removesuffix("_bytes")).replace("_", "-") for name in values}
    return tuple(f"--{words[name]}={value}" for name, value in values.items())


def overlay(goal: Goal, point: OperatingPoint, *, cores: int | None = None) -> Overlaid:
    """Fill in the settings that a goal leaves open. `cores`: physical cores of the machine; None: unknown."""
    asked = goal.offload_min_batch
    found = point.dials.offload_min_batch
    if asked is not None and asked != found:
        rows = "an unknown number of rows" if found is None else f"{found} rows"
        return Overlaid(goal, why_not=f"the operating point was measured with experts moved to the GPU from {rows} on")
    now, then = (
        tuple(each for each in under if not each.startswith(_ROWS)) for under in (circumstances(goal), point.under)
    )
    if now != then:
        more = sorted({*now} - {*then})
        less = sorted({*then} - {*now})
        words = f"without {_option(more[0])}" if not less else f"with {_option(less[0])}"
        return Overlaid(goal, why_not=f"the operating point was measured {words}")
    spared = goal.reserve_cores > 0
    if spared and goal.threads is None and (cores is None or point.dials.threads > cores - goal.reserve_cores):
        words = f"the operating point's {number_of(point.dials.threads, 'thread')}"
        return Overlaid(goal, why_not=f"{words} may need cores that --reserve-cores {goal.reserve_cores} keeps free")
    if (why_not := _other_context(goal, point)) is not None:
        return Overlaid(goal, why_not=why_not)
    taken = dict(_open(goal, point))
    if spared and (cores is None or point.dials.threads_batch > cores - goal.reserve_cores):
        taken.pop("threads_batch", None)
    if not taken:
        return Overlaid(goal)
    figures = point.figures
    best = figures.jobs_tok_s if figures.jobs_tok_s is not None else figures.decode_tok_s
    measured = ""
    if best is not None and taken.keys() >= {"threads", "sequences"}:
        measured = f", measured {format_tok_s(best)} tok/s"
    reason = f"operating point of {point.when[:10]}{measured}"
    decisions = tuple(Decision(name, value, reason) for name, value in _decided(taken))
    words = f"operating point of {point.when[:10]}: {in_words(taken)}{measured}; use --no-point to ignore it"
    return Overlaid(replace(goal, **taken), decisions, words, placement=point.dials.placement)


def _other_context(goal: Goal, point: OperatingPoint) -> str | None:
    """Why the point does not apply to the goal's context; None: it applies."""
    measured = point.dials.context
    if goal.context is None and point.context_given:
        return f"the operating point was measured with --context {measured}; give it to use the point"
    if goal.context is not None and goal.context > measured:
        return f"the operating point was measured with {measured:,} tokens per sequence"
    return None


def _option(text: str) -> str:
    """`--cpu-only` of `--cpu-only=True`, `--gpus 0,2` of `--gpus=(0, 2)`."""
    name, _, value = text.partition("=")
    return name if value == "True" else f"{name} {value.strip('()').rstrip(',').replace(', ', ',')}"


def misplaced(plan: Plan, laid: Overlaid) -> str | None:
    """Why a point does not apply to the plan made with it, which places weights elsewhere; None: it applies."""
    now = fingerprint(plan.profile, plan.placement)
    then = laid.placement
    if then is None or then == now:
        return None
    if then == UNKNOWN:
        return f"the placement of the operating point is unknown, and this plan uses {', '.join(plan.placement.gpus)}"
    where = "without a GPU" if now == UNKNOWN else f"with {now}"
    return f"the operating point was measured with {then}, and this plan is {where}"


def decided(plan: Plan, laid: Overlaid) -> Plan:
    """The plan with decisions attributed to the point, and a warning if the point does not apply to it."""
    own = {decision.name for decision in laid.decisions}
    kept = tuple(decision for decision in plan.decisions if decision.name not in own)
    why = misplaced(plan, laid)
    warnings = (
        plan.warnings
        if why is None
        else (*plan.warnings, f"{why}, so its speeds may not apply; use --no-point to ignore it")
    )
    return replace(plan, decisions=(*kept, *laid.decisions), warnings=warnings)


def _decided(taken: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and values as displayed in plans."""
    for name, value in taken.items():
        if name == "cache_type_k":
            yield "cache type", "/".join(dict.fromkeys((value, taken["cache_type_v"])))
        elif isinstance(value, bool):
            yield name.replace("_", " "), "on" if value else "off"
        elif name != "cache_type_v":
            yield name.replace("_", " "), str(value)


def in_words(settings: Mapping[str, Any]) -> str:
    """The settings of a point as text, most important first."""
    parts = []
    if "threads" in settings:
        parts.append(number_of(settings["threads"], "thread"))
    if "threads_batch" in settings and settings["threads_batch"] != settings.get("threads"):
        parts.append(f"{settings['threads_batch']} for prefill")
    if "sequences" in settings:
        parts.append(number_of(settings["sequences"], "sequence"))
    if "ubatch" in settings:
        parts.append(f"ubatch {settings['ubatch']}")
    if settings.get("cache_type_k", "f16") != "f16":
        parts.append(f"{settings['cache_type_k']} cache")
    if settings.get("flash_attention") is False:
        parts.append("no flash attention")
    if "context" in settings:
        parts.append(f"context {settings['context']}")
    if "offload_min_batch" in settings:
        parts.append(f"offload from {settings['offload_min_batch']} rows")
    return ", ".join(parts)


def _open(goal: Goal, point: OperatingPoint) -> Iterator[tuple[str, Any]]:
    """Settings of the point that the goal leaves open."""
    settings = point.dials
    for name in ("threads", "threads_batch", "sequences", "ubatch", "context"):
        if getattr(goal, name) is None:
            yield name, getattr(settings, name)
    for name in ("mmap", "repack"):  # keep the plan's choice if only one value was tried
        if getattr(goal, name) is None and len({getattr(trial.dials, name) for trial in point.trials}) > 1:
            yield name, getattr(settings, name)
    rows = settings.offload_min_batch
    # the planner chooses another value if decoding reaches this one and no measurement is beyond it
    if goal.offload_min_batch is None and rows is not None:
        asked = goal.sequences or settings.sequences
        as_measured = rows <= settings.sequences <= asked and goal.mmap in (None, settings.mmap)
        if asked < rows or as_measured:
            yield "offload_min_batch", rows
    if goal.cache_type_k is None and goal.cache_type_v is None:
        yield "cache_type_k", settings.cache_type_k
        yield "cache_type_v", settings.cache_type_v
    quantized = {goal.cache_type_v, settings.cache_type_v} - {None, "f16", "f32", "bf16"}
    if goal.flash_attention and not settings.flash_attention and not quantized:
        yield "flash_attention", False
