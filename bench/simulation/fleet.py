"""Simulates many workers on one batch, each with an engine and a scheduler of its own, on one clock. Workers fail.

A worker behaves like `jobs.worker.loop`: it asks its scheduler what to send, fetches more jobs when it runs low, starts
jobs, commits answers, and waits for the end of each store call before the next, while its engine continues. The jobs of
a failed worker become available when its lease expires, and another worker starts in its place.

The schedulers are the real ones. Seconds are simulated; nothing here waits or reads a clock.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Literal

from bench.simulation.anywhere import Anywhere
from bench.simulation.engine import Engine, Work
from bench.simulation.recorded import LANES, Recorded
from bench.simulation.sharing import Range, Sharer, Sharing
from bench.simulation.store import Queue, StoreCosts
from bench.simulation.table import Table

from tokenmill.engine.engine import Usage
from tokenmill.jobs.scheduler.decisions import Dispatch, Fetch
from tokenmill.jobs.scheduler.scheduler import Scheduler
from tokenmill.jobs.scheduler.shape import EngineShape
from tokenmill.jobs.sharding.worker_lease import LEASE_S, RENEW_S
from tokenmill.jobs.worker.loop import TICK_S
from tokenmill.jobs.worker.queue_reader import MIN_BUFFERED

_FREE_TICK_S = 60.0  # between two fetches from a store without costs, which would otherwise follow immediately
_WINDOW = 256  # works in flight, if a work has several jobs
What = Literal["step", "fails", "over", "back", "turn", "written", "look"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a simulated batch. All of them are predicted."""

    engines: int
    jobs: int
    answered: int  # jobs, each counted once
    wall_s: float
    computed_tokens: float  # prompt tokens
    written_tokens: float
    busy_s: float  # all engines
    failed: int  # failures of workers
    redone: int  # works in flight at failures
    stretches: int  # shards that were assigned
    taken: int  # shards taken from other workers
    turns: int  # turns of workers at the store
    turns_s: float  # total time of the turns
    writing_s: float  # store time for started jobs and committed answers

    @property
    def engine_hours(self) -> float:
        """Engine time if all engines are kept until the last answer."""
        return self.engines * self.wall_s / 3600


@dataclass(slots=True)
class _Seat:
    """A place for a worker."""

    number: int
    engine: Engine
    chance: random.Random  # random numbers for failures
    scheduler: Scheduler
    runner: Sharer
    unread: list[Work] = field(default_factory=list)  # assigned, not yet given to the scheduler
    hand: dict[int, Work] = field(default_factory=dict)  # with the scheduler, not sent
    at_hand: int = 0  # number of jobs of these
    sent: dict[int, Work] = field(default_factory=dict)  # works without a committed answer
    starting: list[Work] = field(default_factory=list)  # works not yet sent to the engine
    done: list[Work] = field(default_factory=list)  # answers to commit
    committing: list[Work] = field(default_factory=list)
    up: bool = False
    calling: bool = False  # a store call is running
    more: bool = True  # whether there may be more works to fetch
    fed: bool = True  # whether the last fetch returned something
    again_s: float = float("-inf")  # time of the last fetch that returned nothing
    asks_again: bool = True  # whether it fetches with no work left
    limit: int = 0  # works requested from the store
    look_s: float = float("-inf")  # time of the next check
    life: int = 0  # events announced for an earlier one are ignored
    step: int = 0  # number of the engine's announcements; earlier ones are ignored


class Fleet:
    """All runners."""

    def __init__(
        self,
        recorded: Recorded,
        table: Table,
        engines: int,
        costs: StoreCosts | None,
        *,
        seed: str | None,
        shares: Sequence[Range] | None = None,
        least_works: int | None = None,
        hours_between_failures: float | None = None,
        cells: int | None = None,
    ) -> None:
        """With `shares`, jobs run anywhere. Without `least_works`, a job is a work; without `costs`, calls are free."""
        self._recorded = recorded
        self._table = table
        self._costs = costs
        self._each = least_works is None
        self._tick_s = TICK_S if costs is not None else _FREE_TICK_S
        self._mean_s = hours_between_failures * 3600 if hours_between_failures is not None else None
        self._events: list[tuple[float, int, What, int, int]] = []
        self._order = count()
        self._turn = Queue(1)
        self._writers = Queue(costs.writers if costs is not None else 1)
        self._turns = self._failures = self._redone = self._answered = 0
        self._lost: dict[int, list[Range]] = {}  # jobs of failed workers whose lease has not expired, by seat
        most = max(1, table.jobs // least_works) if least_works is not None else 1
        self._way: Sharing | Anywhere = (
            Sharing(table, most, self._moved)
            if shares is None
            else Anywhere(table, shares, most, LANES, recorded.rates, self._moved)
        )
        self._shape = EngineShape("shares", LANES, None, LANES, cells, recorded.rates)
        self._seats = [
            _Seat(
                number,
                Engine(recorded.rates, LANES, cells),
                random.Random(f"fails {seed} {number}"),
                self._scheduler(),
                Sharer(number, LANES),
            )
            for number in range(engines)
        ]

    def run(self) -> Outcome:
        """Run until the last answer is committed; mutates."""
        for seat in self._seats:
            self._announce(self._recorded.load_s, "back", seat)
        now_s = 0.0
        while self._answered < self._table.jobs:
            now_s, _, what, number, mark = heappop(self._events)
            seat = self._seats[number]
            if mark == (seat.step if what == "step" else seat.life):
                self._happens(what, seat, now_s)
        engines = [seat.engine for seat in self._seats]
        return Outcome(
            len(engines),
            self._table.jobs,
            self._answered,
            now_s,
            sum(engine.computed_tokens for engine in engines),
            sum(engine.written_tokens for engine in engines),
            sum(engine.busy_s for engine in engines),
            self._failures,
            self._redone,
            self._way.stretches,
            self._way.taken,
            self._turns,
            self._turn.busy_s,
            self._writers.busy_s,
        )

    def _happens(self, what: What, seat: _Seat, now_s: float) -> None:
        match what:
            case "step":
                if not self._step(seat) and (seat.more or seat.calling or self._pending(seat) > MIN_BUFFERED * LANES):
                    self._announce_step(seat)
                    return
            case "fails":
                self._fails(seat, now_s)
                return
            case "over":
                self._way.leave(seat.runner, self._lost.pop(seat.number))
                seat.runner = Sharer(seat.number, LANES)
                self._announce(now_s + self._recorded.load_s, "back", seat)
                for other in self._seats:  # an idle worker may take it
                    if not other.sent:
                        self._go_on(other, now_s)
                return
            case "back":
                self._back(seat, now_s)
            case "turn":
                self._fetched(seat, now_s)
            case "written":
                self._written(seat, now_s)
            case "look":
                pass
        # Send what a turn returned, and commit the answers that have arrived meanwhile.
        self._go_on(seat, now_s, reach=what != "turn")

    def _announce(self, at_s: float, what: What, seat: _Seat) -> None:
        mark = seat.step if what == "step" else seat.life
        heappush(self._events, (at_s, next(self._order), what, seat.number, mark))

    def _scheduler(self) -> Scheduler:
        return Scheduler(self._shape, window=None if self._each else _WINDOW)

    # -- runners -----------------------------------------------------------------------------------------------------

    def _back(self, seat: _Seat, now_s: float) -> None:
        """Start a new worker with a loaded engine and an empty cache."""
        seat.up = True
        seat.scheduler = self._scheduler()
        seat.more = True
        seat.fed = True
        seat.asks_again = True
        seat.again_s = seat.look_s = float("-inf")
        seat.engine.now_s = now_s
        self._way.join(seat.runner)
        if self._mean_s is not None:
            self._announce(now_s + seat.chance.expovariate(1 / self._mean_s), "fails", seat)

    def _fails(self, seat: _Seat, now_s: float) -> None:
        """Finished jobs stay finished; the others become pending when the lease expires."""
        self._failures += 1
        self._redone += seat.engine.running
        ended = {work.number: done for work, done in seat.engine.die(now_s)}
        lost = list[Range]()
        for work in seat.sent.values():
            done = ended.get(work.number, 0)
            self._answered += done
            lost.append((work.first + done, work.end))
        self._lost[seat.number] = lost
        for state in (seat.sent, seat.hand, seat.unread, seat.starting, seat.done, seat.committing):
            state.clear()
        seat.up, seat.calling, seat.at_hand, seat.life, seat.step = False, False, 0, seat.life + 1, seat.step + 1
        if isinstance(self._way, Anywhere):
            self._way.fail(seat.runner)
        # the lease was renewed recently
        self._announce(now_s + LEASE_S - seat.chance.uniform(0.0, RENEW_S), "over", seat)

    def _moved(self, runner: Sharer, gone: Sequence[Work], instead: Sequence[Work]) -> None:
        """Handle that another worker has taken some of a worker's jobs."""
        seat = self._seats[runner.seat]
        if not seat.up:
            return
        numbers = {work.number for work in gone}
        seat.unread = [work for work in seat.unread if work.number not in numbers]
        read = [number for number in numbers if number in seat.hand]
        seat.at_hand -= sum(seat.hand.pop(number).jobs for number in read)
        seat.scheduler.withdraw(read)
        if instead:
            self._available(seat, instead, more=None)

    # -- a runner's loop -----------------------------------------------------------------------------------------------

    def _go_on(self, seat: _Seat, now_s: float, *, reach: bool = True) -> None:
        """Let the scheduler decide up to the next call, and announce what comes next."""
        if reach:
            self._reach_on(seat, now_s)
        while seat.up and not seat.calling:
            decisions = seat.scheduler.decide()
            for decision in decisions:
                if isinstance(decision, Dispatch):
                    self._send(seat, decision.job)
            fetch = next((decision for decision in decisions if isinstance(decision, Fetch)), None)
            if fetch is None:
                self._write(seat, now_s)
                break
            self._fetch(seat, fetch.jobs, now_s)
        self._announce_look(seat, now_s)
        self._announce_step(seat)

    def _reach_on(self, seat: _Seat, now_s: float) -> None:
        """Fetch more while jobs are left; repeat from time to time if there were none."""
        if not seat.up or seat.calling or seat.more or self._pending(seat) > MIN_BUFFERED * LANES:
            return
        if isinstance(self._way, Anywhere):
            asks = not seat.at_hand and not seat.sent
        else:
            asks = seat.fed or (now_s >= seat.again_s + self._tick_s and bool(seat.sent or self._way.pending))
        if asks:
            seat.again_s, seat.asks_again = now_s, self._pending(seat) < 1
            seat.more = True
            seat.fed = False
            seat.scheduler.reopen_stream()

    def _pending(self, seat: _Seat) -> float:
        """Number of fetched jobs that would not be with the engine if each were sent alone."""
        return seat.at_hand + max(0.0, seat.engine.left - self._shape.width - self._shape.look_ahead)

    def _announce_look(self, seat: _Seat, now_s: float) -> None:
        """Let workers with few jobs fetch more if they could get none before."""
        little = seat.up and not seat.calling and not seat.more and self._pending(seat) <= MIN_BUFFERED * LANES
        if little and seat.look_s <= now_s and isinstance(self._way, Sharing) and (seat.sent or self._way.pending):
            seat.look_s = now_s if seat.fed else max(now_s, seat.again_s + self._tick_s)
            self._announce(seat.look_s, "look", seat)

    def _announce_step(self, seat: _Seat) -> None:
        next_s = seat.engine.next_s()
        if next_s is not None:
            seat.step += 1
            self._announce(next_s, "step", seat)

    def _step(self, seat: _Seat) -> bool:
        """Handle an engine's report; returns False if its worker does not see it."""
        event = seat.engine.step()
        if event is None:
            return False
        work = event.work
        if event.kind == "first token":
            seat.scheduler.first_token(work.number)
        else:
            usage = Usage(self._table.tokens(work), int(work.output_tokens), None) if self._each else None
            seat.scheduler.finished(work.number, usage)
            seat.done.append(work)
        return True

    def _send(self, seat: _Seat, number: int) -> None:
        work = seat.sent[number] = seat.hand.pop(number)
        seat.at_hand -= work.jobs
        self._way.sent(work)
        seat.starting.append(work)

    def _available(self, seat: _Seat, works: Sequence[Work], *, more: bool | None) -> None:
        seat.hand.update((work.number, work) for work in works)
        seat.at_hand += sum(work.jobs for work in works)
        seat.scheduler.available([self._table.record(work, lengths=not self._each) for work in works], more=more)

    # -- calls -------------------------------------------------------------------------------------------------------

    def _fetch(self, seat: _Seat, limit: int, now_s: float) -> None:
        """Fetch from the worker's own jobs; if these are too few, wait for a turn."""
        seat.limit = limit
        if sum(work.jobs for work in seat.unread[:LANES]) >= LANES:
            self._read(seat)
        elif self._costs is None or isinstance(self._way, Anywhere):
            self._fetched(seat, now_s)
        else:
            self._turns += 1
            seat.calling = True
            others = len(self._way.runners) - 1
            self._announce(self._turn.end_s(now_s, self._costs.turn_s(others)), "turn", seat)

    def _fetched(self, seat: _Seat, now_s: float) -> None:
        """A worker's turn at the store."""
        seat.calling = False
        own = sum(work.jobs for work in seat.unread)
        seat.unread += self._way.window(seat.runner, now_s, own, again=seat.asks_again)
        self._read(seat)

    def _read(self, seat: _Seat) -> None:
        page = seat.unread[: seat.limit]
        seat.unread = seat.unread[seat.limit :]
        seat.more = len(page) >= seat.limit
        seat.fed = bool(page)
        seat.asks_again = seat.asks_again and not page
        self._available(seat, page, more=seat.more)

    def _write(self, seat: _Seat, now_s: float) -> None:
        """Write started jobs and finished answers."""
        if not seat.starting and not seat.done:
            return
        seat.committing = seat.done
        seat.done = []
        if self._costs is None:
            self._written(seat, now_s)
            return
        started, ended = (sum(work.jobs for work in works) for works in (seat.starting, seat.committing))
        seat.calling = True
        takes_s = started * self._costs.start_s + ended * self._costs.commit_s
        self._announce(self._writers.end_s(now_s, takes_s), "written", seat)

    def _written(self, seat: _Seat, now_s: float) -> None:
        seat.calling = False
        for work in seat.starting:
            seat.scheduler.started(work.number)
        seat.engine.send(seat.starting, now_s)
        seat.starting = []
        for work in seat.committing:
            del seat.sent[work.number]
            self._answered += work.jobs
        seat.committing = []
