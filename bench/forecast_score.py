"""Scores of the forecast on published runs, split by machine.

Machines are divided by a hash of their name into those that the constants are fitted on and those that are only
scored. In every figure of a score all machines count the same, however many runs they have, and within a machine all
cases. `score` compares the forecast with two formulas that people use instead:

    roofline    bytes that a token reads, divided by the nominal bandwidth of the memory they are in
    0.55 rule   the same with 0.55 of that bandwidth

For prefill both formulas take PREFILL_TOKENS tokens of a prompt in the time of one token of decode.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from support.runs import Figure
from tokenmill.planner.speed.devices import devices
from tokenmill.planner.speed.intervals import MachineClass, machine_class
from tokenmill.planner.speed.rates import RangeRow, RateConstants
from tokenmill.planner.speed.step_time import Missing, decode_terms, prefill_terms
from tokenmill.planner.speed.work import StepWork, work

HELD_OUT = 40  # percent of the machines, by hash
ALWAYS_FITTED = ("EPYC9175F", "7532", "optane", "H200")  # the machines of the seeds, and our own
PREFILL_TOKENS = 10
CLASSES: tuple[MachineClass, ...] = ("CPU only", "one GPU", "several GPUs", "two sockets")
Formula = Literal["forecast", "roofline", "0.55 rule"]


@dataclass(frozen=True, slots=True)
class Point:
    """A figure with the work of one step, computed once."""

    figure: Figure
    work: StepWork

    @property
    def held_out(self) -> bool:
        """Whether the constants are not fitted on the machine."""
        return is_held_out(self.figure.group)

    @property
    def machine_class(self) -> MachineClass:
        """The class that the range of the forecast depends on."""
        return machine_class(self.figure.machine, self.figure.placement)


@dataclass(frozen=True, slots=True)
class Score:
    """Errors over machines that count the same: a half and a tenth of the weight have larger ones."""

    machines: int
    figures: int
    median: float
    p90: float


def is_held_out(group: str) -> bool:
    """Whether a machine is one of those that are only scored."""
    if group in ALWAYS_FITTED:
        return False
    return hashlib.sha256(group.encode()).digest()[0] * 100 < HELD_OUT * 256


def points(figures: Iterable[Figure]) -> list[Point]:
    """Figures with their work, which does not depend on any constant."""
    kept: dict[tuple[int, int, object], StepWork] = {}
    made = []
    for figure in figures:
        key = (id(figure.profile), hash(figure.placement), figure.settings.ik)
        if key not in kept:
            kept[key] = work(figure.profile, figure.placement, figure.settings)
        made.append(Point(figure, kept[key]))
    return made


def predict(point: Point, rates: RateConstants) -> float | None:
    """Tokens per second; None if the machine lacks a fact."""
    figure = point.figure
    step = point.work
    found = devices(figure.machine, figure.settings, rates, step.resident_bytes())
    try:
        if figure.kind == "decode":
            terms = decode_terms(
                step,
                found,
                figure.settings,
                rates,
                depth=figure.depth,
                sequences=figure.sequences,
                min_batch=figure.min_batch,
            )
            return figure.sequences / sum(term.seconds for term in terms)
        prompt = figure.prompt or figure.settings.ubatch
        terms = prefill_terms(
            step,
            found,
            figure.settings,
            rates,
            depth=figure.depth,
            prompt=prompt,
            ubatch=figure.settings.ubatch,
            min_batch=figure.min_batch,
        )
        return prompt / sum(term.seconds for term in terms)
    except Missing:
        return None


def by_formula(point: Point, share: float) -> float | None:
    """Tokens per second by `share` of the nominal bandwidth; None if it is unknown."""
    figure = point.figure
    nominal = {tier.name: tier.measured_gb_s or tier.nominal_gb_s for tier in figure.machine.tiers()}
    seconds = 0.0
    for group in point.work.weights:
        gb_s = nominal.get(group.tier)
        if gb_s is None:
            return None
        seconds += group.bytes * (point.work.used_share() if group.routed else 1.0) / (share * gb_s * 1e9)
    return (PREFILL_TOKENS if figure.kind == "prefill" else figure.sequences) / seconds


def errors(chosen: Sequence[Point], speed: Callable[[Point], float | None]) -> list[tuple[Point, float]]:
    """The signed error of each figure that has a prediction."""
    found = []
    for point in chosen:
        tok_s = speed(point)
        if tok_s is not None:
            found.append((point, point.figure.error(tok_s)))
    return found


def weights(chosen: Sequence[Point]) -> list[float]:
    """The weight of each figure, which makes machines equal, and cases within a machine."""
    cases: defaultdict[str, set[str]] = defaultdict(set)
    figures: defaultdict[tuple[str, str], int] = defaultdict(int)
    for point in chosen:
        cases[point.figure.group].add(point.figure.case)
        figures[point.figure.group, point.figure.case] += 1
    return [1 / len(cases[point.figure.group]) / figures[point.figure.group, point.figure.case] for point in chosen]


def quantile(values: Sequence[float], weight: Sequence[float], share: float) -> float:
    """The smallest value up to which `share` of the weight lies."""
    ordered = sorted(zip(values, weight, strict=True))
    total = sum(weight)
    summed = 0.0
    for value, part in ordered:
        summed += part
        if summed >= share * total - 1e-9:
            return value
    return ordered[-1][0]


def score(found: Sequence[tuple[Point, float]]) -> Score | None:
    """Median and 90th percentile; None without figures."""
    if not found:
        return None
    chosen = [point for point, _ in found]
    sizes = [abs(error) for _, error in found]
    weight = weights(chosen)
    machines = {point.figure.group for point in chosen}
    return Score(len(machines), len(found), quantile(sizes, weight, 0.5), quantile(sizes, weight, 0.9))


INSIDE = 0.80  # of the weight lies in a range
LEAST_MACHINES = 4  # a class with fewer machines takes the range of all


def ranges(chosen: Sequence[Point], rates: RateConstants) -> dict[str, dict[str, RangeRow]]:
    """Factors from a forecast to the ends of a range that holds most of the figures of its class.

    From all machines, because a class has few, and the fitted ones are not predicted better than the others.
    """
    found: dict[str, dict[str, RangeRow]] = {name: {} for name in CLASSES}
    for kind in ("decode", "prefill"):
        every = [point for point in chosen if point.figure.kind == kind]
        for name in CLASSES:
            own = [point for point in every if point.machine_class == name]
            many = len({point.figure.group for point in own}) >= LEAST_MACHINES
            found[name][kind] = _range(own if many else every, rates)
    return found


def _range(chosen: Sequence[Point], rates: RateConstants) -> RangeRow:
    ratios = [(point, 1 / (1 + error)) for point, error in errors(chosen, partial(predict, rates=rates))]
    weight = weights([point for point, _ in ratios])
    values = [ratio for _, ratio in ratios]
    low = quantile(values, weight, (1 - INSIDE) / 2)
    high = quantile(values, weight, (1 + INSIDE) / 2)
    return RangeRow(round(min(low, 0.95), 2), round(max(high, 1.05), 2))


def coverage(
    chosen: Sequence[Point], rates: RateConstants, found: Mapping[str, Mapping[str, RangeRow]]
) -> float | None:
    """The share of the figures inside the range of their forecast; machines count the same. None without figures."""
    inside = []
    for point, error in errors(chosen, partial(predict, rates=rates)):
        ends = found[point.machine_class][point.figure.kind]
        inside.append((point, ends.low - 0.005 <= 1 / (1 + error) <= ends.high + 0.005))
    weight = weights([point for point, _ in inside])
    return (
        sum(part for part, (_, within) in zip(weight, inside, strict=True) if within) / sum(weight) if weight else None
    )
