"""One loop that works batches through an engine: take what happened, decide, begin, write down.

The scheduler decides which job goes next, the store remembers, the engine computes; here they meet. An answer is on
the disk before it counts. A job that fails is tried again when that can help; one that was at work when the engine
died is tried alone. Stopping, a dead engine or a full disk leave everything as the same work can go on from.
"""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.engine.engine import Answer, Engine, Status
from tokenmill.errors import EngineDied, EngineError, TokenmillError
from tokenmill.jobs import flights, life, retries
from tokenmill.jobs.accounts import Accounts, Tell
from tokenmill.jobs.at_hand import AtHand
from tokenmill.jobs.body import answer_body, encode
from tokenmill.jobs.books import Books, Settlement, prompt_bytes
from tokenmill.jobs.decisions import Dispatch, Fetch
from tokenmill.jobs.flights import Broke, Came, Ended, Flight
from tokenmill.jobs.forest import Pending
from tokenmill.jobs.job import MOST_LINES, NUMBER_BITS, Batch, Failure, Finished, Position, State
from tokenmill.jobs.least import counted
from tokenmill.jobs.misses import Miss, explain
from tokenmill.jobs.output import Output
from tokenmill.jobs.progress import End, Failed, Least, Report
from tokenmill.jobs.scheduler import Scheduler
from tokenmill.jobs.shape import EngineShape
from tokenmill.jobs.store import MOST_DEATHS, Store
from tokenmill.jobs.width import Widens

GATHER_S = 0.003  # answers that come within this are written down together
TICK_S = 1.0  # between two looks at the store, the clock and the output
_AGAIN_S = 0.05  # between two readings of what another worker may be about to answer
_JOINING = 512  # jobs of a batch that joins, taken at once; the rest comes with the stream
_KEPT = "what is answered is kept, and the same command goes on from there"

Event = Came | Ended | Broke | Status | EngineError | Batch | None
"""From streams; how the engine is, or why it is gone for good; a batch that joins; None: the work is to stop."""


@dataclass(frozen=True, slots=True)
class Options:
    """How batches are worked on."""

    attempts: int = retries.MOST_ATTEMPTS
    job_timeout_s: float | None = None  # of jobs that have none of their own
    most_deaths: int = MOST_DEATHS
    first_delay_s: float = retries.FIRST_DELAY_S
    tick_s: float = TICK_S
    count_least: bool = False  # at the end, make tokens of the prompts once more to say what they cost at least


async def work(
    store: Store,
    batches: Sequence[Batch],
    engine: Engine,
    shape: EngineShape,
    *,
    outputs: Mapping[int, Output] | None = None,
    options: Options | None = None,
    stop: asyncio.Event | None = None,
    tell: Tell | None = None,
    clock: Callable[[], float] = time.time,
    joining: "asyncio.Queue[Batch] | None" = None,
    missed: Callable[[Miss], None] | None = None,
) -> Report:
    """Work until every job of the batches has its outcome, or until told to stop.

    EngineError when the engine is gone for good, StoreError and what the output raises: all after what was running has
    been put back. `clock` is the store's. Batches that come through `joining` are worked on, too; one that comes too
    late is left as it is: who sends it looks whether it is finished when this returns. `missed` is told of every
    prompt that was computed though it need not have been.
    """
    settings = options or Options()
    books = Books(store, batches, outputs or {}, clock=clock, most_deaths=settings.most_deaths)
    worker = _Worker(books, engine, shape, settings, stop or asyncio.Event(), tell or (lambda _: None), clock)
    worker.missed = missed or worker.missed
    return await worker.run(joining)


class _Worker:
    def __init__(
        self, books: Books, engine: Engine, shape: EngineShape, options: Options, stop: asyncio.Event, tell: Tell,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._books, self._engine, self._options, self._clock = books, engine, options, clock
        self._stop, self._tell, self._width = stop, tell, shape.width
        self._hand = AtHand(Scheduler(shape))
        self._accounts = Accounts(shape, engine.identity.kind)
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._flights: dict[int, Flight] = {}
        self._settlement = Settlement()
        self._unchecked: list[tuple[Dispatch, Flight, Answer]] = []
        self._read: Position | None = None  # how far the stream of pending jobs was
        self._loop_s = asyncio.get_running_loop().time
        self._began_s = self._turned_s = self._loop_s()
        self._looked_s: float | None = None
        self._again_s = float("-inf")  # when the stream was read again for want of anything else
        self._down: str | None = None  # why the engine cannot be used now
        self._gone: EngineError | None = None  # why it never can
        self._done = False
        self.missed: Callable[[Miss], None] = lambda _: None

    async def run(self, joining: "asyncio.Queue[Batch] | None" = None) -> Report:
        """The loop."""
        beside = [self._beside(life.watch(self._engine, self._inbox.put_nowait, look_s=self._options.tick_s)),
                  self._beside(self._await_stop())]  # fmt: skip
        if joining is not None:
            beside.append(self._beside(self._await_joining(joining)))
        try:
            while not self._over:
                await self._look()
                more = await self._begin() | await self._record()
                self._tell_how()
                await self._take(await self._events(wait=not more))
            seconds, least = self._loop_s() - self._began_s, await self._count_least()
        except BaseException:
            with suppress(TokenmillError):  # one error is enough, and the first says more
                await self._let_go()
            raise
        finally:
            for task in beside:
                task.cancel()
        await self._let_go()
        if self._gone is not None:
            raise EngineError(self._gone.message, hint="\n".join(filter(None, (_KEPT, self._gone.hint))))
        end: End = "finished" if self._done else "stopped" if self._stop.is_set() else "cancelled"
        return self._accounts.report(end, seconds, self._books.counts, least, self._hand.scheduler.notes)

    @property
    def _over(self) -> bool:
        return self._done or self._stop.is_set() or self._gone is not None or not self._books.open

    @property
    def _busy(self) -> int:
        return min(len(self._flights), self._width)

    # -- take --------------------------------------------------------------------------------------------------------

    def _beside(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Something that goes on beside the loop; what is wrong with it ends the loop."""

        def over(task: "asyncio.Task[None]") -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._inbox.put_nowait(Broke(error))

        task = asyncio.create_task(work)
        task.add_done_callback(over)
        return task

    async def _await_stop(self) -> None:
        await self._stop.wait()
        self._inbox.put_nowait(None)

    async def _await_joining(self, joining: "asyncio.Queue[Batch]") -> None:
        while True:
            self._inbox.put_nowait(await joining.get())

    async def _join(self, batch: Batch) -> None:
        """Its first jobs at once, past the stream, which may be far from them; for the rest it is read again."""
        rows = await self._books.join(batch, _JOINING)
        self._hand.come(rows, deadline_s=self._books.deadline_s, more=None)
        self._read, self._done = None, False
        self._hand.scheduler.again()

    async def _events(self, *, wait: bool) -> list[Event]:
        """What has happened; nothing after a tick without anything."""
        if not wait or self._over:
            return self._events_there()
        retry_s = self._hand.next_retry_s
        patience_s = max(0.0, min(self._options.tick_s, (retry_s or float("inf")) - self._clock()))
        try:
            async with asyncio.timeout(patience_s):
                first = await self._inbox.get()
        except TimeoutError:
            return []
        if isinstance(first, Ended):
            await asyncio.sleep(GATHER_S)
        return [first, *self._events_there()]

    def _events_there(self) -> list[Event]:
        return [self._inbox.get_nowait() for _ in range(self._inbox.qsize())]

    async def _take(self, events: Sequence[Event]) -> None:
        """Note what happened; answers first, so that a death in the same breath does not cost them."""
        now_s = self._loop_s()
        self._accounts.pace.passed(now_s - self._turned_s, self._busy)
        self._turned_s = now_s
        for event in events:
            if isinstance(event, Came | Ended) and self._flights.get(event.flight.id) is event.flight:
                self._heard(event)
        for event in events:
            if isinstance(event, Ended) and self._flights.get(event.flight.id) is event.flight:
                await self._ended(event.flight, event.how)
            elif isinstance(event, Status):
                self._accounts.seen(event)
                if event.state == "ready" and self._down is not None:
                    await self._back()
            elif isinstance(event, EngineError):
                self._gone = self._gone or event
            elif isinstance(event, Batch):
                await self._join(event)
            elif isinstance(event, Broke):
                raise event.error

    def _heard(self, event: Came | Ended) -> None:
        """Tokens of an answer, or the whole of it."""
        flight = event.flight
        if isinstance(event, Came):
            self._hand.came(flight.id, flight.tokens, trial=flight.trial)
        elif isinstance(event.how, Answer):
            answer, job = event.how, flight.job
            del self._flights[flight.id]
            self._accounts.answered(flight, answer, prompt_bytes(flight.call))
            sent = self._hand.answered(flight.id, answer.usage, trial=flight.trial)
            if sent is not None:
                self._unchecked.append((sent, flight, answer))
            engine = self._engine.identity
            body = answer_body(
                flight.call.endpoint, answer, id=(job.identity or b"").hex()[:24], model=engine.model,
                created_s=self._clock(), made_by=f"{engine.kind} {engine.build}",
            )  # fmt: skip
            usage, engine_s = answer.usage, self._loop_s() - flight.began_s
            spent = (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, engine_s)
            self._settlement.answers.append(Finished(flight.id, encode(body), *spent))

    async def _ended(self, flight: Flight, how: Answer | TokenmillError) -> None:
        """A stream broke off: the job's affair, or the engine's."""
        if isinstance(how, EngineError):
            self._gone = self._gone or life.over(self._engine)
        if isinstance(how, EngineDied) and not await life.goes_on(self._engine, flight.life):
            await self._fell(how)
        elif isinstance(how, TokenmillError) and self._gone is None:
            self._failed(flight, how)

    def _failed(self, flight: Flight, error: TokenmillError) -> None:
        """One job has failed: for good, or to be tried again later."""
        said, attempts, retry_at_s = retries.verdict(error), flight.job.attempts + 1, None
        failure = retries.after(said.failure, attempts)
        if said.can_pass and attempts < self._options.attempts:
            chance = random.random()  # noqa: S311  so that jobs which failed together do not come back together
            failure = said.failure
            retry_at_s = self._clock() + retries.delay_s(attempts, chance, self._options.first_delay_s)
        del self._flights[flight.id]
        self._settlement.failures.append((flight.id, failure, retry_at_s))
        self._hand.failed(flight.id, retry_at_s=retry_at_s, trial=flight.trial)
        accounts = self._accounts
        accounts.failed = Failed(flight.job.number, failure, again=retry_at_s is not None)
        if failure.code in retries.OF_THE_ENGINE:
            accounts.in_a_row += 1
            if accounts.in_a_row >= retries.most_in_a_row(self._width):
                words = f"the engine failed {accounts.in_a_row} times without one answer in between"
                self._gone = EngineError(f"{words}: {failure.message}")

    async def _fell(self, death: EngineDied) -> None:
        """The engine died: whoever was at work is a suspect, and is tried alone when it is back."""
        self._down, self._accounts.deaths = death.message, self._accounts.deaths + 1
        lost = await self._break_off(list(self._flights.values()))
        trial = [flight.id for flight in lost if flight.id == self._hand.on_trial]
        blamed = trial or ([] if death.from_outside else [flight.id for flight in lost])
        if blamed:
            self._settlement.deaths.append((blamed, retries.verdict(death).failure))
        self._settlement.released += [flight.id for flight in lost if flight.id not in blamed]
        self._hand.died([(flight.id, flight.tokens) for flight in lost])
        await self._record()  # before any of them is tried

    async def _back(self) -> None:
        """An engine is there again. It has the lanes that were planned: it gets those that were measured."""
        self._down, now = None, life.of(self._engine)
        if isinstance(now, Widens) and now.identity.lanes != self._width:
            with suppress(EngineError):  # it died again, which others tell
                await now.set_lanes(min(self._width, now.most_lanes))

    # -- decide and begin --------------------------------------------------------------------------------------------

    async def _begin(self) -> bool:
        """Begin what is decided; whether to ask again at once."""
        if self._over or self._down is not None:
            return False
        decisions = self._hand.decide(self._flights.keys(), sum(flight.trial for flight in self._flights.values()))
        more = [await self._fetch(decision.jobs) for decision in decisions if isinstance(decision, Fetch)]
        sent = {decision.job: decision for decision in decisions if isinstance(decision, Dispatch | Pending)}
        if sent:
            more.append(await self._send(sent))
        elif self._hand.empty and not self._flights and not self._settlement:
            await self._idle()
        return any(more)

    async def _fetch(self, limit: int) -> bool:
        rows = await self._books.window(self._read, limit)
        self._read = rows[-1].key if rows else self._read
        self._hand.come(rows, deadline_s=self._books.deadline_s, more=len(rows) >= limit)
        return bool(rows)

    async def _idle(self) -> None:
        """Nothing is at hand: all is done, or there is more behind what was read."""
        retry_s = await self._books.next_retry_s() if self._books.counts.pending else None
        if not self._books.counts.pending:
            self._done = True
        elif (retry_s is None or retry_s <= self._clock()) and self._loop_s() - self._again_s >= _AGAIN_S:
            self._read, self._again_s = None, self._loop_s()
            self._hand.unheld()
            self._hand.scheduler.again()

    async def _send(self, sent: Mapping[int, Dispatch | Pending]) -> bool:
        """Send jobs to the engine; whether one of them need not be worked after all, and its lane is free."""
        started = await self._books.start(list(sent))
        for job in started.running:
            decision = sent[job.id]
            try:
                call = self._books.call(job.id, job.line)
            except (TokenmillError, ValueError) as error:  # an older version took the line
                self._settlement.failures.append((job.id, Failure("refused", str(error)), None))
                continue
            flight = Flight(job, call, self._hand[job.id].prompt_bytes, self._loop_s(),
                            decision if isinstance(decision, Dispatch) else None, life.of(self._engine),
                            self._accounts.counters.evicted_tokens, self._accounts.pace.mark)  # fmt: skip
            self._flights[job.id] = flight
            flights.launch(flight, self._engine, timeout_s=self._options.job_timeout_s, tell=self._inbox.put_nowait,
                           heard=self._accounts.pace.heard)  # fmt: skip
            if not flight.trial:
                self._hand.scheduler.started(job.id)
        self._hand.held(started.held)
        unsent = [job for job in sent if job not in self._flights]
        self._hand.drop([job for job in unsent if job not in started.held])
        return bool(unsent)

    # -- write down --------------------------------------------------------------------------------------------------

    async def _record(self) -> bool:
        """Write down what was noted; from then on it counts. Whether there was anything."""
        settled, self._settlement = self._settlement, Settlement()
        for outcome in await self._books.settle(settled) if settled else ():
            if outcome.state.final:
                self._hand.drop([outcome.job])
            elif outcome.job not in settled.jobs:
                self._hand.freed(outcome.job)
            if outcome.state is State.SET_ASIDE:
                self._accounts.failed = Failed(outcome.job & MOST_LINES, settled.deaths[0][1], again=False)
        unchecked, self._unchecked = self._unchecked, []
        for sent, flight, answer in unchecked:
            await self._check_reuse(sent, flight, answer)
        return bool(settled)

    async def _check_reuse(self, sent: Dispatch, flight: Flight, answer: Answer) -> None:
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
            self.missed(miss)

    async def _look(self) -> None:
        """The clock always; from time to time orders from elsewhere, and the output brought up to date."""
        self._hand.due(self._clock())
        if self._looked_s is not None and self._loop_s() - self._looked_s < self._options.tick_s:
            return
        self._looked_s = self._loop_s()
        self._hand.scheduler.measured(self._accounts.pace.by_lanes())
        look = await self._books.look()
        self._hand.come(look.due, deadline_s=self._books.deadline_s, more=None)
        for batch in look.asked:
            mine = [flight for flight in self._flights.values() if flight.id >> NUMBER_BITS == batch]
            self._settlement.released += [flight.id for flight in await self._break_off(mine)]
            await self._record()  # what has come is done, and not cancelled
            await self._books.cancel(batch)
            self._hand.drop(self._hand.of_batch(batch))

    async def _break_off(self, some: list[Flight]) -> list[Flight]:
        """End streams; those whose answers have come meanwhile are answered, the others are returned."""
        await flights.let_go(some)
        for event in self._events_there():
            if isinstance(event, Ended) and isinstance(event.how, Answer):
                if self._flights.get(event.flight.id) is event.flight:
                    self._heard(event)
            elif not (isinstance(event, Came | Ended) and event.flight in some):
                self._inbox.put_nowait(event)
        return [flight for flight in some if self._flights.pop(flight.id, None) is not None]

    async def _let_go(self) -> None:
        """Put back what is running; answers that have come meanwhile are kept."""
        try:
            self._settlement.released += [flight.id for flight in await self._break_off(list(self._flights.values()))]
            await self._record()
        finally:
            await self._books.close()

    # -- tell --------------------------------------------------------------------------------------------------------

    def _tell_how(self) -> None:
        output = self._books.output_error
        self._tell(self._accounts.snapshot(
            self._loop_s() - self._began_s, self._books.counts, retrying=self._hand.retrying,
            under_way=[flight.tokens for flight in self._flights.values()],
            lengths=self._hand.scheduler.lengths, down=self._down, output=output.message if output else None,
        ))  # fmt: skip

    async def _count_least(self) -> Least | None:
        """What the prompts had to cost; None where somebody waits for the end, and counting them would take a while."""
        if self._stop.is_set() or self._gone is not None:
            return None
        jobs = self._accounts.countable if self._options.count_least else []
        exact = await counted(self._engine, await self._books.calls(jobs)) if jobs else None
        return self._accounts.least(exact)
