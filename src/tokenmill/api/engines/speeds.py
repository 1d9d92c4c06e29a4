"""Speeds for an estimate: measured by tune or bench, measured by earlier batches, or forecast by the plan.

The speed of every batch is stored for the next estimate, apart from the history of benchmarks: a batch may run next to
other programs, so its speed must not correct the forecasts of plans.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from tokenmill import measurements
from tokenmill.api.engines.choose import EngineChoice
from tokenmill.api.planning.plan import EnginePlan
from tokenmill.errors import TokenmillError
from tokenmill.hardware.catalog import find
from tokenmill.hardware.identity import machine_id
from tokenmill.hardware.machine import Machine
from tokenmill.jobs.scheduler.estimates import MeasuredRates
from tokenmill.jobs.worker.progress import RunReport
from tokenmill.planner.plan import Plan
from tokenmill.planner.speed.forecast import SEQUENCES, decode_speed, prefill_speed
from tokenmill.tuner import history
from tokenmill.tuner.history import SpeedRecord
from tokenmill.tuner.point import OperatingPoint
from tokenmill.units import number_of

MIN_TOKENS = 64  # computed and generated tokens that a stage needs for a rate
MAX_STAGES = 16  # newest stages used for a rate


@dataclass(frozen=True, slots=True)
class EngineSpeeds:
    """Speeds of an engine and their source."""

    rates: MeasuredRates
    width: int  # number of slots
    measured: bool
    source: str  # source of the figures, for the user
    confidence: str  # measured, calibrated, estimated
    load_s: float | None = None  # predicted; None: unknown, or the engine runs already


@dataclass(frozen=True, slots=True)
class EngineOrigin:
    """The model and the engine whose speed is stored."""

    model_id: str
    engine: str  # native, llama-server, ...
    build: str


@dataclass(frozen=True, slots=True)
class StageSpeed:
    """Measured speed of a batch or of a stage of a recipe, as stored in the measurement journal."""

    when: str  # ISO 8601, UTC
    machine_id: str
    model_id: str
    engine: str  # native, llama-server, ...
    build: str
    answers: int
    lanes: float  # mean number of busy slots
    computed_tokens: int  # computed prompt tokens
    prefill_tok_s: float
    written_tokens: int
    decode_tok_s: float  # total of all slots
    watts: float | None = None  # mean of the whole machine; None: unknown


def stage_speed(
    report: RunReport, origin: EngineOrigin, machine: Machine, when: datetime, *, watts: float | None = None
) -> StageSpeed | None:
    """The speed of a batch; None: too few tokens."""
    rates = report.rates
    tokens = report.tokens
    decode = rates.decode_at(1)  # a report has one rate, at its final number of slots
    if not rates.prefill_tok_s or not decode or min(tokens.computed, tokens.generated) < MIN_TOKENS:
        return None
    return StageSpeed(
        when.astimezone(UTC).isoformat(timespec="seconds"),
        machine_id(machine),
        origin.model_id,
        origin.engine,
        origin.build,
        report.answers,
        round(report.busy_slots, 3),
        tokens.computed,
        rates.prefill_tok_s,
        tokens.generated,
        decode,
        watts,
    )


def record_speed(
    state: Path, machine: Machine, report: RunReport, origin: EngineOrigin, *, watts: float | None = None
) -> None:
    """Store the speed of a batch and the mean power of the machine; a failed write is ignored."""
    speed = stage_speed(report, origin, machine, datetime.now(UTC), watts=watts)
    if speed is not None:
        with suppress(TokenmillError):
            measurements.append(state, "stage", speed)


def stage_speeds(state: Path, *, machine: Machine, model_id: str, engine: str, build: str | None) -> list[StageSpeed]:
    """Stages of a model with an engine on a machine, oldest first; `build` None: the most recent one."""
    place = {"machine_id": machine_id(machine), "model_id": model_id, "engine": engine}
    found = list(measurements.read(state, "stage", StageSpeed, **place))
    last = build if build is not None else next((speed.build for speed in reversed(found)), None)
    return [speed for speed in found if speed.build == last]


def speeds_of_stages(found: Sequence[StageSpeed]) -> EngineSpeeds | None:
    """Mean speeds of the newest stages; None: no stages."""
    newest = found[-MAX_STAGES:]
    if not newest:
        return None
    computed = sum(speed.computed_tokens for speed in newest)
    written = sum(speed.written_tokens for speed in newest)
    prefill_s = sum(speed.computed_tokens / speed.prefill_tok_s for speed in newest)
    decode_s = sum(speed.written_tokens / speed.decode_tok_s for speed in newest)
    slots = max(1, round(sum(speed.lanes * speed.written_tokens for speed in newest) / written))
    rate = written / decode_s
    answers = number_of(sum(speed.answers for speed in newest), "answer")
    source = f"measured by earlier batches here: {answers} up to {newest[-1].when[:10]} with {newest[-1].build}"
    # A single slot is at least as fast as its share.
    points = ((1, rate),) if slots == 1 else ((1, rate / slots), (slots, rate))
    return EngineSpeeds(
        MeasuredRates(computed / prefill_s, points), slots, measured=True, source=source, confidence="measured"
    )


SpeedsAtDepth = Callable[[int], EngineSpeeds | None]
"""Speeds at a number of tokens per sequence; None: unknown."""


def speeds_for(choice: EngineChoice, wanted: EnginePlan | None, machine: str) -> SpeedsAtDepth:
    """Speeds of an engine without starting it; `machine`: the configured machine."""
    if wanted is not None:
        plan = wanted.plan
        found = _of_point(choice, wanted) or _of_history(choice, plan.machine, plan.settings.sequences)
        load_s = plan.forecast.load_cold_s
        recipe_speeds = None
        if found is None:
            recipe_speeds = _of_stages(choice, plan.machine, installed_build(wanted))
            # For many more sequences than in earlier batches the forecast is better, if there is one.
            found = (
                recipe_speeds
                if recipe_speeds is not None and plan.settings.sequences <= 2 * recipe_speeds.width
                else None
            )
        return lambda depth: _loading(found, load_s) or _predicted(plan, depth) or _loading(recipe_speeds, load_s)
    if choice.record is not None:
        here = find(machine)
        measured = _of_history(choice, here, None) or _of_stages(choice, here, choice.record.build)
        return lambda _depth: measured
    return lambda _depth: None


def watts_for(choice: EngineChoice, wanted: EnginePlan | None, machine: str) -> float | None:
    """The machine's power during the last batch of this model that measured it; None: unknown."""
    here = find(machine) if wanted is None else wanted.plan.machine
    kind = choice.record.kind if choice.record is not None else choice.config.kind
    place = {"machine_id": machine_id(here), "model_id": choice.model_id, "engine": kind}
    found = measurements.read(choice.state, "stage", StageSpeed, **place)
    return next((speed.watts for speed in reversed(list(found)) if speed.watts is not None), None)


def installed_build(wanted: EnginePlan) -> str | None:
    """The engine's build; None if it is only known after starting it."""
    from tokenmill.tuner.point_scope import build_of  # noqa: PLC0415  engines, which not every command needs

    try:
        return build_of(wanted.config)
    except TokenmillError:  # not installed or unknown: starting it raises a better error
        return None


def _loading(speeds: EngineSpeeds | None, load_s: float | None) -> EngineSpeeds | None:
    return None if speeds is None else replace(speeds, load_s=load_s)


def _of_point(choice: EngineChoice, wanted: EnginePlan) -> EngineSpeeds | None:
    """Speeds of the operating point that the plan uses."""
    if not wanted.tuned:
        return None
    from tokenmill.tuner.point_scope import place_here  # noqa: PLC0415  imports engines
    from tokenmill.tuner.point_store import load_point  # noqa: PLC0415

    plan = wanted.plan
    place = place_here(plan.machine, plan.profile.name, wanted.model_path, wanted.config)
    point = None if place is None else load_point(choice.state, place)
    if point is None or point.dials.sequences != plan.settings.sequences:
        return None
    return _from_point(point)


def _from_point(point: OperatingPoint) -> EngineSpeeds | None:
    figures = point.figures
    width = point.dials.sequences
    if figures.decode_tok_s is None or figures.prefill_tok_s is None:
        return None
    source = f"measured {point.when[:10]} by tokenmill tune with {point.place.build}"
    rates = MeasuredRates(figures.prefill_tok_s, with_one_slot([(width, figures.decode_tok_s)]))
    return EngineSpeeds(rates, width, measured=True, source=source, confidence="measured")


def _of_history(choice: EngineChoice, machine: Machine, width: int | None) -> EngineSpeeds | None:
    """Newest measurements of this model with this engine; `width` None: the largest measured number of slots."""
    kind = choice.record.kind if choice.record is not None else choice.config.kind
    found = history.read(choice.state, machine_id=machine_id(machine), model_id=choice.model_id, engine=kind)
    return speeds_of_history(found, width)


def _of_stages(choice: EngineChoice, machine: Machine, build: str | None) -> EngineSpeeds | None:
    """Speeds of earlier batches here."""
    kind = choice.record.kind if choice.record is not None else choice.config.kind
    return speeds_of_stages(
        stage_speeds(choice.state, machine=machine, model_id=choice.model_id, engine=kind, build=build)
    )


def speeds_of_history(found: Iterable[SpeedRecord], width: int | None) -> EngineSpeeds | None:
    """Rates of the newest measured build; None if decode or prefill is missing."""
    speeds = list(found)
    build = next((speed.build for speed in reversed(speeds)), None)
    same = [speed for speed in speeds if speed.build == build]
    decode = {
        speed.dials.sequences: rate for speed in same if (rate := speed.figures.decode_tok_s)
    }  # the newest one counts
    prefill = next((rate for speed in reversed(same) if (rate := speed.figures.prefill_tok_s)), None)
    if not decode or prefill is None or (width is not None and width > 2 * max(decode)):
        return None
    rates = MeasuredRates(prefill, with_one_slot(decode.items()))
    source = f"measured {same[-1].when[:10]} with {build}"
    return EngineSpeeds(rates, width or max(decode), measured=True, source=source, confidence="measured")


def with_one_slot(points: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Rates by number of slots, with one slot added: it is at least as fast as its share of the smallest number."""
    given = sorted(points)
    width, rate = given[0]
    return tuple(given) if width == 1 else ((1, rate / width), *given)


def _predicted(plan: Plan, depth: int) -> EngineSpeeds | None:
    """Speeds predicted by the plan; None: unknown."""
    common = plan.machine, plan.profile, plan.settings, plan.placement
    depth = min(depth, plan.settings.context - 1)
    width = plan.settings.sequences
    prefill = prefill_speed(*common, depth=0, prompt=plan.settings.ubatch, calibration=plan.calibration)
    widths = sorted({*(number for number in SEQUENCES if number < width), width})
    decode = [
        (number, decode_speed(*common, depth=depth, sequences=number, calibration=plan.calibration))
        for number in widths
    ]
    points = tuple((number, speed.tok_s) for number, speed in decode if speed is not None)
    last = decode[-1][1]
    if prefill is None or last is None:
        return None
    confidence = "estimated" if "estimated" in (prefill.confidence, last.confidence) else last.confidence
    source = f"predicted ({confidence}); tokenmill bench or tune measures it"
    return EngineSpeeds(
        MeasuredRates(prefill.tok_s, with_one_slot(points)),
        width,
        measured=False,
        source=source,
        confidence=confidence,
        load_s=plan.forecast.load_cold_s,
    )
