"""The worker loop: poll the store, dispatch jobs, write outcomes, handle events.

Connects the scheduler, the store, the engine and the completion handler. A run that was stopped, or ended by an engine
failure or a full disk, is resumed by the same command.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from tokenmill.engine.engine import Engine
from tokenmill.errors import EngineError, TokenmillError
from tokenmill.jobs.ingest.background import Ingest
from tokenmill.jobs.models import Batch, JobId
from tokenmill.jobs.output import Output
from tokenmill.jobs.scheduler.decisions import Dispatch, Fetch
from tokenmill.jobs.scheduler.estimates import ExpectedJobs
from tokenmill.jobs.scheduler.prefix_groups import Pending
from tokenmill.jobs.scheduler.scheduler import Scheduler
from tokenmill.jobs.scheduler.shape import EngineShape
from tokenmill.jobs.sharding.view import ShardView
from tokenmill.jobs.store.store import MAX_CRASHES, Store
from tokenmill.jobs.worker import attempts, liveness, retries
from tokenmill.jobs.worker.async_store import AsyncStore
from tokenmill.jobs.worker.attempts import Attempt, InternalError, StreamEnded
from tokenmill.jobs.worker.completion import CompletionHandler, WorkerEvent
from tokenmill.jobs.worker.job_buffer import JobBuffer
from tokenmill.jobs.worker.progress import MinimumTokens, RunEnd, RunReport
from tokenmill.jobs.worker.queue_reader import QueueReader
from tokenmill.jobs.worker.reuse import Miss, counted
from tokenmill.jobs.worker.stats import OnSnapshot, RunStats

GATHER_S = 0.003  # answers that arrive within this time are handled together
COMMIT_EVERY_S = 0.2  # minimum interval between commits of answers; slots are reused before the commit
TICK_S = 1.0  # interval between polls of the store, the clock and the output
RESUME_HINT = "finished answers are kept; run the same command again to resume"
_JOIN_JOBS = 512  # jobs of a joining batch that are read immediately; the rest is read from the queue


@dataclass(frozen=True, slots=True)
class WorkOptions:
    """Options of a worker."""

    attempts: int = retries.MAX_ATTEMPTS
    job_timeout_s: float | None = None  # default for jobs without their own
    max_crashes: int = MAX_CRASHES
    first_delay_s: float = retries.FIRST_DELAY_S
    tick_s: float = TICK_S
    names_as_requested: bool = False  # answers have the model name of their request, not the engine's
    count_minimum: bool = False  # tokenize the prompts again at the end, to report the exact minimum
    expected: ExpectedJobs | None = None  # for the estimates until the first job has finished


@dataclass(frozen=True, slots=True)
class WorkTask:
    """What a worker runs: batches of a store, on an engine.

    Batches from `joining` are added to the run; a batch that arrives too late is not run, so the sender must check
    whether it is finished when the worker returns. `on_miss` is called for every prompt that was computed although it
    should have been cached. `ingest` may still be adding jobs to a batch: its output is written once the batch is
    sealed, and its file errors are raised by the worker.
    """

    store: Store
    batches: Sequence[Batch]
    engine: Engine
    shape: EngineShape
    _: KW_ONLY
    outputs: Mapping[int, Output] = field(default_factory=dict)
    options: WorkOptions = field(default_factory=WorkOptions)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    on_snapshot: OnSnapshot = lambda _: None
    clock: Callable[[], float] | None = None  # None: the store's
    joining: "asyncio.Queue[Batch] | None" = None
    on_miss: Callable[[Miss], None] = lambda _: None
    shards: ShardView | None = None  # None: the store's
    ingest: Ingest | None = None


async def work(task: WorkTask) -> RunReport:
    """Run batches until every job has an outcome, or until `stop` is set.

    Raises EngineError if the engine fails permanently, StoreError, and output errors; jobs in flight have returned to
    the queue by then. With `shards` or a shared store, this returns when the jobs of all workers are done.
    """
    result = await run_worker(task)
    if result.failure is not None:
        hint = "\n".join(filter(None, (RESUME_HINT, result.failure.hint)))
        raise EngineError(result.failure.message, hint=hint, code=result.failure.code)
    return result.report


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """The report of a worker, and the permanent engine failure that ended it, if any."""

    report: RunReport
    failure: EngineError | None


async def run_worker(task: WorkTask) -> WorkerResult:
    """Like `work`, but returns a permanent engine failure together with the report."""
    return await _Worker(task).run(task.joining)


class _Worker:
    def __init__(self, task: WorkTask) -> None:
        engine = task.engine
        shape = task.shape
        options = task.options
        clock = task.clock or task.store.now_s
        store = AsyncStore(
            task.store,
            task.batches,
            task.outputs,
            clock=clock,
            max_crashes=options.max_crashes,
            shards=task.shards or task.store.shards(shape.width),
        )
        self._store = store
        self._engine = engine
        self._options = options
        self._clock = clock
        self._stop = task.stop
        self._on_snapshot = task.on_snapshot
        self._width = shape.width
        self._buffer = JobBuffer(Scheduler(shape))
        self._stats = RunStats(shape, engine.identity.kind, options.expected)
        self.completion = CompletionHandler(
            store,
            self._buffer,
            self._stats,
            engine,
            shape.width,
            attempts=options.attempts,
            first_delay_s=options.first_delay_s,
            clock=clock,
            on_miss=task.on_miss,
            names_as_requested=options.names_as_requested,
        )
        self._in_flight, self._inbox = self.completion.in_flight, self.completion.inbox
        self._loop_s = asyncio.get_running_loop().time
        self._queue = QueueReader(store, self._buffer, slots=shape.width, tick_s=options.tick_s, clock=self._loop_s)
        self._started_s = self._accounted_s = self._loop_s()
        self._polled_s: float | None = None
        self._commit_from_s = float("-inf")  # while jobs are in flight, answers are not committed earlier
        self._done = False
        self._ingest = task.ingest if task.ingest is not None and task.ingest.growing else None

    async def run(self, joining: "asyncio.Queue[Batch] | None" = None) -> WorkerResult:
        """Run until done, and report."""
        background = [
            self._background(liveness.watch(self._engine, self._inbox.put_nowait, poll_s=self._options.tick_s)),
            self._background(self._await_stop()),
        ]
        if joining is not None:
            background.append(self._background(self._await_joining(joining)))
        if self._ingest is not None:
            background.append(self._background(self._await_ingest(self._ingest)))
        try:
            await self._store.register(self._engine.identity.context, self._width, more=joining is not None)
            while not self._over:
                await self._poll_store()
                # Write before a suspect starts: it may crash this process.
                written = self._buffer.trying and await self.completion.record()
                more = written | await self._dispatch() | await self._record()
                self._report_progress()
                await self._handle(await self._events(wait=not more))
            seconds = self._loop_s() - self._started_s
            minimum = await self._count_minimum()
        except BaseException:
            with suppress(TokenmillError):  # raise the first error, which is the cause
                await self.completion.shut_down()
            raise
        finally:
            for task in background:
                task.cancel()
        await self.completion.shut_down()
        stopped = self._stop.is_set() or self.completion.engine_failure is not None
        end: RunEnd = "finished" if self._done else "stopped" if stopped else "cancelled"
        notes = self._buffer.scheduler.notes
        report = self._stats.report(end, seconds, self._store.counts, minimum, notes)
        return WorkerResult(report, self.completion.engine_failure)

    @property
    def _over(self) -> bool:
        return self._done or self._stop.is_set() or self.completion.engine_failure is not None or not self._store.open

    @property
    def _busy(self) -> int:
        return min(len(self._in_flight), self._width)

    # -- events ------------------------------------------------------------------------------------------------------

    def _background(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Start a background task; if it fails, the loop raises its error."""

        def done(task: "asyncio.Task[None]") -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._inbox.put_nowait(InternalError(error))

        task = asyncio.create_task(work)
        task.add_done_callback(done)
        return task

    async def _await_stop(self) -> None:
        await self._stop.wait()
        self._inbox.put_nowait(None)

    async def _await_joining(self, joining: "asyncio.Queue[Batch]") -> None:
        while True:
            self._inbox.put_nowait(await joining.get())

    async def _await_ingest(self, ingest: Ingest) -> None:
        found = await ingest.sealed()
        await self._store.sealed(found.batch.id, ingest.output)
        self._ingest = None
        self._inbox.put_nowait(None)

    async def _join(self, batch: Batch) -> None:
        """Add a batch: its first jobs immediately, the rest when the queue is reread.

        Buffered jobs of lower priority are dropped, and reread after the batch.
        """
        rows = await self._store.join(batch, _JOIN_JOBS)
        if rows:
            self._buffer.drop(self._buffer.below(-rows[0].rank))
        self._buffer.add(rows, deadline_s=self._store.deadline_s, more=None)
        self._done = False
        self._queue.reread()

    async def _events(self, *, wait: bool) -> list[WorkerEvent]:
        """The next events; with `wait`, wait for one for up to a tick."""
        if not wait or self._over:
            return self.completion.pending_events()
        retry_s = self._buffer.next_retry_s
        patience_s = max(0.0, min(self._options.tick_s, (retry_s or float("inf")) - self._clock()))
        if self.completion.writes:
            patience_s = min(patience_s, self._commit_later_s)
        try:
            async with asyncio.timeout(patience_s):
                first = await self._inbox.get()
        except TimeoutError:
            return []
        if isinstance(first, StreamEnded):
            await asyncio.sleep(GATHER_S)
        return [first, *self.completion.pending_events()]

    async def _record(self) -> bool:
        """Write the collected outcomes and the started jobs; returns whether there were any outcomes.

        While jobs are in flight, answers are committed at most every COMMIT_EVERY_S, because every transaction rewrites
        the same pages.
        """
        if self._commit_later_s > 0:
            return False
        if self.completion.writes.answers:
            self._commit_from_s = self._loop_s() + COMMIT_EVERY_S
        recorded = await self.completion.record()
        await self._store.flush()
        return recorded

    @property
    def _commit_later_s(self) -> float:
        """Seconds until collected answers are due for commit; 0 if they are due or there are none."""
        writes = self.completion.writes
        if not writes.answers or writes.jobs or self._buffer.trying or self._over or not self._in_flight:
            return 0.0
        return max(0.0, self._commit_from_s - self._loop_s())

    async def _handle(self, events: Sequence[WorkerEvent]) -> None:
        """Handle events, and account for the elapsed time."""
        now_s = self._loop_s()
        self._stats.throughput.passed(now_s - self._accounted_s, self._busy)
        self._accounted_s = now_s
        await self.completion.handle(events)
        for event in events:
            if isinstance(event, Batch):
                await self._join(event)

    # -- dispatch ----------------------------------------------------------------------------------------------------

    async def _dispatch(self) -> bool:
        """Carry out the scheduler's decisions; returns whether to ask it again immediately."""
        if self._over or self.completion.engine_down is not None:
            return False
        self._queue.prefetch(busy=bool(self._in_flight))
        decisions = self._buffer.decide(
            self._in_flight.keys(), sum(attempt.trial for attempt in self._in_flight.values())
        )
        more = [await self._queue.fetch(decision.jobs) for decision in decisions if isinstance(decision, Fetch)]
        sent = {decision.job: decision for decision in decisions if isinstance(decision, Dispatch | Pending)}
        if sent:
            more.append(await self._send(sent))
        elif self._buffer.empty and not self._in_flight and not self.completion.writes:
            await self._idle()
        return any(more)

    async def _idle(self) -> None:
        """The buffer is empty: finish, or look for more jobs."""
        if not self._store.left.pending:
            self._done = not self._store.elsewhere and self._ingest is None
            return
        retry_s = None if self._store.shared else await self._store.next_retry_s()
        if (retry_s is None or retry_s <= self._clock()) and self._queue.idle_reread_due():
            self._buffer.release_held()
            await self.completion.fail_unrunnable()
            self._queue.reread()

    async def _send(self, sent: Mapping[int, Dispatch | Pending]) -> bool:
        """Send jobs to the engine; returns whether some of them were not sent, so that their slots are free."""
        started = await self._store.start(list(sent))
        dispatched = {job: each for job, each in sent.items() if isinstance(each, Dispatch)}
        prompts = await self._store.prompts({job for each in dispatched.values() for job in each.later})
        for job in started.running:
            decision = dispatched.get(job.id)
            try:
                call = self._store.call(job.id, job.line)
            except (TokenmillError, ValueError) as error:
                self.completion.fail_line(job.id, error)
                continue
            attempt = Attempt(
                job,
                call,
                self._buffer[job.id].prompt_bytes,
                self._loop_s(),
                decision,
                self._engine.generation,
                self._stats.counters.evicted_tokens,
                self._stats.throughput.mark,
                tuple(prompts[job] for job in decision.later if job in prompts) if decision else (),
            )
            self._in_flight[job.id] = attempt
            attempts.launch(
                attempt,
                self._engine,
                timeout_s=self._options.job_timeout_s,
                on_event=self._inbox.put_nowait,
                on_tokens=self._stats.throughput.received,
            )
            if not attempt.trial:
                self._buffer.scheduler.started(job.id)
        self._buffer.hold(started.held)
        unsent = [job for job in sent if job not in self._in_flight]
        self._buffer.drop([job for job in unsent if job not in started.held])
        return bool(unsent)

    async def _poll_store(self) -> None:
        """Advance the clock, and once per tick handle cancellations, deadlines and output."""
        self._buffer.advance_clock(self._clock())
        if self._polled_s is not None and self._loop_s() - self._polled_s < self._options.tick_s:
            return
        self._polled_s = self._loop_s()
        self._buffer.scheduler.measured(self._stats.throughput.by_concurrency())
        changes = await self._store.poll()
        self._buffer.add(changes.due, deadline_s=self._store.deadline_s, more=None)
        # A batch is not cancelled before all its lines are stored.
        for batch in changes.to_cancel if self._ingest is None else ():
            # This keeps answers that have arrived.
            await self.completion.requeue([each for each in self._in_flight.values() if JobId.batch(each.id) == batch])
            await self._store.cancel(batch)
            self._buffer.drop(self._buffer.of_batch(batch))
        if changes.reopened:
            self._queue.reread()

    # -- report ------------------------------------------------------------------------------------------------------

    def _report_progress(self) -> None:
        output = self._store.output_error
        self._on_snapshot(
            self._stats.snapshot(
                self._loop_s() - self._started_s,
                self._store.counts,
                retrying=self._buffer.retrying,
                in_flight=[attempt.tokens for attempt in self._in_flight.values()],
                lengths=self._buffer.scheduler.lengths,
                down=self.completion.engine_down,
                output=output.message if output else None,
            )
        )

    async def _count_minimum(self) -> MinimumTokens | None:
        """The minimum prompt tokens; None after a stop, because counting would delay the exit."""
        if self._stop.is_set() or self.completion.engine_failure is not None:
            return None
        jobs = self._stats.sample if self._options.count_minimum else []
        exact = await counted(self._engine, await self._store.calls(jobs)) if jobs else None
        return self._stats.minimum(exact)
