"""Groups measurements into curves, with the spread of repeats and the knee. Pure.

A curve varies one setting and fixes the others. If several such groups were measured, the one with the operating point
is used, else the one with the most values of the setting, else the newest. A line never mixes builds, sources or
engines.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from tokenmill.hardware.machine import Machine
from tokenmill.planner.plan import Forecast
from tokenmill.planner.plan import Speed as Forecasted
from tokenmill.report.report import PREDICTED, ChartCurve, Dot, FailedTrial, FigureOrigin, Series
from tokenmill.report.svg import figure_text
from tokenmill.tuner.history import SpeedRecord
from tokenmill.tuner.point import Figures, OperatingPoint, Trial, TrialSettings
from tokenmill.tuner.search.tradeoffs import FALL, LITTLE, steepest
from tokenmill.tuner.search.tradeoffs import Curve as Measured
from tokenmill.units import number_of

Value = Callable[[Figures], float | None]
Varied = Literal["threads", "threads_batch", "sequences", "depth"]


@dataclass(frozen=True, slots=True)
class Axis:
    """A varied setting and the figure that is read at each of its values."""

    key: str
    title: str
    x_name: str
    line_name: str
    varied: Varied
    value: Value
    doubling: bool = False

    def x(self, settings: TrialSettings, depth: int) -> float:
        """The value of the setting in a measurement."""
        return float(depth if self.varied == "depth" else getattr(settings, self.varied))

    def fixed(self, settings: TrialSettings) -> TrialSettings:
        """The settings that are equal along a curve; the maximum context may differ, as it does not affect speeds."""
        if self.varied in ("threads", "threads_batch"):
            return replace(settings, context=0, threads=0, threads_batch=0)
        return replace(settings, context=0, sequences=0 if self.varied == "sequences" else settings.sequences)


BY_THREADS = Axis(
    "threads",
    "Decoding by threads",
    "threads for decoding",
    "decode",
    "threads",
    lambda figures: figures.decode_tok_s,
)
BY_BATCH_THREADS = Axis(
    "prefill-threads",
    "Prefill by threads",
    "threads for prefill",
    "prefill",
    "threads_batch",
    lambda figures: figures.prefill_tok_s,
)
BY_SEQUENCES = Axis(
    "sequences",
    "Decoding by concurrent sequences",
    "concurrent sequences",
    "decode",
    "sequences",
    lambda figures: figures.decode_tok_s,
    doubling=True,
)
JOBS_BY_SEQUENCES = replace(BY_SEQUENCES, line_name="jobs", value=lambda figures: figures.jobs_tok_s)
DECODE_BY_DEPTH = Axis(
    "decode-depth",
    "Decoding by depth",
    "tokens in the context",
    "decode",
    "depth",
    lambda figures: figures.decode_tok_s,
)
PREFILL_BY_DEPTH = Axis(
    "prefill-depth",
    "Prefill by depth",
    "tokens in the context",
    "prefill",
    "depth",
    lambda figures: figures.prefill_tok_s,
)


def setting_curves(
    speeds: Sequence[SpeedRecord], point: OperatingPoint | None, forecast: Forecast | None
) -> list[ChartCurve]:
    """Curves by threads and by sequences that were measured or, for sequences, predicted."""
    curves = []
    for axis in (BY_THREADS, BY_BATCH_THREADS):
        if group := _group(axis, speeds, point):
            curves.append(_curve(axis, group, point))
    group = _group(BY_SEQUENCES, speeds, point)
    curve = _curve(BY_SEQUENCES, group, point)
    if jobs := _measured(JOBS_BY_SEQUENCES, group):
        note = f"{curve.note}; jobs: generated tokens per second, prompts included in the time"
        curve = replace(curve, lines=(*curve.lines, *jobs), note=note)
    predicted = [speed for speed in forecast.decode if speed.depth == 0] if forecast else []
    curves.append(_with_forecast(curve, predicted, by_depth=False))
    return [curve for curve in curves if curve.lines]


def depth_curves(speeds: Sequence[SpeedRecord], forecast: Forecast | None, ubatch: int | None) -> list[ChartCurve]:
    """Prefill and decode by tokens in the context."""
    curves = []
    for axis in (PREFILL_BY_DEPTH, DECODE_BY_DEPTH):
        curve = _curve(axis, _group(axis, speeds, None), None)
        predicted = () if forecast is None else forecast.prefill if axis is PREFILL_BY_DEPTH else forecast.decode
        alone = [speed for speed in predicted if speed.sequences == 1 and speed.ubatch in (None, ubatch)]
        curves.append(replace(_with_forecast(curve, alone, by_depth=True), knee=None))
    return [curve for curve in curves if curve.lines]


def bandwidth_curves(machine: Machine) -> list[ChartCurve]:
    """Memory bandwidth by threads, as measured by `probe --measure`."""
    if machine.measured is None:
        return []
    origin = FigureOrigin("measured", machine.name, when=machine.measured.when)
    rates = [rate for rate in machine.measured.rates if len(rate.by_threads) > 2]
    lines = tuple(
        Series(rate.path, origin, tuple(Dot(float(count), gb_s) for count, gb_s in sorted(rate.by_threads.items())))
        for rate in rates
        if "->" not in rate.path
    )
    return [ChartCurve("bandwidth", "Bandwidth by threads", "threads", "GB/s", lines)] if lines else []


def knee(dots: Sequence[Dot], noise: float = 0.0) -> float | None:
    """The x beyond which more loses or gains little; None if the curve has no knee.

    That is the last x before the steepest fall or, without a fall, the first x from which on little is gained.
    """
    if len(dots) < 3:
        return None
    rates = {round(dot.x): dot.y for dot in dots}
    fall = steepest(Measured("", rates, None), max(FALL, 2 * noise))
    if fall is not None:
        return float(fall[0])
    bend = next(x for x, rate in rates.items() if rate * (1 + LITTLE) >= max(rates.values()))
    return None if bend in (min(rates), max(rates)) else float(bend)


def failed_trials(axis: Axis, point: OperatingPoint) -> tuple[FailedTrial, ...]:
    """Failed trials on the curve of the operating point, with their outcome; one per x."""
    fixed = axis.fixed(point.dials)
    trials = [trial for trial in point.trials if trial.outcome != "measured" and axis.fixed(trial.dials) == fixed]
    found = {axis.x(trial.dials, 0): trial.outcome for trial in trials}
    return tuple(FailedTrial(x, outcome) for x, outcome in sorted(found.items()))


def dots(pairs: Iterable[tuple[float, float]]) -> tuple[Dot, ...]:
    """One dot per x: the median of its measurements, with their range."""
    by_x: dict[float, list[float]] = defaultdict(list)
    for x, y in pairs:
        by_x[x].append(y)
    return tuple(
        Dot(x, median(ys), min(ys), max(ys), len(ys)) if len(ys) > 1 else Dot(x, ys[0])
        for x, ys in sorted(by_x.items())
    )


def settings_text(settings: TrialSettings) -> str:
    """Settings as text, without those at their default."""
    parts = [
        number_of(settings.threads, "thread") if settings.threads else "",
        f"{settings.threads_batch} for prefill" if settings.threads_batch not in (0, settings.threads) else "",
        number_of(settings.sequences, "sequence") if settings.sequences else "",
        f"ubatch {settings.ubatch}",
        f"context {settings.context}" if settings.context else "",
    ]
    cache = {settings.cache_type_k, settings.cache_type_v}
    parts += [f"cache {'/'.join(sorted(cache))}" if cache != {"f16"} else ""]
    parts += ["" if settings.flash_attention else "no flash attention", "" if settings.mmap else "no mmap"]
    parts += [
        "" if settings.repack else "no repack",
        "" if settings.placement == "plan" else f"placement {settings.placement}",
    ]
    parts += [f"offload from {settings.offload_min_batch} rows" if settings.offload_min_batch else ""]
    return ", ".join(part for part in parts if part)


def curve_text(curve: ChartCurve) -> str:
    """A chart in one sentence, for screen readers."""
    line = next((line for line in curve.lines if line.dots), None)
    if line is None:
        return ""
    best = max(line.dots, key=lambda dot: dot.y)
    words = f"{line.name}: maximum {figure_text(best.y)} {curve.unit} at {best.x:g}"
    if curve.knee is not None and (bend := line.at(curve.knee)) is not None and bend.x != best.x:
        words += f"; knee at {bend.x:g}, with {100 * bend.y / best.y:.0f} % of the maximum"
    if curve.chosen is not None and (chosen := line.at(curve.chosen)) is not None:
        words += f"; chosen: {chosen.x:g}, with {figure_text(chosen.y)} {curve.unit}"
    return words


@dataclass(frozen=True, slots=True)
class TrialDot:
    """A trial in the chart of the Pareto front."""

    x: float
    y: float
    words: str
    best: bool  # on the Pareto front
    chosen: bool


@dataclass(frozen=True, slots=True)
class Front:
    """Trials by speed and by one cost, such as threads."""

    x_name: str
    y_name: str
    trials: tuple[TrialDot, ...]
    whole: bool  # x is an integer


_COSTS: tuple[tuple[str, bool, Callable[[Trial], float | None]], ...] = (
    ("seconds to the first token", False, lambda trial: trial.figures.first_token_s),
    ("joules per token", False, lambda trial: trial.figures.joules_per_token),
    ("tokens of context", True, lambda trial: float(trial.dials.context)),
    ("threads", True, lambda trial: float(trial.dials.threads)),
    ("concurrent sequences", True, lambda trial: float(trial.dials.sequences)),
)


def throughput(figures: Figures) -> tuple[str, float] | None:
    """Tokens per second of jobs, else of decoding."""
    if figures.jobs_tok_s is not None:
        return "jobs", figures.jobs_tok_s
    return None if figures.decode_tok_s is None else ("decode", figures.decode_tok_s)


def front_of(point: OperatingPoint) -> Front | None:
    """The trials by the first cost in which they differ; None if there is nothing to compare."""
    gained = throughput(point.figures)
    if gained is None:
        return None
    on_front = {trial.dials: trial for trial in point.front}
    # figures on the front combine all runs of the same settings; of other settings the last run is shown
    last = {trial.dials: trial for trial in point.trials if trial.counts} | on_front
    kept = [
        (trial, found[1])
        for trial in last.values()
        if (found := throughput(trial.figures)) is not None and found[0] == gained[0]
    ]
    for name, whole, cost in _COSTS:
        placed = [(trial, x, y) for trial, y in kept if (x := cost(trial)) is not None]
        if len({x for _, x, _ in placed}) > 1:
            tried = tuple(
                TrialDot(x, y, settings_text(trial.dials), trial.dials in on_front, trial.dials == point.dials)
                for trial, x, y in placed
            )
            return Front(name, gained[0], tried, whole)
    return None


def _group(axis: Axis, speeds: Sequence[SpeedRecord], point: OperatingPoint | None) -> list[SpeedRecord]:
    """The measurements of one curve; empty if the setting was never varied."""
    groups: dict[Hashable, list[SpeedRecord]] = defaultdict(list)
    for speed in speeds:
        if axis.value(speed.figures) is not None:
            depth = None if axis.varied == "depth" else speed.depth
            groups[speed.source, speed.engine, speed.build, axis.fixed(speed.dials), depth].append(speed)

    def values(group: list[SpeedRecord]) -> int:
        return len({axis.x(speed.dials, speed.depth) for speed in group})

    def rank(group: list[SpeedRecord]) -> tuple[bool, int, str]:
        has_point = point is not None and any(speed.dials == point.dials for speed in group)
        return has_point, values(group), max(speed.when for speed in group)

    return max((group for group in groups.values() if values(group) > 1), key=rank, default=[])


def _curve(axis: Axis, group: Sequence[SpeedRecord], point: OperatingPoint | None) -> ChartCurve:
    lines = [*_measured(axis, group), *_predicted(axis, group)]
    measured = lines[0].dots if lines else ()
    chosen: float | None = None
    failed: tuple[FailedTrial, ...] = ()
    if point is not None and group and axis.fixed(group[0].dials) == axis.fixed(point.dials):
        x = axis.x(point.dials, 0)
        chosen = x if any(dot.x == x for dot in measured) else None
        failed = failed_trials(axis, point)
    return ChartCurve(
        axis.key,
        axis.title,
        axis.x_name,
        "tok/s",
        tuple(lines),
        doubling=axis.doubling,
        knee=knee(measured, point.noise if point else 0.0),
        chosen=chosen,
        lost=failed,
        note=settings_text(axis.fixed(group[-1].dials)) if group else None,
    )


def _measured(axis: Axis, group: Sequence[SpeedRecord]) -> list[Series]:
    pairs = [
        (axis.x(speed.dials, speed.depth), value) for speed in group if (value := axis.value(speed.figures)) is not None
    ]
    if not pairs:
        return []
    last = max(group, key=lambda speed: speed.when)
    origin = FigureOrigin("measured", last.machine, last.build, last.when, note=f"tokenmill {last.source}")
    return [Series(axis.line_name, origin, dots(pairs))]


def _predicted(axis: Axis, group: Sequence[SpeedRecord]) -> list[Series]:
    """The predictions that were stored with the measurements."""
    latest = {axis.x(speed.dials, speed.depth): axis.value(speed.predicted) for speed in group}
    pairs = [(x, y) for x, y in latest.items() if y is not None]
    return [Series("predicted", PREDICTED, dots(pairs))] if len(pairs) > 1 else []


def _with_forecast(curve: ChartCurve, speeds: Sequence[Forecasted], *, by_depth: bool) -> ChartCurve:
    """A curve with the plan's forecast, unless predictions were stored with the measurements."""
    if len(speeds) < 2 or any(line.origin.kind == "predicted" for line in curve.lines):
        return curve
    origin = replace(PREDICTED, note=f"by the plan, {speeds[0].confidence}")
    pairs = ((float(speed.depth if by_depth else speed.sequences), speed.tok_s) for speed in speeds)
    return replace(curve, lines=(*curve.lines, Series("predicted", origin, dots(pairs))))
