"""From a model, a machine and options to the plan that `run`, `serve` and `tune` start.

`plan_engine` makes every plan: it reads the machine and the model, applies the operating point of `tokenmill tune`,
places the tensors, and calibrates the forecast with earlier measurements. It starts nothing.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack, cast, get_args

from tokenmill.api.options import (
    ENGINES,
    EngineArguments,
    EngineOptions,
    dialect_of,
    engine_name,
    engine_options,
    known_engines,
)
from tokenmill.api.planning.loadable import has_this_library, require_here, require_weights, usable_goal, warned
from tokenmill.api.progress import log
from tokenmill.config import Config, EngineConfig
from tokenmill.errors import DoesNotFit, UnknownModel, UsageError
from tokenmill.hardware import catalog as machines
from tokenmill.hardware.catalog import THIS, find
from tokenmill.hardware.machine import Machine
from tokenmill.model import catalog, derived
from tokenmill.model.describe import describe
from tokenmill.model.gguf import is_url
from tokenmill.model.profile import Profile
from tokenmill.model.read import read
from tokenmill.planner.alternatives import CONTEXT_STEP, longest_context
from tokenmill.planner.goal import DialectName, Goal
from tokenmill.planner.make import make
from tokenmill.planner.plan import Command, Decision, Plan
from tokenmill.planner.regimes import BatchProfile, Regimes, batch_options, can_stream
from tokenmill.tuner.apply import Overlaid, calibrated, decided, misplaced, operating_point
from tokenmill.tuner.slots import DEFAULT_SLOTS, FALLBACK_SLOTS
from tokenmill.units import format_bytes

if TYPE_CHECKING:
    from tokenmill.launch import FlagSet

_QUANTS = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_K_S", "IQ4_XS", "Q3_K_M", "Q2_K", "IQ2_XXS", "IQ1_S")


ReadBatch = Callable[[], BatchProfile | None]
"""Reads the lengths of a batch's jobs; called only if the plan depends on them."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """A plan with the model file and the configuration that an engine is started with."""

    plan: Plan
    model_path: Path
    config: EngineConfig
    tuned: bool = False  # an operating point applies, so the slots need not be measured
    regimes: Regimes | None = None  # the forecasts that chose the slots and the KV layout for a batch

    def require_fit(self) -> "EnginePlan":
        """This plan; DoesNotFit if it does not fit."""
        if not self.plan.fits:
            raise does_not_fit(self.plan)
        return self


def plan(
    model: str | Path,
    *,
    config: Config | str | Path | None = None,
    **options: Unpack[EngineArguments],
) -> Plan:
    """Plan a model on a machine without loading anything.

    `model`: a GGUF file, a folder of safetensors, a URL, a pulled model or a catalogue name such as
    `kimi-k2.5:Q4_K_S`. `machine=`: `this`, a catalogue name or a machine file. The options are those of `tokenmill
    plan`; the plan is the one that `tokenmill.run` and `tokenmill.serve` start with the same arguments. A plan that
    does not fit is returned too: see `Plan.fits` and `Plan.changes`.
    """
    asked = engine_options(options)
    settings = configuration(config)
    made = plan_engine(str(model), asked, settings, files=False)
    return replace(made.plan, command=command_for(made, str(model), asked) if made.plan.fits else None)


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """A model and a machine; `plan` is None for a running server."""

    path: str  # of its file, or the catalogue name
    here: bool  # the file is on this machine
    machine: Machine
    profile: Profile
    plan: Plan | None


def describe_or_plan(model: str, options: EngineOptions, config: Config) -> DescribedModel:
    """`plan_engine` for a model on this machine; for any other, a plan from its description.

    The latter has no operating point, no calibration and no default number of sequences.
    """
    path = locate(model, config, remote=True)
    here = Path(path).exists()
    kind = options.engine_config(config).kind
    machine = find(options.machine or config.machine)
    profile = read(path)
    plan = None
    if kind in ENGINES:
        goal = options.goal_for(dialect_of(options.engine_config(config)))
        plan = plan_engine(model, options, config, files=False).plan if here else make(machine, profile, goal)
    return DescribedModel(path, here, plan.machine if plan else machine, profile, plan)


def configuration(config: Config | str | Path | None) -> Config:
    """The given configuration, the one in the given file, or the one that the command line would use."""
    from tokenmill.config import load  # noqa: PLC0415  the name of another function in this package

    return config if isinstance(config, Config) else load(None if config is None else Path(config))


def plan_engine(
    model: str,
    options: EngineOptions,
    config: Config,
    *,
    files: bool = True,
    batch: ReadBatch | BatchProfile | None = None,
) -> EnginePlan:
    """The plan for a model on the engine that the options choose.

    `batch`: the jobs that the engine is for, or a function that reads their lengths; if experts can be copied to a GPU,
    the plan then has the slots and the KV layout that finish them soonest.
    `files`: an engine will be started, so the model's files are required; UnknownModel if they are missing.
    """
    from tokenmill.native.builds.finished import library_decisions  # noqa: PLC0415  reads the machine

    engine, dialect = engine_to_plan(options, config, started=files)
    path = locate(model, config, remote=not files)
    if files and (is_url(path) or is_derived(path)):
        raise UnknownModel(
            f"{model} has not been downloaded, and an engine needs its files", hint=catalog.pull_hint(model)
        )
    named = options.machine or config.machine
    machine = find(named)
    profile = read(path)
    if files:
        require_weights(profile, model)
        require_here(machine, named)
    if named == THIS or named not in machines.names():
        options = options.reserving(config.reserve)
    goal = options.goal_for(dialect)
    if goal.speculation is not None and engine.kind == "native":
        raise UsageError(
            "the native engine does not draft tokens",
            hint="use --engine llama-server, or omit --mtp and --draft-model",
            code="no_speculation",
        )
    unused = None
    if files or has_this_library(machine, named):
        goal, unused = usable_goal(machine, goal, engine)
    reasons: tuple[Decision, ...] = ()
    if options.max_context:
        goal, reasons = _longest(machine, profile, goal, engine)
    point = Overlaid(goal)
    if options.point and dialect == dialect_of(engine):
        point = operating_point(goal, machine, profile, Path(path), engine, config.state_path)
    point, made = _placed(machine, profile, goal, point, engine, path)
    found = None
    if batch is not None and engine.kind == "native" and options.sequences is None:
        found = _regimes(machine, profile, goal, batch, engine, here=named == THIS)
    if found is not None:
        made = _for_batch(machine, profile, made, found)
    if options.machine is None:  # operating points are found on this machine
        _log_point(point)
    made = decided(calibrated(made, config.state_path, path, engine=engine.kind), point)
    made = replace(made, decisions=(*reasons, *made.decisions, *library_decisions(engine, config.engines_path)))
    made = warned(made, unused, started=files)
    limited = _with_limits(made, engine, here=named == THIS)
    return EnginePlan(
        limited, Path(path), engine, point.words is not None or made.settings.total_cells is not None, found
    )


def _regimes(
    machine: Machine, profile: Profile, goal: Goal, batch: ReadBatch | BatchProfile, engine: EngineConfig, *, here: bool
) -> Regimes | None:
    """The ways to run a batch on the native engine; None if the jobs need not be read or cannot be.

    Another machine is assumed to have a library of its own, built with `tokenmill engines build`.
    """
    from tokenmill.native.builds.build import DEFAULT_SEQUENCES  # noqa: PLC0415  reads the machine
    from tokenmill.native.builds.finished import max_sequences  # noqa: PLC0415
    from tokenmill.native.worker_config import RETAINED_SEQUENCES, max_slots  # noqa: PLC0415  pydantic models

    if not isinstance(batch, BatchProfile):
        read_batch = batch() if can_stream(machine, profile, goal) else None
        if read_batch is None:
            return None
        batch = read_batch
    limit = max_slots(profile, max_sequences(engine) if here else DEFAULT_SEQUENCES)
    return batch_options(machine, profile, goal, batch, max_slots=limit, retained=RETAINED_SEQUENCES)


def _for_batch(machine: Machine, profile: Profile, made: Plan, found: Regimes) -> Plan:
    """The plan of the fastest regime if that streams; resident batches keep the plan, whose slots are measured."""
    best = found.best
    if best is None or best.regime == "resident":
        return made
    plan = make(machine, profile, best.goal)
    if not plan.fits:
        return made
    what = f"{best.slots:,} slots, KV layout {best.layout}, host experts copied to the GPU in every pass"
    return replace(plan, decisions=(*plan.decisions, Decision("batch", what, found.reason())))


def engine_to_plan(options: EngineOptions, config: Config, *, started: bool) -> tuple[EngineConfig, DialectName]:
    """The engine's configuration and the dialect to plan for; older dialects can be planned but not started."""
    asked = engine_name(options.engine or config.engine.kind)
    if asked in ENGINES:
        engine = options.engine_config(config)
        return engine, dialect_of(engine)
    if "://" in asked:
        raise UsageError(
            f"{asked} is a running server, so there is nothing to plan",
            hint="run and load use a running server as it is",
        )
    if asked not in get_args(DialectName):
        raise UsageError(f"unknown engine {asked!r}", hint=f"known: {known_engines()}")
    if started:
        raise UsageError(f"{asked} can be planned but not started", hint=f"start one of {', '.join(ENGINES)}")
    kind = "ik_llama" if asked.startswith("ik") else "llama-server"
    return replace(options, engine=kind).engine_config(config), cast(DialectName, asked)


def locate(model: str, config: Config, *, remote: bool = False) -> str:
    """The path of a pulled model; files, URLs, references to a config.json and catalogue names are returned unchanged.

    `remote`: so are names of a Hugging Face repository that has not been pulled, which `read` describes.
    """
    known = catalog.looks_like_name(model) and catalog.known(model.partition(":")[0])
    if is_url(model) or Path(model).exists() or known or derived.reference(model) is not None:
        return model
    from tokenmill.model.pull import locate as pulled  # noqa: PLC0415  imports an HTTP client
    from tokenmill.model.pull import names  # noqa: PLC0415

    if path := pulled(model, config.models_path):
        return str(path)
    if model.startswith("hf:") and remote:
        return model
    if model in names() or model.startswith("hf:"):
        raise UnknownModel(f"{model} has not been downloaded", hint=f"tokenmill models pull {model}")
    return model


def command_for(
    made: EnginePlan,
    model: str,
    options: EngineOptions,
    *,
    binary: str | None = None,
    flags: "FlagSet | None" = None,
) -> Command:
    """The command that starts a plan's engine: a server's own, or `tokenmill serve --engine-only` for native."""
    if made.config.kind == "native":
        here = model.startswith("hf:") or made.model_path.exists()  # serve knows pulled models by name
        name = model if here and derived.reference(model) is None else file_name(model)
        return _native_command(made.plan, name, options)
    from tokenmill.launch import spell  # noqa: PLC0415  reads the captured flags of every engine

    return spell(made.plan, model=file_name(str(made.model_path)), binary=binary, flags=flags)


def file_name(model: str) -> str:
    """The model's file in a command; for a model without a file, a placeholder path."""
    if not is_derived(model) and not model.startswith("hf:"):
        return model
    config = derived.reference(model)
    name = model.removeprefix("hf:") if config is None else f"{config.name}-{config.quant or derived.DEFAULT_QUANT}"
    return f"/path/to/models/{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}.gguf"


def is_derived(path: str) -> bool:
    """Whether a located model is described by the catalogue or by a config.json, so that it has no file."""
    if derived.reference(path) is not None:
        return True
    return catalog.looks_like_name(path) and not Path(path).exists()


def smaller_quants(model: str) -> Iterator[tuple[str, Profile]]:
    """Yield smaller quantizations of a model that is described by the catalogue or a local config.json, best first."""
    config = derived.reference(model)
    if config is not None and not is_url(config.where):
        name, size = config.where, derived.read_config(config).bytes
    elif is_derived(model) and config is None:
        name, chosen = catalog.resolve(model)
        size = _weights(f"{name}:{chosen}").bytes
    else:
        return
    for quant in _QUANTS:
        profile = _weights(f"{name}:{quant}")
        if profile.bytes < size:
            yield quant, profile


def does_not_fit(plan: Plan) -> DoesNotFit:
    """The error for a plan that does not fit, with the missing bytes and the first change that would help."""
    missing = "; ".join(f"{lack.tier} lacks {format_bytes(lack.missing_bytes)}" for lack in plan.shortfalls)
    hint = f"would fit with {plan.changes[0].what}" if plan.changes else "use a smaller quantization or context"
    return DoesNotFit(f"{plan.profile.name} does not fit {plan.machine.name}: {missing}", plan=plan, hint=hint)


def _placed(
    machine: Machine, profile: Profile, goal: Goal, point: Overlaid, engine: EngineConfig, path: str
) -> tuple[Overlaid, Plan]:
    """The plan with the operating point, unless that does not fit or was measured with another placement."""
    made = _with_sequences(machine, profile, point.goal, engine, path)
    if point.words is None:
        return point, made
    if not made.fits:
        why: str | None = "the operating point does not fit any more; run tokenmill tune again"
    else:
        why = misplaced(made, point)
    if why is None:
        return point, made
    return Overlaid(goal, why_not=why), _with_sequences(machine, profile, goal, engine, path)


def _longest(machine: Machine, profile: Profile, goal: Goal, engine: EngineConfig) -> tuple[Goal, tuple[Decision, ...]]:
    """The goal with the longest context that fits; without one, the shortest, whose plan shows what is missing."""
    goal = replace(goal, sequences=goal.sequences or 1)
    longest = longest_context(machine, profile, _engine_goal(goal, engine))
    if longest is None:
        return replace(goal, context=CONTEXT_STEP), ()
    why = "all that the model was trained for" if longest == profile.training_context else "the longest that fits"
    return replace(goal, context=longest), (Decision("context", str(longest), why),)


def _engine_goal(goal: Goal, engine: EngineConfig) -> Goal:
    """The goal as the engine carries it out."""
    if engine.kind != "native":
        return goal
    from tokenmill.native.worker_config import goal_for  # noqa: PLC0415  pydantic models of the worker

    return goal_for(goal)


def _with_sequences(machine: Machine, profile: Profile, goal: Goal, engine: EngineConfig, path: str) -> Plan:
    """A plan with the requested number of sequences; by default 8, or fewer if 8 do not fit."""

    def planned(sequences: int) -> Plan:
        wanted = _engine_goal(replace(goal, sequences=sequences), engine)
        return make(machine, profile, wanted, alternatives=smaller_quants(path))

    if goal.sequences is not None:
        return planned(goal.sequences)
    first = planned(DEFAULT_SLOTS)
    if first.fits:
        return _decided_sequences(first, "default for batches; tokenmill tune finds the best number")
    for fewer in FALLBACK_SLOTS:
        made = planned(fewer)
        if made.fits and fewer == 1:
            alone = made
        elif made.fits:
            return _decided_sequences(made, "as many as fit")
        elif fewer == 1:
            return made
    return _decided_sequences(alone, "as many as fit")


def _decided_sequences(plan: Plan, why: str) -> Plan:
    return replace(plan, decisions=(*plan.decisions, Decision("sequences", str(plan.settings.sequences), why)))


def _with_limits(plan: Plan, engine: EngineConfig, *, here: bool) -> Plan:
    """The plan with the decisions about cores, memory limits and priority of the engine's process."""
    from tokenmill.engine.limits.reserve import decisions  # noqa: PLC0415  reads cgroups

    return replace(plan, decisions=(*plan.decisions, *decisions(plan, engine, here=here)))


def _native_command(plan: Plan, name: str, options: EngineOptions) -> Command:
    settings = plan.settings
    # The command is run on the machine that it was planned for.
    machine = None if options.machine in machines.names() else options.machine
    given = replace(
        options,
        context=settings.context,
        max_context=False,
        sequences=settings.sequences,
        engine=None,
        machine=machine,
    )
    words = ["tokenmill", "serve", name, "--engine-only"]
    for field in fields(EngineOptions):
        value = getattr(given, field.name)
        if value == field.default:
            continue
        flag = field.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return Command(tuple(words), {})


def _log_point(point: Overlaid) -> None:
    if point.words is not None:
        log.info(point.words)
    elif point.why_not is not None:
        log.info("planned without the operating point: %s", point.why_not)


def _weights(name: str) -> Profile:
    """The profile of a model without files, without its vocabulary, which plans do not need."""
    if (config := derived.reference(name)) is not None:
        return derived.read_config(config)
    return describe((catalog.header(name, words=False),), format="catalog")
