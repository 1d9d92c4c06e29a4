"""Jobs that have been read from the store and have no outcome yet.

    scheduled    pending in the scheduler, or sent by it
    suspect      in flight at an engine crash: retried alone, bypassing the scheduler
    waiting      for the time of its retry
    held         by the store, while a job with the same identity runs

Pure: time is passed in as a number. Does not send jobs.
"""

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence

from tokenmill.engine.engine import Usage
from tokenmill.jobs.models import JobId, QueuedJob
from tokenmill.jobs.scheduler.crash_isolation import CrashIsolation
from tokenmill.jobs.scheduler.decisions import Dispatch, ScheduleDecision
from tokenmill.jobs.scheduler.prefix_groups import Pending
from tokenmill.jobs.scheduler.scheduler import Scheduler


class JobBuffer:
    """The worker's jobs in memory."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._suspects = CrashIsolation()
        self._records: dict[int, Pending] = {}
        self._outside: set[int] = set()  # suspect, waiting and held jobs, which the scheduler does not have
        self._held: set[int] = set()
        self._later: list[tuple[float, int]] = []  # heap of (retry time, job)

    def __getitem__(self, job: int) -> Pending:
        return self._records[job]

    def __contains__(self, job: object) -> bool:
        return job in self._records

    @property
    def retrying(self) -> int:
        """Number of jobs that wait for a retry."""
        return len(self._later)

    @property
    def next_retry_s(self) -> float | None:
        """When the first retry is due, if any."""
        return self._later[0][0] if self._later else None

    @property
    def trying(self) -> bool:
        """Whether there are suspects, which must be retried before other jobs run."""
        return self._suspects.trying

    @property
    def on_trial(self) -> int | None:
        """The suspect that is being retried."""
        return self._suspects.on_trial

    @property
    def empty(self) -> bool:
        """Whether no job is left to send, now or later."""
        return not (self._later or self._suspects.trying or self.scheduler.pending)

    def add(self, rows: Sequence[QueuedJob], *, deadline_s: Callable[[int], float | None], more: bool | None) -> None:
        """Add jobs read from the store; `more` as in Scheduler.available. Jobs with earlier crashes become suspects."""
        fresh = []
        for row in rows:
            if row.id in self._outside:
                continue
            record = self.scheduler.lengths.pending(row, deadline_s=deadline_s(row.id))
            self._records[row.id] = record
            if row.crashes:
                self._outside.add(row.id)
                self._suspects.add_suspect(record, None)
            else:
                fresh.append(record)
        self.scheduler.available(fresh, more=more)

    def decide(self, in_flight: Collection[int], outside: int) -> tuple[ScheduleDecision | Pending, ...]:
        """The next suspect to retry, or the scheduler's decisions; `outside` is the number of running suspects."""
        if self._suspects.trying:
            suspect = self._suspects.try_next(in_flight)
            return () if suspect is None else (suspect,)
        self.scheduler.set_interactive(outside)
        return self.scheduler.decide()

    def received(self, job: int, tokens: int, *, trial: bool) -> None:
        """Record the tokens of an answer received so far."""
        if trial:
            self._suspects.advanced(job, tokens)
        else:
            self.scheduler.first_token(job)

    def answered(self, job: int, usage: Usage, *, trial: bool) -> Dispatch | None:
        """Record an answer; returns the job's Dispatch, or None for a suspect."""
        self._suspects.ended(job)
        if trial:
            self.scheduler.lengths.finished(self._records[job], usage)
            return None
        return self.scheduler.finished(job, usage)

    def failed(self, job: int, *, retry_at_s: float | None, trial: bool) -> None:
        """Record a failure, which is permanent without `retry_at_s`."""
        self._suspects.ended(job)
        if not trial:
            self.scheduler.failed(job, again=False)
        if retry_at_s is not None:
            self._outside.add(job)
            heapq.heappush(self._later, (retry_at_s, job))

    def advance_clock(self, now_s: float) -> None:
        """Set the current time, and return jobs whose retry is due to the scheduler."""
        while self._later and self._later[0][0] <= now_s:
            self.restore(heapq.heappop(self._later)[1])
        self.scheduler.advance_clock(now_s)

    def restore(self, job: int) -> None:
        """Return a job to the scheduler."""
        if job in self._records:
            self._outside.discard(job)
            self._held.discard(job)
            self.scheduler.available([self._records[job]])

    def hold(self, jobs: Iterable[int]) -> None:
        """Take jobs from the scheduler that the store holds while equal ones run."""
        for job in jobs:
            self.scheduler.withdraw([job])
            self._suspects.ended(job)
            self._outside.add(job)
            self._held.add(job)

    def release_held(self) -> None:
        """Allow held jobs to be read again, because the jobs they wait for run in another worker."""
        self._outside -= self._held
        self._held.clear()

    def engine_died(self, in_flight: Sequence[tuple[int, int]], *, suspect: bool) -> None:
        """The engine died with these jobs in flight, given with the tokens received so far; its caches are lost.

        If `suspect` is set, a job may be the cause, so each one is retried alone. Otherwise only earlier suspects are.
        """
        jobs = [job for job, _ in in_flight]
        self.scheduler.engine_lost()
        self.scheduler.withdraw(jobs)
        self.scheduler.engine_back()  # no job is dispatched before the engine is up again
        for job, tokens in in_flight:
            record = self._records[job]
            if suspect:
                self._outside.add(job)
                self._suspects.add_suspect(record, tokens)
            elif not self._suspects.retry(record, tokens):
                self.restore(job)

    def drop(self, jobs: Sequence[int]) -> None:
        """Forget jobs that have an outcome or must not run."""
        self.scheduler.withdraw(jobs)
        self._suspects.dropped(jobs)
        dropped = set(jobs)
        self._held -= dropped
        for job in dropped:
            self._records.pop(job, None)
        if not dropped.isdisjoint(self._outside):
            self._outside -= dropped
            self._later = [(at_s, job) for at_s, job in self._later if job not in dropped]
            heapq.heapify(self._later)

    def below(self, priority: int) -> list[int]:
        """Unsent jobs of a lower priority."""
        sent = {*self._outside, *self.scheduler.in_flight}
        return [job for job, record in self._records.items() if record.priority < priority and job not in sent]

    def of_batch(self, batch: int) -> list[int]:
        """All jobs of a batch."""
        return [job for job in self._records if JobId.batch(job) == batch]
