"""Every job that was read from the store and has no outcome yet, and who has it.

    with the scheduler    pending in its order, or sent by it
    a suspect             was at work when an engine died: tried alone, past the scheduler
    waiting               out a failure, until a time; or held by the store for an equal job that runs

Pure: time comes in as a number, and nothing is sent from here.
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
    """The jobs at hand."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._suspects = CrashIsolation()
        self._records: dict[int, Pending] = {}
        self._away: set[int] = set()  # not with the scheduler
        self._held: set[int] = set()  # of these, by the store
        self._later: list[tuple[float, int]] = []  # a heap: when, and the job

    def __getitem__(self, job: int) -> Pending:
        return self._records[job]

    def __contains__(self, job: object) -> bool:
        return job in self._records

    @property
    def retrying(self) -> int:
        """Jobs that wait out a failure."""
        return len(self._later)

    @property
    def next_retry_s(self) -> float | None:
        """When the first of them is due."""
        return self._later[0][0] if self._later else None

    @property
    def trying(self) -> bool:
        """Whether there are suspects to be tried, each alone."""
        return self._suspects.trying

    @property
    def on_trial(self) -> int | None:
        """The suspect that is being tried."""
        return self._suspects.on_trial

    @property
    def empty(self) -> bool:
        """Whether there is nothing that could be sent, now or later."""
        return not (self._later or self._suspects.trying or self.scheduler.pending)

    def come(self, rows: Sequence[Waiting], *, deadline_s: Callable[[int], float | None], more: bool | None) -> None:
        """Jobs were read; `more` as the scheduler's. One that an engine died with in an earlier run is a suspect."""
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
        """What the scheduler decides, `outside` jobs running past it; before that, the next suspect to be tried."""
        if self._suspects.trying:
            suspect = self._suspects.try_next(in_flight)
            return () if suspect is None else (suspect,)
        self.scheduler.interactive(outside)
        return self.scheduler.decide()

    def came(self, job: int, tokens: int, *, trial: bool) -> None:
        """So many tokens of an answer have come."""
        if trial:
            self._suspects.advanced(job, tokens)
        else:
            self.scheduler.first_token(job)

    def answered(self, job: int, usage: Usage, *, trial: bool) -> Dispatch | None:
        """A job has its answer; what it was expected to reuse, None for a suspect."""
        self._suspects.ended(job)
        if trial:
            self.scheduler.lengths.finished(self._records[job], usage)
            return None
        return self.scheduler.finished(job, usage)

    def failed(self, job: int, *, retry_at_s: float | None, trial: bool) -> None:
        """A job has none: for good, or it is to be tried again from a time on."""
        self._suspects.ended(job)
        if not trial:
            self.scheduler.failed(job, again=False)
        if retry_at_s is not None:
            self._away.add(job)
            heapq.heappush(self._later, (retry_at_s, job))

    def due(self, now_s: float) -> None:
        """Time has passed: who has waited long enough is the scheduler's again."""
        while self._later and self._later[0][0] <= now_s:
            self.freed(heapq.heappop(self._later)[1])
        self.scheduler.clock(now_s)

    def freed(self, job: int) -> None:
        """A job may be sent again."""
        if job in self._records:
            self._away.discard(job)
            self._held.discard(job)
            self.scheduler.available([self._records[job]])

    def held(self, jobs: Iterable[int]) -> None:
        """The store holds jobs for equal ones that run; they are freed when those fail."""
        for job in jobs:
            self.scheduler.withdrawn([job])
            self._suspects.ended(job)
            self._away.add(job)
            self._held.add(job)

    def unheld(self) -> None:
        """Nothing of ours runs: what is held is held for another worker's job, and may be read again."""
        self._away -= self._held
        self._held.clear()

    def died(self, in_flight: Sequence[tuple[int, int]], *, accused: bool) -> None:
        """The engine died with these jobs in flight, each with the tokens received so far; its caches are lost.

        `accused`: one of them may be the cause, so each is retried alone. Otherwise only earlier suspects are.
        """
        jobs = [job for job, _ in in_flight]
        self.scheduler.lost()
        self.scheduler.withdrawn(jobs)
        self.scheduler.back()  # it is not asked before the engine lives, and knows that all is cold
        for job, tokens in in_flight:
            record = self._records[job]
            if accused:
                self._away.add(job)
                self._suspects.accuse(record, tokens)
            elif not self._suspects.retry(record, tokens):
                self.freed(job)

    def drop(self, jobs: Sequence[int]) -> None:
        """Jobs have their outcome, or need none."""
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
        """Jobs of a lower priority that only wait for their turn."""
        sent = {*self._away, *self.scheduler.in_flight}
        return [job for job, record in self._records.items() if record.priority < priority and job not in sent]

    def of_batch(self, batch: int) -> list[int]:
        """Jobs of one batch."""
        return [job for job in self._records if JobId.batch(job) == batch]
