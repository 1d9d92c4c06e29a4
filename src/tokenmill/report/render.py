"""Renders a report as one HTML page or as Markdown, from the Jinja2 templates in `templates/`.

Both environments escape every expression, so a hostile model or file name is shown as text; only charts and the
functions below insert markup. The content security policy of the page forbids network requests and every script but the
one that copies commands. Pure.
"""

import re
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from tokenmill.report import plan_text, result_text
from tokenmill.report.bars import reuse_chart, swatch, tier_chart
from tokenmill.report.charts import error_bar, front_chart, line_chart
from tokenmill.report.curves import front_of
from tokenmill.report.report import BatchReuse, ChartCurve, ReportPage, Series, TierPicture
from tokenmill.report.svg import figure_text, tick_text, visible
from tokenmill.units import format_bytes

GENERATOR = "tokenmill report"  # marks a file as a report, which may be overwritten
MARK = f"<!-- {GENERATOR} -->"
_WIDE = 530  # px of a chart in one of two columns
_BROAD = 660  # px of a chart of a memory or of batches
_SLIM = 356  # px of a chart on a phone
_BAR = 32  # characters
_EIGHTHS = " ▏▎▍▌▋▊▉"
COPY_SCRIPT = (
    'document.addEventListener("click", async ({target}) => { if (!target.matches("button.copy")) return; '
    "await navigator.clipboard.writeText(target.nextElementSibling.textContent); "
    'target.textContent = "Copied"; });'
)
_COPY_HASH = b64encode(sha256(COPY_SCRIPT.encode()).digest()).decode()
_DATE = re.compile(r"\b\d{4}-\d\d-\d\d\b")
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~])")


def page(report: ReportPage) -> str:
    """The report as a self-contained HTML page."""
    return _HTML.get_template("report.html.j2").render(report=report).lstrip()


def markdown(report: ReportPage) -> str:
    """The report as Markdown, with charts of block characters."""
    return _MARKDOWN.get_template("report.md.j2").render(report=report).lstrip()


def plain(text: object) -> Markup:
    """Text on one line, escaped for Markdown."""
    return Markup(_SPECIAL.sub(r"\\\1", visible(" ".join(str(text).split()))))  # noqa: S704  escaped for Markdown


def fenced(text: str) -> Markup:
    """A code block, with a fence that is longer than any in the text."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return Markup(f"{fence}\n{visible(text)}\n{fence}")  # noqa: S704


def code(text: str) -> Markup:
    """Inline code, with more backquotes than any run in the text."""
    fence = "`" * (1 + _longest_run(text))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return Markup(f"{fence}{space}{visible(' '.join(text.split()))}{space}{fence}")  # noqa: S704


def bar(share: float, width: int = _BAR) -> str:
    """A bar of block characters with a resolution of eighths."""
    eighths = round(max(0.0, min(share, 1.0)) * width * 8)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> Markup:
    rule = ["---:" if column in numbers else "---" for column in range(len(head))]
    lines = [map(plain, head), rule, *(map(plain, row) for row in rows)]
    return Markup("\n".join("| " + " | ".join(line) + " |" for line in lines))  # noqa: S704


def _bars(rows: Sequence[tuple[str, float, str]]) -> Markup:
    wide = max((len(label) for label, _, _ in rows), default=0)
    return fenced("\n".join(f"{label:>{wide}} {bar(share):{_BAR}} {value}".rstrip() for label, share, value in rows))


def _text_curve(curve: ChartCurve, line: Series) -> Markup:
    highest = max(dot.y for each in curve.lines for dot in each.dots) or 1.0
    rows = []
    for dot in line.dots:
        marks = [name for name, x in (("knee", curve.knee), ("chosen", curve.chosen)) if x == dot.x]
        marked = f"  ← {', '.join(marks)}" if marks and line is curve.lines[0] else ""
        rows.append((tick_text(dot.x), dot.y / highest, figure_text(dot.y) + marked))
    return _bars(rows)


def _text_tier(tier: TierPicture) -> Markup:
    full = max(tier.capacity_bytes or 0, tier.planned_bytes) or 1
    sizes = plan_text.planned_sizes(tier)
    rows = [(item, sizes.get(item, 0)) for item in plan_text.tier_items(tier)]
    return _bars([(plan_text.NAMES[item], size / full, format_bytes(size)) for item, size in rows])


def _text_reuse(batches: Sequence[BatchReuse]) -> Markup:
    largest = max(batch.computed_tokens + batch.reused_tokens for batch in batches) or 1
    rows = []
    for batch in batches:
        computed = round(_BAR * batch.computed_tokens / largest)
        reused = round(_BAR * (batch.computed_tokens + batch.reused_tokens) / largest) - computed
        share = "" if batch.share is None else f", {100 * batch.share:.0f} % reused"
        blocks = "█" * computed + "░" * reused
        rows.append(f"{batch.when[:10]} {blocks:{_BAR}} {batch.computed_tokens:,} computed{share}  {batch.source}")
    return fenced("\n".join(rows))


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall(r"`+", text)), default=0)


def _dated(text: str) -> Markup:
    """Text whose dates are not wrapped."""
    return Markup(_DATE.sub(r'<span class="date">\g<0></span>', str(escape(visible(text)))))  # noqa: S704


def _environment(finalize: object) -> Environment:
    return Environment(
        loader=PackageLoader("tokenmill.report"),
        autoescape=True,
        finalize=finalize,  # type: ignore[arg-type]
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


_HTML = _environment(lambda value: value if isinstance(value, Markup) else visible(str(value)))
_HTML.filters["dated"] = _dated
_HTML.globals |= {
    "GENERATOR": GENERATOR,
    "WIDE": _WIDE,
    "BROAD": _BROAD,
    "SLIM": _SLIM,
    "MAX_ROWS": 14,
    "NAMES": plan_text.NAMES,
    "plan_text": plan_text,
    "result_text": result_text,
    "front_of": front_of,
    "swatch": swatch,
    "COPY_SCRIPT": Markup(COPY_SCRIPT),  # noqa: S704  a constant
    "COPY_HASH": Markup(f"sha256-{_COPY_HASH}"),  # noqa: S704  base64
    "line_chart": line_chart,
    "front_chart": front_chart,
    "tier_chart": tier_chart,
    "reuse_chart": reuse_chart,
    "error_bar": error_bar,
}
_MARKDOWN = _environment(lambda value: value if isinstance(value, Markup) else plain(value))
_MARKDOWN.filters |= {"code": code, "fenced": fenced, "bytes": format_bytes}
_MARKDOWN.globals |= {
    "MARK": MARK,
    "plan_text": plan_text,
    "result_text": result_text,
    "table": _table,
    "tick_text": tick_text,
    "curve_chart": _text_curve,
    "tier_chart": _text_tier,
    "reuse_chart": _text_reuse,
}
