"""Jobs that were at work when an engine died, tried one at a time so that no innocent is set aside with the guilty.

    the engine dies with A B C D at work      four suspects
    A alone, until it has come further        cleared: goes on, and B is tried beside it
    than when the engine died
    B alone among the cleared: it dies        B did it; the others are tried again
    another process kills the engine          whoever was on trial is tried again, and no new suspect is added
    no suspects are left                      the scheduler goes on with all lanes

Pure. What is blamed, and how often, the store counts.
"""

from collections import deque
from collections.abc import Collection, Iterable

from tokenmill.jobs.scheduler.prefix_groups import Pending

FURTHER_TOKENS = 8  # beyond the point of death: tokens may have been on their way to us


class CrashIsolation:
    """Suspects, the one on trial, and those that were cleared and still run."""

    def __init__(self) -> None:
        self.on_trial: int | None = None
        self._waiting: deque[Pending] = deque()
        self._points: dict[int, int | None] = {}  # tokens that had come; None: not known, so only an end clears
        self._cleared: set[int] = set()

    @property
    def trying(self) -> bool:
        """Whether one is on trial or waits for it, so that nobody else is to be begun. Mutates nothing."""
        return self.on_trial is not None or bool(self._waiting)

    def accuse(self, record: Pending, tokens: int | None) -> None:
        """A job was at work when an engine died, and so many tokens of its answer had come; mutates."""
        self.ended(record.job)
        self._waiting.append(record)
        self._points[record.job] = tokens

    def retry(self, record: Pending, tokens: int) -> bool:
        """Queue a suspect again whose trial was interrupted after so many tokens; False: it is no suspect. Mutates."""
        if record.job != self.on_trial and record.job not in self._cleared:
            return False
        self.accuse(record, self._points.get(record.job, tokens))
        return True

    def try_next(self, in_flight: Collection[int]) -> Pending | None:
        """The next to be tried, now; None: others are at work that could be the cause of a death. Mutates."""
        if self.on_trial is not None or not self._waiting or not self._cleared.issuperset(in_flight):
            return None
        record = self._waiting.popleft()
        self.on_trial = record.job
        return record

    def advanced(self, job: int, tokens: int) -> bool:
        """So many tokens of an answer have come; mutates. Whether that cleared the job."""
        point = self._points.get(job)
        if job != self.on_trial or point is None or tokens < point + FURTHER_TOKENS:
            return False
        self._points.pop(job)
        self._cleared.add(job)
        self.on_trial = None
        return True

    def ended(self, job: int) -> None:
        """A job has ended, however it did; mutates."""
        self._cleared.discard(job)
        if self._points.pop(job, -1) != -1:
            self._waiting = deque(record for record in self._waiting if record.job != job)
        if self.on_trial == job:
            self.on_trial = None

    def dropped(self, jobs: Iterable[int]) -> None:
        """Jobs need not be tried; mutates."""
        for job in jobs:
            self.ended(job)
