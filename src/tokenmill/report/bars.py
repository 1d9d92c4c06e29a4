"""Bar charts as inline SVG: the contents of each memory, and computed and reused prompt tokens. Pure."""

from collections.abc import Sequence

from markupsafe import Markup

from tokenmill.report.charts import drawing, label
from tokenmill.report.compare import FREE
from tokenmill.report.plan_text import NAMES
from tokenmill.report.report import BarSegment, BatchReuse, TierPicture
from tokenmill.report.svg import joined, tag, text_width
from tokenmill.units import format_bytes

BAR = 24.0
GAP = 8.0
_ENLARGE = 0.3  # a plan that uses a smaller share of a memory is drawn a second time, enlarged
_MIN_WIDTH = 1.5  # px of a segment, so that it stays visible
_BOLD = 1.08  # width of bold text relative to regular text


def tier_chart(tier: TierPicture, width: int) -> Markup:
    """One memory: the plan at full context, enlarged if it is small, and the last load, predicted and measured."""
    used = tier.planned_bytes
    full = max(tier.capacity_bytes or 0, used) or 1
    y = 14.0
    parts = []
    free = [BarSegment(FREE, tier.free_bytes)] if tier.free_bytes else []
    parts += [label(0, y, _planned_words(tier), "row"), _bar((*tier.planned, *free), full, width, y + 6)]
    y += 6 + BAR
    if tier.capacity_bytes is not None and used > tier.capacity_bytes:
        x = width * tier.capacity_bytes / full
        parts.append(tag("line", x1=x, x2=x, y1=y - BAR - 5, y2=y + 5, class_="limit"))
    if used < _ENLARGE * full:
        edge = max(width * used / full, _MIN_WIDTH)
        parts.append(tag("path", d=f"M0 {y:.1f}L0 {y + 14:.1f}H{width}L{edge:.1f} {y:.1f}Z", class_="larger"))
        parts.append(_bar(tier.planned, used, width, y + 14))
        y += 14 + BAR
    if tier.loaded is not None:
        largest = max(sum(part.bytes for part in parts_) for parts_ in (tier.loaded.predicted, tier.loaded.measured))
        for words, shown in (("predicted", tier.loaded.predicted), ("measured", tier.loaded.measured)):
            y += 2 * GAP + 6
            total = format_bytes(sum(part.bytes for part in shown))
            parts += [
                label(0, y, f"last load, {words}: {total}", "row"),
                _bar(shown, largest, width, y + 6, kind=words),
            ]
            y += 6 + BAR
    return drawing("tier", width, y + 6, f"{tier.name}: {_planned_words(tier)}", *parts)


def _planned_words(tier: TierPicture) -> str:
    of = f" of {format_bytes(tier.capacity_bytes)}" if tier.capacity_bytes is not None else ""
    missing = f", {format_bytes(tier.missing_bytes)} missing" if tier.missing_bytes else ""
    return f"plan at full context, predicted: {format_bytes(tier.planned_bytes)}{of}{missing}"


def _bar(parts: Sequence[BarSegment], full: int, width: float, y: float, *, kind: str = "planned") -> Markup:
    """A stacked bar; `full` bytes fill the width. Segments are labelled where the label fits."""
    x = 0.0
    drawn = []
    for part in parts:
        wide = max(width * part.bytes / full, _MIN_WIDTH)
        wide = min(wide, width - x)
        name = NAMES[part.item]
        size = format_bytes(part.bytes)
        words = next((text for text in (f"{name} {size}", name) if _BOLD * text_width(text) + 10 < wide), None)
        drawn.append(
            tag(
                "g",
                tag("title", f"{name}: {size}"),
                tag("rect", x=x, y=y, width=wide, height=BAR, class_=f"part {part.item}"),
                None if words is None else label(x + 6, y + BAR / 2 + 4, words, f"inside {part.item}"),
                data_item=part.item,
                data_bytes=part.bytes,
            )
        )
        x += wide
    frame = tag("rect", x=0.5, y=y + 0.5, width=width - 1.0, height=BAR - 1, class_="outline")
    return tag("g", *drawn, frame, data_bar=kind)


def swatch(item: str) -> Markup:
    """The colour of an item, for tables and legends."""
    rect = tag("rect", x=0.5, y=0.5, width=11, height=11, rx=2, class_=f"part {item} edge")
    return drawing("swatch", 12, 12, NAMES[item], rect)


def reuse_chart(batches: Sequence[BatchReuse], width: int) -> Markup:
    """A bar for each batch: computed and reused prompt tokens."""
    largest = max(batch.computed_tokens + batch.reused_tokens for batch in batches) or 1
    y = 14.0
    parts = []
    for batch in batches:
        share = "" if batch.share is None else f"{100 * batch.share:.0f} % reused"
        title = label(0, y, f"{batch.source}, {batch.when[:10]}", "row")
        computed = width * batch.computed_tokens / largest
        reused = width * batch.reused_tokens / largest
        tokens = (("computed", 0.0, computed, batch.computed_tokens), ("reused", computed, reused, batch.reused_tokens))
        bars = [
            tag(
                "g",
                tag("title", f"{count:,} tokens {name}"),
                tag("rect", x=x, y=y + 6, width=max(wide, 0.1), height=BAR - 4, class_=f"part {name}"),
                label(x + 6, y + BAR / 2 + 8, f"{count:,} {name}", f"inside {name}")
                if _BOLD * text_width(f"{count:,} {name}") + 10 < wide
                else None,
                data_item=name,
                data_tokens=count,
            )
            for name, x, wide, count in tokens
            if count
        ]
        parts += [title, label(width, y, share, "row strong", "end"), tag("g", *bars, data_batch=batch.name)]
        y += BAR + 2 * GAP + 8
    return drawing("reuse", width, y - GAP - 4, "prompt tokens computed and reused", joined(*parts))
