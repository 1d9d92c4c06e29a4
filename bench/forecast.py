"""Compares the speed forecast with published runs.

    python bench/forecast.py [--fit] [--leave-out]

Prints predicted and published speeds for every figure of seeds.json and public_runs.json, for the curves measured on an
H200 machine, and for runs that the fit never sees. --fit searches the constants within their bounds and writes better
ones into rates.toml; --leave-out fits without each machine in turn and then forecasts that machine. Writes
results/forecast.json, which forecast_docs.py puts into docs/forecast-errors.md. Exits 1 if a promise is not met.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.public_runs import public  # noqa: E402
from support.runs import Figure, h200, seeds  # noqa: E402
from support.unseen_runs import unseen  # noqa: E402
from tokenmill.planner.speed.devices import devices  # noqa: E402
from tokenmill.planner.speed.rates import RateConstants, standard, table  # noqa: E402
from tokenmill.planner.speed.step_time import Missing, decode_terms, prefill_terms  # noqa: E402
from tokenmill.planner.speed.work import StepWork, work  # noqa: E402

RATES = ROOT / "src/tokenmill/planner/speed/rates.toml"
WEIGHTS = {"seed": 1.5, "A": 1.0, "B": 0.25, "h200": 1.0, "unseen": 0.0}
PREFILL_WEIGHT = 0.3  # promised: within 40 %, decode within 20 %
PROMISED = {"decode": {"seed": 0.18, "h200": 0.24}, "prefill": {"seed": 0.37}}  # larger errors are weighted more
PRIOR = 0.25  # weight that holds a constant to the middle of its bounds, relative to one case


@dataclass(frozen=True, slots=True)
class Point:
    """A figure with the work of one step, computed once."""

    figure: Figure
    work: StepWork


@dataclass(frozen=True, slots=True)
class Line:
    """A row of the report."""

    set: str
    case: str
    machine: str
    kind: str
    note: str
    depth: int
    sequences: int
    published: tuple[float, float]
    predicted: float | None
    error: float | None


def points(figures: Iterable[Figure]) -> list[Point]:
    """Figures with their work, which does not depend on any constant."""
    kept: dict[tuple[int, int], StepWork] = {}
    made = []
    for figure in figures:
        key = (id(figure.profile), hash(figure.placement))
        if key not in kept:
            kept[key] = work(figure.profile, figure.placement)
        made.append(Point(figure, kept[key]))
    return made


def predict(point: Point, rates: RateConstants) -> float | None:
    """Tokens per second; None if the machine file lacks a fact."""
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


def loss(
    chosen: Sequence[Point], rates: RateConstants, start: RateConstants, names: Sequence[str], strict: float
) -> float:
    """Weighted error over cases; large errors are damped, so that one outlier does not dominate."""
    cases: dict[tuple[str, str], list[float]] = {}
    for point in chosen:
        figure = point.figure
        predicted = predict(point, rates)
        if predicted is not None and WEIGHTS[figure.tier]:
            off = math.log1p(figure.error(predicted))
            cost = min(math.sqrt(1 + (off / 0.12) ** 2) - 1, 4.0)
            cost += strict * max(0.0, abs(figure.error(predicted)) - PROMISED[figure.kind].get(figure.tier, 9.0))
            cases.setdefault((f"{figure.tier} {figure.case}", figure.kind), []).append(cost)
    total = sum(
        WEIGHTS[name.split()[0]] * (1.0 if kind == "decode" else PREFILL_WEIGHT) * sum(costs) / len(costs)
        for (name, kind), costs in cases.items()
    )
    held = sum(math.log(getattr(rates, name) / getattr(start, name)) ** 2 for name in names)
    return total + PRIOR * held


def fit(chosen: Sequence[Point], say: Callable[[str], None], sweeps: int = 14) -> RateConstants:
    """Coordinate search over the constants that have bounds, in ratios, from the middle of their bounds."""
    bounds = {name: row.bounds for name, row in table().constants.items() if row.bounds is not None}
    names = list(bounds)
    start = replace(standard(), **{name: math.sqrt(low * high) for name, (low, high) in bounds.items()})
    at = start
    step = 1.25
    for sweep in range(sweeps):
        # start with a small penalty: a hard bound would keep the search in its first corner
        strict = 2.0 if sweep < sweeps // 2 else 300.0
        best = loss(chosen, at, start, names, strict)
        before = at
        for name in names:
            for factor in (step, 1 / step):
                best, at = _further(chosen, start, names, bounds, strict, best, at, {name: factor})
        # also try the direction of the whole sweep, which no single constant can follow
        way = {name: getattr(at, name) / getattr(before, name) for name in names}
        best, at = _further(chosen, start, names, bounds, strict, best, at, way)
        say(f"sweep {sweep + 1}: loss {best:.3f}, steps of {step:.3f}")
        step = 1.06 if sweep == sweeps // 2 - 1 else max(1.005, step**0.7)
    return at


def _further(
    chosen: Sequence[Point],
    start: RateConstants,
    names: Sequence[str],
    bounds: Mapping[str, tuple[float, float]],
    strict: float,
    best: float,
    at: RateConstants,
    way: Mapping[str, float],
) -> tuple[float, RateConstants]:
    """Move in one direction while the loss decreases."""
    while True:
        values = {
            name: min(max(getattr(at, name) * factor, bounds[name][0]), bounds[name][1]) for name, factor in way.items()
        }
        tried = replace(at, **values)
        cost = loss(chosen, tried, start, names, strict)
        if cost >= best - 1e-6:
            return best, at
        best = cost
        at = tried


def lines(chosen: Iterable[Point], rates: RateConstants) -> list[Line]:
    """The report."""
    made = []
    for point in chosen:
        figure = point.figure
        predicted = predict(point, rates)
        made.append(
            Line(
                figure.tier,
                figure.case,
                figure.group,
                figure.kind,
                figure.note,
                figure.depth,
                figure.sequences,
                (figure.low, figure.high),
                predicted and round(predicted, 2),
                None if predicted is None else round(figure.error(predicted), 4),
            )
        )
    return made


def summary(report: Sequence[Line]) -> dict[str, dict[str, float]]:
    """Medians and shares by set and kind."""
    made: dict[str, dict[str, float]] = {}
    for kind in ("decode", "prefill"):
        for name in ("seed", "A", "B", "h200", "unseen"):
            rows = [line for line in report if line.set == name and line.kind == kind and line.error is not None]
            off = [abs(line.error) for line in rows if line.error is not None]
            if not off:
                continue
            by_case = [
                median(abs(line.error) for line in rows if line.case == case and line.error is not None)
                for case in {line.case for line in rows}
            ]
            made[f"{kind} {name}"] = {
                "figures": len(off),
                "median": median(off),
                "median_of_cases": median(by_case),
                "worst": max(off),
                "within_12": sum(value <= 0.12 for value in off) / len(off),
                "within_20": sum(value <= 0.20 for value in off) / len(off),
                "within_40": sum(value <= 0.40 for value in off) / len(off),
            }
    return made


def leave_out(chosen: Sequence[Point], say: Callable[[str], None]) -> dict[str, float]:
    """Median decode error of each machine with constants fitted without it."""
    made = {}
    for group in sorted({point.figure.group for point in chosen if point.figure.tier in ("seed", "A", "h200")}):
        others = [point for point in chosen if point.figure.group != group]
        rates = fit(others, lambda text: None)
        held = [point for point in chosen if point.figure.group == group and point.figure.kind == "decode"]
        off = [abs(line.error) for line in lines(held, rates) if line.error is not None and line.set != "B"]
        made[group] = median(off)
        say(f"without {group}: median error {made[group]:.1%} over {len(off)} figures")
    return made


def write_rates(rates: RateConstants) -> None:
    """Write fitted values into rates.toml with three digits, leaving the rest of the file unchanged."""
    text = RATES.read_text(encoding="utf-8")
    for name, row in table().constants.items():
        if row.bounds is not None:
            value = _digits(getattr(rates, name))
            text = re.sub(rf"(\[constants\.{name}\]\nvalue = )\S+", rf"\g<1>{value}", text)
    RATES.write_text(text, encoding="utf-8")


def _digits(value: float) -> str:
    return f"{value:.3g}" if 1e-3 <= value < 1000 else f"{value:.3g}".replace("e-0", "e-")


def broken(report: Sequence[Line]) -> list[str]:
    """Promises that are not met."""
    found = []
    own = [line for line in report if line.set == "seed" and line.error is not None]
    for line in own:
        limit = 0.20 if line.kind == "decode" else 0.40
        if line.error is not None and abs(line.error) > limit:
            found.append(f"{line.case} {line.note}: {line.kind} is off by {line.error:+.0%}")
    numbers = summary(report)
    if numbers["decode seed"]["within_12"] < 0.5:
        found.append("fewer than half of the seeds' decode figures are within 12 %")
    if numbers["decode A"]["median"] > 0.15 or numbers["decode A"]["median_of_cases"] > 0.15:
        found.append("the median decode error of the public runs is over 15 %")
    return found


def show(report: Sequence[Line]) -> None:
    """Print every figure."""
    for line in report:
        low, high = line.published
        published = f"{low:g}" if low == high else f"{low:g}-{high:g}"
        got = "not said" if line.predicted is None else f"{line.predicted:9.2f}"
        off = "" if line.error is None else f"{line.error:+6.0%}"
        where = f"depth {line.depth}" if line.sequences == 1 else f"{line.sequences} sequences"
        what = f"{line.set:6} {line.kind:7} {line.case[:36]:36} {line.note[:24]:24} {where:13}"
        print(f"{what} {published:>12} {got} {off}")


def main() -> int:
    """Compare, and fit if requested."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--leave-out", action="store_true")
    arguments = parser.parse_args()
    chosen = points([*seeds(), *public(), *h200(), *unseen()])
    rates = standard()
    fitted_on = [point for point in chosen if WEIGHTS[point.figure.tier]]
    if arguments.fit:
        rates = fit(fitted_on, print)
        write_rates(rates)
    report = lines(chosen, rates)
    show(report)
    numbers = summary(report)
    for name, row in numbers.items():
        middle = f"median {row['median']:.1%}, of cases {row['median_of_cases']:.1%}"
        within = ", ".join(f"within {limit} % {row[f'within_{limit}']:.0%}" for limit in (12, 20, 40))
        print(f"{name:16} {row['figures']:4.0f} figures, {middle}, {within}")
    result = ROOT / "bench" / "results" / "forecast.json"
    kept = json.loads(result.read_text(encoding="utf-8")).get("left_out", {}) if result.is_file() else {}
    left = leave_out(fitted_on, print) if arguments.leave_out else kept
    result.write_text(
        json.dumps({"summary": numbers, "left_out": left, "lines": [asdict(line) for line in report]}, indent=1) + "\n",
        encoding="utf-8",
    )
    wrong = broken(report)
    print(*(f"broken: {text}" for text in wrong), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
