"""How fast the engine of a recipe will be: as it was measured here, as recipes went, or as its plan forecasts it."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from tokenmill.api.engines import EngineChoice
from tokenmill.api.planning import EnginePlan
from tokenmill.engine.measured import machine_id
from tokenmill.hardware.catalog import find
from tokenmill.hardware.machine import Machine
from tokenmill.jobs.expected import Rates
from tokenmill.planner.plan import Plan
from tokenmill.planner.speed.forecast import TOGETHER, decode_speed, prefill_speed
from tokenmill.recipes.engine import build_here
from tokenmill.recipes.estimate import Speeds
from tokenmill.recipes.stage_speeds import from_paces, paces
from tokenmill.tuner import history
from tokenmill.tuner.history import Speed
from tokenmill.tuner.point import OperatingPoint

Asked = Callable[[int], Speeds | None]
"""Speeds with so many tokens in a sequence; None: nothing is known."""


def speeds_for(choice: EngineChoice, wanted: EnginePlan | None, machine: str) -> Asked:
    """What is known of an engine that is not asked; `machine`: the configuration's."""
    if wanted is not None:
        plan = wanted.plan
        found = _of_point(choice, wanted) or _of_history(choice, plan.machine, plan.settings.sequences)
        load_s = plan.forecast.load_cold_s
        worked = None
        if found is None:
            worked = _of_paces(choice, plan.machine, build_here(wanted))
            # Much wider than recipes went so far, a forecast knows more; where there is none, this is something.
            found = worked if worked is not None and plan.settings.sequences <= 2 * worked.width else None
        return lambda depth: _loading(found, load_s) or _predicted(plan, depth) or _loading(worked, load_s)
    if choice.record is not None:
        here = find(machine)
        measured = _of_history(choice, here, None) or _of_paces(choice, here, choice.record.build)
        return lambda _depth: measured
    return lambda _depth: None


def _loading(speeds: Speeds | None, load_s: float | None) -> Speeds | None:
    return None if speeds is None else replace(speeds, load_s=load_s)


def _of_point(choice: EngineChoice, wanted: EnginePlan) -> Speeds | None:
    """The operating point that is in force."""
    if not wanted.tuned:
        return None
    from tokenmill.tuner.here import place_here  # noqa: PLC0415  engines
    from tokenmill.tuner.point_store import load_point  # noqa: PLC0415

    plan = wanted.plan
    place = place_here(plan.machine, plan.profile.name, wanted.model_path, wanted.config)
    point = None if place is None else load_point(choice.state, place)
    if point is None or point.dials.sequences != plan.settings.sequences:
        return None
    return _from_point(point)


def _from_point(point: OperatingPoint) -> Speeds | None:
    figures = point.figures
    width = point.dials.sequences
    if figures.decode_tok_s is None or figures.prefill_tok_s is None:
        return None
    words = f"measured {point.when[:10]} by tokenmill tune with {point.place.build}"
    rates = Rates(figures.prefill_tok_s, with_narrow([(width, figures.decode_tok_s)]))
    return Speeds(rates, width, measured=True, words=words, confidence="measured")


def _of_history(choice: EngineChoice, machine: Machine, width: int | None) -> Speeds | None:
    """The newest measurements of this model with this kind of engine; `width` None: the widest that was measured."""
    here = machine_id(machine)
    kind = choice.record.kind if choice.record is not None else choice.config.kind
    found = [
        speed
        for speed in history.read(choice.state)
        if (speed.machine_id, speed.model_id, speed.engine) == (here, choice.model_id, kind)
    ]
    return from_history(found, width)


def _of_paces(choice: EngineChoice, machine: Machine, build: str | None) -> Speeds | None:
    """As recipes went here."""
    kind = choice.record.kind if choice.record is not None else choice.config.kind
    return from_paces(paces(choice.state, machine=machine, model_id=choice.model_id, engine=kind, build=build))


def from_history(found: Iterable[Speed], width: int | None) -> Speeds | None:
    """Rates of the newest build that was measured; None where writing or reading was not."""
    speeds = list(found)
    build = next((speed.build for speed in reversed(speeds)), None)
    same = [speed for speed in speeds if speed.build == build]
    decode = {speed.dials.sequences: rate for speed in same if (rate := speed.figures.decode_tok_s)}  # the last holds
    prefill = next((rate for speed in reversed(same) if (rate := speed.figures.prefill_tok_s)), None)
    if not decode or prefill is None or (width is not None and width > 2 * max(decode)):
        return None
    rates = Rates(prefill, with_narrow(decode.items()))
    words = f"measured {same[-1].when[:10]} with {build}"
    return Speeds(rates, width or max(decode), measured=True, words=words, confidence="measured")


def with_narrow(points: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Rates by width with one lane in them: a lane alone is at least as fast as its share of the narrowest."""
    given = sorted(points)
    width, rate = given[0]
    return tuple(given) if width == 1 else ((1, rate / width), *given)


def _predicted(plan: Plan, depth: int) -> Speeds | None:
    """As the plan has it; None: the machine states too little."""
    common = plan.machine, plan.profile, plan.settings, plan.placement
    depth = min(depth, plan.settings.context - 1)
    width = plan.settings.sequences
    prefill = prefill_speed(*common, depth=0, prompt=plan.settings.ubatch, calibration=plan.calibration)
    widths = sorted({*(number for number in TOGETHER if number < width), width})
    decode = [
        (number, decode_speed(*common, depth=depth, sequences=number, calibration=plan.calibration))
        for number in widths
    ]
    points = tuple((number, speed.tok_s) for number, speed in decode if speed is not None)
    last = decode[-1][1]
    if prefill is None or last is None:
        return None
    sure = "estimated" if "estimated" in (prefill.confidence, last.confidence) else last.confidence
    words = f"predicted ({sure}); tokenmill bench or tune measures it"
    return Speeds(
        Rates(prefill.tok_s, with_narrow(points)),
        width,
        measured=False,
        words=words,
        confidence=sure,
        load_s=plan.forecast.load_cold_s,
    )
