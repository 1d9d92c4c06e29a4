"""Handles the end of attempts: answers, failures, engine crashes and released jobs; collects outcomes and writes them.

An answer counts once it is on disk. A failed job is retried if that can help; a job that was in flight when the engine
died is retried alone. Does not decide which job is next, and sends none.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from tokenmill.engine.engine import Answer, Engine, EngineStatus
from tokenmill.errors import EngineDied, EngineError, NonFiniteLogits, TokenmillError, TooLong, UsageError
from tokenmill.jobs.models import Batch, Failure, FinishedJob, JobId, State
from tokenmill.jobs.openai.answers import answer_body
from tokenmill.jobs.scheduler.decisions import Dispatch
from tokenmill.jobs.worker import attempts, liveness, retries
from tokenmill.jobs.worker.async_store import AsyncStore, PendingWrites, prompt_bytes
from tokenmill.jobs.worker.attempts import Attempt, Broke, Came, StreamEnded
from tokenmill.jobs.worker.job_buffer import JobBuffer
from tokenmill.jobs.worker.progress import Failed
from tokenmill.jobs.worker.reuse import Miss, explain
from tokenmill.jobs.worker.stats import RunStats
from tokenmill.storage.json_text import encode

WorkerEvent = Came | StreamEnded | Broke | EngineStatus | EngineError | Batch | None
"""Stream events, engine status, permanent engine failure, a joining batch; None: wake up, the run may have to stop."""


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
        missed: Callable[[Miss], None],
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
        self.inbox: asyncio.Queue[WorkerEvent] = asyncio.Queue()
        self.in_flight: dict[int, Attempt] = {}
        self.writes = PendingWrites()
        self._unchecked: list[tuple[Dispatch, Attempt, Answer]] = []
        self._loop_s = asyncio.get_running_loop().time
        self.down: str | None = None  # why the engine is not usable now
        self.gone: EngineError | None = None  # why it failed permanently
        self._on_miss = missed

    def there(self) -> list[WorkerEvent]:
        """Events that have not been handled yet."""
        return [self.inbox.get_nowait() for _ in range(self.inbox.qsize())]

    # -- events ------------------------------------------------------------------------------------------------------

    async def take(self, events: Sequence[WorkerEvent]) -> None:
        """Handle events, answers first, so that a simultaneous engine crash does not lose them."""
        for event in events:
            if isinstance(event, Came | StreamEnded) and self.in_flight.get(event.attempt.id) is event.attempt:
                if isinstance(event, StreamEnded) and await self._continues_elsewhere(event.attempt, event.how):
                    self._release(event.attempt)
                else:
                    self._received(event)
        for event in events:
            if isinstance(event, StreamEnded) and self.in_flight.get(event.attempt.id) is event.attempt:
                await self._ended(event.attempt, event.how)
            elif isinstance(event, EngineStatus):
                self._stats.seen(event)
                if event.state == "ready" and self.down is not None:
                    await self._back()
            elif isinstance(event, EngineError):
                self.gone = self.gone or event
            elif isinstance(event, Broke):
                raise event.error

    def _received(self, event: Came | StreamEnded) -> None:
        """Note received tokens or a complete answer."""
        attempt = event.attempt
        if isinstance(event, Came):
            self._buffer.came(attempt.id, attempt.tokens, trial=attempt.trial)
        elif isinstance(event.how, Answer):
            answer = event.how
            job = attempt.job
            del self.in_flight[attempt.id]
            self._stats.answered(attempt, answer, prompt_bytes(attempt.call))
            sent = self._buffer.answered(attempt.id, answer.usage, trial=attempt.trial)
            if sent is not None:
                self._unchecked.append((sent, attempt, answer))
            engine = self._engine.identity
            body = answer_body(
                attempt.call.endpoint,
                answer,
                id=(job.identity or b"").hex()[:24],
                model=engine.model,
                created_s=self._clock(),
                made_by=f"{engine.kind} {engine.build}",
            )
            usage = answer.usage
            engine_s = self._loop_s() - attempt.began_s
            spent = (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, engine_s)
            self.writes.answers.append(FinishedJob(attempt.id, encode(body), *spent))

    async def _continues_elsewhere(self, attempt: Attempt, answer: Answer | TokenmillError) -> bool:
        """Whether an answer was cut off by this engine's context and another worker may complete it."""
        if not self._store.shared or not isinstance(answer, Answer):
            return False
        cut = retries.cut_short(answer, attempt.call.request().max_tokens, self._engine.identity.context)
        return cut is not None and await self._store.too_long(attempt.id, cut) is None

    async def _ended(self, attempt: Attempt, how: Answer | TokenmillError) -> None:
        """Handle a stream that ended without an answer: the job failed, or the engine."""
        if isinstance(how, EngineError):
            self.gone = self.gone or liveness.over(self._engine)
        if isinstance(how, NonFiniteLogits):  # every answer is suspect: the run ends, and its jobs return to the queue
            self.gone = self.gone or how
        if isinstance(how, EngineDied) and not await liveness.survived(self._engine, attempt.generation):
            await self._engine_died(how)
        elif isinstance(how, TokenmillError) and self.gone is None:
            error = await self._store.too_long(attempt.id, how) if isinstance(how, TooLong) else how
            if error is not None:
                self._failed(attempt, error)
            else:
                self._release(attempt)

    def _failed(self, attempt: Attempt, error: TokenmillError) -> None:
        """Fail a job, permanently or until a retry."""
        judged = retries.verdict(error)
        attempts = attempt.job.attempts + 1
        retry_at_s = None
        failure = retries.after(judged.failure, attempts)
        if judged.can_pass and attempts < self._attempts:
            chance = random.random()  # noqa: S311  jitter: jobs that failed together should not be retried together
            failure = judged.failure
            retry_at_s = self._clock() + retries.delay_s(attempts, chance, self._first_delay_s)
        del self.in_flight[attempt.id]
        self.writes.failures.append((attempt.id, failure, retry_at_s))
        self._buffer.failed(attempt.id, retry_at_s=retry_at_s, trial=attempt.trial)
        stats = self._stats
        stats.failed = Failed(attempt.job.number, failure, again=retry_at_s is not None)
        if failure.code in retries.OF_THE_ENGINE:
            stats.in_a_row += 1
            if stats.in_a_row >= retries.most_in_a_row(self._width):
                words = f"the engine failed {stats.in_a_row} times without one answer in between"
                self.gone = EngineError(f"{words}: {failure.message}")

    def _release(self, attempt: Attempt) -> None:
        """Release a job that is too long for this engine, so that another worker can run it."""
        del self.in_flight[attempt.id]
        self.writes.released.append(attempt.id)
        self._buffer.failed(attempt.id, retry_at_s=None, trial=attempt.trial)
        self._buffer.drop([attempt.id])

    async def give_up(self) -> None:
        """Fail jobs that need a larger context than any remaining worker has."""
        for job, error in await self._store.hopeless():
            failure = retries.verdict(error).failure
            self.writes.failures.append((job, failure, None))
            self._stats.failed = Failed(JobId.line(job), failure, again=False)

    async def _engine_died(self, death: EngineDied) -> None:
        """The engine died: retry the jobs in flight one at a time, or together if another process killed the engine."""
        self.down, self._stats.deaths = death.message, self._stats.deaths + 1
        lost = await self.break_off(list(self.in_flight.values()))
        blamed = self._blamed(death, [attempt.id for attempt in lost])
        if blamed:
            self.writes.deaths.append((blamed, retries.verdict(death).failure))
        self.writes.released += [attempt.id for attempt in lost if attempt.id not in blamed]
        in_flight = [(attempt.id, attempt.tokens) for attempt in lost]
        self._buffer.died(in_flight, accused=not death.from_outside)
        await self.record()  # before any of them is retried

    def _blamed(self, death: EngineDied, lost: list[int]) -> list[int]:
        """The lost jobs against which the store counts the crash."""
        on_trial = [job for job in lost if job == self._buffer.on_trial]
        if death.from_outside is False:
            return on_trial or lost
        if death.from_outside or self.gone is not None:
            return []
        return on_trial  # the cause is unknown: only this job was running every time

    async def _back(self) -> None:
        """A restarted engine has its planned settings: set the measured number of slots and the KV layout again."""
        self.down = None
        engine = self._engine
        can = self._engine.capabilities
        if can.max_slots is not None and engine.identity.lanes != self._width:
            with suppress(EngineError):  # it died again, which is reported elsewhere
                await engine.set_slots(min(self._width, can.max_slots))
        runtime = engine.runtime
        if self._kv_layout == "per_slot" and runtime is not None and runtime.kv_layout != "per_slot":
            with suppress(EngineError, UsageError):  # the unified cache works, too
                await engine.set_kv_layout("per_slot")

    # -- write -------------------------------------------------------------------------------------------------------

    async def record(self) -> bool:
        """Write the collected outcomes; returns whether there were any."""
        settled = self.writes
        self.writes = PendingWrites()
        for outcome in await self._store.commit(settled) if settled else ():
            if outcome.state.final:
                self._buffer.drop([outcome.job])
            elif outcome.job not in settled.jobs:
                self._buffer.freed(outcome.job)
            if outcome.state is State.SET_ASIDE:
                self._stats.failed = Failed(JobId.line(outcome.job), settled.deaths[0][1], again=False)
        unchecked = self._unchecked
        self._unchecked = []
        for sent, attempt, answer in unchecked:
            await self._check_reuse(sent, attempt, answer)
        return bool(settled)

    def refused(self, job: int, error: Exception) -> None:
        """Fail a job whose line, stored by an older version, cannot be parsed."""
        self.writes.failures.append((job, Failure("refused", str(error)), None))

    async def _check_reuse(self, sent: Dispatch, attempt: Attempt, answer: Answer) -> None:
        """Compare reused with expected tokens, and explain a miss."""
        evidence = self._stats.evidence(sent, attempt, answer)
        if explain(sent, answer.usage, attempt.prompt_bytes, evidence) is None:
            return
        if evidence.evicted_tokens is not None:  # recent evictions may be the cause
            self._stats.seen(await self._engine.status())
            evidence = self._stats.evidence(sent, attempt, answer)
        like = await self._store.prompt(sent.like) if sent.like is not None else None
        evidence = replace(evidence, prompt=prompt_bytes(attempt.call), like=like)
        miss = explain(sent, answer.usage, attempt.prompt_bytes, evidence)
        if miss is not None:
            self._stats.misses.add(miss)
            self._on_miss(miss)

    # -- release -----------------------------------------------------------------------------------------------------

    async def break_off(self, some: list[Attempt]) -> list[Attempt]:
        """Cancel attempts; those that were answered meanwhile count as answered, the others are returned."""
        await attempts.cancel(some)
        for event in self.there():
            if isinstance(event, StreamEnded) and isinstance(event.how, Answer):
                if self.in_flight.get(event.attempt.id) is event.attempt:
                    self._received(event)
            elif not (isinstance(event, Came | StreamEnded) and event.attempt in some):
                self.inbox.put_nowait(event)
        return [attempt for attempt in some if self.in_flight.pop(attempt.id, None) is not None]

    async def put_back(self, some: list[Attempt]) -> None:
        """Cancel attempts and return their jobs to the queue without counting an attempt."""
        self.writes.released += [attempt.id for attempt in await self.break_off(some)]
        await self.record()

    async def shut_down(self) -> None:
        """Release running jobs and close the store; answers that arrived meanwhile are kept."""
        try:
            if isinstance(self.gone, EngineDied) and self.in_flight:
                await self._engine_died(self.gone)  # the status watch reported it before the streams did
            await self.put_back(list(self.in_flight.values()))
        finally:
            await self._store.close()
