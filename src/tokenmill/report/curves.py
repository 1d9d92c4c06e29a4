"""Groups measurements into curves, with the spread of repeats and the knee. Pure.

A curve holds everything still but one setting. Where several such groups were measured, the one that the operating
point lies in is taken, then the one with most places, then the newest. Figures of different builds, sources and
engines are never on one line.
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
    """One setting that is varied and what is read there."""

    key: str
    title: str
    x_name: str
    line_name: str
    varied: Varied
    value: Value
    doubling: bool = False

    def x(self, dials: TrialSettings, depth: int) -> float:
        """Where on the axis a measurement lies."""
        return float(depth if self.varied == "depth" else getattr(dials, self.varied))

    def still(self, dials: TrialSettings) -> TrialSettings:
        """Dials with what may differ along the curve taken out; how long the context may grow changes no speed."""
        if self.varied in ("threads", "threads_batch"):
            return replace(dials, context=0, threads=0, threads_batch=0)
        return replace(dials, context=0, sequences=0 if self.varied == "sequences" else dials.sequences)


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
    "Decoding by sequences at once",
    "sequences at once",
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
    """By threads and by sequences: those for which something was measured or, for sequences, predicted."""
    curves = []
    for axis in (BY_THREADS, BY_BATCH_THREADS):
        if group := _group(axis, speeds, point):
            curves.append(_curve(axis, group, point))
    group = _group(BY_SEQUENCES, speeds, point)
    curve = _curve(BY_SEQUENCES, group, point)
    if jobs := _measured(JOBS_BY_SEQUENCES, group):
        note = f"{curve.note}; jobs: tokens written with the time of the prompts counted"
        curve = replace(curve, lines=(*curve.lines, *jobs), note=note)
    together = [speed for speed in forecast.decode if speed.depth == 0] if forecast else []
    curves.append(_with_forecast(curve, together, by_depth=False))
    return [curve for curve in curves if curve.lines]


def depth_curves(speeds: Sequence[SpeedRecord], forecast: Forecast | None, ubatch: int | None) -> list[ChartCurve]:
    """Prefill and decode by tokens in the context."""
    curves = []
    for axis in (PREFILL_BY_DEPTH, DECODE_BY_DEPTH):
        curve = _curve(axis, _group(axis, speeds, None), None)
        told = () if forecast is None else forecast.prefill if axis is PREFILL_BY_DEPTH else forecast.decode
        alone = [speed for speed in told if speed.sequences == 1 and speed.ubatch in (None, ubatch)]
        curves.append(replace(_with_forecast(curve, alone, by_depth=True), knee=None))
    return [curve for curve in curves if curve.lines]


def bandwidth_curves(machine: Machine) -> list[ChartCurve]:
    """Bandwidth of the memories by threads, as `probe --measure` saw it."""
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
    """Where more stops paying, as an operating point's sentence has it; None: nothing bends.

    That is the last place before the steepest fall or, where none falls, the first beyond which little is added.
    """
    if len(dots) < 3:
        return None
    rates = {round(dot.x): dot.y for dot in dots}
    fall = steepest(Measured("", rates, None), max(FALL, 2 * noise))
    if fall is not None:
        return float(fall[0])
    bend = next(x for x, rate in rates.items() if rate * (1 + LITTLE) >= max(rates.values()))
    return None if bend in (min(rates), max(rates)) else float(bend)


def lost(axis: Axis, point: OperatingPoint) -> tuple[FailedTrial, ...]:
    """Trials of the chosen point's curve that gave no figures, and what ended them; each place once."""
    still = axis.still(point.dials)
    trials = [trial for trial in point.trials if trial.outcome != "measured" and axis.still(trial.dials) == still]
    found = {axis.x(trial.dials, 0): trial.outcome for trial in trials}
    return tuple(FailedTrial(place, why) for place, why in sorted(found.items()))


def dots(pairs: Iterable[tuple[float, float]]) -> tuple[Dot, ...]:
    """One point per x: the median of its measurements, and their range."""
    by_x: dict[float, list[float]] = defaultdict(list)
    for x, y in pairs:
        by_x[x].append(y)
    return tuple(
        Dot(x, median(ys), min(ys), max(ys), len(ys)) if len(ys) > 1 else Dot(x, ys[0])
        for x, ys in sorted(by_x.items())
    )


def dial_words(dials: TrialSettings) -> str:
    """Dials in a few words; those at their usual value are left out."""
    parts = [
        number_of(dials.threads, "thread") if dials.threads else "",
        f"{dials.threads_batch} for prefill" if dials.threads_batch not in (0, dials.threads) else "",
        number_of(dials.sequences, "sequence") if dials.sequences else "",
        f"ubatch {dials.ubatch}",
        f"context {dials.context}" if dials.context else "",
    ]
    cache = {dials.cache_type_k, dials.cache_type_v}
    parts += [f"cache {'/'.join(sorted(cache))}" if cache != {"f16"} else ""]
    parts += ["" if dials.flash_attention else "no flash attention", "" if dials.mmap else "no mmap"]
    parts += ["" if dials.repack else "no repack", "" if dials.placement == "plan" else f"placement {dials.placement}"]
    parts += [f"offload from {dials.offload_min_batch} rows" if dials.offload_min_batch else ""]
    return ", ".join(part for part in parts if part)


def curve_words(curve: ChartCurve) -> str:
    """A chart in one sentence, for screen readers."""
    line = next((line for line in curve.lines if line.dots), None)
    if line is None:
        return ""
    best = max(line.dots, key=lambda dot: dot.y)
    words = f"{line.name}: most at {best.x:g}, {figure_text(best.y)} {curve.unit}"
    if curve.knee is not None and (bend := line.at(curve.knee)) is not None and bend.x != best.x:
        words += f"; the knee is at {bend.x:g}, with {100 * bend.y / best.y:.0f} % of that"
    if curve.chosen is not None and (chosen := line.at(curve.chosen)) is not None:
        words += f"; chosen: {chosen.x:g}, {figure_text(chosen.y)} {curve.unit}"
    return words


@dataclass(frozen=True, slots=True)
class Tried:
    """One trial as a dot."""

    x: float
    y: float
    words: str
    best: bool  # on the Pareto front
    chosen: bool


@dataclass(frozen=True, slots=True)
class Front:
    """Trials over what they cost."""

    x_name: str
    y_name: str
    trials: tuple[Tried, ...]
    whole: bool  # x has whole values only


_COSTS: tuple[tuple[str, bool, Callable[[Trial], float | None]], ...] = (
    ("seconds to the first token", False, lambda trial: trial.figures.first_token_s),
    ("joules per token", False, lambda trial: trial.figures.joules_per_token),
    ("tokens of context", True, lambda trial: float(trial.dials.context)),
    ("threads", True, lambda trial: float(trial.dials.threads)),
    ("sequences at once", True, lambda trial: float(trial.dials.sequences)),
)


def throughput(figures: Figures) -> tuple[str, float] | None:
    """Tokens per second of jobs, else of decoding."""
    if figures.jobs_tok_s is not None:
        return "jobs", figures.jobs_tok_s
    return None if figures.decode_tok_s is None else ("decode", figures.decode_tok_s)


def front_of(point: OperatingPoint) -> Front | None:
    """The first cost in which the trials differ; None: there is nothing to compare."""
    gained = throughput(point.figures)
    if gained is None:
        return None
    held = {trial.dials: trial for trial in point.front}
    # the front's figures are already those of all runs of its dials together; of other dials the last run is shown
    last = {trial.dials: trial for trial in point.trials if trial.counts} | held
    kept = [
        (trial, found[1])
        for trial in last.values()
        if (found := throughput(trial.figures)) is not None and found[0] == gained[0]
    ]
    for name, whole, cost in _COSTS:
        placed = [(trial, x, y) for trial, y in kept if (x := cost(trial)) is not None]
        if len({x for _, x, _ in placed}) > 1:
            tried = tuple(
                Tried(x, y, dial_words(trial.dials), trial.dials in held, trial.dials == point.dials)
                for trial, x, y in placed
            )
            return Front(name, gained[0], tried, whole)
    return None


def _group(axis: Axis, speeds: Sequence[SpeedRecord], point: OperatingPoint | None) -> list[SpeedRecord]:
    """The measurements of one curve; none where nothing was varied."""
    groups: dict[Hashable, list[SpeedRecord]] = defaultdict(list)
    for speed in speeds:
        if axis.value(speed.figures) is not None:
            depth = None if axis.varied == "depth" else speed.depth
            groups[speed.source, speed.engine, speed.build, axis.still(speed.dials), depth].append(speed)

    def places(group: list[SpeedRecord]) -> int:
        return len({axis.x(speed.dials, speed.depth) for speed in group})

    def merit(group: list[SpeedRecord]) -> tuple[bool, int, str]:
        ours = point is not None and any(speed.dials == point.dials for speed in group)
        return ours, places(group), max(speed.when for speed in group)

    return max((group for group in groups.values() if places(group) > 1), key=merit, default=[])


def _curve(axis: Axis, group: Sequence[SpeedRecord], point: OperatingPoint | None) -> ChartCurve:
    lines = [*_measured(axis, group), *_predicted(axis, group)]
    measured = lines[0].dots if lines else ()
    chosen: float | None = None
    gone: tuple[FailedTrial, ...] = ()
    if point is not None and group and axis.still(group[0].dials) == axis.still(point.dials):
        place = axis.x(point.dials, 0)
        chosen = place if any(dot.x == place for dot in measured) else None
        gone = lost(axis, point)
    return ChartCurve(
        axis.key,
        axis.title,
        axis.x_name,
        "tok/s",
        tuple(lines),
        doubling=axis.doubling,
        knee=knee(measured, point.noise if point else 0.0),
        chosen=chosen,
        lost=gone,
        note=dial_words(axis.still(group[-1].dials)) if group else None,
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
    """What was predicted, at the time, for the very settings that were measured."""
    latest = {axis.x(speed.dials, speed.depth): axis.value(speed.predicted) for speed in group}
    pairs = [(x, y) for x, y in latest.items() if y is not None]
    return [Series("predicted", PREDICTED, dots(pairs))] if len(pairs) > 1 else []


def _with_forecast(curve: ChartCurve, speeds: Sequence[Forecasted], *, by_depth: bool) -> ChartCurve:
    """A curve with the plan's own line, where none was kept with the measurements."""
    if len(speeds) < 2 or any(line.origin.kind == "predicted" for line in curve.lines):
        return curve
    origin = replace(PREDICTED, note=f"by the plan, {speeds[0].confidence}")
    pairs = ((float(speed.depth if by_depth else speed.sequences), speed.tok_s) for speed in speeds)
    return replace(curve, lines=(*curve.lines, Series("predicted", origin, dots(pairs))))
