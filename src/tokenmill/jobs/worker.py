"""One loop that works batches through an engine: take what happened, decide, begin, write down.

The scheduler decides which job goes next, the store remembers, the engine computes; here they meet. An answer is on
the disk before it counts. A job that fails is tried again when that can help; one that was at work when the engine
died is tried alone. Stopping, a dead engine or a full disk leave everything as the same work can go on from.
"""

import asyncio
import heapq
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from tokenmill.engine.engine import Answer, Engine, Status
from tokenmill.errors import EngineDied, EngineError, TokenmillError
from tokenmill.jobs import flights, life, retries
from tokenmill.jobs.body import answer_body, encode
from tokenmill.jobs.books import Books, Settlement, text_of
from tokenmill.jobs.decisions import Dispatch, Fetch
from tokenmill.jobs.expected import Left, eta_s
from tokenmill.jobs.flights import Broke, Came, Ended, Flight
from tokenmill.jobs.forest import Pending
from tokenmill.jobs.job import MOST_LINES, NUMBER_BITS, Batch, Failure, Finished, State, Waiting
from tokenmill.jobs.least import MOST_JOBS, least
from tokenmill.jobs.misses import SLOT_SIMILARITY, Evidence, Misses, explain
from tokenmill.jobs.output import Output
from tokenmill.jobs.pace import Pace
from tokenmill.jobs.progress import End, Failed, Report, Snapshot
from tokenmill.jobs.scheduler import Scheduler
from tokenmill.jobs.shape import EngineShape
from tokenmill.jobs.store import MOST_DEATHS, Store
from tokenmill.jobs.suspects import Suspects

GATHER_S = 0.003  # answers that come within this are written down together
TICK_S = 1.0  # between two looks at the store, the clock and the output


@dataclass(frozen=True, slots=True)
class Options:
    """How a batch is worked on."""

    attempts: int = retries.MOST_ATTEMPTS
    job_timeout_s: float | None = None  # of jobs that have none of their own
    most_deaths: int = MOST_DEATHS
    first_delay_s: float = retries.FIRST_DELAY_S
    tick_s: float = TICK_S


async def work(
    store: Store,
    batches: Sequence[Batch],
    engine: Engine,
    shape: EngineShape,
    *,
    outputs: Mapping[int, Output] | None = None,
    options: Options | None = None,
    stop: asyncio.Event | None = None,
    tell: Callable[[Snapshot], None] | None = None,
    clock: Callable[[], float] = time.time,
) -> Report:
    """Work until every job of the batches has its outcome, or until told to stop.

    EngineError when the engine is gone for good, StoreError and what the output raises: all after what was running has
    been put back. `clock` as the store's: Unix seconds.
    """
    return await _Worker(store, batches, engine, shape, outputs or {}, options or Options(), stop, tell, clock).run()


class _Worker:
    def __init__(
        self,
        store: Store,
        batches: Sequence[Batch],
        engine: Engine,
        shape: EngineShape,
        outputs: Mapping[int, Output],
        options: Options,
        stop: asyncio.Event | None,
        tell: Callable[[Snapshot], None] | None,
        clock: Callable[[], float],
    ) -> None:
        self._engine, self._shape, self._options, self._clock = engine, shape, options, clock
        self._stop, self._tell = stop or asyncio.Event(), tell or (lambda _: None)
        self._books = Books(store, batches, outputs, clock=clock, most_deaths=options.most_deaths)
        self._open = {batch.id for batch in batches}
        self._scheduler = Scheduler(shape)
        self._suspects = Suspects()
        self._inbox: asyncio.Queue[Came | Ended | Broke | Status | EngineError | None] = asyncio.Queue()
        self._flights: dict[int, Flight] = {}
        self._records: dict[int, Pending] = {}  # of every job that is at hand and has no outcome
        self._away: set[int] = set()  # of those, the ones the scheduler is not to know of now
        self._later: list[tuple[float, int]] = []  # a heap: jobs that wait out a failure, and until when
        self._after: tuple[int, bytes, int] | None = None  # how far the stream of pending jobs was read
        self._settlement = Settlement()
        self._unchecked: list[tuple[Dispatch, Flight, Answer]] = []
        self._began_s = self._turned_s = asyncio.get_running_loop().time()
        self._looked_s: float | None = None
        self._status: Status | None = None
        self._down: str | None = None  # why the engine cannot be used now
        self._gone: EngineError | None = None  # why it never can
        self._done = False
        self._pace, self._misses, self._computed = Pace(), Misses(), list[int]()
        self._failed: Failed | None = None
        self._in_a_row = self._deaths = self._live_prompt = 0

    async def run(self) -> Report:
        """The loop."""
        tasks = [
            asyncio.create_task(life.watch(self._engine, self._inbox.put_nowait)),
            asyncio.create_task(self._await_stop()),
        ]
        ended = False
        try:
            await self._look()
            while not self._over:
                while await self._begin():
                    pass
                await self._record()
                self._tell(self._snapshot())
                await self._take(await self._events())
                await self._look()
            ended = True
        finally:
            for task in tasks:
                task.cancel()
            await self._let_go(raising=ended)
        if self._gone is not None:
            raise self._gone
        return await self._report()

    @property
    def _over(self) -> bool:
        return self._done or self._stop.is_set() or self._gone is not None or not self._open

    # -- take --------------------------------------------------------------------------------------------------------

    async def _await_stop(self) -> None:
        await self._stop.wait()
        self._inbox.put_nowait(None)

    async def _events(self) -> list[Came | Ended | Broke | Status | EngineError | None]:
        """What has happened; nothing after a tick without anything."""
        patience_s = self._options.tick_s
        if self._later:
            patience_s = min(patience_s, max(0.0, self._later[0][0] - self._clock()))
        try:
            async with asyncio.timeout(patience_s):
                events = [await self._inbox.get()]
        except TimeoutError:
            return []
        if isinstance(events[0], Ended):
            await asyncio.sleep(GATHER_S)
        return events + self._waiting_events()

    def _waiting_events(self) -> list[Came | Ended | Broke | Status | EngineError | None]:
        return [self._inbox.get_nowait() for _ in range(self._inbox.qsize())]

    async def _take(self, events: Sequence[Came | Ended | Broke | Status | EngineError | None]) -> None:
        """Note what happened; answers first, so that a death in the same breath does not cost them."""
        now_s = asyncio.get_running_loop().time()
        self._pace.passed(now_s - self._turned_s, self._busy)
        self._turned_s = now_s
        for event in events:
            if isinstance(event, Came):
                self._came(event)
            elif isinstance(event, Ended) and isinstance(event.how, Answer):
                self._answered(event.flight, event.how)
        for event in events:
            if isinstance(event, Ended) and not isinstance(event.how, Answer):
                await self._ended_with(event.flight, event.how)
            elif isinstance(event, Status):
                self._seen(event)
            elif isinstance(event, EngineError):
                self._gone = self._gone or _resumable(event)
            elif isinstance(event, Broke):
                raise event.error

    def _came(self, event: Came) -> None:
        flight = event.flight
        if self._flights.get(flight.id) is not flight:
            return
        self._pace.heard(event.tokens)
        if flight.sent is not None:
            self._scheduler.first_token(flight.id)
        elif self._suspects.advanced(flight.id, flight.tokens):
            self._in_a_row = 0

    def _answered(self, flight: Flight, answer: Answer) -> None:
        if self._flights.get(flight.id) is not flight:
            return
        self._in_a_row = 0
        usage, identity = answer.usage, flight.job.identity or b""
        self._pace.answered(answer, flight.tokens)
        if flight.sent is not None:
            self._unchecked.append((self._scheduler.finished(flight.id, usage), flight, answer))
        else:
            self._scheduler.lengths.finished(flight.record, usage)
        body = answer_body(flight.call.endpoint, answer, id=identity.hex()[:24], model=self._engine.identity.model,
                           created_s=self._clock())  # fmt: skip
        engine_s = asyncio.get_running_loop().time() - flight.began_s
        self._settlement.answers.append(
            Finished(flight.id, encode(body), usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, engine_s)
        )
        if len(self._computed) <= MOST_JOBS:
            self._computed.append(flight.id)
        self._forget(flight)

    async def _ended_with(self, flight: Flight, error: TokenmillError) -> None:
        if self._flights.get(flight.id) is not flight:
            return
        if isinstance(error, EngineError) and (gone := life.over(self._engine)) is not None:
            self._gone = self._gone or _resumable(gone)
        if isinstance(error, EngineDied) and not await life.answers(self._engine):
            await self._fell(error)
        elif self._gone is None:
            self._refused(flight, error)

    def _refused(self, flight: Flight, error: TokenmillError) -> None:
        """One job has failed: for good, or to be tried again later."""
        said, attempts = retries.verdict(error), flight.job.attempts + 1
        again = said.can_pass and attempts < self._options.attempts
        failure = said.failure if again else retries.after(said.failure, attempts)
        retry_at_s = None
        if again:
            retry_at_s = self._clock() + retries.delay_s(attempts, random.random(), self._options.first_delay_s)  # noqa: S311
            heapq.heappush(self._later, (retry_at_s, flight.id))
            self._away.add(flight.id)
        self._settlement.failures.append((flight.id, failure, retry_at_s))
        self._failed = Failed(flight.job.number, failure, again)
        if flight.sent is not None:
            self._scheduler.failed(flight.id, again=False)
        self._forget(flight)
        if failure.code in ("engine_failed", "engine_died"):
            self._in_a_row += 1
            if self._in_a_row >= retries.most_in_a_row(self._shape.width):
                words = f"the engine failed {self._in_a_row} times without one answer in between: {failure.message}"
                self._gone = _resumable(EngineError(words))

    async def _fell(self, death: EngineDied) -> None:
        """The engine died: whoever was at work is a suspect, and is tried alone when it is back."""
        self._deaths += 1
        self._down = death.message
        for event in self._waiting_events():  # what it could still say
            if isinstance(event, Ended) and isinstance(event.how, Answer):
                self._answered(event.flight, event.how)
            elif not isinstance(event, Ended | Came):
                self._inbox.put_nowait(event)
        lost = list(self._flights.values())
        await flights.let_go(lost)
        trial = [flight.id for flight in lost if flight.id == self._suspects.on_trial]
        blamed = trial or ([] if retries.from_outside(death) else [flight.id for flight in lost])
        failure = retries.verdict(death).failure
        self._settlement.deaths.append((blamed, failure))
        self._settlement.released += [flight.id for flight in lost if flight.id not in blamed]
        self._scheduler.lost()
        self._scheduler.withdrawn(flight.id for flight in lost)
        self._scheduler.back()  # it is not asked before the engine lives, and knows from now on that all is cold
        for flight in lost:
            self._away.add(flight.id)
            self._suspects.accuse(flight.record, flight.tokens)
        self._flights.clear()

    def _seen(self, status: Status) -> None:
        """How the engine is."""
        before = self._status.counters.prompt_tokens_computed if self._status is not None else None
        now = status.counters.prompt_tokens_computed
        if now is not None:
            started_anew = before is None or now < before
            self._live_prompt += (now if self._status is not None else 0) if started_anew else now - (before or 0)
        self._status = status
        if self._down is not None and status.state == "ready":
            self._down = None

    # -- decide and begin --------------------------------------------------------------------------------------------

    async def _begin(self) -> bool:
        """Begin what the scheduler decides, or the trial of a suspect; whether to ask again at once."""
        if self._over or self._down is not None:
            return False
        if self._suspects.waiting:
            suspect = self._suspects.try_next(self._flights.keys())
            return suspect is not None and await self._send({suspect.job: None})
        self._scheduler.interactive(sum(flight.sent is None for flight in self._flights.values()))
        decisions = self._scheduler.decide()
        fetched = [await self._fetch(decision.jobs) for decision in decisions if isinstance(decision, Fetch)]
        sent = {decision.job: decision for decision in decisions if isinstance(decision, Dispatch)}
        again = bool(sent) and await self._send(sent)
        if not (sent or self._flights or self._later or self._suspects.waiting or self._scheduler.pending):
            await self._idle()
        return again or any(fetched)

    async def _fetch(self, limit: int) -> bool:
        rows = await self._books.window(self._after, limit)
        self._after = rows[-1].key if rows else self._after
        self._scheduler.available(self._at_hand(rows), more=len(rows) >= limit)
        return bool(rows)

    def _at_hand(self, rows: Sequence[Waiting]) -> list[Pending]:
        """Records for the scheduler. A job that an engine died with in an earlier run is a suspect still."""
        fresh = []
        for row in rows:
            if row.id in self._away or row.id in self._flights:
                continue
            record = self._scheduler.lengths.pending(row, deadline_s=self._books.deadline_s(row.id))
            self._records[row.id] = record
            if row.deaths:
                self._away.add(row.id)
                self._suspects.accuse(record, None)
            else:
                fresh.append(record)
        return fresh

    async def _idle(self) -> None:
        """Nothing is at hand: all is done, or what the stream has passed is due again."""
        if self._books.counts.pending == 0:
            self._done = self._books.counts.running == 0 and not self._settlement
            return
        retry_s = await self._books.next_retry_s()
        if retry_s is None or retry_s <= self._clock():
            self._after = None
            self._scheduler.again()

    async def _send(self, sent: Mapping[int, Dispatch | None]) -> bool:
        """Send jobs to the engine; whether one of them need not be worked after all, and its lane is free."""
        started = await self._books.start(list(sent))
        evicted = self._status.counters.evicted_tokens if self._status is not None else None
        for job in started.running:
            try:
                call = self._books.call(job.id, job.line)
            except (TokenmillError, ValueError) as error:  # an older version took the line
                self._settlement.failures.append((job.id, Failure("refused", str(error)), None))
                self._drop([job.id])
                continue
            flight = Flight(job, call, self._records[job.id], sent[job.id], asyncio.get_running_loop().time(), evicted)
            self._flights[job.id] = flight
            flights.launch(flight, self._engine, self._options.job_timeout_s, self._inbox.put_nowait)
            if sent[job.id] is not None:
                self._scheduler.started(job.id)
        left = [job for job in sent if job not in self._flights]
        self._away.update(started.held)
        self._drop(left, keep=started.held)
        return bool(left)

    def _drop(self, jobs: Sequence[int], *, keep: Sequence[int] = ()) -> None:
        """Jobs are the scheduler's no longer; those to be kept come back when their equal fails."""
        self._scheduler.withdrawn(jobs)
        self._suspects.dropped(jobs)
        for job in set(jobs).difference(keep):
            self._records.pop(job, None)
            self._away.discard(job)

    def _forget(self, flight: Flight) -> None:
        del self._flights[flight.id]
        self._suspects.ended(flight.id)

    # -- write down --------------------------------------------------------------------------------------------------

    async def _record(self) -> None:
        """Write down what was noted; from then on it counts."""
        settled, self._settlement = self._settlement, Settlement()
        if settled:
            own = {job for job, *_ in settled.failures} | {*settled.released}
            own |= {job for jobs, _ in settled.deaths for job in jobs}
            for outcome in await self._books.settle(settled):
                record = self._records.get(outcome.job)
                if outcome.state is State.PENDING and outcome.job not in own and record is not None:
                    self._away.discard(outcome.job)
                    self._scheduler.available([record])
                elif outcome.state is State.SET_ASIDE:
                    self._failed = Failed(outcome.job & MOST_LINES, settled.deaths[0][1], again=False)
                if outcome.state.final:
                    self._drop([outcome.job])
        unchecked, self._unchecked = self._unchecked, []
        for sent, flight, answer in unchecked:
            await self._check_reuse(sent, flight, answer)

    async def _check_reuse(self, sent: Dispatch, flight: Flight, answer: Answer) -> None:
        """Hold what the engine reused against what it should have; a miss is explained."""
        counters = self._status.counters if self._status is not None else None
        evicted = None
        if counters is not None and counters.evicted_tokens is not None and flight.evicted_tokens is not None:
            evicted = counters.evicted_tokens - flight.evicted_tokens
        chooses = self._engine.identity.kind in ("llama-server", "ik_llama") and sent.lane is None
        evidence = Evidence(
            self._shape.reuse, lane=answer.lane, evicted_tokens=evicted, notes=answer.notes,
            cells_total=counters.cells_total if counters is not None else None,
            similarity=SLOT_SIMILARITY if chooses else None,
        )  # fmt: skip
        size = flight.record.prompt_bytes
        if explain(sent, answer.usage, size, evidence) is None:
            return
        like = await self._books.prompt(sent.like) if sent.like is not None else None
        miss = explain(sent, answer.usage, size, replace(evidence, prompt=text_of(flight.call), like=like))
        if miss is not None:
            self._misses.add(miss)

    async def _look(self) -> None:
        """From time to time: the clock, orders from elsewhere, and the output brought up to date."""
        now_s = asyncio.get_running_loop().time()
        while self._later and self._later[0][0] <= self._clock():
            job = heapq.heappop(self._later)[1]
            self._away.discard(job)
            if job in self._records:
                self._scheduler.available([self._records[job]])
        if self._looked_s is not None and now_s - self._looked_s < self._options.tick_s:
            return
        self._looked_s = now_s
        look = await self._books.look()
        for batch in look.asked:
            await self._cancel(batch)
        if look.due:
            self._scheduler.available(self._at_hand(look.due))
        self._scheduler.clock(self._clock())

    async def _cancel(self, batch: int) -> None:
        """Somebody wants nothing more of a batch."""
        await self._books.cancel(batch)
        self._open.discard(batch)
        mine = [flight for flight in self._flights.values() if flight.id >> NUMBER_BITS == batch]
        await flights.let_go(mine)
        for flight in mine:
            self._forget(flight)
        self._settlement.released += [flight.id for flight in mine]
        self._drop([job for job in self._records if job >> NUMBER_BITS == batch])
        self._later = [(at_s, job) for at_s, job in self._later if job >> NUMBER_BITS != batch]
        heapq.heapify(self._later)

    async def _let_go(self, *, raising: bool) -> None:
        """Put back what is running; answers that have come meanwhile are kept."""
        await flights.let_go(list(self._flights.values()))
        for event in self._waiting_events():
            if isinstance(event, Ended) and isinstance(event.how, Answer):
                self._answered(event.flight, event.how)
        with suppress() if raising else suppress(TokenmillError):  # one error is enough, and the first says more
            try:
                await self._record()
            finally:
                await self._books.close(list(self._flights))
        self._flights.clear()

    # -- tell --------------------------------------------------------------------------------------------------------

    @property
    def _busy(self) -> int:
        return min(len(self._flights), self._shape.width)

    def _snapshot(self) -> Snapshot:
        tokens, rates, counts = self._pace.tokens, self._pace.rates(), self._books.counts
        left = self._scheduler.lengths.left(counts.pending + counts.running)
        if left is not None and rates.prefill_tok_s is None:
            left = Left(0, left.output_tokens)
        output = self._books.output_error
        trouble = self._down
        if trouble is None and self._status is not None:
            trouble = self._status.detail if self._status.state == "ready" else f"is {self._status.state}"
        return Snapshot(
            elapsed_s=asyncio.get_running_loop().time() - self._began_s, counts=counts, tokens=tokens,
            prompt_tokens_live=max(self._live_prompt, tokens.computed), busy=self._busy, width=self._shape.width,
            retrying=len(self._later), eta_s=eta_s(left, rates, self._shape.width) if left is not None else None,
            engine=trouble, failed=self._failed, output=output.message if output is not None else None,
        )  # fmt: skip

    async def _report(self) -> Report:
        end: End = "finished" if self._done else "stopped" if self._stop.is_set() else "cancelled"
        return Report(
            end, asyncio.get_running_loop().time() - self._began_s, self._pace.busy_s, self._books.counts,
            self._pace.answers, self._pace.tokens, self._pace.rates(), self._pace.lanes, self._misses, None,
            self._deaths, self._scheduler.notes,
        )  # fmt: skip


def _resumable(error: EngineError) -> EngineError:
    kept = "what is answered is kept, and the same command goes on from there"
    return EngineError(error.message, hint=f"{kept}\n{error.hint}" if error.hint else kept)
