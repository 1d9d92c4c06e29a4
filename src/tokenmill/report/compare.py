"""Predicted against measured: speeds from the history, sizes and times from the newest load. Pure."""

from collections.abc import Iterator, Sequence
from statistics import median

from tokenmill.engine.measured import Record
from tokenmill.report.curves import dial_words
from tokenmill.report.report import Comparison, Origin
from tokenmill.report.tiers import load_words
from tokenmill.tuner.history import Speed
from tokenmill.tuner.point import Figures

_SPEEDS = (("decode", "decode_tok_s"), ("prefill", "prefill_tok_s"), ("jobs", "jobs_tok_s"))
_SAID_BY = {"engine": "the engine", "process": "the system", "driver": "the driver"}


def comparisons(speeds: Sequence[Speed], load: Record | None) -> list[Comparison]:
    """Every figure that both sides know: sizes first, then speeds, the newest of the same settings."""
    newest: dict[object, Comparison] = {}
    for speed in speeds:
        for what, name in _SPEEDS:
            found = _speed(speed, what, name)
            if found is not None:
                newest[what, found.at, speed.build, speed.engine, speed.source] = found
    return [*(() if load is None else _load(load)), *newest.values()]


def typical_error(found: Sequence[Comparison]) -> float | None:
    """The median of the errors, whichever way they point."""
    errors = [abs(each.error) for each in found if each.error is not None]
    return median(errors) if errors else None


def _speed(speed: Speed, what: str, name: str) -> Comparison | None:
    measured = _figure(speed.figures, name)
    predicted = _figure(speed.predicted, name)
    if measured is None or predicted is None:
        return None
    at = dial_words(speed.dials) + (f", at depth {speed.depth}" if speed.depth else "")
    origin = Origin("measured", speed.machine, speed.build, speed.when, note=f"tokenmill {speed.source}")
    return Comparison(what, at, "tok/s", predicted, measured, origin)


def _figure(figures: Figures, name: str) -> float | None:
    value: float | None = getattr(figures, name)
    return value


def _load(load: Record) -> Iterator[Comparison]:
    at = load_words(load.settings)
    origin = Origin("measured", load.machine, load.build, load.when)
    for row in load.rows:
        if row.measured_bytes is not None:
            what = f"{row.tier} {row.item.replace('_', ' ')}, as {_SAID_BY[row.source]} says"
            yield Comparison(what, at, "bytes", row.predicted_bytes, row.measured_bytes, origin, row.explanation)
