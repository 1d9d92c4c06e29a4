"""Async facade over the blocking store and output files; all calls run in order on one dedicated thread.

`commit` returns once the data is on disk. A failing output file does not stop the batch, because every answer is in the
store: writing is retried periodically, and if it still fails at the end, `close` raises the error.
"""

import asyncio
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from tokenmill.engine.engine import Prompt
from tokenmill.errors import StoreError, TokenmillError, TooLong
from tokenmill.jobs.ingest.identity import prompt_text
from tokenmill.jobs.ingest.line import call_of
from tokenmill.jobs.models import (
    Batch,
    Counts,
    Failure,
    FinishedJob,
    JobId,
    JobOutcome,
    QueuedJob,
    Started,
    State,
)
from tokenmill.jobs.openai.call import Call
from tokenmill.jobs.output import Output
from tokenmill.jobs.sharding.view import ShardView, WorkerSpec
from tokenmill.jobs.store.store import Store

DUE_JOBS = 256  # maximum number of jobs near their deadline that are loaded in addition to the window
DUE_S = 3600.0  # they are loaded this long before their deadline
_OUTPUT_RETRY_S = 10.0
T = TypeVar("T")


@dataclass(slots=True)
class PendingWrites:
    """Job outcomes collected for one transaction."""

    answers: list[FinishedJob] = field(default_factory=list)
    failures: list[tuple[int, Failure, float | None]] = field(default_factory=list)  # job, failure, retry time if any
    crashes: list[tuple[list[int], Failure]] = field(default_factory=list)  # blamed jobs, failure
    released: list[int] = field(default_factory=list)  # back to the queue without an attempt

    def __bool__(self) -> bool:
        return bool(self.answers or self.failures or self.crashes or self.released)

    @property
    def jobs(self) -> set[int]:
        """Jobs that were in flight and have no answer."""
        blamed = (job for jobs, _ in self.crashes for job in jobs)
        return {*self.released, *(job for job, *_ in self.failures), *blamed}


@dataclass(frozen=True, slots=True)
class StoreChanges:
    """Changes in the store since the last poll."""

    to_cancel: tuple[int, ...]  # batches
    due: tuple[QueuedJob, ...]
    reopened: tuple[int, ...]  # batches that have pending jobs again


class AsyncStore:
    """The store and the output files, called from the event loop."""

    def __init__(
        self,
        store: Store,
        batches: Sequence[Batch],
        outputs: Mapping[int, Output],
        *,
        clock: Callable[[], float],
        max_crashes: int,
        shards: ShardView | None = None,
    ) -> None:
        self._store = store
        self._outputs = dict(outputs)
        self._clock = clock
        self._max_crashes = max_crashes
        self._shards = shards or ShardView(store)
        self._known: dict[int, QueuedJob] = {}  # in a shared store: jobs that were read and have no outcome yet
        self._batches = {batch.id: batch for batch in batches}
        self.open = [batch.id for batch in batches]  # batches to run: not cancelled, not removed
        self._finished: dict[int, Counts] = {}  # batches that were finished when another joined
        self._thread = ThreadPoolExecutor(1, "store")
        self._output_retry_s = 0.0
        self.output_error: TokenmillError | None = None
        self.counts = Counts()  # of all batches, including cancelled ones
        self.left = Counts()  # of the open batches

    def deadline_s(self, job: int) -> float | None:
        """Deadline of the job's batch; None if it has none."""
        return self._batches[JobId.batch(job)].deadline_s

    def call(self, job: int, line: str) -> Call:
        """Parse a stored line."""
        return call_of(line, self._batches[JobId.batch(job)].defaults)

    async def register(self, context: int | None, slots: int, *, more: bool) -> None:
        """Register this worker's context and slots; with `more`, batches may join later."""
        if self._batches:
            batches = None if more else tuple(self._batches)
            spec = WorkerSpec(next(iter(self._batches.values())).model_id, context, batches)
            await self._do(lambda: self._shards.register(spec, slots))

    async def too_long(self, job: int, error: TooLong) -> TooLong | None:
        """The error to fail a job with that is too long for this worker; None if another worker may run it."""

        def work() -> TooLong | None:
            found = self._shards.too_long(job, error)
            if found is None:
                self._forget([job])
            return found

        return await self._do(work)

    async def unrunnable(self) -> list[tuple[int, TooLong]]:
        """Jobs that need a larger context than any remaining worker has, with their errors."""

        def work() -> list[tuple[int, TooLong]]:
            found = self._shards.unrunnable()
            jobs = {job: self._store.job(job) for job, _ in found if JobId.batch(job) in self.open}
            waiting = {number for number, job in jobs.items() if job is not None and job.state is State.PENDING}
            return [(job, error) for job, error in found if job in waiting]

        return await self._do(work)

    async def window(self, limit: int, *, again: bool) -> list[QueuedJob]:
        """The next pending jobs that this worker may take; with `again`, from the beginning."""
        return await self._do(lambda: self._remember(self._shards.window(self.open, again=again, limit=limit)))

    async def start(self, jobs: Sequence[int]) -> Started:
        """Mark jobs as running and read their lines. Jobs that now belong to another worker are in neither list."""

        def work() -> Started:
            ours = [job for job in jobs if job not in self._known or self._shards.has(self._known[job])]
            started = self._store.start(ours)
            kept = {*(job.id for job in started.running), *started.held}
            self._forget(job for job in jobs if job not in kept)
            return started

        return await self._do(work)

    async def commit(self, what: PendingWrites) -> tuple[JobOutcome, ...]:
        """Write outcomes to the store; they are on disk when this returns."""

        def work() -> tuple[JobOutcome, ...]:
            outcomes = list(self._store.commit(what.answers)) if what.answers else []
            for jobs, failure in what.crashes:
                outcomes += self._store.record_crash(
                    jobs, failure, retry_at_s=self._clock(), max_crashes=self._max_crashes
                )
            for job, failure, retry_at_s in what.failures:
                outcomes += self._store.fail(job, failure, retry_at_s=retry_at_s)
            if what.released:
                outcomes += self._store.release(what.released)
            self._forget(outcome.job for outcome in outcomes if outcome.state.final)
            self._count()
            return tuple(outcomes)

        return await self._do(work)

    async def flush(self) -> None:
        """Make started jobs visible to other processes."""
        if self._store.unflushed:
            await self._do(self._store.flush)

    async def poll(self) -> StoreChanges:
        """Check for cancellations, deadlines and reopened batches; renew leases; append to the output files."""

        def work() -> StoreChanges:
            asked = tuple(batch for batch in self._to_cancel() if batch in self.open)
            reopened = self._reopen()
            due = tuple(self._store.due(self._clock() + DUE_S, DUE_JOBS))
            if due or any(self._batches[batch].deadline_s is not None for batch in self.open):
                self._store.expire()
            self._store.renew_lease()
            self._shards.refresh()
            self._count()
            self._advance()
            return StoreChanges(
                asked, tuple(self._remember([waiting for waiting in due if self._may_take(waiting)])), reopened
            )

        return await self._do(work)

    async def join(self, batch: Batch, limit: int) -> list[QueuedJob]:
        """Add a batch; returns up to `limit` of its pending jobs.

        The counts of finished batches are frozen; afterwards these are only checked for being reopened.
        """

        def work() -> list[QueuedJob]:
            self._batches[batch.id] = batch
            self._finished.pop(batch.id, None)
            for known in self._batches.keys() - self._finished.keys() - {batch.id}:
                if (now := self._now(known)) is not None and now.finished and now.cancelled_s is None:
                    self._finished[known] = now.counts
            self.open = [*(known for known in self.open if known not in self._finished and known != batch.id), batch.id]
            self._count()
            return self._remember(self._shards.join(batch.id, limit))

        return await self._do(work)

    async def sealed(self, batch: int, output: Output | None) -> None:
        """All lines of a growing batch are stored: write its output from now on, unless another process does (None)."""

        def work() -> None:
            if output is not None:
                self._outputs[batch] = output
            self._count()

        await self._do(work)

    async def cancel(self, batch: int) -> None:
        """Stop running a cancelled batch, and cancel its jobs unless another worker's cancellation has been undone."""

        def work() -> None:
            if not self.shared or batch in self._store.cancel_requests():
                self._store.cancel(batch)
            self.open.remove(batch)
            self._forget([job for job in self._known if JobId.batch(job) == batch])
            self._count()

        await self._do(work)

    async def next_retry_s(self) -> float | None:
        """The time of the first pending retry; None if no job waits for one."""
        return await self._do(lambda: self._store.next_retry_s(self.open))

    async def prompt(self, job: int) -> bytes | None:
        """The canonical prompt of a job; None if it does not exist."""

        def work() -> bytes | None:
            found = self._store.job(job)
            return None if found is None else prompt_bytes(self.call(job, found.line))

        return await self._do(work)

    async def calls(self, jobs: Iterable[int]) -> list[Call]:
        """Parse the lines of some jobs."""

        def work() -> list[Call]:
            found = (self._store.job(job) for job in jobs)
            return [self.call(job.id, job.line) for job in found if job is not None]

        return await self._do(work)

    async def prompts(self, jobs: Collection[int]) -> dict[int, Prompt]:
        """The prompts of some jobs, without those whose lines are invalid."""
        if not jobs:
            return {}

        def work() -> dict[int, Prompt]:
            found: dict[int, Prompt] = {}
            for job in filter(None, map(self._store.job, jobs)):
                with suppress(TokenmillError, ValueError):
                    found[job.id] = self.call(job.id, job.line).prompt
            return found

        return await self._do(work)

    async def close(self) -> None:
        """Release the shards and finish the output files; raises the output's error if it persists."""

        def work() -> None:
            self._shards.close()
            self._output_retry_s = 0.0
            self._advance(finish=True)
            self._count()

        try:
            await self._do(work)
        finally:
            self._thread.shutdown(wait=False)
        if self.output_error is not None:
            raise self.output_error

    @property
    def shared(self) -> bool:
        """Whether other workers may run the same batches."""
        return self._shards.shared

    @property
    def elsewhere(self) -> bool:
        """Whether jobs that run in other workers could return to the queue."""
        return self.shared and self.left.running > 0

    def _may_take(self, waiting: QueuedJob) -> bool:
        return JobId.batch(waiting.id) in self.open and self._shards.has(waiting)

    def _remember(self, rows: list[QueuedJob]) -> list[QueuedJob]:
        if self.shared:
            self._known.update((row.id, row) for row in rows)
        return rows

    def _forget(self, jobs: Iterable[int]) -> None:
        for job in jobs:
            self._known.pop(job, None)

    def _to_cancel(self) -> list[int]:
        """Batches to stop: cancelled by request, cancelled by another worker, or removed."""
        asked = self._store.cancel_requests()
        if not self.shared:
            return asked
        return [*asked, *(batch for batch in self.open if batch not in asked and self._cancelled(batch))]

    def _cancelled(self, batch: int) -> bool:
        now = self._now(batch)
        return now is None or now.cancelled_s is not None

    def _reopen(self) -> tuple[int, ...]:
        """Reopen batches that were cancelled or finished and have pending jobs again."""
        closed = self._batches.keys() - set(self.open)
        again = [batch for batch in self._store.open_batches() if batch.id in closed] if closed else []
        for batch in again:
            self._batches[batch.id] = batch
            self._finished.pop(batch.id, None)
            self.open.append(batch.id)
        return tuple(batch.id for batch in again)

    def _count(self) -> None:
        unfinished = (batch for batch in self._batches if batch not in self._finished)
        every = {batch: now.counts for batch in unfinished if (now := self._now(batch)) is not None}
        self.counts = _sum([*every.values(), *self._finished.values()])
        self.left = _sum(counts for batch, counts in every.items() if batch in self.open)

    def _now(self, batch: int) -> Batch | None:
        """The current state of a batch; None if it was removed."""
        try:
            return self._store.batch(batch)
        except StoreError:
            if any(known.id == batch for known in self._store.batches()):
                raise
            return None

    def _advance(self, *, finish: bool = False) -> None:
        if self._clock() < self._output_retry_s:
            return
        try:
            for output in self._outputs.values():
                if finish:
                    output.finish()
                else:
                    output.advance()
            self.output_error = None
        except TokenmillError as error:
            if isinstance(error.__cause__, BrokenPipeError):
                raise  # the reader closed the pipe
            self.output_error, self._output_retry_s = error, self._clock() + _OUTPUT_RETRY_S

    async def _do(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _sum(every: Iterable[Counts]) -> Counts:
    every = list(every)
    return Counts(**{name: sum(getattr(counts, name) for counts in every) for name in Counts.__dataclass_fields__})


def prompt_bytes(call: Call) -> bytes:
    """The canonical prompt of a call, from which its prefix key is computed."""
    prompt = call.prompt
    return array("I", prompt).tobytes() if isinstance(prompt, tuple) else prompt_text(call).encode()
