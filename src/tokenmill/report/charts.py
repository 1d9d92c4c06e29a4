"""Charts as inline SVG, each drawn for a given width so that its text keeps its size on a phone. Pure.

Measured lines are solid with filled marks, predicted lines dashed with hollow marks, so the difference does not depend
on colour. Lines are labelled directly; a mark shows its values in a tooltip when hovered, focused or tapped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from tokenmill.report.curves import Front, curve_text
from tokenmill.report.report import ChartCurve, Dot, FailedTrial, Series
from tokenmill.report.svg import (
    Scale,
    figure_text,
    joined,
    nice_ticks,
    spread,
    tag,
    text_width,
    thinned,
    tick_text,
    token_ticks,
    tokens_text,
)

NARROW = 420  # px: below this width, line labels are above the plot
_TICK = 5.0
_LINE_GAP = 16.0
_MARK = 3.6
_BOLD = 1.08  # width of bold text relative to regular text


@dataclass(frozen=True, slots=True)
class Frame:
    """The plot area of a chart."""

    width: float
    height: float
    x: Scale
    y: Scale

    @property
    def left(self) -> float:
        """Left edge in px."""
        return self.x.start

    @property
    def right(self) -> float:
        """Right edge in px."""
        return self.x.end

    @property
    def top(self) -> float:
        """Top edge in px."""
        return self.y.end

    @property
    def bottom(self) -> float:
        """Bottom edge in px."""
        return self.y.start


def line_chart(curve: ChartCurve, width: int) -> Markup:
    """A curve with its axes, spread, knee, operating point and failed trials."""
    narrow = width < NARROW
    lines = [line for line in curve.lines if line.dots]
    high = max(max(dot.high or dot.y for dot in line.dots) for line in lines)
    ticks = nice_ticks(high * 1.04)
    right = 10.0 if narrow else 16.0 + _BOLD * max(text_width(line.name) for line in lines)
    top = 30.0 + (_LINE_GAP * len(lines) if narrow else 0.0) + (14.0 if curve.knee is not None else 0.0)
    left = 12.0 + max(text_width(tick_text(tick)) for tick in ticks)
    height = (238.0 if narrow else 262.0) + (top - 30.0)
    xs = sorted({dot.x for line in lines for dot in line.dots} | {trial.x for trial in curve.lost})
    frame = Frame(
        width, height, _x_scale(curve, xs, left + 10.0, width - right - 8.0), Scale(0.0, ticks[-1], height - 42.0, top)
    )
    under = sorted(lines, key=lambda line: line.origin.kind == "measured")  # measured lines are drawn on top
    parts = [
        _y_axis(frame, ticks, curve.unit),
        _x_axis(frame, _x_ticks(curve, xs), curve.x_name),
        *_knee(frame, curve),
        *(_failed(frame, trial) for trial in curve.lost),
        *(_stroke(frame, line, _style(lines, line)) for line in under),
        *_chosen(frame, curve, lines),
        *(_names_above(lines) if narrow else _names_right(frame, lines)),
        *(_mark(frame, curve, line, dot, _style(lines, line)) for line in under for dot in line.dots),
    ]
    return drawing(f"chart {curve.key}", width, height, f"{curve.title}: {curve_text(curve)}", *parts)


def drawing(kind: str, width: float, height: float, title: str, *parts: object) -> Markup:
    """An SVG element with a fixed size, which shrinks on a narrower page."""
    return tag(
        "svg",
        *parts,
        class_=kind,
        viewBox=f"0 0 {width:g} {height:g}",
        width=width,
        height=height,
        role="img",
        aria_label=title,
    )


def label(x: float, y: float, words: object, kind: str = "", anchor: str = "start") -> Markup:
    """Text in a chart."""
    return tag("text", words, x=x, y=y, class_=kind or None, text_anchor=None if anchor == "start" else anchor)


def marked(mark: Markup, x: float, y: float, words: Sequence[str], width: float, spoken: str) -> Markup:
    """A mark with a tooltip for mouse, touch and keyboard; `spoken` is its text for screen readers."""
    wide = max(text_width(line) for line in words) + 16
    high = 10 + 15 * len(words)
    left = min(max(x - wide / 2, 2.0), width - wide - 2)
    top = y - high - 9 if y - high - 9 > 0 else y + 11
    lines = [label(left + 8, top + 16 + 15 * number, line) for number, line in enumerate(words)]
    tip = tag("g", tag("rect", x=left, y=top, width=wide, height=float(high), rx=4), *lines, class_="tip")
    reach = tag("circle", cx=x, cy=y, r=11, class_="reach")
    return tag("g", reach, mark, tip, class_="mark", tabindex=0, role="img", aria_label=spoken)


def _style(lines: Sequence[Series], line: Series) -> str:
    """CSS class of a line: p if predicted; m0, m1, ... if measured."""
    if line.origin.kind == "predicted":
        return "p"
    return f"m{[each for each in lines if each.origin.kind == 'measured'].index(line) % 4}"


def _x_scale(curve: ChartCurve, xs: Sequence[float], start: float, end: float) -> Scale:
    if curve.doubling and xs[0] > 0:
        return Scale(xs[0], xs[-1], start, end, doubling=True)
    if curve.x_name.startswith("tokens"):
        return Scale(0.0, max(token_ticks(xs[-1])[-1], xs[-1]) if xs[-1] else 1.0, start, end)
    return Scale(min(xs[0], 1.0), xs[-1], start, end)


def _x_ticks(curve: ChartCurve, xs: Sequence[float]) -> tuple[float, ...]:
    return token_ticks(xs[-1]) if curve.x_name.startswith("tokens") else tuple(xs)


def _y_axis(frame: Frame, ticks: Sequence[float], unit: str) -> Markup:
    rules = [
        joined(
            tag(
                "line",
                x1=frame.left - 10,
                x2=frame.right + 8,
                y1=frame.y(tick),
                y2=frame.y(tick),
                class_="base" if tick == 0 else "rule",
            ),
            label(frame.left - 16, frame.y(tick) + 4, tick_text(tick), "tick", "end"),
        )
        for tick in ticks
    ]
    return joined(*rules, label(4, 14, unit, "axis"))


def _x_axis(frame: Frame, ticks: Sequence[float], name: str) -> Markup:
    tokens = name.startswith("tokens")
    words = tokens_text if tokens else tick_text
    wide = max(text_width(words(tick)) for tick in ticks) + 8
    shown = thinned([tick for tick in ticks if tick <= frame.x.high], frame.x, wide)
    parts = [
        joined(
            tag("line", x1=frame.x(tick), x2=frame.x(tick), y1=frame.bottom, y2=frame.bottom + _TICK, class_="base"),
            label(frame.x(tick), frame.bottom + 18, words(tick), "tick", "middle"),
        )
        for tick in shown
    ]
    title = f"{name} (K = 1024)" if tokens and ticks[-1] >= 1024 else name
    return joined(*parts, label((frame.left + frame.right) / 2, frame.height - 6, title, "axis", "middle"))


def _stroke(frame: Frame, line: Series, style: str) -> Markup:
    way = " ".join(
        f"{'L' if number else 'M'}{frame.x(dot.x):.1f} {frame.y(dot.y):.1f}" for number, dot in enumerate(line.dots)
    )
    # a spread smaller than the mark would only blur it
    seen = [dot for dot in line.dots if frame.y(dot.low or dot.y) - frame.y(dot.high or dot.y) > 2.5 * _MARK]
    return joined(tag("path", d=way, class_=f"line {style}"), *(_spread(frame, dot, style) for dot in seen))


def _spread(frame: Frame, dot: Dot, style: str) -> Markup:
    x = frame.x(dot.x)
    low = frame.y(dot.low or 0.0)
    high = frame.y(dot.high or 0.0)
    way = f"M{x:.1f} {low:.1f}V{high:.1f}M{x - 4:.1f} {low:.1f}h8M{x - 4:.1f} {high:.1f}h8"
    return tag("path", d=way, class_=f"spread {style}")


def _mark(frame: Frame, curve: ChartCurve, line: Series, dot: Dot, style: str) -> Markup:
    x = frame.x(dot.x)
    y = frame.y(dot.y)
    words = [f"{tick_text(dot.x)} {curve.x_name}", f"{line.name}: {figure_text(dot.y)} {curve.unit}"]
    if dot.low is not None and dot.high is not None:
        words.append(f"{figure_text(dot.low)} to {figure_text(dot.high)} in {dot.runs} runs")
    words.append(line.origin.kind)
    return tag(
        "g",
        marked(shape(style, x, y), x, y, words, frame.width, ", ".join(words)),
        data_line=line.name,
        data_x=f"{dot.x:g}",
        data_y=f"{dot.y:.6g}",
    )


def shape(style: str, x: float, y: float, size: float = _MARK) -> Markup:
    """A mark whose shape distinguishes lines without colour."""
    if style == "m1":
        return tag("rect", x=x - size, y=y - size, width=2 * size, height=2 * size, class_=f"dot {style}")
    if style in ("p", "m2"):
        wide = 1.35 * size
        corners = f"{x:.1f},{y - wide:.1f} {x + wide:.1f},{y:.1f} {x:.1f},{y + wide:.1f} {x - wide:.1f},{y:.1f}"
        return tag("polygon", points=corners, class_=f"dot {style}")
    return tag("circle", cx=x, cy=y, r=size, class_=f"dot {style}")


def _knee(frame: Frame, curve: ChartCurve) -> list[Markup]:
    if curve.knee is None:
        return []
    x = frame.x(curve.knee)
    words = f"knee: {tick_text(curve.knee)}"
    half = text_width(words) / 2
    at = min(max(x, half + 2), frame.width - half - 2)
    return [
        tag("line", x1=x, x2=x, y1=frame.top - 6, y2=frame.bottom, class_="knee"),
        label(at, frame.top - 10, words, "knee", "middle"),
    ]


def _chosen(frame: Frame, curve: ChartCurve, lines: Sequence[Series]) -> list[Markup]:
    dot = lines[0].at(curve.chosen)
    if dot is None:
        return []
    x = frame.x(dot.x)
    y = frame.y(dot.y)
    words = f"chosen: {tick_text(dot.x)}"
    half = _BOLD * text_width(words) / 2
    at = min(max(x, frame.left - 8 + half), frame.right + 8 - half)
    marks = [(frame.x(each.x), frame.y(each.y)) for line in lines for each in line.dots if each is not dot]

    def covered(middle: float) -> int:
        return sum(abs(mark_x - at) < half + 5 and abs(mark_y - middle) < 13 for mark_x, mark_y in marks)

    inside = [place for place in (y + 24, y - 15, y + 40, y - 31) if frame.top + 8 < place < frame.bottom - 4]
    place = min(inside, key=lambda place: covered(place - 4), default=y + 24)
    return [
        tag("circle", cx=x, cy=y, r=8, class_="chosen"),
        label(at, place, words, "chosen", "middle"),
    ]


def _failed(frame: Frame, trial: FailedTrial) -> Markup:
    x = frame.x(trial.x)
    y = frame.bottom - 9
    cross = tag("path", d=f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8", class_="lost")
    return marked(cross, x, y, [f"at {tick_text(trial.x)}: {trial.why}"], frame.width, f"{trial.x:g}: {trial.why}")


def _names_right(frame: Frame, lines: Sequence[Series]) -> list[Markup]:
    ends = spread([frame.y(line.dots[-1].y) + 4 for line in lines], 15, frame.top + 4, frame.bottom - 2)
    found = []
    for line, y in zip(lines, ends, strict=True):
        x = frame.x(line.dots[-1].x)
        found.append(label(max(x, frame.right - 1) + 11, y, line.name, f"name {_style(lines, line)}"))
    return found


def _names_above(lines: Sequence[Series]) -> list[Markup]:
    return [
        joined(
            shape(_style(lines, line), 10.0, 28.0 + _LINE_GAP * number),
            label(20, 32.0 + _LINE_GAP * number, line.name, f"name {_style(lines, line)}"),
        )
        for number, line in enumerate(lines)
    ]


def front_chart(front: Front, width: int) -> Markup:
    """Every trial as a dot; those on the Pareto front are filled and connected."""
    ticks = nice_ticks(1.04 * max(trial.y for trial in front.trials))
    left = 12.0 + max(text_width(tick_text(tick)) for tick in ticks)
    height = 262.0
    xs = sorted({trial.x for trial in front.trials})
    tokens = front.x_name.startswith("tokens")
    x_ticks = token_ticks(xs[-1]) if tokens else tuple(xs) if front.whole else nice_ticks(xs[-1])
    low = min(xs[0], 1.0) if front.whole and not tokens else 0.0
    frame = Frame(
        width,
        height,
        Scale(low, max(x_ticks[-1], xs[-1]), left + 10.0, width - 18.0),
        Scale(0.0, ticks[-1], height - 42.0, 30.0),
    )
    best = sorted((trial for trial in front.trials if trial.best), key=lambda trial: (trial.x, trial.y))
    way = " ".join(
        f"{'L' if number else 'M'}{frame.x(trial.x):.1f} {frame.y(trial.y):.1f}" for number, trial in enumerate(best)
    )
    parts = [
        _y_axis(frame, ticks, f"{front.y_name}, tok/s"),
        _x_axis(frame, x_ticks, front.x_name),
        tag("path", d=way, class_="line front"),
    ]
    for trial in sorted(front.trials, key=lambda trial: trial.best):
        x = frame.x(trial.x)
        y = frame.y(trial.y)
        kind = "m0" if trial.best else "other"
        words = [trial.words, f"{figure_text(trial.y)} tok/s, {front.x_name}: {figure_text(trial.x)}"]
        parts.append(marked(shape(kind, x, y), x, y, words, width, ", ".join(words)))
        if trial.chosen:
            parts.append(tag("circle", cx=x, cy=y, r=8, class_="chosen"))
            below = y + 24 < frame.bottom
            parts.append(label(min(x, width - 40.0), y + 24 if below else y - 14, "chosen", "chosen", "middle"))
    return drawing("chart front", width, height, f"{front.y_name} against {front.x_name}", *parts)


def error_bar(error: float, width: float = 96.0, limit: float = 0.5) -> Markup:
    """A prediction error as a bar: to the right if too high, to the left if too low; beyond `limit` an arrow."""
    middle = width / 2
    high = 14.0
    reach = min(abs(error) / limit, 1.0) * (middle - 8)
    x = middle if error >= 0 else middle - reach
    parts = [tag("line", x1=middle, x2=middle, y1=0, y2=high, class_="base")]
    if reach > 0.3:
        parts.append(tag("rect", x=x, y=3.0, width=reach, height=8.0, class_="over" if error > 0 else "under"))
    if abs(error) > limit:
        tip = width - 1.0 if error > 0 else 1.0
        back = tip - 6 if error > 0 else tip + 6
        arrow = f"{tip:g},7 {back:g},2 {back:g},12"
        parts.append(tag("polygon", points=arrow, class_="over" if error > 0 else "under"))
    return drawing("error", width, high, f"error {100 * error:+.1f} %", *parts)
