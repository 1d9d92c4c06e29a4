"""The progress display of `tokenmill run`: live on a terminal, log lines elsewhere."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tokenmill.cli.output import harmless, say
from tokenmill.jobs.worker.progress import Snapshot
from tokenmill.units import format_percent, format_seconds, number_of

NOW_S = 15.0  # window of the current speeds
_LINE_S = 30.0  # between two log lines without a terminal
_DRAW_S = 0.25
_DAY_S = 86400.0
_BAR = 24  # characters


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
