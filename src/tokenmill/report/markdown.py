"""The report as Markdown: tables, and charts of blocks that any terminal shows. Pure; every text is escaped."""

import re
from collections.abc import Iterator, Sequence

from tokenmill.report import facts
from tokenmill.report.bars import NAMES
from tokenmill.report.report import BatchReuse, Comparison, Curve, Gap, Line, Report, TierPicture
from tokenmill.report.svg import figure_text, tick_text, visible
from tokenmill.report.tiers import SHOWN
from tokenmill.units import format_bytes

MARK = "<!-- tokenmill report -->"
_BAR = 32
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~])")
_EIGHTHS = " ▏▎▍▌▋▊▉"


def markdown(report: Report) -> str:
    """The whole document."""
    title = f"{report.model.name} on {report.machine.name}" if report.model else report.machine.name
    parts = [MARK, f"# {plain(title)}", *_headline(report)]
    for name, make in (
        ("The machine", _machine),
        ("The plan", _plan),
        ("The operating point", _point),
        ("Threads and sequences", _curves),
        ("Depth", _depth),
        ("Reuse", _reuse),
        ("Predicted against measured", _comparisons),
        ("Soak and quality", _checks),
        ("The commands", _commands),
    ):
        content = list(make(report))
        if content:
            parts += [f"## {name}", *content]
    made = report.made[:16].replace("T", " ")
    parts.append(f"Made {made} UTC by tokenmill {plain(report.version)}. {facts.UNITS}")
    return "\n\n".join(parts) + "\n"


def plain(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return _SPECIAL.sub(r"\\\1", visible(" ".join(text.split())))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A table; columns of numbers are set to the right."""
    rule = ["---:" if column in numbers else "---" for column in range(len(head))]
    lines = [[plain(cell) for cell in head], rule, *([plain(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fenced(text: str) -> str:
    """Text as it is; no fence inside can end it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{visible(text)}\n{fence}"


def bar(share: float, width: int = _BAR) -> str:
    """Blocks for a share of the width, in eighths."""
    eighths = round(max(0.0, min(share, 1.0)) * width * 8)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def _headline(report: Report) -> Iterator[str]:
    rows = list(facts.headline(report))
    if rows:
        yield table(("", "", ""), rows, numbers=(1,))


def _machine(report: Report) -> Iterator[str]:
    machine = report.machine
    yield table(("", ""), facts.machine_rows(machine))
    yield table(("memory", "kind", "size", "free", "nominal", "measured"), facts.tier_rows(machine), (2, 3, 4, 5))
    if machine.measured is not None:
        yield plain(f"bandwidth measured on {machine.name}, {machine.measured.when[:10]}")
    if machine.gpus:
        yield table(("card", "name", "memory", "nominal", "PCIe", "limit"), facts.gpu_rows(machine), (2, 3, 4, 5))
    if links := facts.link_rows(machine):
        yield table(("between", "link", "nominal", "measured"), links, (2, 3))
    yield from map(_curve, report.bandwidth)
    yield from _gaps(report.gap("machine"))


def _plan(report: Report) -> Iterator[str]:
    yield from _gaps(report.gap("plan"))
    if report.plan is None or report.model is None:
        return
    yield "Predicted before anything is loaded."
    for lack in report.plan.shortfalls:
        when = "while loading" if lack.moment == "load_peak" else "at full context"
        yield f"**{plain(lack.tier)} lacks {format_bytes(lack.missing_bytes)} {when}.**"
    if report.plan.changes:
        changes = [f"{change.what}: {change.effect}" for change in report.plan.changes]
        yield "\n".join(f"- would fit with {plain(words)}" for words in changes)
    yield table(("", ""), [*facts.model_rows(report.model), *facts.plan_rows(report.plan)])
    for tier in report.tiers:
        yield from _tier(tier)
    yield from (f"> {plain(words)}" for words in (*report.plan.warnings, *report.plan.notes))
    yield from _gaps(report.gap("tiers"))


def _tier(tier: TierPicture) -> Iterator[str]:
    columns = {"planned": facts.planned_sizes(tier)}
    caption = "planned: predicted, at full context"
    if tier.loaded is not None:
        columns["load, predicted"] = {part.item: part.bytes for part in tier.loaded.predicted}
        columns["load, measured"] = {part.item: part.bytes for part in tier.loaded.measured}
        caption += f"; last load ({tier.loaded.settings}): {tier.loaded.origin.words}"
    of = "" if tier.capacity_bytes is None else f", {format_bytes(tier.capacity_bytes)}"
    yield f"### {plain(tier.name)}{of}"
    room = max(tier.capacity_bytes or 0, tier.planned_bytes) or 1
    items = [item for item in SHOWN if any(item in sizes for sizes in columns.values())]
    names = [NAMES[item] for item in items]
    sizes = [columns["planned"].get(item, 0) for item in items]
    yield _chart(names, [size / room for size in sizes], [format_bytes(size) for size in sizes])
    if tier.loaded is not None:
        rows = [
            (NAMES[item], *(format_bytes(size[item]) if item in size else "" for size in columns.values()))
            for item in items
        ]
        yield table(("item", *columns), rows, tuple(range(1, len(columns) + 1)))
    yield plain(caption)


def _point(report: Report) -> Iterator[str]:
    point = report.point
    if point is not None:
        yield plain(facts.point_words(point))
        yield f"> {plain(point.knee)}"
        yield table(("", ""), [*facts.dial_rows(point.dials), *facts.figure_rows(point.figures)])
        if point.given_up:
            yield "Given up:"
            yield "\n".join(f"- {plain(words)}" for words in point.given_up)
        yield "Nothing else is better in everything (the Pareto front):"
        yield table(facts.FRONT_HEAD, facts.front_rows(point), tuple(range(7)))
    yield from _gaps(report.gap("point"))


def _curves(report: Report) -> Iterator[str]:
    yield from map(_curve, report.curves)
    yield from _gaps(report.gap("curves"))


def _depth(report: Report) -> Iterator[str]:
    yield from map(_curve, report.depth)
    yield from _gaps(report.gap("depth"))


def _curve(curve: Curve) -> str:
    parts = [f"### {plain(curve.title)}"]
    most = max(dot.y for line in curve.lines for dot in line.dots) or 1.0
    for line in curve.lines:
        parts.append(f"{plain(_named(line, curve))}")
        labels = [tick_text(dot.x) for dot in line.dots]
        values = [f"{figure_text(dot.y)}{_marks(curve, line, dot.x)}" for dot in line.dots]
        parts.append(_chart(labels, [dot.y / most for dot in line.dots], values))
    if curve.note:
        parts.append(plain(f"at {curve.note}"))
    parts += [plain(f"at {tick_text(gone.x)}: {gone.why}") for gone in curve.lost]
    return "\n\n".join(parts)


def _named(line: Line, curve: Curve) -> str:
    name = "" if line.name == line.origin.kind else f"{line.name}, "
    return f"{name}{curve.unit} by {curve.x_name}; {line.origin.words}"


def _marks(curve: Curve, line: Line, x: float) -> str:
    if line is not curve.lines[0]:
        return ""
    marks = [name for name, at in (("knee", curve.knee), ("chosen", curve.chosen)) if at == x]
    return f"  ← {', '.join(marks)}" if marks else ""


def _chart(labels: Sequence[str], shares: Sequence[float], values: Sequence[str]) -> str:
    wide = max((len(label) for label in labels), default=0)
    every = zip(labels, shares, values, strict=True)
    rows = [f"{label:>{wide}} {bar(share):{_BAR}} {value}" for label, share, value in every]
    return fenced("\n".join(row.rstrip() for row in rows))


def _reuse(report: Report) -> Iterator[str]:
    if report.reuse:
        yield "Prompt tokens of past batches, measured by the engines' own counters: █ computed, ░ reused."
        most = max(batch.computed_tokens + batch.reused_tokens for batch in report.reuse) or 1
        yield fenced("\n".join(_reuse_row(batch, most) for batch in report.reuse))
    yield from _gaps(report.gap("reuse"))


def _reuse_row(batch: BatchReuse, most: int) -> str:
    computed = round(_BAR * batch.computed_tokens / most)
    reused = round(_BAR * (batch.computed_tokens + batch.reused_tokens) / most) - computed
    share = "" if batch.share is None else f", {100 * batch.share:.0f} % reused"
    blocks = "█" * computed + "░" * reused
    return f"{batch.when[:10]} {blocks:{_BAR}} {batch.computed_tokens:,} computed{share}  {batch.source}"


def _comparisons(report: Report) -> Iterator[str]:
    if report.comparisons:
        yield "An error above 0: predicted too much."
        yield table(
            ("what", "at", "predicted", "measured", "error", "measured with"),
            [_comparison(each) for each in report.comparisons],
            (2, 3, 4),
        )
    yield from _gaps(report.gap("comparisons"))


def _comparison(each: Comparison) -> tuple[str, ...]:
    return (
        each.what,
        each.at,
        facts.amount(each.predicted, each.unit),
        facts.amount(each.measured, each.unit),
        facts.error_text(each.error),
        each.origin.words.removeprefix("measured on "),
    )


def _checks(report: Report) -> Iterator[str]:
    soaked = report.soaked
    qualified = report.qualified
    if soaked is not None:
        of = f" of {soaked.goal_context:,}" if soaked.goal_context else ""
        usable = "unknown" if soaked.usable_context is None else f"{soaked.usable_context:,}{of} tokens"
        yield f"**Usable context: {usable}.** {plain(soaked.reason)}"
        yield plain(soaked.origin.words)
        yield from map(_curve, soaked.curves)
    yield from _gaps(report.gap("soaked"))
    if qualified is not None:
        verdicts = {True: "good", False: "not good enough", None: "reported"}
        rows = [
            (
                check.name,
                "" if check.score is None else figure_text(check.score),
                "" if check.threshold is None else figure_text(check.threshold),
                verdicts[check.good],
                check.words or "",
            )
            for check in qualified.checks
        ]
        yield table(("check", "score", "needed", "", "what was seen"), rows, (1, 2))
        yield plain(", ".join(part for part in (qualified.verdict, qualified.origin.words) if part))
    yield from _gaps(report.gap("qualified"))


def _commands(report: Report) -> Iterator[str]:
    for command in report.commands:
        yield f"{plain(command.what)}:"
        yield fenced(command.text)
        yield from (plain(note) for note in command.notes)


def _gaps(found: Sequence[Gap]) -> Iterator[str]:
    for gap in found:
        yield f"> {plain(gap.words)}" + (f": {_code(gap.command)}" if gap.command else "")


def _code(text: str) -> str:
    fence = "`" * (1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{visible(' '.join(text.split()))}{space}{fence}"
