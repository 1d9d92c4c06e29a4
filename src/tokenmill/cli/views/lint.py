"""A lint report for a terminal of 80 columns and as JSON: totals, then each finding with its cost and an example."""

from typing import Any

from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tokenmill.cli.output import facts, jsonable
from tokenmill.jobs.lint.differences import Difference
from tokenmill.jobs.lint.report import COSTLY, FIXABLE, TOO_MUCH, LintFinding, Report
from tokenmill.units import format_bytes, format_seconds


def render(
    name: str,
    report: Report,
    *,
    prefill_tok_s: float | None,
    speed: str | None,
    why_estimated: str | None,
    fixed: bool = False,
) -> list[RenderableType]:
    """The report at 80 columns; `fixed`: of a file that --fix has written."""
    parts: list[RenderableType] = [_summary(name, report, prefill_tok_s, speed, why_estimated)]
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for finding in report.findings:
        table.add_row("", "")
        if finding.kind in COSTLY:
            _add_costly(table, finding, report, prefill_tok_s)
        else:
            _add_other(table, finding, report)
    return [*parts, table, Text(), _verdict(report, fixed=fixed)]


def _summary(
    name: str, report: Report, prefill_tok_s: float | None, speed: str | None, why_estimated: str | None
) -> Table:
    total = report.prompt_bytes
    compute = report.compute_bytes
    could = report.repaired_bytes
    how = f"{report.bytes_per_token:.2f} bytes per token, from a sample"
    if not report.counted:
        how = f"estimated at 4 bytes per token{'; ' + why_estimated if why_estimated else ''}"
    rows = {
        "file": name,
        "jobs": _count(report.jobs),
        "prompts": f"{format_bytes(total)}, {_tokens(report, total)} ({how})",
    }
    if speed is not None:
        rows["prefill"] = speed
    rows["to compute"] = f"{_cost(report, compute, prefill_tok_s)} with each shared prefix computed once"
    if could < compute:
        rows["possible"] = f"{_cost(report, could, prefill_tok_s)} if the problems below are fixed"
    return facts(rows)


def _add_costly(table: Table, finding: LintFinding, report: Report, prefill_tok_s: float | None) -> None:
    cost = finding.cost_bytes or 0
    share = report.share(cost)
    style = "bold red" if share > TOO_MUCH else "yellow"
    shown = f"{100 * share:.0f} %" if share >= 0.0095 else f"{100 * share:.1f} %"
    table.add_row(Text(shown, style=style), Text(finding.title, style="bold"))
    jobs = f"{_jobs(finding.jobs)}, " if finding.jobs else ""
    table.add_row("", f"{jobs}{_cost(report, cost, prefill_tok_s)} wasted")
    if finding.example is not None:
        _add_example(table, finding.example)
    _add_advice(table, finding)


def _add_advice(table: Table, finding: LintFinding) -> None:
    advice = Table.grid(padding=(0, 1))
    advice.add_row("->", Text(finding.advice))
    table.add_row("", advice)


def _add_example(table: Table, difference: Difference) -> None:
    """Both texts below each other, with a mark at the first byte that differs."""
    first = difference.first
    second = difference.second
    width = max(cell_len(first.before), cell_len(second.before))
    labels = [f"line {side.line}: " for side in (first, second)]
    label = max(map(len, labels))
    where = f"{first.where}, byte {first.byte}"
    if (first.where, first.byte) != (second.where, second.byte):
        where += f"; {second.where}, byte {second.byte}"
    table.add_row("", Text(f"in {where}"))
    for text, side in zip(labels, (first, second), strict=True):
        shown = f"{text:>{label}}{' ' * (width - cell_len(side.before))}{side.before}{side.behind}"
        table.add_row("", Text(shown, no_wrap=True, overflow="ellipsis"))
    table.add_row("", Text(" " * (label + width) + "^", no_wrap=True))


def _add_other(table: Table, finding: LintFinding, report: Report) -> None:
    label = Text("error", style="bold red") if finding.fatal else Text("note")
    jobs = "" if finding.jobs is None else f": {_jobs(finding.jobs, 'line')}"
    cost = "" if finding.cost_bytes is None else f": up to {_tokens(report, finding.cost_bytes)}"
    table.add_row(label, Text(finding.title, style="bold").append(jobs + cost, style="not bold"))
    if finding.detail:
        table.add_row("", Text(finding.detail))
    _add_advice(table, finding)


def _verdict(report: Report, *, fixed: bool) -> Text:
    if report.clean:
        return Text("no problem costs more than 1 % of the prompt tokens", style="green")
    fixable = not fixed and any(finding.kind in FIXABLE for finding in report.findings)
    text = "fix these problems before running the batch" + ("; --fix -o FILE fixes some of them" if fixable else "")
    return Text(text, style="bold red")


def document(report: Report, prefill_tok_s: float | None) -> dict[str, Any]:
    """The report as JSON. Bytes are exact, or scaled from a sample; tokens are estimated unless `tokens_counted`."""
    return {
        "jobs": report.jobs,
        "clean": report.clean,
        "prompt_bytes": report.prompt_bytes,
        "prompt_tokens": report.tokens(report.prompt_bytes),
        "compute_tokens": report.tokens(report.compute_bytes),
        "repaired_tokens": report.tokens(report.repaired_bytes),
        "bytes_per_token": round(report.bytes_per_token, 4),
        "tokens_counted": report.counted,
        "findings": [
            {
                "kind": finding.kind,
                "title": finding.title,
                "advice": finding.advice,
                "jobs": finding.jobs,
                "cost_tokens": None if finding.cost_bytes is None else report.tokens(finding.cost_bytes),
                "cost_share": None if finding.cost_bytes is None else round(report.share(finding.cost_bytes), 6),
                "cost_s": _seconds(report, finding.cost_bytes, prefill_tok_s),
                "fixable": finding.kind in FIXABLE,
                "fatal": finding.fatal,
                "detail": finding.detail,
                "example": jsonable(finding.example),
            }
            for finding in report.findings
        ],
    }


def _seconds(report: Report, size: int | None, prefill_tok_s: float | None) -> float | None:
    return None if size is None or prefill_tok_s is None else report.tokens(size) / prefill_tok_s


def _cost(report: Report, size: int, prefill_tok_s: float | None) -> str:
    seconds = _seconds(report, size, prefill_tok_s)
    return _tokens(report, size) + (f" ({format_seconds(seconds)})" if seconds is not None else "")


def _tokens(report: Report, size: int) -> str:
    return f"{_count(report.tokens(size))} tokens"


def _jobs(number: int, word: str = "job") -> str:
    return f"{_count(number)} {word}{'' if number == 1 else 's'}"


def _count(number: int) -> str:
    return f"{number:,}"
