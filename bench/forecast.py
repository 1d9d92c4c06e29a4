"""Compares the speed forecast with published runs, by machine.

    python bench/forecast.py [--fit] [--lines]

Scores the forecast on the machines that its constants were fitted on and on those that were held out, for every class
of machines, next to two simple formulas. --fit searches the constants within their bounds on the first part and writes
them, and the ranges of forecasts, into rates.toml; --lines prints every figure. Writes results/forecast.json, which
forecast_docs.py puts into the documentation. Exits 1 if a promise is not met.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from bench.forecast_fit import fit, write_ranges, write_rates  # noqa: E402
from bench.forecast_score import (  # noqa: E402
    CLASSES,
    Point,
    Score,
    by_formula,
    coverage,
    errors,
    points,
    predict,
    ranges,
    score,
)

from support.h200_slice import h200_slice  # noqa: E402
from support.public_runs import public  # noqa: E402
from support.published_runs import published  # noqa: E402
from support.runs import h200, seeds  # noqa: E402
from support.unseen_runs import unseen  # noqa: E402
from tokenmill.planner.speed.rates import RateConstants, standard, table  # noqa: E402

RATES = ROOT / "src/tokenmill/planner/speed/rates.toml"
RESULT = ROOT / "bench" / "results" / "forecast.json"
KINDS = ("decode", "prefill")
TARGETS = {"decode": (0.18, 0.42), "prefill": (0.28, 0.95)}  # median and 90th percentile on held-out machines
SEED_LIMITS = {"decode": 0.20, "prefill": 0.40}


@dataclass(frozen=True, slots=True)
class Row:
    """Scores of one kind of speed on one class of machines of one part."""

    kind: str
    part: str
    machines: str
    forecast: Score | None
    roofline: Score | None
    rule: Score | None
    coverage: float | None


@dataclass(frozen=True, slots=True)
class Line:
    """One published figure and its forecast."""

    set: str
    case: str
    machine: str
    held_out: bool
    kind: str
    note: str
    depth: int
    sequences: int
    published: tuple[float, float]
    predicted: float | None
    error: float | None


def all_points() -> list[Point]:
    """Every published figure that can be forecast, and our own."""
    return points([*seeds(), *h200(), *h200_slice(), *public(), *unseen(), *published()])


def rows(chosen: Sequence[Point], rates: RateConstants) -> list[Row]:
    """The report, held-out machines first."""
    made = []
    speeds = (partial(predict, rates=rates), partial(by_formula, share=1.0), partial(by_formula, share=0.55))
    for part, held in (("held out", True), ("fitted", False)):
        for kind in KINDS:
            for machines in ("all", *CLASSES):
                own = [
                    point
                    for point in chosen
                    if point.held_out == held and point.figure.kind == kind and machines in ("all", point.machine_class)
                ]
                ours, roofline, rule = (score(errors(own, speed)) for speed in speeds)
                inside = coverage(own, rates, table().ranges)
                made.append(Row(kind, part, machines, ours, roofline, rule, inside))
    return made


def lines(chosen: Sequence[Point], rates: RateConstants) -> list[Line]:
    """Every figure."""
    made = []
    for point in chosen:
        figure = point.figure
        predicted = predict(point, rates)
        made.append(
            Line(
                figure.tier,
                figure.case,
                figure.group,
                point.held_out,
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


def broken(report: Sequence[Row], figures: Sequence[Line]) -> list[str]:
    """Promises that are not met."""
    found = []
    for line in figures:
        if line.set == "seed" and line.error is not None and abs(line.error) > SEED_LIMITS[line.kind]:
            found.append(f"{line.case} {line.note}: {line.kind} is off by {line.error:+.0%}")
    for row in report:
        if row.part == "held out" and row.machines == "all" and row.forecast is not None:
            middle, rare = TARGETS[row.kind]
            if row.forecast.median > middle or row.forecast.p90 > rare:
                found.append(f"{row.kind}: median {row.forecast.median:.0%}, 90th percentile {row.forecast.p90:.0%}")
    return found


def _shown(found: Score | None) -> str:
    return f"{found.median:4.0%} {found.p90:5.0%}" if found else "   -     -"


def show(report: Sequence[Row]) -> None:
    """Print the scores: median and 90th percentile of forecast and formulas."""
    print(f"{'':30} machines  forecast   roofline   0.55 rule  in range")
    for row in report:
        count = row.forecast.machines if row.forecast else 0
        inside = "" if row.coverage is None else f"{row.coverage:.0%}"
        name = f"{row.part} {row.kind} {row.machines}"
        print(f"{name:30} {count:8} {_shown(row.forecast)} {_shown(row.roofline)} {_shown(row.rule)}  {inside}")


def show_lines(figures: Sequence[Line]) -> None:
    """Print every figure."""
    for line in figures:
        low, high = line.published
        stated = f"{low:g}" if low == high else f"{low:g}-{high:g}"
        got = "not said" if line.predicted is None else f"{line.predicted:9.2f}"
        off = "" if line.error is None else f"{line.error:+6.0%}"
        part = "held" if line.held_out else "fit"
        what = f"{part:4} {line.machine[:20]:20} {line.kind:7} {line.case[:36]:36} {line.note[:24]:24}"
        print(f"{what} depth {line.depth:6} {stated:>12} {got} {off}")


def main() -> int:
    """Score, and fit if requested."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--lines", action="store_true")
    arguments = parser.parse_args()
    chosen = all_points()
    rates = standard()
    if arguments.fit:
        rates = fit([point for point in chosen if not point.held_out], print)
        write_rates(rates, RATES)
        write_ranges(ranges(chosen, rates), RATES)
        table.cache_clear()
    report = rows(chosen, rates)
    figures = lines(chosen, rates)
    if arguments.lines:
        show_lines(figures)
    show(report)
    text = {"scores": [asdict(row) for row in report], "lines": [asdict(line) for line in figures]}
    RESULT.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
    wrong = broken(report, figures)
    print(*(f"broken: {text}" for text in wrong), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
