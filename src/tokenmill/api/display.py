"""The progress bar of `tokenmill.run` and `tokenmill.load` when no `on_progress` is given.

One bar at a time, labelled with its phase, on stderr if that is a terminal, or in the notebook.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tokenmill.api.progress import Download, Measuring, OnProgress, Progress, ignore
from tokenmill.engine.loading.progress import LoadProgress
from tokenmill.engine.warm import WarmProgress

_BYTES = "B"
_JOBS = "job"


@dataclass(frozen=True, slots=True)
class Bar:
    """The contents of the bar for an event; None: unknown, and the bar has no length."""

    phase: str
    done: int | None = None
    total: int | None = None
    unit: str = _BYTES


@contextmanager
def display() -> Iterator[OnProgress]:
    """A callback that draws progress events, or ignores them without a terminal or notebook."""
    if not (in_notebook() or _is_terminal()):
        yield ignore
        return
    drawing = _Display()
    try:
        yield drawing.show
    finally:
        drawing.close()


def bar_for(event: Progress) -> Bar:
    """The bar for an event."""
    if isinstance(event, Download):
        return Bar(f"downloading {event.model}", event.done_bytes, event.total_bytes)
    if isinstance(event, LoadProgress):
        counted = event.phase in ("starting", "reading")
        return Bar("loading", event.bytes_loaded, event.bytes_total) if counted else Bar(f"loading: {event.phase}")
    if isinstance(event, WarmProgress):
        counted = event.step == "page cache"
        return Bar("reading the model", event.done, event.total) if counted else Bar(f"warming up: {event.step}")
    if isinstance(event, Measuring):
        return Bar(event.text)
    return Bar("jobs", event.counts.final, event.counts.total, _JOBS)


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


class _Display:
    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tqdm warns in a notebook without ipywidgets, and then draws text
            from tqdm.auto import tqdm  # noqa: PLC0415  only needed where a bar is shown

        self._tqdm = tqdm
        self._shown: Bar | None = None
        self._bar: Any = None

    def show(self, event: Progress) -> None:
        """Draw an event."""
        now = bar_for(event)
        if self._shown is None or now.phase != self._shown.phase or (now.total is None) != (self._shown.total is None):
            self.close()
            self._bar = self._draw(now)
        else:
            self._bar.total = now.total
            self._bar.update((now.done or 0) - self._bar.n)
        self._shown = now

    def _draw(self, now: Bar) -> Any:
        jobs = now.unit == _JOBS
        return self._tqdm(
            desc=now.phase,
            total=now.total,
            initial=now.done or 0,
            unit=now.unit,
            unit_scale=not jobs,
            unit_divisor=1000 if jobs else 1024,
            leave=jobs,
            bar_format=None if now.total is not None else "{desc} ({elapsed})",
        )

    def close(self) -> None:
        """Remove the bar; that of finished jobs stays."""
        if self._bar is not None:
            self._bar.close()
        self._bar = self._shown = None


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # no stderr, or a closed one
        return False
