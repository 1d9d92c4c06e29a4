"""Handles the events of attempts: answers, failures and engine crashes; collects their outcomes and writes them.

An answer is final once it is on disk. A failed job is retried if that can help; jobs in flight at an engine crash are
retried one at a time. Does not schedule or send jobs.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from tokenmill.engine.engine import Answer, Engine, EngineStatus
from tokenmill.errors import EngineDied, EngineError, NonFiniteLogits, TokenmillError, TooLong, UsageError
from tokenmill.jobs.models import Batch, Failure, FinishedJob, JobId, State
from tokenmill.jobs.openai.answers import answer_body, made_by
from tokenmill.jobs.scheduler.decisions import Dispatch
from tokenmill.jobs.worker import attempts, liveness, retries
from tokenmill.jobs.worker.async_store import AsyncStore, PendingWrites, prompt_bytes
from tokenmill.jobs.worker.attempts import Attempt, InternalError, StreamEnded, TokensReceived
from tokenmill.jobs.worker.job_buffer import JobBuffer
from tokenmill.jobs.worker.progress import Failed
from tokenmill.jobs.worker.reuse import Miss, explain
from tokenmill.jobs.worker.stats import RunStats
from tokenmill.storage.json_text import encode

WorkerEvent = TokensReceived | StreamEnded | InternalError | EngineStatus | EngineError | Batch | None
"""Stream event, engine status, permanent engine failure, or joining batch; None: check whether the run has to stop."""


class CompletionHandler:
    """Turns events of one worker's attempts into outcomes."""

    def __init__(
        self,
        store: AsyncStore,
        buffer: JobBuffer,
        stats: RunStats,
        engine: Engine,
        width: int,
        *,
        attempts: int,
        first_delay_s: float,
        clock: Callable[[], float],
        on_miss: Callable[[Miss], None],
        names_as_requested: bool,
    ) -> None:
        self._store = store
        self._buffer = buffer
        self._stats = stats
        self._engine = engine
        self._width = width
        self._kv_layout = engine.runtime.kv_layout if engine.runtime is not None else None
        self._attempts = attempts
        self._first_delay_s = first_delay_s
        self._clock = clock
        self._names_as_requested = names_as_requested
        self.inbox: asyncio.Queue[WorkerEvent] = asyncio.Queue()
        self.in_flight: dict[int, Attempt] = {}
        self.writes = PendingWrites()
        self._unchecked: list[tuple[Dispatch, Attempt, Answer]] = []
        self._loop_s = asyncio.get_running_loop().time
        self.engine_down: str | None = None  # why the engine cannot be used now
        self.engine_failure: EngineError | None = None  # permanent
        self._on_miss = on_miss

    def pending_events(self) -> list[WorkerEvent]:
        """Remove and return the events in the inbox."""
        return [self.inbox.get_nowait() for _ in range(self.inbox.qsize())]

    # -- events ------------------------------------------------------------------------------------------------------

    async def handle(self, events: Sequence[WorkerEvent]) -> None:
        """Handle events, answers first, so that an engine crash among the events does not lose them."""
        for event in events:
            if isinstance(event, TokensReceived | StreamEnded) and self._is_current(event.attempt):
                if isinstance(event, StreamEnded) and await self._continues_elsewhere(event.attempt, event.result):
                    self._release(event.attempt)
                else:
                    self._received(event)
        for event in events:
            if isinstance(event, StreamEnded) and self._is_current(event.attempt):
                await self._ended(event.attempt, event.result)
            elif isinstance(event, EngineStatus):
                self._stats.seen(event)
                if event.state == "ready" and self.engine_down is not None:
                    await self._back()
            elif isinstance(event, EngineError):
                self.engine_failure = self.engine_failure or event
            elif isinstance(event, InternalError):
                raise event.error

    def _is_current(self, attempt: Attempt) -> bool:
        return self.in_flight.get(attempt.id) is attempt

    def _received(self, event: TokensReceived | StreamEnded) -> None:
        """Process received tokens or a complete answer."""
        attempt = event.attempt
        if isinstance(event, TokensReceived):
            self._buffer.received(attempt.id, attempt.tokens, trial=attempt.trial)
        elif isinstance(event.result, Answer):
            answer = event.result
            job = attempt.job
            del self.in_flight[attempt.id]
            self._stats.answered(attempt, answer, prompt_bytes(attempt.call))
            sent = self._buffer.answered(attempt.id, answer.usage, trial=attempt.trial)
            if sent is not None:
                self._unchecked.append((sent, attempt, answer))
            engine = self._engine.identity
            requested = attempt.call.model if self._names_as_requested else None
            body = answer_body(
                attempt.call.endpoint,
                answer,
                id=(job.identity or b"").hex()[:24],
                model=requested or engine.model,
                created_s=self._clock(),
                made_by=made_by(engine),
                request=attempt.call.values.get("response"),
            )
            usage = answer.usage
            engine_s = self._loop_s() - attempt.began_s
            spent = (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, engine_s)
            self.writes.answers.append(FinishedJob(attempt.id, encode(body), *spent))

    async def _continues_elsewhere(self, attempt: Attempt, answer: Answer | TokenmillError) -> bool:
        """Whether an answer was cut off by this engine's context and a worker with a larger one may complete it."""
        if not self._store.shared or not isinstance(answer, Answer):
            return False
        cut = retries.cut_short(answer, attempt.call.request().max_tokens, self._engine.identity.context)
        return cut is not None and await self._store.too_long(attempt.id, cut) is None

    async def _ended(self, attempt: Attempt, result: Answer | TokenmillError) -> None:
        """Handle a stream that ended without an answer, because the job or the engine failed."""
        if isinstance(result, EngineError):
            self.engine_failure = self.engine_failure or liveness.failure(self._engine)
        if isinstance(result, NonFiniteLogits):  # no answer can be trusted: end the run and requeue its jobs
            self.engine_failure = self.engine_failure or result
        if isinstance(result, EngineDied) and not await liveness.survived(self._engine, attempt.generation):
            await self._engine_died(result)
        elif isinstance(result, TokenmillError) and self.engine_failure is None:
            error = await self._store.too_long(attempt.id, result) if isinstance(result, TooLong) else result
            if error is not None:
                self._failed(attempt, error)
            else:
                self._release(attempt)

    def _failed(self, attempt: Attempt, error: TokenmillError) -> None:
        """Fail a job, or schedule a retry."""
        decision = retries.classify(error)
        attempts = attempt.job.attempts + 1
        retry_at_s = None
        failure = retries.final_failure(decision.failure, attempts)
        if decision.retryable and attempts < self._attempts:
            chance = random.random()  # noqa: S311  jitter: jobs that failed together should not be retried together
            failure = decision.failure
            retry_at_s = self._clock() + retries.delay_s(attempts, chance, self._first_delay_s)
        del self.in_flight[attempt.id]
        self.writes.failures.append((attempt.id, failure, retry_at_s))
        self._buffer.failed(attempt.id, retry_at_s=retry_at_s, trial=attempt.trial)
        stats = self._stats
        stats.failed = Failed(attempt.job.number, failure, again=retry_at_s is not None)
        if failure.code in retries.ENGINE_FAILURES:
            stats.consecutive_failures += 1
            if stats.consecutive_failures >= retries.max_consecutive_failures(self._width):
                message = f"the engine failed {stats.consecutive_failures} times in a row"
                self.engine_failure = EngineError(f"{message}: {failure.message}")

    def _release(self, attempt: Attempt) -> None:
        """Release a job that is too long for this engine, so that another worker can run it."""
        del self.in_flight[attempt.id]
        self.writes.released.append(attempt.id)
        self._buffer.failed(attempt.id, retry_at_s=None, trial=attempt.trial)
        self._buffer.drop([attempt.id])

    async def fail_unrunnable(self) -> None:
        """Fail jobs that need a larger context than any remaining worker provides."""
        for job, error in await self._store.unrunnable():
            failure = retries.classify(error).failure
            self.writes.failures.append((job, failure, None))
            self._stats.failed = Failed(JobId.line(job), failure, again=False)

    async def _engine_died(self, death: EngineDied) -> None:
        """Retry the jobs in flight one at a time, or all together if another process killed the engine."""
        self.engine_down, self._stats.crashes = death.message, self._stats.crashes + 1
        lost = await self.cancel(list(self.in_flight.values()))
        blamed = self._blamed(death, [attempt.id for attempt in lost])
        if blamed:
            self.writes.crashes.append((blamed, retries.classify(death).failure))
        self.writes.released += [attempt.id for attempt in lost if attempt.id not in blamed]
        in_flight = [(attempt.id, attempt.tokens) for attempt in lost]
        self._buffer.engine_died(in_flight, suspect=not death.from_outside)
        await self.record()  # before any job is retried

    def _blamed(self, death: EngineDied, lost: list[int]) -> list[int]:
        """The lost jobs against which the store counts the crash."""
        on_trial = [job for job in lost if job == self._buffer.on_trial]
        if death.from_outside is False:
            return on_trial or lost
        if death.from_outside or self.engine_failure is not None:
            return []
        return on_trial  # the cause is unknown, but the job on trial was in flight at every crash

    async def _back(self) -> None:
        """Restore the number of slots and the KV layout, which a restart resets to the planned settings."""
        self.engine_down = None
        engine = self._engine
        can = self._engine.capabilities
        if can.max_slots is not None and engine.identity.slots != self._width:
            with suppress(EngineError):  # if it died again, the streams report it
                await engine.set_slots(min(self._width, can.max_slots))
        runtime = engine.runtime
        if self._kv_layout == "per_slot" and runtime is not None and runtime.kv_layout != "per_slot":
            with suppress(EngineError, UsageError):  # the unified layout works too
                await engine.set_kv_layout("per_slot")

    # -- write -------------------------------------------------------------------------------------------------------

    async def record(self) -> bool:
        """Write the collected outcomes; returns whether there were any."""
        writes = self.writes
        self.writes = PendingWrites()
        for outcome in await self._store.commit(writes) if writes else ():
            if outcome.state.final:
                self._buffer.drop([outcome.job])
            elif outcome.job not in writes.jobs:
                self._buffer.restore(outcome.job)
            if outcome.state is State.QUARANTINED:
                self._stats.failed = Failed(JobId.line(outcome.job), writes.crashes[0][1], again=False)
        unchecked = self._unchecked
        self._unchecked = []
        for sent, attempt, answer in unchecked:
            await self._check_reuse(sent, attempt, answer)
        return bool(writes)

    def fail_line(self, job: int, error: Exception) -> None:
        """Fail a job whose line cannot be parsed, which an older version may have stored."""
        self.writes.failures.append((job, Failure("refused", str(error)), None))

    async def _check_reuse(self, sent: Dispatch, attempt: Attempt, answer: Answer) -> None:
        """Compare the cached with the expected tokens, and report a miss."""
        evidence = self._stats.evidence(sent, attempt, answer)
        if explain(sent, answer.usage, attempt.prompt_bytes, evidence) is None:
            return
        if evidence.evicted_tokens is not None:  # recent evictions may be the cause
            self._stats.seen(await self._engine.status())
            evidence = self._stats.evidence(sent, attempt, answer)
        source_prompt = await self._store.prompt(sent.source_job) if sent.source_job is not None else None
        evidence = replace(evidence, prompt=prompt_bytes(attempt.call), source_prompt=source_prompt)
        miss = explain(sent, answer.usage, attempt.prompt_bytes, evidence)
        if miss is not None:
            self._stats.misses.add(miss)
            self._on_miss(miss)

    # -- release -----------------------------------------------------------------------------------------------------

    async def cancel(self, running: list[Attempt]) -> list[Attempt]:
        """Cancel attempts; returns those that were not answered meanwhile."""
        await attempts.cancel(running)
        for event in self.pending_events():
            if isinstance(event, StreamEnded) and isinstance(event.result, Answer):
                if self._is_current(event.attempt):
                    self._received(event)
            elif not (isinstance(event, TokensReceived | StreamEnded) and event.attempt in running):
                self.inbox.put_nowait(event)
        return [attempt for attempt in running if self.in_flight.pop(attempt.id, None) is not None]

    async def requeue(self, running: list[Attempt]) -> None:
        """Cancel attempts and return their jobs to the queue without counting an attempt."""
        self.writes.released += [attempt.id for attempt in await self.cancel(running)]
        await self.record()

    async def shut_down(self) -> None:
        """Return running jobs to the queue and close the store; answers that arrived meanwhile are kept."""
        try:
            if isinstance(self.engine_failure, EngineDied) and self.in_flight:
                await self._engine_died(self.engine_failure)  # reported by `liveness.watch` before the streams ended
            await self.requeue(list(self.in_flight.values()))
        finally:
            await self._store.close()
