"""The generated parts of docs/forecast.md and docs/forecast-errors.md, from rates.toml and results/forecast.json.

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
PAGES = (ROOT / "docs" / "forecast.md", ROOT / "docs" / "forecast-errors.md")
RESULT = ROOT / "bench" / "results" / "forecast.json"


def scores(rows: Sequence[Mapping[str, Any]], part: str) -> str:
    """Errors by class of machines, next to both formulas."""
    lines = [
        "| machines | | number | forecast | roofline | 0.55 rule | in range |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["part"] == part and row["forecast"] is not None:
            three = " | ".join(_score(row[name]) for name in ("forecast", "roofline", "rule"))
            count = row["forecast"]["machines"]
            lines.append(f"| {row['machines']} | {row['kind']} | {count} | {three} | {row['coverage']:.0%} |")
    return "\n".join(lines)


def _score(found: Mapping[str, float] | None) -> str:
    return "" if found is None else f"{found['median']:.0%}, {found['p90']:.0%}"


def ranges() -> str:
    """The factors of the ranges."""
    lines = ["| machines | decode | prefill |", "|---|---|---|"]
    for name, kinds in table().ranges.items():
        ends = (f"{kinds[kind].low:g} to {kinds[kind].high:g}" for kind in ("decode", "prefill"))
        lines.append(f"| {name} | {' | '.join(ends)} |")
    return "\n".join(lines)


def cases(lines: Sequence[Mapping[str, Any]]) -> str:
    """One row for each case and kind."""
    rows = [
        "| case | machine | part | | figures | published | predicted | median error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key in dict.fromkeys((line["case"], line["machine"], line["kind"]) for line in lines):
        own = [line for line in lines if (line["case"], line["machine"], line["kind"]) == key]
        known = [line for line in own if line["predicted"] is not None]
        ends = [end for line in own for end in line["published"]]
        got = [line["predicted"] for line in known]
        error = f"{median(abs(line['error']) for line in known):.0%}" if known else "no number: a fact is missing"
        part = "held out" if own[0]["held_out"] else "fitted"
        rows.append(
            f"| {key[0]} | {key[1]} | {part} | {key[2]} | {len(own)} | {_span(ends)} | {_span(got)} | {error} |"
        )
    return "\n".join(rows)


def constants() -> str:
    """rates.toml as a table."""
    rows = ["| constant | value | what it stands for | from | sure |", "|---|---|---|---|---|"]
    for name, row in table().constants.items():
        rows.append(f"| `{name}` | {row.value:g} {row.unit} | {row.stands_for} | {row.source} | {row.sure} |")
    return "\n".join(rows)


def page(text: str) -> str:
    """A page with its generated parts."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    made = {
        "held out": scores(result["scores"], "held out"),
        "fitted": scores(result["scores"], "fitted"),
        "ranges": ranges(),
        "cases": cases(result["lines"]),
        "constants": constants(),
    }
    for name, part in made.items():
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        if mark:
            text = f"{before}{mark}{part}\n{rest[rest.index('<!-- end -->') :]}"
    return text


def _span(values: Sequence[float]) -> str:
    if not values:
        return ""
    low, high = (f"{value:.3g}" if value < 1000 else f"{value:.0f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def main() -> None:
    """Write the pages, or compare them with --check."""
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        made = page(text)
        if "--check" not in sys.argv:
            path.write_text(made, encoding="utf-8")
        elif made != text:
            sys.exit(f"error: docs/{path.name} is out of date\nhint: python bench/forecast_docs.py")


if __name__ == "__main__":
    main()
