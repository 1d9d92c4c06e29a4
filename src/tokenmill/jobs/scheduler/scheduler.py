"""Decides which job runs next, in which slot, and what it should find in the cache.

    report events    available, started, first_token, finished, failed, withdrawn, lost, back, clock, ...
    ask              decide() -> Dispatch, Fetch, Wait

Every prefix is computed once and its jobs run while it is warm. How depends on the engine (`shape.Reuse`):

- shares: depth first through the prefix tree, a few more jobs in flight than slots; the engine holds back followers.
- prefix cache: depth first; a job waits here while another computes a prefix that it needs.
- slots: a prefix belongs to a slot; see `slots`.
- none: jobs run in line order.

Deadlines at risk go first, then priority. Near the end of a run, an answer that would take longer than all remaining
work is started early, before its group's turn. Pure: no clocks, stores, engines or awaits.
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
from tokenmill.jobs.scheduler.slot_assignment import Pick, Slots
from tokenmill.units import number_of

WINDOW = 4096  # jobs in memory; about 2 KB each
SLOT_WINDOW = 16384  # larger, to find a prefix for every slot
_FINAL: dict[Reuse, Order] = {"shares": "longest", "prefix cache": "longest", "slots": "work", "none": "file"}
_NEAR = 32  # jobs examined for one that shares nothing with the prompts being computed
_LONGER = 1.25  # a long answer is started out of order only if it is this much longer than the next


@dataclass(slots=True)
class _InFlight:
    record: Pending
    sent: Dispatch
    started: bool = False


class Scheduler:
    """Orders the jobs of one engine."""

    def __init__(self, shape: EngineShape, *, lengths: AnswerLengths | None = None, window: int | None = None) -> None:
        self.shape = shape
        self.lengths = lengths or AnswerLengths()
        self._costs = EngineCosts(shape, self.lengths)
        self._window = window or (SLOT_WINDOW if shape.reuse == "slots" else WINDOW)
        self._backlog = Backlog(final=_FINAL[shape.reuse], window=self._window)
        self._fetching = False
        self._more = True
        self._in_flight: dict[int, _InFlight] = {}
        self._cache = CacheModel(shape, self._costs.tokens)
        self._slots = Slots(shape.lanes or 0)
        self._cursor = b""  # prefix key of the last job sent in order
        self._width = shape.width
        self._interactive = 0
        self._engine_up = True
        self._notes: dict[str, str] = {}  # by topic; the first note of each is kept

    @property
    def notes(self) -> tuple[str, ...]:
        """Decisions worth reporting, with their reasons."""
        return (*self.shape.notes, *self._notes.values())

    @property
    def pending(self) -> int:
        """Jobs in memory that have not been sent."""
        return len(self._backlog)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Jobs that were sent and have not ended."""
        return tuple(self._in_flight)

    @property
    def width(self) -> int:
        """Jobs that may run concurrently now."""
        return max(0, self._width - self._interactive)

    # -- events ------------------------------------------------------------------------------------------------------

    def available(self, records: Iterable[Pending], *, more: bool | None = None) -> None:
        """Add pending jobs; known ones are ignored.

        `more` is given with the answer to a Fetch: whether more jobs follow these. None: the jobs come from outside the
        stream, because they are due soon or free again.
        """
        come = list(records)
        new = [each for each in come if each.job not in self._in_flight and each.job not in self._backlog]
        self._backlog.add(new)
        if more is not None:
            self._fetching = False
            self._more = more
            self._backlog.reached(come[-1] if come else None, more=more)

    def again(self) -> None:
        """Allow fetching from the start of the stream again: it may have new jobs."""
        self._fetching = False
        self._more = True
        self._backlog.ended = False

    def started(self, job: int) -> None:
        """A job was sent to the engine."""
        attempt = self._in_flight[job]
        if not attempt.started:
            attempt.started = True
            if attempt.sent.lane is not None:
                self._slots[attempt.sent.lane].left = attempt.record

    def first_token(self, job: int) -> None:
        """A job's prompt is computed, so others can reuse it."""
        self.started(job)
        self._cache.warmed(self._in_flight[job].record)

    def finished(self, job: int, usage: Usage | None = None) -> Dispatch:
        """A job has its answer. Returns its Dispatch, with the expected reuse as corrected since."""
        self.started(job)
        attempt = self._end(job, answered=True)
        if usage is not None:
            self.lengths.finished(attempt.record, usage)
        return attempt.sent

    def failed(self, job: int, *, again: bool) -> None:
        """A job failed; with `again` it is pending immediately. The state of its prompt in the cache is unknown."""
        attempt = self._end(job, answered=False)
        if again:
            self._backlog.add([attempt.record])

    def withdrawn(self, jobs: Iterable[int]) -> None:
        """Forget jobs that need not run: cancelled, quarantined, answered or held. The caller closes their streams."""
        for job in jobs:
            if job in self._in_flight:
                self._end(job, answered=False)
            else:
                self._backlog.remove(job)

    def lost(self) -> tuple[int, ...]:
        """The engine died with its cache. Returns the jobs that were in flight; they are pending again."""
        self._engine_up = False
        records = [attempt.record for attempt in self._in_flight.values()]
        self._in_flight.clear()
        self._cache.clear()
        self._slots.clear()
        self._backlog.add(records)
        return tuple(record.job for record in records)

    def back(self) -> None:
        """The engine is up again, with an empty cache."""
        self._engine_up = True

    def widened(self, width: int) -> None:
        """Change the number of jobs that run concurrently; jobs in flight continue."""
        self._width = width if self.shape.lanes is None else min(width, self.shape.lanes)

    def measured(self, rates: MeasuredRates) -> None:
        """Update the engine's measured speed."""
        self._costs.measured(rates)

    def interactive(self, running: int) -> None:
        """Set the number of running interactive requests; batch jobs give up slots for them as they end."""
        self._interactive = running

    def slot_taken(self, slot: int) -> None:
        """Another client uses a slot, and its cached prompt is lost."""
        self._slots[slot].taken = True
        self._slots[slot].left = None

    def slot_freed(self, slot: int) -> None:
        """No other client uses a slot any more."""
        self._slots[slot].taken = False

    def clock(self, now_s: float) -> None:
        """Advance the time, for deadlines."""
        self._backlog.clock(now_s, lambda record: self._costs.seconds(record, max(1, self.width)))

    # -- decisions ---------------------------------------------------------------------------------------------------

    def decide(self) -> tuple[ScheduleDecision, ...]:
        """Return what to do now, at least one decision; the caller must carry out all of them."""
        decisions: list[ScheduleDecision] = []
        if self._more and not self._fetching and len(self._backlog) <= self._window // 2:
            self._fetching = True
            decisions.append(Fetch(self._window - len(self._backlog)))
        while self._engine_up and len(self._in_flight) < self._max_in_flight and (pick := self._pick()) is not None:
            decisions.append(self._send(pick))
        return tuple(decisions) or (Wait(self._wait_reason()),)

    @property
    def _max_in_flight(self) -> int:
        """Maximum number of jobs in flight."""
        return self.width + self.shape.look_ahead if self.width else 0

    def _pick(self) -> Pick | None:
        trees = self._backlog.trees()
        for tree in trees:
            pick = (
                self._slots.pick(tree, trees, self._recompute_pays)
                if self.shape.reuse == "slots"
                else self._in_order(tree)
            )
            if pick is not None:
                return pick if self._fits(pick.record) else None
            if self.shape.reuse == "prefix cache" and len(tree) >= self._max_in_flight - len(self._in_flight):
                return None  # the slots are reserved for these until their prefix is computed
        return None

    def _in_order(self, tree: PrefixTree) -> Pick | None:
        """The next job of a tree that need not wait, or one whose answer would otherwise end last and alone."""
        following = self._following(tree)
        late = self._late(tree, following)
        record = late if late is not None and self._cache.ready(late) and self._fits(late) else following
        if record is None:
            return None
        found, like = self._cache.find(record) if self.shape.reuse != "none" else (0, None)
        return Pick(record, None, found, like)

    def _following(self, tree: PrefixTree) -> Pending | None:
        """The next job whose prefix is not being computed, if slots remain for the jobs before it.

        A second prefix is started only for slots that the jobs of the first will not fill: its jobs would wait for
        those, and the prefix might be evicted by then. A short prefix that is being computed is not waited for, but a
        nearby job that does not need it, and has no prefix of its own to keep, goes first.
        """
        free = self._max_in_flight - len(self._in_flight)
        near = islice(tree.walk(self._cursor), max(free, _NEAR))
        following = next(filter(self._cache.ready, islice(near, free)), None)
        if following is None or self._cache.independent(following):
            return following
        others = (other for other in near if not worth_bytes(tree.wanted_bytes(other.job)))
        return next(filter(self._cache.independent, others), following)

    def _late(self, tree: PrefixTree, following: Pending | None) -> Pending | None:
        """The longest job, if all other known work would finish before it even if it started now."""
        if not self._backlog.ended or self.width < 2 or any(other.root.unknown for other in self._backlog.trees()):
            return None
        work = sum(other.root.work for other in self._backlog.trees())
        if tree.longest_ever * (self.width + 1) < work:  # the end is far; no need to examine all groups
            return None
        longest = tree.longest()
        if longest is None or (following is not None and length_of(longest) <= _LONGER * length_of(following)):
            return None
        return longest if length_of(longest) * (self.width + 1) >= work else None

    def _fits(self, record: Pending) -> bool:
        """Whether a job fits into the KV cache with those in flight. A single job is never refused. May add a note."""
        total = self.shape.cells_total
        if total is None or not self._in_flight:
            return True
        together = [*(attempt.record for attempt in self._in_flight.values()), record]
        if self.shape.reuse in ("shares", "prefix cache"):
            prompt_bytes = self._cache.running.bytes + self._cache.running.extra_bytes(record)
        else:
            prompt_bytes = sum(each.prompt_bytes for each in together)
        needed = self._costs.cells(prompt_bytes, together)
        if needed > total and len(self._in_flight) < self.width:
            self._notes.setdefault(
                "cells",
                f"fewer than {self._width} jobs at once where prompts are long: {len(together)} would need about "
                f"{needed} of {total} cells, and prefixes in use would be evicted",
            )
        return needed <= total

    def _recompute_pays(self, node: PrefixNode, again_bytes: int, at: int) -> bool:
        """Whether to recompute a prefix for another slot. May add a note."""
        if self._fetching:
            return False  # the jobs being fetched may have prefixes of their own
        busy = max(1, len(self._in_flight))
        pays, assumed = self._costs.again_pays(node, again_bytes, at=at, busy=busy)
        if assumed is not None:
            self._notes.setdefault(assumed, assumed)
        return pays

    def _send(self, pick: Pick) -> Dispatch:
        """Record a job as sent."""
        record = pick.record
        tree = next(tree for tree in self._backlog.trees() if record.job in tree)
        if next(tree.walk(self._cursor)) is record:  # otherwise the order continues where it was
            self._cursor = record.prefix_key
        leader = self.shape.reuse != "none" and tree.wanted_bytes(record.job) > pick.found_bytes
        sent = Dispatch(
            record.job, pick.slot, pick.found_bytes, self._costs.tokens(pick.found_bytes), leader, pick.like
        )
        self._backlog.take(record.job)
        self._in_flight[record.job] = _InFlight(record, sent)
        self._cache.sent(record)
        if pick.slot is not None:
            self._slots[pick.slot].works = record
        return sent

    # -- internal state ----------------------------------------------------------------------------------------------

    def _end(self, job: int, *, answered: bool) -> _InFlight:
        """Remove a job from those in flight. Without an answer, the content of its slot is unknown."""
        attempt = self._in_flight.pop(job)
        if attempt.sent.lane is not None:
            slot = self._slots[attempt.sent.lane]
            slot.works = None
            if attempt.started and not answered:
                slot.left = None
        if self._cache.ended(attempt.record, answered=answered):
            self._expect_again(job)
        return attempt

    def _expect_again(self, gone: int) -> None:
        """Correct the expected reuse of jobs in flight that were to find what a lost job would have computed."""
        found = self._cache.find_again()
        for job, attempt in self._in_flight.items():
            if attempt.sent.like == gone and job in found:
                shared, like = found[job]
                attempt.sent = replace(
                    attempt.sent, expected_bytes=shared, expected_tokens=self._costs.tokens(shared), like=like
                )

    def _wait_reason(self) -> str:
        """Why nothing can be sent now."""
        slots = self.shape.reuse == "slots"
        reasons = (
            (not self._engine_up, "the engine is not there"),
            (not len(self._backlog) and not self._in_flight, "no jobs are pending"),
            (not len(self._backlog), "all jobs are in flight"),
            (not self.width, f"{number_of(self._interactive, 'interactive request')} at work"),
            (len(self._in_flight) >= self._max_in_flight, f"{number_of(len(self._in_flight), 'job')} in flight"),
            (slots and not self._slots.any_free, "every lane is at work"),
            (slots, "computing a head again for another lane would cost more than it saves"),
            (any(self._cache.cold), "a head that the next jobs need is being computed"),
        )
        return next((words for holds, words in reasons if holds), "the engine's cells are full")
