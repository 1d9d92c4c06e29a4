"""Jobs that were read from the store and have no outcome yet.

    with the scheduler    pending in its order, or sent by it
    a suspect             in flight when an engine died: retried alone, past the scheduler
    waiting               for a retry, until a time; or held by the store while an equal job runs

Pure: time is passed in as a number, and nothing is sent from here.
"""

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence

from tokenmill.engine.engine import Usage
from tokenmill.jobs.models import JobId, Waiting
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
        self._away: set[int] = set()  # jobs that the scheduler does not have
        self._held: set[int] = set()  # those of them that the store holds
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
        """Whether suspects must be retried alone before other jobs run."""
        return self._suspects.trying

    @property
    def on_trial(self) -> int | None:
        """The suspect being retried."""
        return self._suspects.on_trial

    @property
    def empty(self) -> bool:
        """Whether nothing can be sent, now or later."""
        return not (self._later or self._suspects.trying or self.scheduler.pending)

    def come(self, rows: Sequence[Waiting], *, deadline_s: Callable[[int], float | None], more: bool | None) -> None:
        """Add jobs read from the store; `more` as in Scheduler.available. Jobs of an earlier crash become suspects."""
        fresh = []
        for row in rows:
            if row.id in self._away:
                continue
            record = self.scheduler.lengths.pending(row, deadline_s=deadline_s(row.id))
            self._records[row.id] = record
            if row.deaths:
                self._away.add(row.id)
                self._suspects.accuse(record, None)
            else:
                fresh.append(record)
        self.scheduler.available(fresh, more=more)

    def decide(self, in_flight: Collection[int], outside: int) -> tuple[ScheduleDecision | Pending, ...]:
        """The next suspect to retry, or the scheduler's decisions with `outside` jobs running past it."""
        if self._suspects.trying:
            suspect = self._suspects.try_next(in_flight)
            return () if suspect is None else (suspect,)
        self.scheduler.interactive(outside)
        return self.scheduler.decide()

    def came(self, job: int, tokens: int, *, trial: bool) -> None:
        """Note the tokens of an answer received so far."""
        if trial:
            self._suspects.advanced(job, tokens)
        else:
            self.scheduler.first_token(job)

    def answered(self, job: int, usage: Usage, *, trial: bool) -> Dispatch | None:
        """Note an answer; returns the job's Dispatch, or None for a suspect."""
        self._suspects.ended(job)
        if trial:
            self.scheduler.lengths.finished(self._records[job], usage)
            return None
        return self.scheduler.finished(job, usage)

    def failed(self, job: int, *, retry_at_s: float | None, trial: bool) -> None:
        """Note a failure; without `retry_at_s` it is permanent."""
        self._suspects.ended(job)
        if not trial:
            self.scheduler.failed(job, again=False)
        if retry_at_s is not None:
            self._away.add(job)
            heapq.heappush(self._later, (retry_at_s, job))

    def due(self, now_s: float) -> None:
        """Advance the time and return jobs whose retry is due to the scheduler."""
        while self._later and self._later[0][0] <= now_s:
            self.freed(heapq.heappop(self._later)[1])
        self.scheduler.clock(now_s)

    def freed(self, job: int) -> None:
        """Return a job to the scheduler."""
        if job in self._records:
            self._away.discard(job)
            self._held.discard(job)
            self.scheduler.available([self._records[job]])

    def held(self, jobs: Iterable[int]) -> None:
        """Note jobs that the store holds while equal ones run; they are freed if those fail."""
        for job in jobs:
            self.scheduler.withdrawn([job])
            self._suspects.ended(job)
            self._away.add(job)
            self._held.add(job)

    def unheld(self) -> None:
        """Allow held jobs to be read again: the jobs they wait for run in another worker."""
        self._away -= self._held
        self._held.clear()

    def died(self, in_flight: Sequence[tuple[int, int]], *, accused: bool) -> None:
        """The engine died with these jobs in flight, each with the tokens received so far; its caches are lost.

        `accused`: one of them may be the cause, so each is retried alone. Otherwise only earlier suspects are.
        """
        jobs = [job for job, _ in in_flight]
        self.scheduler.lost()
        self.scheduler.withdrawn(jobs)
        self.scheduler.back()  # it is not called before the engine is up, and must know that its cache is empty
        for job, tokens in in_flight:
            record = self._records[job]
            if accused:
                self._away.add(job)
                self._suspects.accuse(record, tokens)
            elif not self._suspects.retry(record, tokens):
                self.freed(job)

    def drop(self, jobs: Sequence[int]) -> None:
        """Forget jobs that have an outcome or need not run."""
        self.scheduler.withdrawn(jobs)
        self._suspects.dropped(jobs)
        gone = set(jobs)
        self._held -= gone
        for job in gone:
            self._records.pop(job, None)
        if not gone.isdisjoint(self._away):
            self._away -= gone
            self._later = [(at_s, job) for at_s, job in self._later if job not in gone]
            heapq.heapify(self._later)

    def below(self, priority: int) -> list[int]:
        """Unsent jobs of a lower priority."""
        sent = {*self._away, *self.scheduler.in_flight}
        return [job for job, record in self._records.items() if record.priority < priority and job not in sent]

    def of_batch(self, batch: int) -> list[int]:
        """All jobs of a batch."""
        return [job for job in self._records if JobId.batch(job) == batch]
