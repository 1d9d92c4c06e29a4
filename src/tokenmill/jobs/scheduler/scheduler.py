"""Decides which job runs next, in which slot, and which cached prefix it should reuse.

    events       available, started, first_token, finished, failed, withdraw, engine_lost, engine_back, ...
    decisions    decide() -> Dispatch, Fetch, Wait

Every prefix is computed once, and its jobs run while it is cached. How depends on the engine (`shape.Reuse`):

- shares: depth first through the prefix tree, with a few more jobs in flight than slots; the engine queues followers.
- prefix cache: depth first; a job is held back here while another one computes a prefix that it needs.
- slots: jobs with the same prefix run in the same slot; see `slot_assignment`.
- none: jobs run in line order.

Jobs whose deadline is at risk go first, then the order is by priority. Near the end of a run, a job whose answer would
take longer than all remaining work starts early, before its group. Pure: no clocks, stores, engines or awaits.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice

from tokenmill.engine.engine import Usage
from tokenmill.jobs.scheduler.backlog import Backlog
from tokenmill.jobs.scheduler.cache_model import CacheModel
from tokenmill.jobs.scheduler.costs import EngineCosts
from tokenmill.jobs.scheduler.decisions import Dispatch, Fetch, ScheduleDecision, Wait, WaitReason
from tokenmill.jobs.scheduler.estimates import AnswerLengths, MeasuredRates
from tokenmill.jobs.scheduler.prefix_groups import Pending, worth_bytes
from tokenmill.jobs.scheduler.prefix_tree import Order, PrefixNode, PrefixTree, length_of
from tokenmill.jobs.scheduler.shape import EngineShape, Reuse
from tokenmill.jobs.scheduler.slot_assignment import Pick, Slots

WINDOW = 4096  # jobs in memory; about 2 KB each
SLOT_WINDOW = 16384  # with reuse "slots": larger, to find a prefix for every slot
_FINAL: dict[Reuse, Order] = {"shares": "longest", "prefix cache": "longest", "slots": "work", "none": "file"}
_LOOKAHEAD_JOBS = 32  # jobs examined for one that shares nothing with the prompts being computed
_DIVERGING_JOBS = 8  # jobs by which an engine is told where a prefix ends; keys only tell it to a chunk
_LONGER = 1.25  # a long answer is started out of order only if it is longer than the next by this factor


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
        self._slots = Slots(shape.slots or 0)
        self._cursor = b""  # prefix key of the last job sent in order
        self._width = shape.width
        self._interactive = 0
        self._engine_up = True
        # Prompt bytes and expected output tokens of the jobs in flight, during one call of `decide`.
        self._in_flight_need: tuple[int, float] | None = None
        self._notes: dict[str, str] = {}  # by topic; the first note of each is kept

    @property
    def notes(self) -> tuple[str, ...]:
        """Notable decisions and their reasons, for the user."""
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

        In response to a Fetch, `more` tells whether the stream has further jobs. None: the jobs are not from the
        stream; they are due soon, or returned from elsewhere.
        """
        added = list(records)
        new = [each for each in added if each.job not in self._in_flight and each.job not in self._backlog]
        self._backlog.add(new)
        if more is not None:
            self._fetching = False
            self._more = more
            self._backlog.stream_read(added[-1] if added else None, more=more)

    def reopen_stream(self) -> None:
        """Resume fetching: the stream may have new jobs."""
        self._fetching = False
        self._more = True
        self._backlog.ended = False

    def started(self, job: int) -> None:
        """A job was sent to the engine."""
        attempt = self._in_flight[job]
        if not attempt.started:
            attempt.started = True
            if attempt.sent.slot is not None:
                self._slots[attempt.sent.slot].cached = attempt.record

    def first_token(self, job: int) -> None:
        """A job's prompt has been computed, so others can reuse it."""
        self.started(job)
        self._cache.warmed(self._in_flight[job].record)

    def finished(self, job: int, usage: Usage | None = None) -> Dispatch:
        """A job was answered. Returns its Dispatch, whose expected reuse may have been corrected since it was sent."""
        self.started(job)
        attempt = self._end(job, answered=True)
        if usage is not None:
            self.lengths.finished(attempt.record, usage)
        return attempt.sent

    def failed(self, job: int, *, again: bool) -> None:
        """A job failed; with `again` it is pending again. Whether its prompt is cached is unknown."""
        attempt = self._end(job, answered=False)
        if again:
            self._backlog.add([attempt.record])

    def withdraw(self, jobs: Iterable[int]) -> None:
        """Forget jobs that must not run: cancelled, quarantined, answered or held. The caller ends their streams."""
        for job in jobs:
            if job in self._in_flight:
                self._end(job, answered=False)
            else:
                self._backlog.remove(job)

    def engine_lost(self) -> tuple[int, ...]:
        """The engine died and its cache is lost. Returns the jobs that were in flight; they are pending again."""
        self._engine_up = False
        records = [attempt.record for attempt in self._in_flight.values()]
        self._in_flight.clear()
        self._cache.clear()
        self._slots.clear()
        self._backlog.add(records)
        return tuple(record.job for record in records)

    def engine_back(self) -> None:
        """The engine is up again, with an empty cache."""
        self._engine_up = True

    def measured(self, rates: MeasuredRates) -> None:
        """Update the engine's measured rates."""
        self._costs.measured(rates)

    def set_interactive(self, running: int) -> None:
        """Set the number of running interactive requests; as batch jobs end, their slots are left to these."""
        self._interactive = running

    def advance_clock(self, now_s: float) -> None:
        """Set the current time, to find deadlines at risk."""
        self._backlog.advance_clock(now_s, lambda record: self._costs.seconds(record, max(1, self.width)))

    # -- decisions ---------------------------------------------------------------------------------------------------

    def decide(self) -> tuple[ScheduleDecision, ...]:
        """Return one or more decisions; the caller must carry out all of them."""
        decisions: list[ScheduleDecision] = []
        self._in_flight_need = None
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
                return None  # the free slots are reserved for the jobs of this tree until their prefix is computed
        return None

    def _in_order(self, tree: PrefixTree) -> Pick | None:
        """The next job of a tree that need not wait, or a long one that would otherwise run alone at the end."""
        following = self._following(tree)
        late = self._late(tree, following)
        record = late if late is not None and self._cache.ready(late) and self._fits(late) else following
        if record is None:
            return None
        cached_bytes, source_job = self._cache.find(record) if self.shape.reuse != "none" else (0, None)
        return Pick(record, None, cached_bytes, source_job)

    def _following(self, tree: PrefixTree) -> Pending | None:
        """The next job whose prefix is not being computed, if slots remain for the jobs before it.

        A second prefix is started only if the jobs of the first leave slots free; otherwise its jobs would queue behind
        them, and the prefix might be evicted before they run. Jobs do not wait for a short prefix that is being
        computed, but a nearby job that does not share it, and has no prefix worth keeping, goes first.
        """
        free = self._max_in_flight - len(self._in_flight)
        near = islice(tree.walk(self._cursor), max(free, _LOOKAHEAD_JOBS))
        following = next(filter(self._cache.ready, islice(near, free)), None)
        if following is None or self._cache.independent(following):
            return following
        others = (other for other in near if not worth_bytes(tree.wanted_bytes(other.job)))
        return next(filter(self._cache.independent, others), following)

    def _late(self, tree: PrefixTree, following: Pending | None) -> Pending | None:
        """The longest job, if it would finish after all other known work even if it started now."""
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
        if self._in_flight_need is None:
            records = [attempt.record for attempt in self._in_flight.values()]
            outputs = sum(self._costs.output(each) or 0.0 for each in records)
            self._in_flight_need = (sum(each.prompt_bytes for each in records), outputs)
        prompt_bytes, outputs = self._in_flight_need
        if self.shape.reuse in ("shares", "prefix cache"):
            prompt_bytes = self._cache.running.bytes + self._cache.running.extra_bytes(record)
        else:
            prompt_bytes += record.prompt_bytes
        needed = self._costs.tokens(prompt_bytes) + int(outputs + (self._costs.output(record) or 0.0))
        if needed > total and len(self._in_flight) < self.width:
            self._notes.setdefault(
                "cells",
                f"fewer than {self._width} jobs in flight while prompts are long: {len(self._in_flight) + 1} jobs "
                f"would need about {needed} of {total} KV cells and evict prefixes in use",
            )
        return needed <= total

    def _recompute_pays(self, node: PrefixNode, recompute_bytes: int, at: int) -> bool:
        """Whether to recompute a prefix in another slot. May add a note."""
        if self._fetching:
            return False  # the jobs being fetched may have other prefixes
        busy = max(1, len(self._in_flight))
        pays, assumed = self._costs.recompute_pays(node, recompute_bytes, at=at, busy=busy)
        if assumed is not None:
            self._notes.setdefault(assumed, assumed)
        return pays

    def _send(self, pick: Pick) -> Dispatch:
        """Record a job as sent."""
        record = pick.record
        tree = next(tree for tree in self._backlog.trees() if record.job in tree)
        if next(tree.walk(self._cursor)) is record:  # otherwise the job is out of order, and the cursor stays
            self._cursor = record.prefix_key
        leader = self.shape.reuse != "none" and tree.wanted_bytes(record.job) > pick.cached_bytes
        branches = tree.diverging(record.job, _DIVERGING_JOBS) if leader and self.shape.needs_branches else ()
        sent = Dispatch(
            record.job,
            pick.slot,
            pick.cached_bytes,
            self._costs.tokens(pick.cached_bytes),
            leader,
            pick.source_job,
            tuple(other.job for other in branches),
        )
        self._backlog.take(record.job)
        self._in_flight[record.job] = _InFlight(record, sent)
        if self._in_flight_need is not None:
            prompt_bytes, outputs = self._in_flight_need
            outputs += self._costs.output(record) or 0.0
            self._in_flight_need = (prompt_bytes + record.prompt_bytes, outputs)
        self._cache.sent(record)
        if pick.slot is not None:
            self._slots[pick.slot].running = record
        return sent

    # -- internal state ----------------------------------------------------------------------------------------------

    def _end(self, job: int, *, answered: bool) -> _InFlight:
        """Remove a job from those in flight. Without an answer, the content of its slot is unknown."""
        attempt = self._in_flight.pop(job)
        if attempt.sent.slot is not None:
            slot = self._slots[attempt.sent.slot]
            slot.running = None
            if attempt.started and not answered:
                slot.cached = None
        if self._cache.ended(attempt.record, answered=answered):
            self._correct_expected(job)
        return attempt

    def _correct_expected(self, ended: int) -> None:
        """Correct the expected reuse of jobs in flight that relied on the prompt of a job that ended too early."""
        found = self._cache.find_for_cold()
        for job, attempt in self._in_flight.items():
            if attempt.sent.source_job == ended and job in found:
                shared, source = found[job]
                attempt.sent = replace(
                    attempt.sent, expected_bytes=shared, expected_tokens=self._costs.tokens(shared), source_job=source
                )

    def _wait_reason(self) -> WaitReason:
        reasons: tuple[tuple[bool, WaitReason], ...] = (
            (not self._engine_up, "engine_down"),
            (not len(self._backlog) and not self._in_flight, "no_jobs"),
            (not len(self._backlog), "all_in_flight"),
            (not self.width, "interactive"),
            (len(self._in_flight) >= self._max_in_flight, "max_in_flight"),
            (self.shape.reuse == "slots", "recompute_too_costly"),
            (any(self._cache.cold), "prefix_pending"),
        )
        return next((reason for applies, reason in reasons if applies), "kv_cache_full")
