"""Draws docs/img/scale.svg: engine-hours and wall hours by number of engines, on logarithmic axes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.simulation.page import MANY, runs
from markupsafe import Markup

from tokenmill.report.svg import FONT, Scale, figure_text, joined, spread, tag, text_width, thinned

_WIDTH = 920
_HEIGHT = 420
_PANEL = 262.0
_LEFT = 64.0
_TOP = 72.0
_BOTTOM = 356.0
_STYLE = Markup(
    "text{font:12px system-ui,sans-serif;fill:#333}.title{font-weight:600}.faint{fill:#777}"
    ".grid{stroke:#ddd}.line{fill:none;stroke-width:2}"
    ".a{stroke:#0b6e99}.b{stroke:#c2410c}.c{stroke:#15803d}.d{stroke:#999;stroke-dasharray:4 4}"
    ".fa{fill:#0b6e99}.fb{fill:#c2410c}.fc{fill:#15803d}.fd{fill:#777}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.faint,.fd{fill:#999}.grid{stroke:#444}"
    ".a{stroke:#5bc0eb}.fa{fill:#5bc0eb}.b{stroke:#fb923c}.fb{fill:#fb923c}.c{stroke:#4ade80}.fc{fill:#4ade80}}"
)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the plot."""

    label: str
    colour: str  # a letter of the style above
    points: tuple[tuple[int, float], ...]


def plot(document: Any) -> str:
    """Draw two panels with labels at the ends of the lines."""
    wall = _lines(document, "wall_hours")
    cost = _lines(document, "engine_hours_per_million")
    one = wall[0].points[0][1]
    ideal = Line("no cost of scale", "d", tuple((count, one / count) for count, _ in wall[0].points))
    drawing = joined(
        tag("style", _STYLE),
        tag("text", "A million jobs on 1 to 1000 engines, predicted (simulated)", x=_LEFT, y=22, class_="title"),
        tag(
            "text",
            "Kimi-K2.5 on a processor, 12 jobs to a head of 1310 tokens, a failure every 24 h and engine",
            x=_LEFT,
            y=40,
            class_="faint",
        ),
        _panel("engine-hours for a million jobs", cost, _LEFT),
        _panel("hours until the last answer", [*wall, ideal], _LEFT + _WIDTH / 2),
    )
    size = {"width": _WIDTH, "height": _HEIGHT, "viewBox": f"0 0 {_WIDTH} {_HEIGHT}"}
    return tag("svg", drawing, xmlns="http://www.w3.org/2000/svg", role="img", **size) + "\n"


def _lines(document: Any, figure: str) -> list[Line]:
    ways = (
        ("by shards", "a", "assigned", "harsh", "measured"),
        ("at random", "b", "scattered", "harsh", "measured"),
        ("no failures", "c", "assigned", "none", "measured"),
    )
    return [
        Line(label, colour, tuple((count, run[figure]) for count, run in sorted(own.items())))
        for label, colour, way, failures, store in ways
        if (own := runs(document, "giant", MANY, way, failures, store=store))
    ]


def _panel(title: str, lines: Sequence[Line], left: float) -> Markup:
    values = [value for line in lines for _, value in line.points]
    counts = [count for count, _ in lines[0].points]
    across = Scale(min(counts), max(counts), left, left + _PANEL, doubling=True)
    up = Scale(_power(min(values), -1), _power(max(values), 1), _BOTTOM, _TOP, doubling=True)
    parts = [tag("text", title, x=left, y=_TOP - 10)]
    tick = up.low
    while tick <= up.high * 1.001:
        parts.append(tag("line", x1=left, x2=left + _PANEL, y1=up(tick), y2=up(tick), class_="grid"))
        parts.append(tag("text", figure_text(tick), x=left - 6, y=up(tick) + 4, text_anchor="end", class_="faint"))
        tick *= 10
    for count in thinned(counts, across, 30):
        parts.append(tag("text", f"{count:g}", x=across(count), y=_BOTTOM + 18, text_anchor="middle", class_="faint"))
    parts.append(tag("text", "engines", x=left + _PANEL / 2, y=_BOTTOM + 38, text_anchor="middle", class_="faint"))
    places = spread([up(line.points[-1][1]) for line in lines], FONT + 3, _TOP, _BOTTOM)
    for line, place in zip(lines, places, strict=True):
        path = " ".join(f"{across(count):.1f},{up(value):.1f}" for count, value in line.points)
        parts.append(tag("path", d="M" + path.replace(" ", " L"), class_=f"line {line.colour}"))
        parts.append(tag("text", line.label, x=left + _PANEL + 6, y=place + 4, class_=f"f{line.colour}"))
        assert left + _PANEL + 6 + text_width(line.label) <= left + _WIDTH / 2, "the label is too long for its panel"
    return joined(*parts)


def _power(value: float, towards: int) -> float:
    """The power of ten below (-1) or above (1) a value."""
    power = 1.0
    while power > value:
        power /= 10
    while power * 10 <= value:
        power *= 10
    return power if towards < 0 or power == value else power * 10
