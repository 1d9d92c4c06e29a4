"""Pieces that the page is built of: tables, lists, figures with their captions, gaps. Pure."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from tokenmill.report.figures import line_chart
from tokenmill.report.report import Curve, Gap, Line
from tokenmill.report.svg import Markup, escaped, figure_text, joined, tag, tick_text

WIDE, SLIM = 530, 356  # px of a chart in one of two columns, and on a phone
_DATE = re.compile(r"\b\d{4}-\d\d-\d\d\b")


def dated(text: str) -> Markup:
    """Text whose dates are not broken over two lines."""
    return Markup(_DATE.sub(lambda found: f'<span class="date">{found[0]}</span>', escaped(text)))


def origin(text: str) -> Markup:
    """A line that says where figures come from."""
    return tag("p", dated(text), class_="origin")


def lacking(found: Sequence[Gap]) -> Iterator[Markup]:
    """What is not known yet, with the command that would tell."""
    for gap in found:
        command = joined(": ", tag("code", gap.command)) if gap.command else None
        yield tag("p", gap.words, command, class_="gap", data_gap=gap.about)


def figure(curve: Curve) -> Markup:
    """A curve with its caption, and its figures as a table."""
    names: dict[str, list[str]] = {}
    for line in curve.lines:
        names.setdefault(line.origin.words, []).append(line.name)
    origins = [
        words if len(curve.lines) == 1 or words.startswith(of[0]) else f"{' and '.join(of)}: {words}"
        for words, of in names.items()
    ]
    notes = [f"at {curve.note}"] if curve.note else []
    return tag(
        "figure",
        tag("h3", curve.title),
        both(partial(line_chart, curve), WIDE),
        tag("figcaption", dated("; ".join([*origins, *notes]))),
        tag("details", tag("summary", "the figures"), _curve_table(curve)),
        data_curve=curve.key,
    )


def _curve_table(curve: Curve) -> Markup:
    xs = sorted({dot.x for line in curve.lines for dot in line.dots})
    head = (curve.x_name, *(_column(curve, line) for line in curve.lines))
    rows = [(tick_text(x), *(figure_text(dot.y) if (dot := line.at(x)) else "" for line in curve.lines)) for x in xs]
    return table(head, rows, numbers=tuple(range(len(head))))


def _column(curve: Curve, line: Line) -> str:
    name = line.name if line.name == line.origin.kind else f"{line.name}, {line.origin.kind}"
    return f"{name}, {curve.unit}"


def both(draw: Callable[[int], Markup], wide: int) -> Markup:
    """One drawing for wide pages and one for slim ones; the style sheet shows the one that fits."""
    return joined(tag("div", draw(wide), class_="wide"), tag("div", draw(SLIM), class_="slim"))


def listed(rows: Sequence[tuple[str, str]]) -> Markup:
    """Labels and what they stand for."""
    return tag("dl", *(joined(tag("dt", label), tag("dd", value)) for label, value in rows))


def table(
    head: Sequence[object], rows: Sequence[Sequence[object]], numbers: Sequence[int] = (), kind: str | None = None
) -> Markup:
    """A table that scrolls by itself where it is too wide."""
    kinds = ["n" if column in numbers else None for column in range(len(head))]
    heads = [tag("th", name, class_=kind, scope="col") for name, kind in zip(head, kinds, strict=True)]
    body = [tag("tr", *(tag("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True))) for row in rows]
    return tag("div", tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *body), class_=kind), class_="scroll")
