"""Progress of long calls: events for a callback, messages for the logger `tokenmill`.

Callers pass `on_progress`; without it, `run` and `load` show a progress bar on a terminal or in a notebook.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from tokenmill.engine.loading.progress import LoadProgress
from tokenmill.engine.warm import WarmProgress
from tokenmill.jobs.worker.progress import Snapshot
from tokenmill.units import format_bytes, format_seconds

log = logging.getLogger("tokenmill")
log.addHandler(logging.NullHandler())


@dataclass(frozen=True, slots=True)
class Download:
    """Progress of a model's download."""

    model: str
    done_bytes: int
    total_bytes: int | None


@dataclass(frozen=True, slots=True)
class Measuring:
    """A short measurement before a batch starts."""

    text: str


Progress = Download | LoadProgress | WarmProgress | Measuring | Snapshot
OnProgress = Callable[[Progress], None]


def ignore(_event: Progress) -> None:
    """Report nothing."""


def described(now: LoadProgress | WarmProgress) -> tuple[str, float | None, str]:
    """An event of a load as its phase, the completed share, and details as text."""
    title: str
    if isinstance(now, LoadProgress):
        title = now.phase
        done = now.bytes_loaded
        total = now.bytes_total
        share = now.share
        sizes = done is not None and total is not None
    else:
        title = "warming up" if now.step == "first decode" else now.step
        done = now.done
        total = now.total
        share = done / total if done is not None and total else None
        sizes = now.step == "page cache" and share is not None
    parts = [now.detail or ""]
    if sizes and done is not None and total is not None:
        parts.append(f"{format_bytes(done)} of {format_bytes(total)}")
    if now.rate_bytes_s:
        parts.append(f"{format_bytes(round(now.rate_bytes_s))}/s")
    if now.eta_s:
        parts.append(f"{format_seconds(now.eta_s)} left")
    return title, share, ", ".join(part for part in parts if part)
