"""Bounds and next probes along one setting while the others stay fixed.

A curve may have several peaks. Three assumptions are made:
- doubling threads, sequences or micro-batch at most about doubles the speed;
- where a curve rises between two measured values, its slope decreases to the right, within a tolerance;
- after a fall, only the first assumption applies: the fall may be a cliff with a second rise behind it.
Gaps between measured values are therefore kept narrow enough to reveal a cliff. Apart from that, only values whose
optimistic bound beats the best by more than noise are tried.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import log

PROPORTIONAL = 1.1  # maximum exponent of growth: slightly superlinear growth was measured on a GPU
BEND = 0.15  # maximum increase of a curve's exponent to the next interval ...
BACK = 0.04  # ... and maximum decrease to the previous one
STEEPEST = 50.0  # avoids overflow
CLIMBS = 0.5  # exponents from which a curve counts as rising
FLAT = -0.05  # exponents below which a curve counts as falling


@dataclass(frozen=True, slots=True)
class WorthCurve:
    """Measured worth of the values of one setting."""

    values: tuple[int, ...]  # ascending
    seen: Mapping[int, float]  # measured worth by value
    excluded: frozenset[int] = field(default_factory=frozenset)  # values that cannot be tried or gave no figures
    gap: float = 4.0  # maximum ratio of neighbours without a measurement between them
    from_first: bool = False  # whether the lowest value must be within a gap of a measured one

    def open(self) -> list[int]:
        """Values that can still be tried."""
        return [value for value in self.values if value not in self.seen and value not in self.excluded]


def exponent(low: int, low_worth: float, high: int, high_worth: float) -> float:
    """Slope between two points on logarithmic axes: 1 is proportional."""
    return log(high_worth / low_worth) / log(high / low)


def bound(line: WorthCurve, at: int) -> float:
    """Upper bound of a value's worth; infinite if no measurement limits it."""
    below = [value for value in line.values if value < at and line.seen.get(value, 0.0) > 0]
    above = [value for value in line.values if value > at and line.seen.get(value, 0.0) > 0]
    upper = float("inf")
    if below:
        near = below[-1]
        slope = PROPORTIONAL
        if len(below) > 1:
            bend = exponent(below[-2], line.seen[below[-2]], near, line.seen[near])
            slope = PROPORTIONAL if bend < FLAT else min(PROPORTIONAL, max(bend, 0.0) + BEND)
        upper = line.seen[near] * (at / near) ** slope
        # points further left also limit growth
        upper = min(upper, *(line.seen[value] * (at / value) ** PROPORTIONAL for value in below))
    if len(above) > 1 and (not below or line.seen[below[-1]] <= line.seen[above[0]]):  # else a cliff may lie between
        near, next_one = above[:2]
        bend = exponent(near, line.seen[near], next_one, line.seen[next_one])
        upper = min(upper, line.seen[near] * (at / near) ** max(min(bend, 1.0) - BACK, -STEEPEST))
    return upper


def probe(line: WorthCurve, bar: float, guess: Callable[[int], float | None] | None = None) -> int | None:
    """The value to try next; None if no value can exceed `bar`.

    `guess` may lower the bound of a value, for example to the optimistic end of a fitted forecast.
    """
    free = line.open()
    if not free:
        return None
    if not line.seen:
        return free[len(free) // 2]
    if (wide := _widest(line, free)) is not None:
        return wide
    hopes = {value: bound(line, value) for value in free}
    if guess is not None:
        guesses = {value: guess(value) for value in free}
        hopes = {
            value: min(hope, most) if (most := guesses[value]) is not None else hope for value, hope in hopes.items()
        }
    hopeful = [value for value in free if hopes[value] > bar]
    if not hopeful:
        return None
    best = max(hopeful, key=lambda value: hopes[value])
    run = _run(line, hopeful, best)
    return run[len(run) // 2]


def _widest(line: WorthCurve, free: list[int]) -> int | None:
    """A value inside the widest gap that may hide a cliff, except gaps where even proportional growth is not enough."""
    known = sorted(value for value in line.values if value in line.seen)
    best = max(line.seen.values())
    ends = [(low, high) for low, high in pairwise(known) if high / low > line.gap]
    found: list[tuple[float, int]] = []
    for low, high in ends:
        inside = [value for value in free if low < value < high]
        inside = [value for value in inside if line.seen[low] * (value / low) ** PROPORTIONAL > best]
        if inside:
            middle = (low * high) ** 0.5
            found.append((high / low, min(inside, key=lambda value: abs(log(value / middle)))))
    lowest = known[0]
    under = [value for value in free if value < lowest]
    if under and lowest / under[0] >= line.gap and (line.from_first or _hardly_rises(line, known)):
        down = under[0] if line.from_first else min(under, key=lambda value: abs(log(value * line.gap / lowest)))
        found.append((lowest / down, down))
    over = [value for value in free if value > known[-1]]
    if over and over[-1] / known[-1] >= line.gap and line.seen[known[-1]] * (over[-1] / known[-1]) > best:
        # towards a failed value, try half way, because a crash costs more than a trial
        crashed = any(value > over[-1] for value in line.excluded)
        found.append((over[-1] / known[-1], over[len(over) // 2 if crashed else -1]))
    return max(found)[1] if found else None


def _hardly_rises(line: WorthCurve, known: list[int]) -> bool:
    """Whether a peak below the lowest measured values is possible, because the curve hardly rises there."""
    if len(known) < 2:
        return True
    low, high = known[:2]
    return min(line.seen[low], line.seen[high]) <= 0 or exponent(low, line.seen[low], high, line.seen[high]) < CLIMBS


def _run(line: WorthCurve, hopeful: list[int], best: int) -> list[int]:
    """Promising values around `best` without a measurement between them."""
    known = [value for value in line.values if value in line.seen]
    low = max((value for value in known if value < best), default=0)
    high = min((value for value in known if value > best), default=line.values[-1] + 1)
    return [value for value in hopeful if low < value < high]
