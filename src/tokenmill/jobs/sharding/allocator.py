"""Assigns shards of the queue to workers, so that each prefix is computed by as few workers as possible.

        worker a   [prefix 1 ........]              [prefix 4 ..]
        worker b                      [prefix 2 ....]            [prefix 5 | taken over by c ...]
                   order of the queue ----------------------------------------------------------->

A shard is a range of the queue, which is sorted by prefix. Jobs outside of all shards are free. A worker that has read
all of its shards gets the next free jobs, continuing after its last shard if that ended within a prefix. If no jobs are
free, it takes over a part of another worker's shard. A job that becomes pending again belongs to the worker whose shard
contains it; a job that is too long for a worker is left to the others.

`ShardAllocator` decides, using `policy`, and a `ShardTable` stores. Shards can change owners; `Store.start` gives each
job to one worker only.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf

from tokenmill.errors import TooLong
from tokenmill.jobs.models import JobId, QueuedJob, SortKey
from tokenmill.jobs.scheduler.prefix_groups import WORTH_BYTES
from tokenmill.jobs.sharding.policy import (
    COUNTED_JOBS,
    MAX_SHARD_JOBS,
    MIN_ROWS,
    Shard,
    Span,
    before,
    cut,
    elsewhere_of,
    fair,
    fair_share,
    gaps,
    halved,
    joined,
    speed_share,
)
from tokenmill.jobs.sharding.reader import PendingJobs
from tokenmill.jobs.sharding.table import AssignedShard, ShardTable, WorkerShards
from tokenmill.jobs.sharding.view import ShardView, WorkerSpec
from tokenmill.jobs.worker.retries import CutShort
from tokenmill.units import number_of

PAGE_ROWS = 4096  # per query


class ShardAllocator(ShardView):
    """The view of one of several workers: assigns shards to it and reads their jobs."""

    shared = True

    def __init__(
        self,
        store: PendingJobs,
        table: ShardTable,
        worker: WorkerShards,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(store)
        self._table = table
        self._worker = worker
        self._clock = clock
        self._closed = False

    def register(self, spec: WorkerSpec, slots: int) -> None:
        """Announce which jobs the worker can run."""
        self._worker.context_tokens = spec.context_tokens
        self._worker.slots = slots
        self._table.announce(self._worker, spec)

    def window(self, batches: Sequence[int], *, again: bool, limit: int) -> list[QueuedJob]:
        """The next jobs of the worker; assigns shards if it has fewer jobs than slots."""
        if self._closed:
            return []
        return self._table.change(lambda: self._window(batches, again=again, limit=limit))

    def join(self, batch: int, limit: int) -> list[QueuedJob]:
        """The first jobs of a batch for this worker."""
        return self.window([batch], again=False, limit=limit)

    def has(self, waiting: QueuedJob) -> bool:
        """Whether a job is in no shard of another worker and not too long for this one."""
        return self._table.look(
            lambda: self._fits(waiting.id) and not any(waiting.key in assigned.shard for _, assigned in self._others())
        )

    def too_long(self, job: int, error: TooLong) -> TooLong | None:
        """The error for a job that is too long for this worker; None if another worker may run it."""
        worker = self._worker
        before_tokens = worker.context_tokens
        # A refusal is more reliable than the context that the engine reports.
        most = min(error.context_tokens, error.needed_tokens - 1)
        worker.context_tokens = most if before_tokens is None else min(most, before_tokens)
        if worker.context_tokens != before_tokens:
            self._table.announce(worker, None)

        def leave() -> TooLong | None:
            largest = largest_context(self._table.contexts(JobId.batch(job)))
            if largest < error.needed_tokens:
                return with_context(error, largest)
            self._table.too_long[job] = error
            return None

        return self._table.look(leave)

    def unrunnable(self) -> list[tuple[int, TooLong]]:
        """Jobs that are too long for all remaining workers, except those of which only the answer is too long."""

        def take() -> list[tuple[int, TooLong]]:
            needs = self._table.too_long
            batches = {JobId.batch(job) for job in needs}
            largest = {batch: largest_context(self._table.contexts(batch)) for batch in batches}
            every = [(job, error, largest[JobId.batch(job)]) for job, error in needs.items()]
            found = [(job, error, most) for job, error, most in every if most < error.needed_tokens]
            for job, _, _ in found:
                del needs[job]
            return [(job, with_context(error, most)) for job, error, most in found if not isinstance(error, CutShort)]

        return self._table.look(take)

    def refresh(self) -> None:
        """Reread the other workers before the next `has`."""
        self._table.refresh()

    def close(self) -> None:
        """Free the worker's shards."""
        if not self._closed:
            self._closed = True
            self._table.leave(self._worker)

    # ---- reading

    def _window(self, batches: Sequence[int], *, again: bool, limit: int) -> list[QueuedJob]:
        if self._closed:
            return []  # closed by another thread
        worker = self._worker
        if again:
            for assigned in worker.assigned:
                assigned.cursor = None
        rows = self._unread(batches, limit)
        enough = min(limit, worker.slots)
        if len(rows) < enough:
            self._measure_speed()
        while len(rows) < enough and self._assign_next(batches, again=again):
            rows += self._unread(batches, limit - len(rows))
        # Only a worker without jobs takes over; otherwise two workers with few jobs would take them from each other.
        if not rows and again and self._take_over(batches):
            rows = self._unread(batches, limit)
        return rows

    def _unread(self, batches: Sequence[int], limit: int) -> list[QueuedJob]:
        """The next pending jobs of the worker's shards, up to the first free job of higher priority."""
        rows = list[QueuedJob]()
        assigned = [each for each in self._worker.assigned if each.shard.first[1] in batches]
        free = self._first_free(batches, None) if assigned else None
        for each in sorted(assigned, key=lambda each: each.shard.first):
            if len(rows) < limit and (free is None or each.shard.first[0] <= free.rank):
                span = each.shard.span if each.cursor is None else Span(each.cursor, each.shard.span.until)
                (new,) = self._table.reader.rows([span], self._unfit(self._worker), limit - len(rows))
                each.cursor = new[-1].key if new else each.cursor
                rows += new
        return rows

    def _first_free(self, batches: Sequence[int], after: SortKey | None) -> QueuedJob | None:
        """The first free job after a position that the worker can run."""
        return self._table.reader.first(gaps(self._taken(), batches, after), self._unfit(self._worker))

    def _free(self, batches: Sequence[int], limit: int, *, after: SortKey | None) -> tuple[list[QueuedJob], bool]:
        """The first free jobs after a position, up to the next shard or unfit job, and whether more may follow."""
        first = self._first_free(batches, after)
        if first is None:
            return [], False
        unfit = self._unfit(self._worker)
        end = next((each.first for each in self._taken() if each.first > first.key), None)
        rows = list[QueuedJob]()
        reached = before(first.key)
        while len(rows) < limit:
            size = min(PAGE_ROWS, limit - len(rows))
            page = self._store.waiting(batches, after=reached, limit=size)
            for row in page:
                if row.id in unfit or (end is not None and row.key >= end):
                    return rows, False
                rows.append(row)
            if len(page) < size:
                return rows, False
            reached = page[-1].key
        return rows, True

    def _counts(self, assigned: Sequence[tuple[WorkerShards, AssignedShard]], limit: int) -> list[int]:
        """For each shard, the number of pending jobs that its worker can run, counted up to a limit."""
        found = [0] * len(assigned)
        groups = dict[frozenset[int], list[int]]()
        for at, (worker, _) in enumerate(assigned):
            groups.setdefault(frozenset(self._unfit(worker)), []).append(at)
        for unfit, places in groups.items():
            counts = self._table.reader.counts([assigned[at][1].shard.span for at in places], unfit, limit)
            for at, jobs in zip(places, counts, strict=True):
                found[at] = jobs
        return found

    def _fits(self, job: int) -> bool:
        error = self._table.too_long.get(job)
        context = self._worker.context_tokens
        return error is None or context is None or error.needed_tokens <= context

    def _unfit(self, worker: WorkerShards) -> Collection[int]:
        """Jobs that are known to be too long for a worker."""
        context = worker.context_tokens
        needs = self._table.too_long
        return () if context is None else {job for job, error in needs.items() if error.needed_tokens > context}

    def _taken(self) -> list[Shard]:
        """All shards, in queue order."""
        every = (each.shard for worker in self._table.workers for each in worker.assigned)
        return sorted(every, key=lambda each: each.first)

    def _others(self) -> list[tuple[WorkerShards, AssignedShard]]:
        """The shards of the other workers."""
        others = (worker for worker in self._table.workers if worker is not self._worker)
        return [(worker, each) for worker in others for each in worker.assigned]

    # ---- assigning

    def _assign_next(self, batches: Sequence[int], *, again: bool) -> bool:
        """Assign the next free shard; returns whether there was one."""
        worker = self._worker
        left = self._counts([(worker, each) for each in worker.assigned], 1)
        worker.assigned = [each for each, jobs in zip(worker.assigned, left, strict=True) if jobs]
        workers = len(self._table.workers)
        speed = speed_share(worker.jobs_per_s, [each.jobs_per_s for each in self._table.workers])
        pending = sum(self._store.pending(batch) for batch in batches)
        most = fair(max(0, pending - self._claimed(batches)), workers, worker.slots, speed=speed)
        whole = fair_share(pending, workers, speed=speed)
        rows, more = self._candidates(batches, max(most, whole, MIN_ROWS) + 1)
        jobs = cut(rows, most, more=more, whole=whole, workers=workers)
        if not jobs:
            return False
        prefetched = not again and worker.last_job is not None
        self._assign(Shard(rows[0].key, rows[jobs - 1].key, jobs), rows[jobs - 1], prefetched=prefetched)
        return True

    def _candidates(self, batches: Sequence[int], limit: int) -> tuple[list[QueuedJob], bool]:
        """Free jobs: the rest of the worker's prefix, or the first that do not continue another worker's prefix."""
        rows, more = self._free(batches, limit, after=None)
        if not rows:
            return rows, more
        own = self._worker.last_job
        if own is not None and _comparable(own, rows[0]):
            rest, more_rest = self._free(batches, limit, after=own.key)
            if rest and _comparable(own, rest[0]) and joined(own, rest[0]) >= WORTH_BYTES:
                return rest, more_rest
        last_jobs = [each.last_job for each in self._table.workers if each is not self._worker]
        near = [job for job in last_jobs if job is not None and _comparable(job, rows[0]) and job.key < rows[0].key]
        return rows[elsewhere_of((job.place for job in near), rows) :], more

    def _take_over(self, batches: Sequence[int]) -> bool:
        """Take over jobs from another worker; returns whether there were any.

        Takes a prefetched shard that was not started, or the last part of the largest shard for which that pays off.
        """
        others = [(owner, each) for owner, each in self._others() if each.shard.first[1] in batches]
        counts = self._counts([(self._worker, each) for _, each in others], MAX_SHARD_JOBS)
        left = [(jobs, *each) for jobs, each in zip(counts, others, strict=True) if jobs]
        left.sort(key=lambda each: -each[0])
        untouched = [each for each in left if each[2].prefetched and each[0] == each[2].shard.jobs]
        for rows, owner, each in self._read_in_turn(untouched):
            if len(rows) == each.shard.jobs:  # otherwise its owner has just started it
                owner.assigned.remove(each)
                owner.jobs -= each.shard.jobs
                self._assign(each.shard, rows[-1])
                return True
        for rows, owner, each in self._read_in_turn(left):
            own = self._worker.jobs_per_s
            stay = halved(rows, speed=speed_share(own, [own, owner.jobs_per_s]) or 0.5)
            if stay is not None:
                taken = Shard(rows[stay].key, each.shard.last, len(rows) - stay)
                each.shard = replace(each.shard, last=rows[stay - 1].key, jobs=stay)
                owner.jobs -= taken.jobs
                self._assign(taken, rows[-1])
                return True
        return False

    def _read_in_turn(
        self, left: Sequence[tuple[int, WorkerShards, AssignedShard]]
    ) -> Iterator[tuple[list[QueuedJob], WorkerShards, AssignedShard]]:
        """Yield the pending jobs of shards with known job counts; reads about a page per query."""
        start = 0
        while start < len(left):
            end = start
            jobs = 0
            while end < len(left) and (end == start or jobs + left[end][0] <= PAGE_ROWS):
                jobs += left[end][0]
                end += 1
            group = left[start:end]
            found = self._table.reader.rows(
                [each.shard.span for *_, each in group], self._unfit(self._worker), MAX_SHARD_JOBS
            )
            yield from ((rows, owner, each) for rows, (_, owner, each) in zip(found, group, strict=True))
            start = end

    def _assign(self, shard: Shard, last_job: QueuedJob, *, prefetched: bool = False) -> None:
        self._worker.jobs += shard.jobs
        self._worker.last_job = last_job
        self._worker.assigned.append(AssignedShard(shard, prefetched=prefetched))

    def _claimed(self, batches: Sequence[int]) -> int:
        """Approximate number of pending jobs inside shards."""
        every = [(worker, each) for worker in self._table.workers for each in worker.assigned]
        every = [(worker, each) for worker, each in every if each.shard.first[1] in batches]
        counts = self._counts(every, COUNTED_JOBS)
        return sum(
            jobs if jobs < COUNTED_JOBS else each.shard.jobs for jobs, (_, each) in zip(counts, every, strict=True)
        )

    def _measure_speed(self) -> None:
        """Update the worker's speed; called when its shards are nearly done."""
        worker = self._worker
        now_s = self._clock()
        if worker.began_s is None:
            worker.began_s = now_s
        elif worker.jobs > 0 and now_s > worker.began_s:
            worker.jobs_per_s = worker.jobs / (now_s - worker.began_s)


def largest_context(contexts: Iterable[int | None]) -> float:
    """The largest context; an unknown one counts as unlimited."""
    return max((inf if context is None else context for context in contexts), default=0)


def with_context(error: TooLong, context: float) -> TooLong:
    """The error for a job that is too long for every worker, with the largest context."""
    if context <= error.context_tokens:
        return error
    over = number_of(max(1, error.needed_tokens - int(context)), "token")
    return TooLong(
        f"the job needs {error.needed_tokens} tokens, and the largest context of all workers has {int(context)}: "
        f"{over} too many",
        needed_tokens=error.needed_tokens,
        context_tokens=int(context),
        hint=error.hint,
    )


def _comparable(one: QueuedJob, other: QueuedJob) -> bool:
    """Whether two jobs have the same batch and priority; only such jobs can be adjacent."""
    return one.key[:2] == other.key[:2]
