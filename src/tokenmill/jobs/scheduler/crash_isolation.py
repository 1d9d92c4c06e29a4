"""Finds the job that crashes an engine: jobs in flight at a crash become suspects and are retried one at a time.

    engine dies with A B C D in flight      four suspects
    A runs alone past the token at which    A is cleared and continues; B is tried next to it
    the engine died
    engine dies with A and B in flight      B is the cause; the others are retried
    another process kills the engine        the suspect on trial is retried; no suspect is added
    no suspects left                        the scheduler continues with all slots

Pure. The store counts crashes per job and quarantines jobs.
"""

from collections import deque
from collections.abc import Collection, Iterable

from tokenmill.jobs.scheduler.prefix_groups import Pending

FURTHER_TOKENS = 8  # required beyond the tokens received before the crash, because the last ones may have been lost


class CrashIsolation:
    """The suspects: waiting, on trial, or cleared and still running."""

    def __init__(self) -> None:
        self.on_trial: int | None = None
        self._waiting: deque[Pending] = deque()
        # Tokens received before the crash, by job; None: unknown, so that only finishing clears the job.
        self._points: dict[int, int | None] = {}
        self._cleared: set[int] = set()

    @property
    def trying(self) -> bool:
        """Whether any suspect is on trial or waiting; if so, no other job may start."""
        return self.on_trial is not None or bool(self._waiting)

    def add_suspect(self, record: Pending, tokens: int | None) -> None:
        """Add a job that was in flight at a crash; `tokens` were received before it, None: unknown."""
        self.ended(record.job)
        self._waiting.append(record)
        self._points[record.job] = tokens

    def retry(self, record: Pending, tokens: int) -> bool:
        """Requeue a suspect whose trial was interrupted; returns False if the job is not a suspect."""
        if record.job != self.on_trial and record.job not in self._cleared:
            return False
        self.add_suspect(record, self._points.get(record.job, tokens))
        return True

    def try_next(self, in_flight: Collection[int]) -> Pending | None:
        """Start the next trial and return its job; None while jobs in flight have not been cleared."""
        if self.on_trial is not None or not self._waiting or not self._cleared.issuperset(in_flight):
            return None
        record = self._waiting.popleft()
        self.on_trial = record.job
        return record

    def advanced(self, job: int, tokens: int) -> bool:
        """Record the tokens received so far; returns whether they clear the job."""
        point = self._points.get(job)
        if job != self.on_trial or point is None or tokens < point + FURTHER_TOKENS:
            return False
        self._points.pop(job)
        self._cleared.add(job)
        self.on_trial = None
        return True

    def ended(self, job: int) -> None:
        """Remove a job that ended, with any outcome."""
        self._cleared.discard(job)
        if self._points.pop(job, -1) != -1:
            self._waiting = deque(record for record in self._waiting if record.job != job)
        if self.on_trial == job:
            self.on_trial = None

    def dropped(self, jobs: Iterable[int]) -> None:
        """Forget jobs that need not run."""
        for job in jobs:
            self.ended(job)
