"""Which job next, on which lane, and what it should find there: a pure state machine over the window that is at hand.

    tell it what happened      available, started, first_token, finished, failed, withdrawn, lost, back, clock, ...
    ask                        decide() -> Dispatch, Fetch, Wait

Every head is computed once and its jobs run while it is warm. How depends on the engine (`shape.Reuse`):

- shares: depth first through the forest, the width and a little more in flight; the engine lets followers wait.
- prefix cache: depth first; a job waits here while another is computing a head that it needs.
- slots: a head belongs to a lane; see `lanes`.
- none: lines in their order.

Danger to a deadline goes first, then priority. When the end is in sight, an answer that would take longer than all the
rest is begun before it, though its group is not yet due. No clocks, stores, engines or awaits in here.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice

from tokenmill.engine.engine import Usage
from tokenmill.jobs.scheduler.backlog import Backlog
from tokenmill.jobs.scheduler.cache_model import CacheModel
from tokenmill.jobs.scheduler.costs import EngineCosts
from tokenmill.jobs.scheduler.decisions import Dispatch, Fetch, ScheduleDecision, Wait
from tokenmill.jobs.scheduler.estimates import AnswerLengths, MeasuredRates
from tokenmill.jobs.scheduler.prefix_groups import Pending, worth_bytes
from tokenmill.jobs.scheduler.prefix_tree import Order, PrefixNode, PrefixTree, length_of
from tokenmill.jobs.scheduler.shape import EngineShape, Reuse
from tokenmill.jobs.scheduler.slots import Pick, Slots
from tokenmill.units import number_of

WINDOW = 4096  # jobs at hand; about 2 KB each
SLOT_WINDOW = 16384  # more, to see a head for every lane
_FINAL: dict[Reuse, Order] = {"shares": "longest", "prefix cache": "longest", "slots": "work", "none": "file"}
_NEAR = 32  # jobs in order that are looked at for one that shares nothing with what is being computed
_LONGER = 1.25  # than the next in order: only then is a long answer begun out of it


@dataclass(slots=True)
class _Flight:
    record: Pending
    sent: Dispatch
    started: bool = False


class Scheduler:
    """Decides the order of jobs on one engine."""

    def __init__(self, shape: EngineShape, *, lengths: AnswerLengths | None = None, window: int | None = None) -> None:
        self.shape = shape
        self.lengths = lengths or AnswerLengths()
        self._costs = EngineCosts(shape, self.lengths)
        self._window = window or (SLOT_WINDOW if shape.reuse == "slots" else WINDOW)
        self._backlog = Backlog(final=_FINAL[shape.reuse], window=self._window)
        self._asked = False
        self._more = True
        self._flights: dict[int, _Flight] = {}
        self._warmth = CacheModel(shape, self._costs.tokens)
        self._lanes = Slots(shape.lanes or 0)
        self._cursor = b""  # head of the last job in order
        self._width = shape.width
        self._interactive = 0
        self._up = True
        self._notes: dict[str, str] = {}  # by what they are about: the first is kept

    @property
    def notes(self) -> tuple[str, ...]:
        """What was decided for reasons that a person may want to know. Mutates nothing."""
        return (*self.shape.notes, *self._notes.values())

    @property
    def pending(self) -> int:
        """Jobs at hand that have not been sent. Mutates nothing."""
        return len(self._backlog)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Jobs that were sent and have not ended. Mutates nothing."""
        return tuple(self._flights)

    @property
    def width(self) -> int:
        """Jobs that may run at once now. Mutates nothing."""
        return max(0, self._width - self._interactive)

    # -- what happened: all of these mutate --------------------------------------------------------------------------

    def available(self, records: Iterable[Pending], *, more: bool | None = None) -> None:
        """Jobs are pending; those known already are left alone.

        More: they are the answer to a Fetch, and whether there are more behind them. None: they come beside the
        stream: due soon, or free again.
        """
        come = list(records)
        new = [each for each in come if each.job not in self._flights and each.job not in self._backlog]
        self._backlog.add(new)
        if more is not None:
            self._asked = False
            self._more = more
            self._backlog.reached(come[-1] if come else None, more=more)

    def again(self) -> None:
        """The stream can be read again from its start: there may be jobs that it has passed."""
        self._asked = False
        self._more = True
        self._backlog.ended = False

    def started(self, job: int) -> None:
        """The engine has a job that was sent."""
        flight = self._flights[job]
        if not flight.started:
            flight.started = True
            if flight.sent.lane is not None:
                self._lanes[flight.sent.lane].left = flight.record

    def first_token(self, job: int) -> None:
        """A job's prompt is computed: others find it from now on."""
        self.started(job)
        self._warmth.warmed(self._flights[job].record)

    def finished(self, job: int, usage: Usage | None = None) -> Dispatch:
        """A job has its answer. What was sent, with the reuse to be expected as it turned out."""
        self.started(job)
        flight = self._end(job, answered=True)
        if usage is not None:
            self.lengths.finished(flight.record, usage)
        return flight.sent

    def failed(self, job: int, *, again: bool) -> None:
        """A job has none; again: it is pending at once. What the engine still has of it is not known."""
        flight = self._end(job, answered=False)
        if again:
            self._backlog.add([flight.record])

    def withdrawn(self, jobs: Iterable[int]) -> None:
        """Jobs need not be worked: cancelled, set aside, answered, held for an equal one. Their streams are closed."""
        for job in jobs:
            if job in self._flights:
                self._end(job, answered=False)
            else:
                self._backlog.remove(job)

    def lost(self) -> tuple[int, ...]:
        """The engine is gone with all it had; jobs that were sent are pending again. These."""
        self._up = False
        records = [flight.record for flight in self._flights.values()]
        self._flights.clear()
        self._warmth.clear()
        self._lanes.clear()
        self._backlog.add(records)
        return tuple(record.job for record in records)

    def back(self) -> None:
        """An engine is there again, and it is cold."""
        self._up = True

    def widened(self, width: int) -> None:
        """Another number of jobs at once; those in flight go on."""
        self._width = width if self.shape.lanes is None else min(width, self.shape.lanes)

    def measured(self, rates: MeasuredRates) -> None:
        """How fast the engine has been so far."""
        self._costs.measured(rates)

    def interactive(self, running: int) -> None:
        """So many interactive requests are at work; batch jobs make room for them as they end."""
        self._interactive = running

    def lane_taken(self, lane: int) -> None:
        """Somebody else works on a lane, and what was left there is gone."""
        self._lanes[lane].taken = True
        self._lanes[lane].left = None

    def lane_freed(self, lane: int) -> None:
        """Nobody else works on a lane any more."""
        self._lanes[lane].taken = False

    def clock(self, now_s: float) -> None:
        """It is so late; for deadlines."""
        self._backlog.clock(now_s, lambda record: self._costs.seconds(record, max(1, self.width)))

    # -- what to do --------------------------------------------------------------------------------------------------

    def decide(self) -> tuple[ScheduleDecision, ...]:
        """What to do now; mutates: what is returned counts as done. Never empty."""
        decisions: list[ScheduleDecision] = []
        if self._more and not self._asked and len(self._backlog) <= self._window // 2:
            self._asked = True
            decisions.append(Fetch(self._window - len(self._backlog)))
        while self._up and len(self._flights) < self._most and (pick := self._pick()) is not None:
            decisions.append(self._send(pick))
        return tuple(decisions) or (Wait(self._why()),)

    @property
    def _most(self) -> int:
        """Jobs that may be in flight. Mutates nothing."""
        return self.width + self.shape.look_ahead if self.width else 0

    def _pick(self) -> Pick | None:
        trees = self._backlog.trees()
        for tree in trees:
            pick = self._lanes.pick(tree, trees, self._pays) if self.shape.reuse == "slots" else self._in_order(tree)
            if pick is not None:
                return pick if self._fits(pick.record) else None
            if self.shape.reuse == "prefix cache" and len(tree) >= self._most - len(self._flights):
                return None  # the lanes are for these, when their head is there
        return None

    def _in_order(self, tree: PrefixTree) -> Pick | None:
        """The next job of a tree that need not wait, or one whose answer would end last and alone. Mutates nothing."""
        following = self._following(tree)
        late = self._late(tree, following)
        record = late if late is not None and self._warmth.ready(late) and self._fits(late) else following
        if record is None:
            return None
        found, like = self._warmth.find(record) if self.shape.reuse != "none" else (0, None)
        return Pick(record, None, found, like)

    def _following(self, tree: PrefixTree) -> Pending | None:
        """The next job whose head nobody is computing, if lanes are left when those before it go. Mutates nothing.

        Another head is begun beside one that is being computed only for lanes that its own jobs will not fill:
        it would wait for them, and might be gone when its turn comes. A few words that somebody is computing are not
        waited for, but a job that does without them is taken first if it is near and has no head of its own to keep.
        """
        free = self._most - len(self._flights)
        near = islice(tree.walk(self._cursor), max(free, _NEAR))
        following = next(filter(self._warmth.ready, islice(near, free)), None)
        if following is None or self._warmth.apart(following):
            return following
        others = (other for other in near if not worth_bytes(tree.wanted_bytes(other.job)))
        return next(filter(self._warmth.apart, others), following)

    def _late(self, tree: PrefixTree, following: Pending | None) -> Pending | None:
        """The longest job, if what else is at hand would be done before it even if it were begun now."""
        if not self._backlog.ended or self.width < 2 or any(other.root.unknown for other in self._backlog.trees()):
            return None
        work = sum(other.root.work for other in self._backlog.trees())
        if tree.longest_ever * (self.width + 1) < work:  # the end is far, and all groups need not be looked at
            return None
        longest = tree.longest()
        if longest is None or (following is not None and length_of(longest) <= _LONGER * length_of(following)):
            return None
        return longest if length_of(longest) * (self.width + 1) >= work else None

    def _fits(self, record: Pending) -> bool:
        """Whether a job has room beside those in flight; mutates notes. One alone is never refused."""
        total = self.shape.cells_total
        if total is None or not self._flights:
            return True
        together = [*(flight.record for flight in self._flights.values()), record]
        if self.shape.reuse in ("shares", "prefix cache"):
            prompt_bytes = self._warmth.running.bytes + self._warmth.running.extra_bytes(record)
        else:
            prompt_bytes = sum(each.prompt_bytes for each in together)
        needed = self._costs.cells(prompt_bytes, together)
        if needed > total and len(self._flights) < self.width:
            self._notes.setdefault(
                "cells",
                f"fewer than {self._width} jobs at once where prompts are long: {len(together)} would need about "
                f"{needed} of {total} cells, and heads in use would be dropped",
            )
        return needed <= total

    def _pays(self, node: PrefixNode, again_bytes: int, at: int) -> bool:
        """Whether to compute a head once more for another lane; mutates notes."""
        if self._asked:
            return False  # what comes may have heads that nobody is at
        busy = max(1, len(self._flights))
        pays, assumed = self._costs.again_pays(node, again_bytes, at=at, busy=busy)
        if assumed is not None:
            self._notes.setdefault(assumed, assumed)
        return pays

    def _send(self, pick: Pick) -> Dispatch:
        """Count a job as sent; mutates."""
        record = pick.record
        tree = next(tree for tree in self._backlog.trees() if record.job in tree)
        if next(tree.walk(self._cursor)) is record:  # else the order goes on where it was
            self._cursor = record.head
        leader = self.shape.reuse != "none" and tree.wanted_bytes(record.job) > pick.found_bytes
        sent = Dispatch(
            record.job, pick.lane, pick.found_bytes, self._costs.tokens(pick.found_bytes), leader, pick.like
        )
        self._backlog.take(record.job)
        self._flights[record.job] = _Flight(record, sent)
        self._warmth.sent(record)
        if pick.lane is not None:
            self._lanes[pick.lane].works = record
        return sent

    # -- bookkeeping -------------------------------------------------------------------------------------------------

    def _end(self, job: int, *, answered: bool) -> _Flight:
        """A job is no longer in flight; mutates. Without an answer, what it left is not known."""
        flight = self._flights.pop(job)
        if flight.sent.lane is not None:
            lane = self._lanes[flight.sent.lane]
            lane.works = None
            if flight.started and not answered:
                lane.left = None
        if self._warmth.ended(flight.record, answered=answered):
            self._expect_again(job)
        return flight

    def _expect_again(self, gone: int) -> None:
        """Jobs in flight were to find what another would have computed; mutates: they find what is there without it."""
        found = self._warmth.find_again()
        for job, flight in self._flights.items():
            if flight.sent.like == gone and job in found:
                shared, like = found[job]
                flight.sent = replace(
                    flight.sent, expected_bytes=shared, expected_tokens=self._costs.tokens(shared), like=like
                )

    def _why(self) -> str:
        """Why nothing is sent. Mutates nothing."""
        slots = self.shape.reuse == "slots"
        reasons = (
            (not self._up, "the engine is not there"),
            (not len(self._backlog) and not self._flights, "no jobs are pending"),
            (not len(self._backlog), "all jobs are in flight"),
            (not self.width, f"{number_of(self._interactive, 'interactive request')} at work"),
            (len(self._flights) >= self._most, f"{number_of(len(self._flights), 'job')} in flight"),
            (slots and not self._lanes.any_free, "every lane is at work"),
            (slots, "computing a head again for another lane would cost more than it saves"),
            (any(self._warmth.cold), "a head that the next jobs need is being computed"),
        )
        return next((words for holds, words in reasons if holds), "the engine's cells are full")
