"""Finds the job that crashes an engine: jobs in flight at a crash are retried one at a time, as suspects.

    the engine dies with A B C D in flight    four suspects
    A alone, until it has more tokens         cleared: it continues, and B is tried next to it
    than when the engine died
    B alone among the cleared: it dies        B is the cause; the others are retried
    another process kills the engine          the suspect on trial is retried, and no suspect is added
    no suspects are left                      the scheduler continues with all slots

Pure. The store counts crashes per job and quarantines.
"""

from collections import deque
from collections.abc import Collection, Iterable

from tokenmill.jobs.scheduler.prefix_groups import Pending

FURTHER_TOKENS = 8  # beyond the tokens received before the crash: some may have been lost on the way


class CrashIsolation:
    """The suspects, the one on trial, and the cleared ones that still run."""

    def __init__(self) -> None:
        self.on_trial: int | None = None
        self._waiting: deque[Pending] = deque()
        self._points: dict[
            int, int | None
        ] = {}  # tokens received before the crash; None: unknown, so only finishing clears the job
        self._cleared: set[int] = set()

    @property
    def trying(self) -> bool:
        """Whether a suspect is on trial or waits for its trial, so that no other job may start."""
        return self.on_trial is not None or bool(self._waiting)

    def accuse(self, record: Pending, tokens: int | None) -> None:
        """Add a job as a suspect that was in flight when the engine died, with this many tokens received."""
        self.ended(record.job)
        self._waiting.append(record)
        self._points[record.job] = tokens

    def retry(self, record: Pending, tokens: int) -> bool:
        """Requeue a suspect whose trial was interrupted after some tokens; False if the job is not a suspect."""
        if record.job != self.on_trial and record.job not in self._cleared:
            return False
        self.accuse(record, self._points.get(record.job, tokens))
        return True

    def try_next(self, in_flight: Collection[int]) -> Pending | None:
        """Start the next trial and return its job; None while other jobs in flight could be the cause of a crash."""
        if self.on_trial is not None or not self._waiting or not self._cleared.issuperset(in_flight):
            return None
        record = self._waiting.popleft()
        self.on_trial = record.job
        return record

    def advanced(self, job: int, tokens: int) -> bool:
        """Note tokens received so far; returns whether they clear the job."""
        point = self._points.get(job)
        if job != self.on_trial or point is None or tokens < point + FURTHER_TOKENS:
            return False
        self._points.pop(job)
        self._cleared.add(job)
        self.on_trial = None
        return True

    def ended(self, job: int) -> None:
        """A job ended, with any outcome."""
        self._cleared.discard(job)
        if self._points.pop(job, -1) != -1:
            self._waiting = deque(record for record in self._waiting if record.job != job)
        if self.on_trial == job:
            self.on_trial = None

    def dropped(self, jobs: Iterable[int]) -> None:
        """Forget jobs that need not run."""
        for job in jobs:
            self.ended(job)
