"""What becomes of the jobs that are in an engine: answered, failed, lost with it, put back; noted, then written down.

An answer is on the disk before it counts. A job that fails is tried again when that can help; one that was at work
when the engine died is tried alone. Which job goes next is not decided here, and none is sent.
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
"""From streams; how the engine is, or why it is gone for good; a batch that joins; None: the work is to stop."""


class CompletionHandler:
    """Of one worker's jobs. What is read mutates nothing, all else does."""

    def __init__(
        self,
        books: AsyncStore,
        hand: JobBuffer,
        accounts: RunStats,
        engine: Engine,
        width: int,
        *,
        attempts: int,
        first_delay_s: float,
        clock: Callable[[], float],
        missed: Callable[[Miss], None],
    ) -> None:
        self._books = books
        self._hand = hand
        self._accounts = accounts
        self._engine = engine
        self._width = width
        self._kv_layout = engine.runtime.kv_layout if engine.runtime is not None else None
        self._attempts = attempts
        self._first_delay_s = first_delay_s
        self._clock = clock
        self.inbox: asyncio.Queue[WorkerEvent] = asyncio.Queue()
        self.flights: dict[int, Attempt] = {}
        self.settlement = PendingWrites()
        self._unchecked: list[tuple[Dispatch, Attempt, Answer]] = []
        self._loop_s = asyncio.get_running_loop().time
        self.down: str | None = None  # why the engine cannot be used now
        self.gone: EngineError | None = None  # why it never can
        self._missed = missed

    def there(self) -> list[WorkerEvent]:
        """What has happened and was not taken yet."""
        return [self.inbox.get_nowait() for _ in range(self.inbox.qsize())]

    # -- take --------------------------------------------------------------------------------------------------------

    async def take(self, events: Sequence[WorkerEvent]) -> None:
        """Note what happened; answers first, so that a death in the same breath does not cost them."""
        for event in events:
            if isinstance(event, Came | StreamEnded) and self.flights.get(event.flight.id) is event.flight:
                if isinstance(event, StreamEnded) and await self._cut(event.flight, event.how):
                    self._left(event.flight)
                else:
                    self._heard(event)
        for event in events:
            if isinstance(event, StreamEnded) and self.flights.get(event.flight.id) is event.flight:
                await self._ended(event.flight, event.how)
            elif isinstance(event, EngineStatus):
                self._accounts.seen(event)
                if event.state == "ready" and self.down is not None:
                    await self._back()
            elif isinstance(event, EngineError):
                self.gone = self.gone or event
            elif isinstance(event, Broke):
                raise event.error

    def _heard(self, event: Came | StreamEnded) -> None:
        """Tokens of an answer, or the whole of it."""
        flight = event.flight
        if isinstance(event, Came):
            self._hand.came(flight.id, flight.tokens, trial=flight.trial)
        elif isinstance(event.how, Answer):
            answer = event.how
            job = flight.job
            del self.flights[flight.id]
            self._accounts.answered(flight, answer, prompt_bytes(flight.call))
            sent = self._hand.answered(flight.id, answer.usage, trial=flight.trial)
            if sent is not None:
                self._unchecked.append((sent, flight, answer))
            engine = self._engine.identity
            body = answer_body(
                flight.call.endpoint,
                answer,
                id=(job.identity or b"").hex()[:24],
                model=engine.model,
                created_s=self._clock(),
                made_by=f"{engine.kind} {engine.build}",
            )
            usage = answer.usage
            engine_s = self._loop_s() - flight.began_s
            spent = (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, engine_s)
            self.settlement.answers.append(FinishedJob(flight.id, encode(body), *spent))

    async def _cut(self, flight: Attempt, answer: Answer | TokenmillError) -> bool:
        """Whether an answer was cut short here and another worker may go on to its end."""
        if not self._books.shared or not isinstance(answer, Answer):
            return False
        cut = retries.cut_short(answer, flight.call.request().max_tokens, self._engine.identity.context)
        return cut is not None and await self._books.too_long(flight.id, cut) is None

    async def _ended(self, flight: Attempt, how: Answer | TokenmillError) -> None:
        """A stream broke off: the job's affair, or the engine's."""
        if isinstance(how, EngineError):
            self.gone = self.gone or liveness.over(self._engine)
        if isinstance(how, NonFiniteLogits):  # every answer is suspect: the run ends, and its jobs return to the queue
            self.gone = self.gone or how
        if isinstance(how, EngineDied) and not await liveness.survived(self._engine, flight.generation):
            await self._fell(how)
        elif isinstance(how, TokenmillError) and self.gone is None:
            error = await self._books.too_long(flight.id, how) if isinstance(how, TooLong) else how
            if error is not None:
                self._failed(flight, error)
            else:
                self._left(flight)

    def _failed(self, flight: Attempt, error: TokenmillError) -> None:
        """One job has failed: for good, or to be tried again later."""
        said = retries.verdict(error)
        attempts = flight.job.attempts + 1
        retry_at_s = None
        failure = retries.after(said.failure, attempts)
        if said.can_pass and attempts < self._attempts:
            chance = random.random()  # noqa: S311  so that jobs which failed together do not come back together
            failure = said.failure
            retry_at_s = self._clock() + retries.delay_s(attempts, chance, self._first_delay_s)
        del self.flights[flight.id]
        self.settlement.failures.append((flight.id, failure, retry_at_s))
        self._hand.failed(flight.id, retry_at_s=retry_at_s, trial=flight.trial)
        accounts = self._accounts
        accounts.failed = Failed(flight.job.number, failure, again=retry_at_s is not None)
        if failure.code in retries.OF_THE_ENGINE:
            accounts.in_a_row += 1
            if accounts.in_a_row >= retries.most_in_a_row(self._width):
                words = f"the engine failed {accounts.in_a_row} times without one answer in between"
                self.gone = EngineError(f"{words}: {failure.message}")

    def _left(self, flight: Attempt) -> None:
        """One job is too long here, or its answer is, and another worker may do it."""
        del self.flights[flight.id]
        self.settlement.released.append(flight.id)
        self._hand.failed(flight.id, retry_at_s=None, trial=flight.trial)
        self._hand.drop([flight.id])

    async def give_up(self) -> None:
        """Fail what was left to workers with a larger context, of which none lives any more."""
        for job, error in await self._books.hopeless():
            failure = retries.verdict(error).failure
            self.settlement.failures.append((job, failure, None))
            self._accounts.failed = Failed(JobId.line(job), failure, again=False)

    async def _fell(self, death: EngineDied) -> None:
        """The engine died: retry the jobs in flight one at a time, or together if another process killed the engine."""
        self.down, self._accounts.deaths = death.message, self._accounts.deaths + 1
        lost = await self.break_off(list(self.flights.values()))
        blamed = self._blamed(death, [flight.id for flight in lost])
        if blamed:
            self.settlement.deaths.append((blamed, retries.verdict(death).failure))
        self.settlement.released += [flight.id for flight in lost if flight.id not in blamed]
        in_flight = [(flight.id, flight.tokens) for flight in lost]
        self._hand.died(in_flight, accused=not death.from_outside)
        await self.record()  # before any of them is sent again

    def _blamed(self, death: EngineDied, lost: list[int]) -> list[int]:
        """The jobs that the store counts a death against, of those that were in flight."""
        on_trial = [job for job in lost if job == self._hand.on_trial]
        if death.from_outside is False:
            return on_trial or lost
        if death.from_outside or self.gone is not None:
            return []
        return on_trial  # the cause is unknown: nothing but this job ran each time

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
            with suppress(EngineError, UsageError):  # it works with the unified cache, too
                await engine.set_kv_layout("per_slot")

    # -- write down --------------------------------------------------------------------------------------------------

    async def record(self) -> bool:
        """Write down what was noted; from then on it counts. Whether there was anything."""
        settled = self.settlement
        self.settlement = PendingWrites()
        for outcome in await self._books.settle(settled) if settled else ():
            if outcome.state.final:
                self._hand.drop([outcome.job])
            elif outcome.job not in settled.jobs:
                self._hand.freed(outcome.job)
            if outcome.state is State.SET_ASIDE:
                self._accounts.failed = Failed(JobId.line(outcome.job), settled.deaths[0][1], again=False)
        unchecked = self._unchecked
        self._unchecked = []
        for sent, flight, answer in unchecked:
            await self._check_reuse(sent, flight, answer)
        return bool(settled)

    def refused(self, job: int, error: Exception) -> None:
        """A job cannot be sent at all: an older version took the line."""
        self.settlement.failures.append((job, Failure("refused", str(error)), None))

    async def _check_reuse(self, sent: Dispatch, flight: Attempt, answer: Answer) -> None:
        """Hold what the engine reused against what it should have; a miss is explained."""
        evidence = self._accounts.evidence(sent, flight, answer)
        if explain(sent, answer.usage, flight.prompt_bytes, evidence) is None:
            return
        if evidence.evicted_tokens is not None:  # what was dropped since it was asked last may be the cause
            self._accounts.seen(await self._engine.status())
            evidence = self._accounts.evidence(sent, flight, answer)
        like = await self._books.prompt(sent.like) if sent.like is not None else None
        evidence = replace(evidence, prompt=prompt_bytes(flight.call), like=like)
        miss = explain(sent, answer.usage, flight.prompt_bytes, evidence)
        if miss is not None:
            self._accounts.misses.add(miss)
            self._missed(miss)

    # -- put back ----------------------------------------------------------------------------------------------------

    async def break_off(self, some: list[Attempt]) -> list[Attempt]:
        """End streams; those whose answers have come meanwhile are answered, the others are returned."""
        await attempts.let_go(some)
        for event in self.there():
            if isinstance(event, StreamEnded) and isinstance(event.how, Answer):
                if self.flights.get(event.flight.id) is event.flight:
                    self._heard(event)
            elif not (isinstance(event, Came | StreamEnded) and event.flight in some):
                self.inbox.put_nowait(event)
        return [flight for flight in some if self.flights.pop(flight.id, None) is not None]

    async def put_back(self, some: list[Attempt]) -> None:
        """Break attempts off that are nobody's fault; what has come of them is kept."""
        self.settlement.released += [flight.id for flight in await self.break_off(some)]
        await self.record()

    async def let_go(self) -> None:
        """Put back what is running, and close the books; answers that have come meanwhile are kept."""
        try:
            if isinstance(self.gone, EngineDied) and self.flights:
                await self._fell(self.gone)  # it was told before the streams said so
            await self.put_back(list(self.flights.values()))
        finally:
            await self._books.close()
