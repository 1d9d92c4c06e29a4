"""Fits the constants of rates.toml that have bounds to published runs.

The errors are logarithms of predicted over published speed; beyond HUGE they count linearly, so that no outlier
dominates. Machines count the same, and cases within a machine. Each constant is drawn to the middle of its bounds with
a weight of PRIOR, which is what keeps a constant that few machines determine near its prior value.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from bench.forecast_score import Point, predict, weights

from tokenmill.planner.speed.rates import RangeRow, RateConstants, standard, table

HUGE = 0.2
PRIOR = 0.2  # of one machine, for a constant at the end of its bounds
PREFILL_WEIGHT = 0.4
OWN_WEIGHT = 4.0  # of the runs that tests promise an accuracy for: the seeds, and our own machine
STEP = 0.01


def fit(chosen: Sequence[Point], say: Callable[[str], None], rounds: int = 12) -> RateConstants:
    """Damped least squares over the logarithms of the constants, from their present values."""
    bounds = {name: row.bounds for name, row in table().constants.items() if row.bounds is not None}
    names = list(bounds)
    low = np.log([bounds[name][0] for name in names])
    high = np.log([bounds[name][1] for name in names])
    at = np.clip(np.log([getattr(standard(), name) for name in names]), low, high)
    weight = _weights(chosen)
    damping = 0.1
    least, residuals = _loss(chosen, weight, names, at, low, high)
    for number in range(rounds):
        slopes = np.empty((len(residuals), len(names)))
        for index in range(len(names)):
            moved = at.copy()
            moved[index] += STEP if at[index] + STEP <= high[index] else -STEP
            slopes[:, index] = (_loss(chosen, weight, names, moved, low, high)[1] - residuals) / (
                moved[index] - at[index]
            )
        improved = False
        while damping < 1e4 and not improved:
            normal = slopes.T @ slopes
            change = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-3), -slopes.T @ residuals)
            tried = np.clip(at + np.clip(change, -0.4, 0.4), low, high)
            cost, found = _loss(chosen, weight, names, tried, low, high)
            improved = cost < least - 1e-3
            damping = max(damping / 3, 1e-3) if improved else damping * 4
        if not improved:
            break
        say(f"round {number + 1}: {least:.4f} to {cost:.4f}")
        at, least, residuals = tried, cost, found
    return _constants(names, at)


def _constants(names: Sequence[str], at: np.ndarray) -> RateConstants:
    return replace(standard(), **{name: float(value) for name, value in zip(names, np.exp(at), strict=True)})


def _weights(chosen: Sequence[Point]) -> list[float]:
    """The weight of each figure: machines are equal within a kind of speed."""
    found = [0.0] * len(chosen)
    for kind, factor in (("decode", 1.0), ("prefill", PREFILL_WEIGHT)):
        indices = [index for index, point in enumerate(chosen) if point.figure.kind == kind]
        for index, weight in zip(indices, weights([chosen[index] for index in indices]), strict=True):
            own = OWN_WEIGHT if chosen[index].figure.tier in ("seed", "h200") else 1.0
            found[index] = weight * factor * own
    return found


def _loss(
    chosen: Sequence[Point],
    weight: Sequence[float],
    names: Sequence[str],
    at: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
) -> tuple[float, np.ndarray]:
    """The loss, and the residuals that it is the sum of squares of."""
    rates = _constants(names, at)
    residuals = np.zeros(len(chosen))
    for index, point in enumerate(chosen):
        tok_s = predict(point, rates)
        if tok_s is not None:
            off = math.log1p(point.figure.error(tok_s))
            size = abs(off)
            cost = size**2 if size <= HUGE else HUGE * (2 * size - HUGE)
            residuals[index] = math.copysign(math.sqrt(weight[index] * cost), off)
    middle = (low + high) / 2
    held = math.sqrt(PRIOR) * HUGE * (at - middle) / ((high - low) / 2)
    both = np.concatenate([residuals, held])
    return float(both @ both), both


def write_rates(rates: RateConstants, path: Path) -> None:
    """Write fitted values into rates.toml with three digits, leaving the rest of the file unchanged."""
    text = path.read_text(encoding="utf-8")
    for name, row in table().constants.items():
        if row.bounds is not None:
            text = re.sub(rf"(\[constants\.{name}\]\nvalue = )\S+", rf"\g<1>{_digits(getattr(rates, name))}", text)
    path.write_text(text, encoding="utf-8")


def write_ranges(found: Mapping[str, Mapping[str, RangeRow]], path: Path) -> None:
    """Write the factors of ranges into rates.toml."""
    text = path.read_text(encoding="utf-8")
    for name, kinds in found.items():
        for kind, row in kinds.items():
            section = re.escape(f'[ranges."{name}".{kind}]')
            text = re.sub(rf"({section}\n)low = \S+\nhigh = \S+", rf"\g<1>low = {row.low}\nhigh = {row.high}", text)
    path.write_text(text, encoding="utf-8")


def _digits(value: float) -> str:
    return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e")
