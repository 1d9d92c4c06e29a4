"""Many engines at one batch: each with a scheduler of its own, all on one clock. Engines fail and come back.

    an engine fails          what it had in hand is lost; when its lease has run out, those without work may take what
                             was its share, and another engine is started in its place
    an engine has no work    it takes half of what waits at the engine that has most, if that is worth the heads

The schedulers are the real ones. Seconds are simulated; nothing here waits or reads a clock.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, islice
from typing import Literal

from bench.simulation.engine import Engine, Work
from bench.simulation.loads import SIZE, Kind, Piece, Texts, works
from bench.simulation.recorded import ASSUMED_LEASE_S, LANES, Recorded

from tokenmill.engine.engine import Usage
from tokenmill.jobs.decisions import Dispatch, Fetch, Wait
from tokenmill.jobs.forest import Pending
from tokenmill.jobs.scheduler import Scheduler
from tokenmill.jobs.shape import EngineShape

_WINDOW = 256  # works at hand where they are of several jobs
What = Literal["step", "fails", "back", "wake"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulated batch took. All of it is predicted."""

    engines: int
    jobs: int
    answered: int  # jobs; each once
    wall_s: float
    computed_tokens: float  # of prompts
    written_tokens: float
    busy_s: float  # of all engines
    failed: int  # times that an engine did
    redone: int  # works that were in hand when an engine failed
    taken: int  # times that an engine without work took some

    @property
    def engine_hours(self) -> float:
        """All engines are kept until the last answer."""
        return self.engines * self.wall_s / 3600


@dataclass(slots=True)
class _Seat:
    """A place for an engine, and its share of the batch."""

    number: int
    engine: Engine
    scheduler: Scheduler
    chance: random.Random  # of failures
    stream: list[Pending]  # not given to the scheduler yet, the next last
    waiting: dict[int, Work]  # not sent, in head order
    waiting_s: float
    next_number: int
    sent: dict[int, Work] = field(default_factory=dict)
    up: bool = False
    open_s: float = 0.0  # others may take its share from then on
    turn: int = 0  # steps that were announced before are void


class Fleet:
    """All engines."""

    def __init__(
        self, recorded: Recorded, kinds: Sequence[Kind], pieces: Sequence[Sequence[Piece]], *,
        seed: str | None, least_works: int | None = None, hours_between_failures: float | None = None,
        cells: int | None = None,
    ) -> None:  # fmt: skip
        """Without a seed answers have one length; without a number of works, each job is one."""
        self._recorded, self._texts = recorded, Texts()
        self._each = least_works is None
        self._mean_s = hours_between_failures * 3600 if hours_between_failures is not None else None
        self._events: list[tuple[float, int, What, int, int]] = []
        self._order = count()
        self._idle: set[int] = set()
        self._failures = self._redone = self._taken = self._answered = 0
        self._decode_tok_s = recorded.rates.decode_at(LANES) or 0.0
        self._prefill_tok_s = recorded.rates.prefill_tok_s or 0.0
        shape = EngineShape("shares", LANES, None, LANES, cells, recorded.rates)
        seconds = [sum(self._kind_s(kinds[group], jobs) for group, jobs in own) for own in pieces]
        self._seats = list[_Seat]()
        for number, own in enumerate(pieces):
            jobs = sum(jobs for _, jobs in own)
            most = max(1, int(sum(seconds) / least_works / seconds[number] * jobs)) if least_works and jobs else 1
            draw = random.Random(f"answers {seed} {number}") if seed is not None else None
            found = {work.number: work for work in works(kinds, own, LANES, draw, most)}
            stream = sorted((self._record(work) for work in found.values()), key=lambda record: record[1::-1])
            waiting = {record.job: found[record.job] for record in stream}
            scheduler = Scheduler(shape, window=None if self._each else _WINDOW)
            self._seats.append(
                _Seat(
                    number, Engine(recorded.rates, LANES, cells), scheduler, random.Random(f"fails {seed} {number}"),
                    stream[::-1], waiting, sum(map(self._seconds, found.values())), len(found),
                )
            )  # fmt: skip
        self._jobs = sum(jobs for own in pieces for _, jobs in own)
        self._left = sum(len(seat.waiting) for seat in self._seats)  # works

    def run(self) -> Outcome:
        """Until the last answer; mutates."""
        for seat in self._seats:
            self._announce(self._recorded.load_s, "back", seat)
        now_s = 0.0
        while self._left:
            now_s, _, what, number, turn = heappop(self._events)
            seat = self._seats[number]
            if what == "step" and turn == seat.turn:
                self._step(seat)
            elif what == "fails" and seat.up:
                self._fails(seat, now_s)
            elif what == "back":
                self._back(seat, now_s)
            elif what == "wake":
                for other in sorted(self._idle):
                    self._go_on(self._seats[other], now_s)
                    if other in self._idle:  # nor will the next one find any
                        break
        return Outcome(
            len(self._seats), self._jobs, self._answered, now_s,
            sum(seat.engine.computed_tokens for seat in self._seats),
            sum(seat.engine.written_tokens for seat in self._seats), sum(seat.engine.busy_s for seat in self._seats),
            self._failures, self._redone, self._taken,
        )  # fmt: skip

    def _announce(self, at_s: float, what: What, seat: _Seat) -> None:
        heappush(self._events, (at_s, next(self._order), what, seat.number, seat.turn))

    def _record(self, work: Work) -> Pending:
        return self._texts.pending(work, lengths=not self._each)

    def _seconds(self, work: Work) -> float:
        """Of an engine, without its head."""
        return work.prompt_tokens / self._prefill_tok_s + work.output_tokens / self._decode_tok_s

    def _kind_s(self, kind: Kind, jobs: int) -> float:
        """The same of so many jobs of a kind, with its heads."""
        tokens = sum(tokens for _, tokens in kind.path) + jobs * kind.prompt_tokens
        return tokens / self._prefill_tok_s + jobs * SIZE.output_tokens / self._decode_tok_s

    def _step(self, seat: _Seat) -> None:
        event = seat.engine.step()
        if event is None:
            self._announce_step(seat)
            return
        work = event.work
        if event.kind == "first token":
            seat.scheduler.first_token(work.number)
        else:
            del seat.sent[work.number]
            self._left -= 1
            self._answered += work.jobs
            seat.scheduler.finished(work.number, self._usage(work) if self._each else None)
        self._go_on(seat, seat.engine.now_s)

    @staticmethod
    def _usage(work: Work) -> Usage:
        prompt = sum(tokens for _, tokens in work.path) + work.prompt_tokens
        return Usage(int(prompt), int(work.output_tokens), None)

    def _back(self, seat: _Seat, now_s: float) -> None:
        """An engine is loaded, and cold."""
        seat.up = True
        seat.scheduler.back()
        if self._mean_s is not None:
            self._announce(now_s + seat.chance.expovariate(1 / self._mean_s), "fails", seat)
        self._go_on(seat, now_s)

    def _fails(self, seat: _Seat, now_s: float) -> None:
        """Jobs that had ended stay so; the others of its works are pending again."""
        self._failures += 1
        seat.up, seat.turn = False, seat.turn + 1
        self._idle.discard(seat.number)
        had = seat.engine.running
        lost = seat.engine.die(now_s)
        seat.scheduler.lost()
        self._redone += had
        for work, done in lost:
            del seat.sent[work.number]
            again = work
            self._answered += done
            if done:
                again = work.rest(seat.next_number, done)
                seat.next_number += 1
                seat.scheduler.withdrawn([work.number])
                seat.scheduler.available([self._record(again)])
            seat.waiting[again.number] = again
            seat.waiting_s += self._seconds(again)
        seat.open_s = now_s + ASSUMED_LEASE_S
        self._announce(seat.open_s, "wake", seat)
        self._announce(seat.open_s + self._recorded.load_s, "back", seat)

    def _go_on(self, seat: _Seat, now_s: float) -> None:
        """Send what is decided, after taking some where nothing is left; announce the next step."""
        if not seat.up:
            return
        if not seat.waiting and not seat.sent and not self._takes(seat, now_s):
            self._idle.add(seat.number)
            return
        self._idle.discard(seat.number)
        if not seat.engine.running:
            seat.engine.now_s = now_s
        self._act(seat)
        self._announce_step(seat)

    def _announce_step(self, seat: _Seat) -> None:
        next_s = seat.engine.next_s()
        if next_s is not None:
            seat.turn += 1
            self._announce(next_s, "step", seat)

    def _act(self, seat: _Seat) -> None:
        while True:
            decisions = seat.scheduler.decide()
            for decision in decisions:
                if isinstance(decision, Fetch):
                    page = [seat.stream.pop() for _ in range(min(decision.jobs, len(seat.stream)))]
                    seat.scheduler.available(page, more=bool(seat.stream))
                elif isinstance(decision, Dispatch):
                    work = seat.waiting.pop(decision.job)
                    seat.waiting_s -= self._seconds(work)
                    seat.sent[work.number] = work
                    seat.engine.send(work)
                    seat.scheduler.started(work.number)
            if isinstance(decisions[-1], Wait):
                return

    def _takes(self, seat: _Seat, now_s: float) -> bool:
        """Half of what waits where most waits; False: it would not be worth it."""
        open_seats = (other for other in self._seats if other.up or other.open_s <= now_s)
        victim = max(open_seats, key=lambda other: (other.waiting_s, -other.number))
        chosen, seconds, heads = list[Work](), 0.0, dict[int, float]()
        half_s = victim.waiting_s / 2 if victim.up else victim.waiting_s
        for work in islice(reversed(victim.waiting.values()), len(victim.waiting)):
            if seconds >= half_s:
                break
            chosen.append(work)
            seconds += self._seconds(work)
            heads |= dict(work.path)
        if victim is seat or seconds <= sum(heads.values()) / self._prefill_tok_s:
            return False
        self._taken += 1
        gone = {work.number for work in chosen}
        for number in gone:
            del victim.waiting[number]
        victim.waiting_s -= seconds
        victim.scheduler.withdrawn(gone)
        if victim.stream:
            victim.stream = [record for record in victim.stream if record.job not in gone]
        self._give(seat, chosen)
        return True

    def _give(self, seat: _Seat, chosen: Sequence[Work]) -> None:
        for work in chosen:
            own = Work(seat.next_number, work.path, work.prompt_tokens, work.output_tokens, work.jobs)
            seat.next_number += 1
            seat.waiting[own.number] = own
            seat.waiting_s += self._seconds(own)
            seat.scheduler.available([self._record(own)])
