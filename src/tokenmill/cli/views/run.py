"""The progress display and the summary of `tokenmill run`."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tokenmill.api.summary import NodeSummary, Summary
from tokenmill.cli.output import facts, harmless, jsonable, say
from tokenmill.engine.engine import SlotLimit
from tokenmill.jobs.models import Counts
from tokenmill.jobs.worker.progress import RunReport, Snapshot
from tokenmill.jobs.worker.retries import remedies
from tokenmill.units import format_percent, format_seconds, number_of

NOW_S = 15.0  # window of the current speeds
_LINE_S = 30.0  # between two log lines without a terminal
_DRAW_S = 0.25
_DAY_S = 86400.0
_BAR = 24  # characters
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


class RecentSpeeds:
    """Tokens per second in the last `NOW_S` seconds."""

    def __init__(self) -> None:
        self._totals: deque[tuple[float, int, int]] = deque()

    def add(self, now: Snapshot) -> None:
        """Add the totals of a snapshot."""
        if self._totals and now.elapsed_s - self._totals[-1][0] < _DRAW_S:
            return
        self._totals.append((now.elapsed_s, now.prompt_tokens_live, now.tokens.generated))
        while len(self._totals) > 2 and self._totals[1][0] < now.elapsed_s - NOW_S:
            self._totals.popleft()

    def now(self) -> tuple[float, float] | None:
        """Computed prompt tokens and generated tokens per second; None before the second snapshot."""
        if len(self._totals) < 2 or self._totals[-1][0] <= self._totals[0][0]:
            return None
        (first_s, first_in, first_out), (last_s, last_in, last_out) = self._totals[0], self._totals[-1]
        return (last_in - first_in) / (last_s - first_s), (last_out - first_out) / (last_s - first_s)


@contextmanager
def progress_shown() -> Iterator[Callable[[Snapshot], None]]:
    """A live display on stderr, or log lines where that is not a terminal."""
    console = Console(stderr=True, highlight=False, emoji=False)
    if not console.is_terminal:
        yield _LogLines().show
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield _LiveDisplay(live).show


@contextmanager
def measuring_shown() -> Iterator[Callable[[str], None]]:
    """Progress of measurements before the first job: a live line, or one log line where stderr is not a terminal."""
    console = Console(stderr=True, highlight=False, emoji=False)
    if not console.is_terminal:
        logged = False

        def log_once(_text: str) -> None:
            nonlocal logged
            if not logged:
                logged = True
                say("measuring the best number of slots")

        yield log_once
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda text: live.update(Text(text), refresh=True)


class _LiveDisplay:
    def __init__(self, live: Live) -> None:
        self._live = live
        self._speeds = RecentSpeeds()
        self._drawn_s = -1.0

    def show(self, now: Snapshot) -> None:
        if now.elapsed_s - self._drawn_s < _DRAW_S:
            return
        self._drawn_s = now.elapsed_s
        self._speeds.add(now)
        self._live.update(drawn(now, self._speeds.now(), time.time()), refresh=True)


class _LogLines:
    """A line every `_LINE_S` seconds, and one whenever an error of the engine or of the output file changes."""

    def __init__(self) -> None:
        self._speeds = RecentSpeeds()
        self._logged_s = 0.0
        self._errors = ""

    def show(self, now: Snapshot) -> None:
        errors = "; ".join(filter(None, (now.engine and f"engine: {now.engine}", now.output)))
        if errors != self._errors:
            self._errors = errors
            say(errors or "engine and output file work again")
        self._speeds.add(now)
        if now.elapsed_s - self._logged_s >= _LINE_S:
            self._logged_s = now.elapsed_s
            say(line(now, self._speeds.now(), time.time()))


def drawn(now: Snapshot, speeds: tuple[float, float] | None, time_s: float) -> RenderableType:
    """The live display of a snapshot."""
    counts = now.counts
    tokens = now.tokens
    failed = counts.failed + counts.quarantined + counts.cancelled
    more = f", {failed:,} failed" if failed else ""
    more += f", {now.retrying:,} waiting for a retry" if now.retrying else ""
    rows = {"jobs": f"{_bar(now)}  {counts.done:,} of {counts.total:,}{more}"}
    if left := _left(now, time_s):
        rows["left"] = left.replace(" left", "", 1)
    if speeds is not None and now.elapsed_s > 0:
        mean = now.prompt_tokens_live / now.elapsed_s, tokens.generated / now.elapsed_s
        rows["tok/s"] = (
            f"prefill {speeds[0]:,.0f} (average {mean[0]:,.0f}), decode {speeds[1]:,.0f} (average {mean[1]:,.0f})"
        )
    if tokens.prompt:
        rows["prompts"] = f"{tokens.prompt:,} tokens, {format_percent(tokens.cached / tokens.prompt)} from cache"
    rows["slots"] = f"{now.busy} of {now.width} busy"
    if now.failed is not None:
        retry = ", will be retried" if now.failed.again else ""
        rows["failed"] = f"line {now.failed.number}{retry}: {now.failed.failure.message}"
    for label, message in (("engine", now.engine or now.engine_detail), ("output", now.output)):
        if message:
            rows[label] = message
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True, min_width=max(map(len, rows)))
    table.add_column(no_wrap=True, overflow="ellipsis")
    for label, value in rows.items():
        table.add_row(label, Text(harmless(value.replace("\n", " "))))
    return table


def line(now: Snapshot, speeds: tuple[float, float] | None, time_s: float) -> str:
    """A snapshot as one log line."""
    counts = now.counts
    tokens = now.tokens
    failed = counts.failed + counts.quarantined + counts.cancelled
    parts = [f"{counts.done:,} of {number_of(counts.total, 'job')}" + (f", {failed:,} failed" if failed else "")]
    if speeds is not None:
        parts.append(f"prefill {speeds[0]:,.0f} tok/s, decode {speeds[1]:,.0f} tok/s")
    if tokens.prompt:
        parts.append(f"{format_percent(tokens.cached / tokens.prompt)} of prompt tokens from cache")
    parts.append(f"{now.busy} of {number_of(now.width, 'slot')} busy")
    return "; ".join(filter(None, [*parts, _left(now, time_s)]))


def _left(now: Snapshot, time_s: float) -> str:
    """The tokens and the time left, and when the batch will be done; empty if they are unknown."""
    parts = []
    if now.left is not None:
        parts.append(f"{now.left.prompt_tokens:,.0f} prompt and {now.left.output_tokens:,.0f} answer tokens")
    until = ""
    if now.eta_s is not None and now.eta_s >= 1:
        parts.append(f"about {format_seconds(now.eta_s)}")
        until = f", done at {clock(time_s + now.eta_s, time_s)}{' (forecast)' if now.forecast else ''}"
    return f"{', '.join(parts)} left{until}" if parts else ""


def clock(time_s: float, now_s: float) -> str:
    """A time of the next day as HH:MM, a later one with its date."""
    form = "%H:%M" if time_s - now_s < _DAY_S else "%Y-%m-%d %H:%M"
    return time.strftime(form, time.localtime(time_s))


def _bar(now: Snapshot) -> str:
    """The share of the tokens that is done, or of the jobs while the tokens are unknown."""
    counts = now.counts
    share = now.share
    if share is None:
        share = counts.final / counts.total if counts.total else 1.0
    filled = int(share * _BAR)
    return "━" * filled + "─" * (_BAR - filled)  # as the bars of downloads and loads


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
    if (engine := _engine(ended.load_s, report)) is not None:
        rows["engine"] = engine
    if (spent := _spent(ended)) is not None:
        rows["energy" if ended.energy_j is not None else "cost"] = spent
    if batch.output is not None:
        rows["results"] = near(batch.output)
    if batch.errors is not None:
        rows["errors"] = near(batch.errors)
    parts: list[RenderableType] = [facts(rows), *_warnings(ended)]
    if report is not None:
        parts += [f"cache miss: {line}" for line in report.misses.lines()[:_MISSES]]
    if counts.failed or counts.quarantined:
        parts.append(f"failed lines: tokenmill results {batch.name} --failed")
        parts += remedies(ended.failed_by_code, batch.name)
    return parts


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
    name = ended.batch.name
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
    if checks.cut:
        lines.append(f"  the cut answers: tokenmill results {name} --cut")
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
