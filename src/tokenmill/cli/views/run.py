"""The summary of `tokenmill run`, as text and as JSON."""

import os
from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tokenmill.api.summary import NodeSummary, Summary
from tokenmill.cli.output import facts, harmless, jsonable
from tokenmill.engine.engine import SlotLimit
from tokenmill.jobs.models import Counts
from tokenmill.jobs.worker.progress import RunReport
from tokenmill.jobs.worker.retries import remedies
from tokenmill.units import format_percent, format_seconds, number_of

_MISSES = 3  # causes shown
_LINE_WIDTH = 71  # characters of a value on a terminal of 80 columns
_GAP = "   "
_FINISH_REASONS = {"length": "cut at max_tokens", "tool_calls": "tool calls"}
_LIMITS: dict[SlotLimit, str] = {
    "jobs": "lacked jobs",
    "cells": "lacked KV cells",
    "prefix": "awaited a prefix",
    "prompts": "grouped prompts",
}
_ALL_BUSY = 0.9  # of the steps: slots were the limit
_MIN_SHARE = 0.02  # of the steps, for a limit to be shown
_WARM = 0.02  # more than this below the minimum: the engine had prefixes of an earlier run in its cache


def summary(ended: Summary) -> list[RenderableType]:
    """The summary of a run, at 80 columns."""
    batch = ended.batch
    report = ended.report
    counts = batch.counts
    rows = {"batch": _fitted(batch.name, "  ", _answered(counts, report))}
    if counts.failed or counts.quarantined or counts.cancelled:
        rows["failed"] = _failed(counts)
    if report is not None and report.answers:
        rows["time"] = _time(report)
        if (limits := _slot_limits(report)) is not None:
            rows["slots"] = limits
        rows["prompts"] = _prompts(report)
        if ended.forecast_s is not None:
            rows["forecast"] = f"at most {format_seconds(ended.forecast_s)}, took {format_seconds(ended.seconds)}"
    if (engine := _engine(ended.load_s, report)) is not None:
        rows["engine"] = engine
    if (spent := _spent(ended)) is not None:
        rows["energy" if ended.energy_j is not None else "cost"] = spent
    if batch.output is not None:
        rows["results"] = near(batch.output)
    if batch.errors is not None:
        rows["errors"] = near(batch.errors)
    if (following := _next(ended)) is not None:
        rows["next"] = following
    parts: list[RenderableType] = [facts(rows), *_warnings(ended)]
    if report is not None:
        parts += [f"cache miss: {line}" for line in report.misses.lines()[:_MISSES]]
    if counts.failed or counts.quarantined:
        parts += remedies(ended.failed_by_code, batch.name)
    return parts


def _next(ended: Summary) -> str | None:
    """The command that helps most after this run; None if nothing is left to do."""
    counts = ended.batch.counts
    if counts.failed or counts.quarantined:
        return f"tokenmill results {ended.batch.name} --failed"
    if ended.checks.cut:
        return f"tokenmill results {ended.batch.name} --cut"
    if not ended.pending and ended.computed and ended.untuned is not None:
        return f"tokenmill tune {ended.untuned}  (best settings for later runs)"
    return None


def _spent(ended: Summary) -> str | None:
    """Energy of the machine and cost of the run, as far as they are known."""
    parts = []
    if ended.energy_j is not None:
        parts.append(f"{ended.energy_j / 3.6e6:,.3g} kWh (whole machine)")
    if ended.cost is not None:
        parts.append(f"{ended.cost:,.2f} {ended.currency}")
    return _GAP.join(parts) or None


def _warnings(ended: Summary) -> list[RenderableType]:
    """Answers that are complete but useless, and how to get better ones."""
    checks = ended.checks
    lines: list[str] = []
    if checks.cut_by_max_tokens:
        lines.append(f"{number_of(checks.cut_by_max_tokens, 'answer')} reached max_tokens and are incomplete")
        limit = ended.batch.defaults.get("max_tokens")
        if limit is not None:
            lines.append(f"  to raise it, run again with --max-tokens {2 * limit} and another --output")
        else:
            lines.append("  raise max_tokens in their lines and use another --output; other answers are reused")
    if checks.cut_by_context:
        lines.append(f"{number_of(checks.cut_by_context, 'answer')} reached the end of the context and are incomplete")
        lines.append("  run again with a larger --context, --no-reuse and another --output")
    if checks.invalid_json:
        of = f"{checks.invalid_json:,} of {number_of(checks.json, 'JSON answer')}"
        lines.append(f"{of} do not follow their schema")
    if not lines:
        return []
    return [Text("\n".join(f"warning: {line}" if line[0] != " " else line for line in lines), style="bold yellow")]


def near(path: str) -> str:
    """The shorter of a path and its form relative to the current folder."""
    return min(path, os.path.relpath(path), key=len)


def _answered(counts: Counts, report: RunReport | None) -> str:
    """`36 of 36 answered (34 stop, 2 cut at max_tokens)`; finish reasons are known for this run only."""
    computed = report.answers if report is not None else 0
    answered = f"{counts.done:,} of {counts.total:,} answered"
    if not computed:
        return f"{answered}, all in earlier runs" if counts.done else answered
    if computed < counts.done:
        answered += f", {computed:,} in this run"
    reasons = report.finish_reasons if report is not None else {}
    parts = [f"{number:,} {_FINISH_REASONS.get(reason, reason)}" for reason, number in reasons.items()]
    return f"{answered} ({', '.join(parts)})" if parts else answered


def _failed(counts: Counts) -> str:
    parts = {"failed": counts.failed, "quarantined": counts.quarantined, "cancelled": counts.cancelled}
    return ", ".join(f"{number:,} {word}" for word, number in parts.items() if number)


def _time(report: RunReport) -> str:
    parts = [format_seconds(report.seconds)]
    if report.seconds > 0:
        parts.append(_job_rate(report.answers / report.seconds))
    if report.busy_s > 0:
        parts.append(f"{report.tokens.generated / report.busy_s:,.0f} tok/s")
    of = "" if report.slots is None else f" of {report.slots}"
    return _GAP.join([*parts, f"{report.busy_slots:.1f}{of} slots busy"])


def _job_rate(per_second: float) -> str:
    """Jobs per minute, or per hour if they are few."""
    return f"{60 * per_second:,.0f} jobs/min" if per_second >= 1 / 6 else f"{3600 * per_second:,.0f} jobs/h"


def _slot_limits(report: RunReport) -> str | None:
    """What kept slots free, if they were not nearly all busy; None if they were or the engine does not count."""
    use = report.slot_use
    if use is None or use.share("slots") >= _ALL_BUSY:
        return None
    causes = sorted((limit for limit in _LIMITS if use.share(limit) >= _MIN_SHARE), key=use.share, reverse=True)
    first, *second = [(format_percent(use.share(limit)), _LIMITS[limit]) for limit in causes[:2]] or [("", "")]
    parts = [f"{first[0]} of steps {first[1]}", *(" ".join(each) for each in second)]
    return f"{use.slots:,.1f} per step; {', '.join(parts)}" if causes else None


def _prompts(report: RunReport) -> str:
    """Prompt tokens, the share that came from the cache, and the time that saved."""
    tokens = report.tokens
    cached = tokens.cached / tokens.prompt if tokens.prompt else 0.0
    text = f"{number_of(tokens.prompt, 'token')}, {format_percent(cached)} from cache"
    if report.minimum is not None and report.minimum.tokens and tokens.computed:
        text += f" ({_over_minimum(tokens.computed / report.minimum.tokens - 1, exact=report.minimum.exact)})"
    if report.long_prefill_tok_s is not None and tokens.cached:
        return _fitted(text, ", ", f"saves {format_seconds(tokens.cached / report.long_prefill_tok_s)}")
    return text


def _fitted(first: str, separator: str, second: str) -> str:
    """Both texts on one line if it has room for them."""
    line = f"{first}{separator}{second}"
    return line if len(line) <= _LINE_WIDTH else f"{first}\n{second}"


def _over_minimum(share: float, *, exact: bool) -> str:
    """How far the computed prompt tokens are above the minimum, with every shared prefix computed once."""
    if share < -_WARM:
        return "some cached before this run"
    about = "" if exact else "about "
    return f"{about}{format_percent(max(share, 0.0))} above the minimum"


def _engine(load_s: float | None, report: RunReport | None) -> str | None:
    parts = [] if load_s is None else [f"loaded in {format_seconds(load_s)}"]
    if report is not None and report.crashes:
        parts.append(f"restarted {number_of(report.crashes, 'time')} after a crash")
    return ", ".join(parts) or None


def document(ended: Summary) -> dict[str, Any]:
    """The totals as JSON: jobs of the batch, tokens and seconds of this run."""
    batch = ended.batch
    report = ended.report
    counts = ended.batch.counts
    found: dict[str, Any] = {
        "batch": batch.name,
        "jobs": counts.total,
        "succeeded": counts.done,
        "failed": counts.failed + counts.quarantined + counts.cancelled,
        "failed_by_code": dict(ended.failed_by_code),
        "set_aside": counts.quarantined,
        "cancelled": counts.cancelled,
        "pending": counts.pending + counts.running,
        "computed": report.answers if report else 0,
        "reused_tokens": report.tokens.cached if report else 0,
        "computed_prompt_tokens": report.tokens.computed if report else 0,
        "generated_tokens": report.tokens.generated if report else 0,
        "seconds": round(ended.seconds, 3),
        "forecast_seconds": ended.forecast_s,
        "output": batch.output,
        "errors": batch.errors,
        "end": ended.end,
        "model_id": batch.model_id,
        "model": ended.engine.model if ended.engine else None,
        "engine": ended.engine.kind if ended.engine else None,
        "build": ended.engine.build if ended.engine else None,
        "load_seconds": ended.load_s,
        "tok_s": ended.tok_s,
        "jobs_per_hour": ended.jobs_per_hour,
        "cut_by_max_tokens": ended.checks.cut_by_max_tokens,
        "cut_by_context": ended.checks.cut_by_context,
        "json_answers": ended.checks.json,
        "invalid_json": ended.checks.invalid_json,
        "energy_j": ended.energy_j,
        "cost": ended.cost,
        "currency": None if ended.cost is None else ended.currency,
    }
    if report is not None:
        found |= {
            "work_seconds": round(report.seconds, 3),
            "least_prompt_tokens": report.minimum.tokens if report.minimum else None,
            "least_is_exact": report.minimum.exact if report.minimum else None,
            "prefill_tok_s": report.rates.prefill_tok_s,
            "head_tok_s": report.long_prefill_tok_s,
            "lanes": round(report.busy_slots, 2),
            "slots_busy": round(report.slot_use.slots, 2) if report.slot_use else None,
            "slots_limited_by": dict(report.slot_use.limited_steps) if report.slot_use else None,
            "engine_deaths": report.crashes,
            "finish_reasons": dict(report.finish_reasons),
            "misses": [
                {
                    "cause": tallied.cause,
                    "jobs": tallied.jobs,
                    "lost_tokens": tallied.lost_tokens,
                    "example": tallied.examples[0].message,
                }
                for tallied in report.misses.by_cost()
            ],
            "notes": list(report.notes),
        }
    found |= {"batch_totals": jsonable(batch.totals), "output_written": ended.output_written}
    return found | ({"nodes": [_node(each) for each in ended.nodes]} if ended.nodes else {})


def nodes_table(nodes: Sequence[NodeSummary]) -> list[RenderableType]:
    """A table of the nodes of a cluster."""
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    table.add_column("node", overflow="fold")
    for column in ("answers", "computed", "cached", "generated", "tok/s"):
        table.add_column(column, justify="right")
    table.add_column("", overflow="fold")
    for node in nodes:
        table.add_row(harmless(node.name), *_node_figures(node.report), harmless(_node_note(node)))
    return ["", table] if nodes else []


def _node_figures(report: RunReport | None) -> list[str]:
    if report is None:
        return [""] * 5
    tokens = report.tokens
    speed = f"{tokens.generated / report.busy_s:,.1f}" if report.busy_s > 0 else ""
    return [*(f"{number:,}" for number in (report.answers, tokens.computed, tokens.cached, tokens.generated)), speed]


def _node_note(node: NodeSummary) -> str:
    if node.lost is not None:
        return f"lost: {node.lost.removeprefix(f'{node.name} is lost: ')}"
    return f"left out: {node.left_out}" if node.left_out is not None else ""


def _node(node: NodeSummary) -> dict[str, Any]:
    report = node.report
    return {
        "name": node.name,
        "lost": node.lost,
        "left_out": node.left_out,
        "answers": report.answers if report else 0,
        "computed_prompt_tokens": report.tokens.computed if report else 0,
        "reused_tokens": report.tokens.cached if report else 0,
        "generated_tokens": report.tokens.generated if report else 0,
        "busy_seconds": round(report.busy_s, 3) if report else 0.0,
        "engine_deaths": report.crashes if report else 0,
    }
