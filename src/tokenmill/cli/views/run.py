"""What a person sees of a run: a display while it works, a summary when it is over."""

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
from tokenmill.jobs.models import Batch, Counts
from tokenmill.jobs.worker.progress import RunReport, Snapshot
from tokenmill.jobs.worker.retries import remedies
from tokenmill.jobs.worker.reuse import Misses
from tokenmill.units import format_seconds, number_of

NOW_S = 15.0  # of which "now" is the mean
_LINE_S = 30.0  # between two lines where there is no terminal
_DRAW_S = 0.25
_BAR = 24  # characters
_MISSES = 3  # causes shown
_WARM = 0.02  # of the least, not computed: an engine that ran before had some heads


class RecentSpeeds:
    """Tokens per second in the last seconds, from totals."""

    def __init__(self) -> None:
        self._totals: deque[tuple[float, int, int]] = deque()

    def add(self, now: Snapshot) -> None:
        """Take the totals of a moment; mutates."""
        if self._totals and now.elapsed_s - self._totals[-1][0] < _DRAW_S:
            return
        self._totals.append((now.elapsed_s, now.prompt_tokens_live, now.tokens.generated))
        while len(self._totals) > 2 and self._totals[1][0] < now.elapsed_s - NOW_S:
            self._totals.popleft()

    def now(self) -> tuple[float, float] | None:
        """Prompt tokens computed and tokens written per second; None: nothing to tell yet. Mutates nothing."""
        if len(self._totals) < 2 or self._totals[-1][0] <= self._totals[0][0]:
            return None
        (first_s, first_in, first_out), (last_s, last_in, last_out) = self._totals[0], self._totals[-1]
        return (last_in - first_in) / (last_s - first_s), (last_out - first_out) / (last_s - first_s)


@contextmanager
def progress_shown() -> Iterator[Callable[[Snapshot], None]]:
    """A display on stderr that is drawn anew as the work goes on; a line now and then where that is no terminal."""
    console = Console(stderr=True, highlight=False, emoji=False)
    if not console.is_terminal:
        yield _Lines().tell
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield _Drawn(live).tell


@contextmanager
def measuring_shown() -> Iterator[Callable[[str], None]]:
    """What is being measured before the work begins: a line that changes, or the first words where it cannot."""
    console = Console(stderr=True, highlight=False, emoji=False)
    if not console.is_terminal:
        said: list[str] = []

        def once(words: str) -> None:
            if not said:
                said.append(words)
                say("measuring the best number of slots")

        yield once
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda words: live.update(Text(words), refresh=True)


class _Drawn:
    def __init__(self, live: Live) -> None:
        self._live = live
        self._speeds = RecentSpeeds()
        self._drawn_s = -1.0

    def tell(self, now: Snapshot) -> None:
        if now.elapsed_s - self._drawn_s < _DRAW_S:
            return
        self._drawn_s = now.elapsed_s
        self._speeds.add(now)
        self._live.update(drawn(now, self._speeds.now(), time.time()), refresh=True)


class _Lines:
    """One line in half a minute, and one whenever the engine's or the output's trouble changes."""

    def __init__(self) -> None:
        self._speeds = RecentSpeeds()
        self._said_s = 0.0
        self._trouble = ""

    def tell(self, now: Snapshot) -> None:
        trouble = "; ".join(filter(None, (now.engine and f"the engine: {now.engine}", now.output)))
        if trouble != self._trouble:
            self._trouble = trouble
            say(trouble or "the engine is there again")
        self._speeds.add(now)
        if now.elapsed_s - self._said_s >= _LINE_S:
            self._said_s = now.elapsed_s
            say(line(now, self._speeds.now()))


def drawn(now: Snapshot, speeds: tuple[float, float] | None, time_s: float) -> RenderableType:
    """The display of a moment."""
    counts = now.counts
    tokens = now.tokens
    without = counts.failed + counts.set_aside + counts.cancelled
    more = f", {without:,} failed" if without else ""
    more += f", {now.retrying:,} to be tried again" if now.retrying else ""
    rows = {"jobs": f"{_bar(counts)}  {counts.done:,} of {counts.total:,}{more}"}
    if speeds is not None and now.elapsed_s > 0:
        mean = now.prompt_tokens_live / now.elapsed_s, tokens.generated / now.elapsed_s
        rows["tok/s"] = f"in {speeds[0]:,.0f} now, {mean[0]:,.0f} on average; out {speeds[1]:,.0f} now, {mean[1]:,.0f}"
    if tokens.prompt:
        rows["prompts"] = (
            f"{tokens.cached:,} tokens reused, {tokens.computed:,} computed: {tokens.cached / tokens.prompt:.0%} reused"
        )
    rows["lanes"] = f"{now.busy} of {now.width} at work" + _left(now.eta_s, time_s)
    if now.failed is not None:
        again = "to be tried again: " if now.failed.again else ""
        rows["failed"] = f"{again}line {now.failed.number}: {now.failed.failure.message}"
    for label, trouble in (("engine", now.engine or now.engine_says), ("output", now.output)):
        if trouble:
            rows[label] = trouble
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True, min_width=max(map(len, rows)))
    table.add_column(no_wrap=True, overflow="ellipsis")
    for label, value in rows.items():
        table.add_row(label, Text(harmless(value.replace("\n", " "))))
    return table


def line(now: Snapshot, speeds: tuple[float, float] | None) -> str:
    """The same as a line of a log."""
    counts = now.counts
    tokens = now.tokens
    without = counts.failed + counts.set_aside + counts.cancelled
    parts = [f"{counts.done:,} of {number_of(counts.total, 'job')}" + (f", {without:,} failed" if without else "")]
    if speeds is not None:
        parts.append(f"{speeds[0]:,.0f} tok/s in, {speeds[1]:,.0f} out")
    if tokens.prompt:
        parts.append(f"{tokens.cached / tokens.prompt:.0%} of prompt tokens reused")
    parts.append(f"{now.busy} of {number_of(now.width, 'lane')}")
    if now.eta_s is not None:
        parts.append(f"about {format_seconds(now.eta_s)} left")
    return "; ".join(parts)


def _left(eta_s: float | None, time_s: float) -> str:
    if eta_s is None:
        return ""
    return f"; about {format_seconds(eta_s)} left, until {time.strftime('%H:%M', time.localtime(time_s + eta_s))}"


def _bar(counts: Counts) -> str:
    share = counts.final / counts.total if counts.total else 1.0
    filled = int(share * _BAR)
    return "█" * filled + "░" * (_BAR - filled)


def summary(ended: Summary) -> list[RenderableType]:
    """What came of a run."""
    batch = ended.batch
    report = ended.report
    load_s = ended.load_s
    counts = batch.counts
    rows = dict[str, str]()
    rows["batch"] = f"{batch.name}, {number_of(counts.total, 'job')} from {batch.source}"
    rows["answers"] = _answers(batch, report)
    if counts.failed or counts.set_aside or counts.cancelled:
        rows["without"] = _without(counts)
    if report is not None and report.answers:
        rows |= _work(report)
    if load_s is not None:
        rows["engine"] = f"ready after {format_seconds(load_s)}"
        if report is not None and report.deaths:
            rows["engine"] += f"; it died {number_of(report.deaths, 'time')} and was started again"
    if batch.output is not None:
        rows["results"] = near(batch.output)
    if batch.errors is not None:
        rows["errors"] = near(batch.errors)
    parts: list[RenderableType] = [facts(rows)]
    if report is not None:
        parts += _missed(report.misses)
    if counts.failed or counts.set_aside:
        parts.append(f"to see what failed: tokenmill results {batch.name} --failed")
        parts += remedies(ended.failed_by_code, batch.name)
    return parts


def near(path: str) -> str:
    """A path as it is shortest from here."""
    return min(path, os.path.relpath(path), key=len)


def _answers(batch: Batch, report: RunReport | None) -> str:
    done = batch.counts.done
    computed = report.answers if report is not None else 0
    if not computed:
        return f"{done:,}, all of which were there: nothing was computed" if done else "none"
    return f"{done:,}, of which {computed:,} were computed now" if computed < done else f"{done:,}"


def _without(counts: Counts) -> str:
    parts = {"failed": counts.failed, "set aside": counts.set_aside, "cancelled": counts.cancelled}
    return ", ".join(f"{number:,} {word}" for word, number in parts.items() if number)


def _work(report: RunReport) -> dict[str, str]:
    """Time, tokens, reuse, and what reuse was worth."""
    tokens = report.tokens
    rate = report.head_tok_s
    per_minute = report.answers / report.seconds * 60 if report.seconds > 0 else 0.0
    rows = {
        "time": f"{format_seconds(report.seconds)}, {per_minute:,.1f} jobs a minute, "
        f"{report.lanes:.1f} lanes at work on average",
        "prompts": f"{tokens.prompt:,} tokens: {tokens.cached:,} reused, {tokens.computed:,} computed",
        "written": f"{tokens.generated:,} tokens, {tokens.generated / report.busy_s:,.1f} a second"
        if report.busy_s > 0
        else f"{tokens.generated:,} tokens",
    }
    if report.least is not None and report.least.tokens and tokens.computed:
        over = tokens.computed / report.least.tokens - 1
        about = "" if report.least.exact else "about "
        how = f"{over:+.1%} against that" if over > -_WARM else "the engine had the rest already"
        rows["least"] = f"{about}{report.least.tokens:,} had to be computed; {how}"
    if rate is not None and tokens.cached:
        rows["saved"] = f"{format_seconds(tokens.cached / rate)} by reuse, at {rate:,.0f} prompt tokens a second"
    return rows


def _missed(misses: Misses) -> list[RenderableType]:
    found = misses.lines()
    return [f"missed reuse: {words}" for words in found[:_MISSES]]


def document(ended: Summary) -> dict[str, Any]:
    """The totals as JSON: jobs of the batch, tokens and seconds of this run."""
    batch = ended.batch
    report = ended.report
    counts = ended.batch.counts
    found: dict[str, Any] = {
        "batch": batch.name,
        "jobs": counts.total,
        "succeeded": counts.done,
        "failed": counts.failed + counts.set_aside + counts.cancelled,
        "failed_by_code": dict(ended.failed_by_code),
        "set_aside": counts.set_aside,
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
    }
    if report is not None:
        found |= {
            "work_seconds": round(report.seconds, 3),
            "least_prompt_tokens": report.least.tokens if report.least else None,
            "least_is_exact": report.least.exact if report.least else None,
            "prefill_tok_s": report.rates.prefill_tok_s,
            "head_tok_s": report.head_tok_s,
            "lanes": round(report.lanes, 2),
            "engine_deaths": report.deaths,
            "misses": [
                {
                    "cause": tallied.cause,
                    "jobs": tallied.jobs,
                    "lost_tokens": tallied.lost_tokens,
                    "example": tallied.examples[0].words,
                }
                for tallied in report.misses.by_cost()
            ],
            "notes": list(report.notes),
        }
    found |= {"batch_totals": jsonable(batch.totals), "output_written": ended.output_written}
    return found | ({"nodes": [_node(each) for each in ended.nodes]} if ended.nodes else {})


def nodes_table(nodes: Sequence[NodeSummary]) -> list[RenderableType]:
    """What every machine of a cluster did."""
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    table.add_column("machine", overflow="fold")
    for column in ("answers", "computed", "reused", "written", "tok/s"):
        table.add_column(column, justify="right")
    table.add_column("", overflow="fold")
    for node in nodes:
        table.add_row(harmless(node.name), *_node_figures(node.report), harmless(_node_trouble(node)))
    return ["", table] if nodes else []


def _node_figures(report: RunReport | None) -> list[str]:
    if report is None:
        return [""] * 5
    tokens = report.tokens
    speed = f"{tokens.generated / report.busy_s:,.1f}" if report.busy_s > 0 else ""
    return [*(f"{number:,}" for number in (report.answers, tokens.computed, tokens.cached, tokens.generated)), speed]


def _node_trouble(node: NodeSummary) -> str:
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
        "engine_deaths": report.deaths if report else 0,
    }
