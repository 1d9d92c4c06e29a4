"""The generated parts of docs/forecast-errors.md, made from rates.toml and results/forecast.json.

python bench/forecast_docs.py [--check]
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tokenmill.planner.speed.rates import table

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "forecast-errors.md"
RESULT = ROOT / "bench" / "results" / "forecast.json"
SETS = {
    "seed": "seeds.json",
    "A": "public_runs.json, complete",
    "B": "public_runs.json, something inferred",
    "h200": "H200 curves",
    "unseen": "never fitted on",
}


def summary(numbers: Mapping[str, Mapping[str, float]]) -> str:
    """Errors by set."""
    rows = [
        "| runs | | figures | median error | within 12 % | within 20 % | within 40 % |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in numbers.items():
        kind, _, of = name.partition(" ")
        shares = " | ".join(f"{row[f'within_{limit}']:.0%}" for limit in (12, 20, 40))
        rows.append(f"| {SETS[of]} | {kind} | {row['figures']:.0f} | {row['median']:.1%} | {shares} |")
    return "\n".join(rows)


def left_out(medians: Mapping[str, float]) -> str:
    """Errors of machines under constants fitted without them."""
    rows = ["| machine left out of the fit | median decode error on it |", "|---|---|"]
    return "\n".join(rows + [f"| {name} | {value:.1%} |" for name, value in medians.items()])


def cases(lines: Sequence[Mapping[str, Any]]) -> str:
    """One row for each case and kind."""
    rows = ["| case | machine | | figures | published | predicted | median error |", "|---|---|---|---|---|---|---|"]
    for key in dict.fromkeys((line["case"], line["machine"], line["kind"]) for line in lines):
        own = [line for line in lines if (line["case"], line["machine"], line["kind"]) == key]
        known = [line for line in own if line["predicted"] is not None]
        ends = [end for line in own for end in line["published"]]
        got = [line["predicted"] for line in known]
        error = f"{median(abs(line['error']) for line in known):.0%}" if known else "no number: a fact is missing"
        count = str(len(own))
        rows.append(f"| {key[0]} | {key[1]} | {key[2]} | {count} | {_span(ends)} | {_span(got)} | {error} |")
    return "\n".join(rows)


def constants() -> str:
    """rates.toml as a table."""
    rows = ["| constant | value | what it stands for | from | sure |", "|---|---|---|---|---|"]
    for name, row in table().constants.items():
        rows.append(f"| `{name}` | {row.value:g} {row.unit} | {row.stands_for} | {row.source} | {row.sure} |")
    return "\n".join(rows)


def page(text: str) -> str:
    """The page with its generated parts."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    made = {
        "summary": summary(result["summary"]),
        "left out": left_out(result["left_out"]),
        "cases": cases(result["lines"]),
        "constants": constants(),
    }
    for name, part in made.items():
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        text = f"{before}{mark}{part}\n{rest[rest.index('<!-- end -->') :]}"
    return text


def _span(values: Sequence[float]) -> str:
    if not values:
        return ""
    low, high = (f"{value:.3g}" if value < 1000 else f"{value:.0f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def main() -> None:
    """Write the page, or compare it with --check."""
    text = PAGE.read_text(encoding="utf-8")
    made = page(text)
    if "--check" not in sys.argv:
        PAGE.write_text(made, encoding="utf-8")
    elif made != text:
        sys.exit("error: docs/forecast-errors.md is out of date\nhint: python bench/forecast_docs.py")


if __name__ == "__main__":
    main()
