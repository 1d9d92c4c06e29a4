"""`tokenmill status --watch`: redraws the status of batches, and measures their speed between two looks."""

import time
from collections import deque
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live

from tokenmill.cli.output import show
from tokenmill.cli.views.run_progress import clock
from tokenmill.jobs.models import Batch
from tokenmill.units import format_seconds

_LOOK_S = 1.0
_LINE_S = 30.0  # between two texts where stdout is not a terminal
_WINDOW_S = 300.0  # of the measured speed


class WatchedSpeeds:
    """Tokens and jobs per second of a batch over the last minutes."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()

    def add(self, batch: Batch, now_s: float) -> str | None:
        """The speed and the time left as text; None before something changed, and when the batch is done."""
        counts = batch.counts
        self._seen.append((now_s, counts.final, batch.totals.completion_tokens))
        while self._seen[0][0] < now_s - _WINDOW_S:
            self._seen.popleft()
        first_s, first_jobs, first_tokens = self._seen[0]
        jobs, tokens, seconds = (
            counts.final - first_jobs,
            batch.totals.completion_tokens - first_tokens,
            now_s - first_s,
        )
        if jobs <= 0 or seconds <= 0 or batch.finished:
            return None
        left_s = (counts.total - counts.final) * seconds / jobs
        return (
            f"{tokens / seconds:,.0f} tok/s, {3600 * jobs / seconds:,.0f} jobs/h; "
            f"about {format_seconds(left_s)}, done at {clock(now_s + left_s, now_s)}"
        )


def watched(look: Callable[[], tuple[list[RenderableType], bool]]) -> None:
    """Show what `look` returns until it says that nothing will change; on a terminal in place."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        while True:
            parts, active = look()
            show(*parts)
            if not active:
                return
            time.sleep(_LINE_S)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            parts, active = look()
            live.update(Group(*parts), refresh=True)
            if not active:
                return
            time.sleep(_LOOK_S)
