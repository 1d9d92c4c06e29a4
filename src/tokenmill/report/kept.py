"""Results of `soak` and `qualify` as a report shows them; what cannot be read of the latter is left out. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenmill.report.curves import dots
from tokenmill.report.report import PREDICTED, Check, Curve, Line, Origin, Qualified, Soaked
from tokenmill.tuner.soak import SoakResult, Step
from tokenmill.units import GIB


def qualified(data: Mapping[str, Any] | None) -> Qualified | None:
    """A qualification; None where there is none or nothing of it can be read."""
    if data is None:
        return None
    checks = tuple(_checks(data.get("checks", data)))
    return Qualified(checks, _origin(data), _text(data.get("verdict"))) if checks else None


def soaked(result: SoakResult | None) -> Soaked | None:
    """A soak, with a chart of each memory."""
    if result is None:
        return None
    origin = Origin("measured", result.machine, result.build, result.when)
    reason = result.reason + (f"; the engine's last words: {result.last_words}" if result.last_words else "")
    return Soaked(result.usable_context, result.goal, reason, origin, tuple(_soak_curves(result.steps, origin)))


def _checks(data: object) -> Iterator[Check]:
    for name, row in data.items() if isinstance(data, Mapping) else ():
        if not isinstance(row, Mapping):
            continue
        score = _number(row.get("score"))
        threshold = _number(row.get("threshold"))
        good = row.get("good")
        if not isinstance(good, bool):
            good = None if score is None or threshold is None else score >= threshold
        if score is not None:
            yield Check(str(name), score, threshold, good, _text(row.get("words")))


def _soak_curves(steps: Sequence[Step], origin: Origin) -> Iterator[Curve]:
    """Memory by depth with the first number of sequences that was tried, predicted beside measured."""
    alike = [step for step in steps if step.sequences == steps[0].sequences]
    for tier in dict.fromkeys(reading.tier for step in alike for reading in step.memory):
        rows = [(float(step.depth), reading) for step in alike for reading in step.memory if reading.tier == tier]
        measured = dots((x, row.measured_bytes / GIB) for x, row in rows if row.measured_bytes is not None)
        predicted = dots((x, row.predicted_bytes / GIB) for x, row in rows if row.predicted_bytes is not None)
        lines = [Line("measured", origin, measured), Line("predicted", PREDICTED, predicted)]
        if len(measured) > 1:
            shown = tuple(line for line in lines if line.dots)
            yield Curve(f"soak-{tier}", f"Memory of {tier} by depth", "tokens in the context", "GiB", shown)


def _origin(data: Mapping[str, Any]) -> Origin:
    return Origin("measured", _text(data.get("machine")), _text(data.get("build")), _text(data.get("when")))


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
