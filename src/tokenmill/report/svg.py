"""SVG elements and chart geometry: ticks, scales and text widths.

Text is escaped unless it is `Markup`. Colours are CSS classes, so one drawing serves a light and a dark page.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

FONT = 12.0  # px of regular text in charts
_WIDE = 0.61  # of the font size: an average letter of a wide system font, so that no text is cut
# Characters that browsers, terminals and editors interpret: control and bidirectional formatting characters.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def visible(text: str) -> str:
    """Text with control and formatting characters as escapes."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """An SVG element. `class_` sets class, underscores become dashes, and attributes that are None are omitted."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escaped(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if not children:
        return Markup(f"<{name}{given}/>")  # noqa: S704  every part is escaped
    return Markup(f"<{name}{given}>{joined(*children)}</{name}>")  # noqa: S704


def joined(*parts: object) -> Markup:
    """The parts concatenated, with text escaped and None skipped."""
    return Markup("").join(_escaped(part) for part in parts if part is not None)


def _escaped(value: object) -> Markup:
    return value if isinstance(value, Markup) else escape(visible(str(value)))


def _number(value: object) -> object:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value


def text_width(text: str, size: float = FONT) -> float:
    """The approximate width of a text in px."""
    return sum(0.38 if letter in "ijl.,:;|!' tfr" else 0.95 if letter in "mwMW%" else _WIDE for letter in text) * size


def nice_ticks(high: float, max_steps: int = 5) -> tuple[float, ...]:
    """Ticks from 0 to at least `high`, with steps of 1, 2, 2.5 or 5 times a power of ten."""
    if not high > 0 or not math.isfinite(high):
        return (0.0, 1.0)
    rough = high / max_steps
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= rough * (1 - 1e-9))
    count = math.ceil(high / step - 1e-9)
    return tuple(step * number for number in range(count + 1))


def token_ticks(high: float, max_steps: int = 5) -> tuple[float, ...]:
    """`nice_ticks` with powers of two as steps, for numbers of tokens."""
    if high < 64:
        return nice_ticks(high, max_steps)
    step = 2.0 ** math.ceil(math.log2(high / max_steps))
    return tuple(step * number for number in range(math.ceil(high / step - 1e-9) + 1))


def tick_text(value: float) -> str:
    """`2.5`, `40`, `1,200`: a number without trailing zeros."""
    return f"{value:,.0f}" if value == round(value) else f"{value:,.2f}".rstrip("0")


def figure_text(value: float) -> str:
    """A number with three significant digits, or as an integer: `91.2`, `0.42`, `1,834`."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def tokens_text(value: float) -> str:
    """A number of tokens; `4K` is 4096."""
    return f"{value / 1024:g}K" if value >= 1024 and value % 256 == 0 else tick_text(value)


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values to px, linearly or, with `doubling`, logarithmically."""

    low: float
    high: float
    start: float  # px
    end: float
    doubling: bool = False

    def __call__(self, value: float) -> float:
        """The position of a value in px."""
        low = self.low
        high = self.high
        at = value
        if self.doubling:
            low = math.log2(low)
            high = math.log2(high)
            at = math.log2(value)
        if high == low:
            return (self.start + self.end) / 2
        return self.start + (at - low) / (high - low) * (self.end - self.start)


def thinned(values: Sequence[float], scale: Scale, min_px: float) -> list[float]:
    """The values that are at least `min_px` apart, from the last one backwards."""
    kept: list[float] = []
    for value in sorted(values, reverse=True):
        if not kept or scale(kept[-1]) - scale(value) >= min_px:
            kept.append(value)
    return kept[::-1]


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near the wanted ones, at least `gap` apart and within the limits, in the given order."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    placed = [0.0] * len(wanted)
    at = low
    for index in order:
        at = max(at, wanted[index])
        placed[index] = at
        at += gap
    over = (at - gap) - high
    for index in reversed(order) if over > 0 else ():
        placed[index] = min(placed[index], high)
        high = placed[index] - gap
    return placed
