"""Assigns jobs as `tokenmill.jobs.sharding.allocator` does, with the same pure functions, on a table in memory.

Reads are not simulated: rows of a million jobs are created on demand, and pending ones are counted incrementally. Where
the product reads all rows of another worker to find out that there is nothing to take, that result is remembered. Does
not know engines or clocks; the cost of a turn belongs to the store.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from bench.simulation.engine import Work
from bench.simulation.table import Table, position_of

from tokenmill.jobs.models import QueuedJob
from tokenmill.jobs.scheduler.prefix_groups import WORTH_BYTES, chunk_bytes
from tokenmill.jobs.sharding.policy import (
    COUNTED_JOBS,
    MIN_ROWS,
    cut,
    elsewhere,
    fair,
    fair_share,
    halved,
    joined,
    speed_share,
)

_FINER = 2  # minimum works of a shard per slot
Range = tuple[int, int]
"""Positions: the first one and the end."""


@dataclass(slots=True, eq=False)
class Held:
    """A shard: pending jobs in a range of positions."""

    first: int
    end: int
    jobs: int  # pending jobs when it was created
    ahead: bool = False  # assigned while the worker had other work
    waiting: dict[int, Work] = field(default_factory=dict)  # pending works by number
    pending: int = 0  # jobs of those
    kept: int = 0  # with at most this number of pending jobs, none of it is worth taking


@dataclass(slots=True, eq=False)
class Sharer:
    """A worker and its shards."""

    seat: int
    lanes: int
    held: list[Held] = field(default_factory=list)
    behind: QueuedJob | None = None  # the last job of its latest shard
    began_s: float | None = None
    jobs: int = 0  # total jobs received
    jobs_s: float | None = None  # jobs per second when it last came back for more
    in_vain: tuple[int, bool] | None = None  # the change at which it found nothing, and whether it had nothing


_OWN_BYTES = 7  # of a place, after the prefixes: see `table.Table.row`


def quickly_joined(one: QueuedJob, other: QueuedJob) -> int:
    """Same as `shard_policy.joined` of two rows of a table, but faster for equal prefixes."""
    if one.place[:-_OWN_BYTES] != other.place[:-_OWN_BYTES]:
        return joined(one, other)
    return min(chunk_bytes(len(one.place) - _OWN_BYTES), one.prompt_bytes, other.prompt_bytes)


Moved = Callable[[Sharer, Sequence[Work], Sequence[Work]], None]
"""A worker lost some works to another one, and has others instead."""


class Sharing:
    """Assigns the jobs of one batch to all workers. All methods mutate."""

    def __init__(self, table: Table, most_jobs: int, moved: Moved) -> None:
        self._table = table
        self._most_jobs = most_jobs
        self._moved = moved
        self._free: list[Range] = [(0, table.jobs)] if table.jobs else []
        self.pending = table.jobs
        self.runners: list[Sharer] = []
        self.stretches = self.taken = 0
        self.changes = 0  # count of changes after which more may be available
        self._homes: dict[int, Held] = {}  # number of pending works

    def join(self, runner: Sharer) -> None:
        """A worker has started."""
        self.runners.append(runner)
        self.changes += 1

    def leave(self, runner: Sharer, lost: Iterable[Range]) -> None:
        """The lease of a worker has expired: its jobs are free, including those in flight."""
        self.runners.remove(runner)
        self.changes += 1
        for held in runner.held:
            for number, work in held.waiting.items():
                del self._homes[number]
                insort(self._free, (work.first, work.end))
        for first, end in lost:
            self.pending += end - first
            insort(self._free, (first, end))
        runner.held.clear()

    def sent(self, work: Work) -> None:
        """A work is no longer pending."""
        held = self._homes.pop(work.number)
        del held.waiting[work.number]
        held.pending -= work.jobs
        self.pending -= work.jobs

    def window(self, runner: Sharer, now_s: float, own: int, *, again: bool) -> list[Work]:
        """Assign more works to a worker that has only `own` jobs left; `again`: it has none at all."""
        self._clock_in(runner, now_s)
        if runner.in_vain == (self.changes, again):
            return []  # nothing has changed since
        found = list[Work]()
        while own < runner.lanes and (held := self._next(runner, again=again)) is not None:
            found += held.waiting.values()
            own += held.jobs
        if not own and again and (taken := self._take_over(runner)) is not None:
            self.taken += 1
            found += taken.waiting.values()
        runner.in_vain = None if found else (self.changes, again)
        return found

    def _next(self, runner: Sharer, *, again: bool) -> Held | None:
        """The next free shard."""
        runner.held = [held for held in runner.held if held.pending]
        count = len(self.runners)
        speed = speed_share(runner.jobs_s, [each.jobs_s for each in self.runners])
        most = fair(max(0, self.pending - self._claimed()), count, runner.lanes, speed=speed)
        whole = fair_share(self.pending, count, speed=speed)
        rows, more = self._begin(runner, max(most, whole, MIN_ROWS) + 1)
        jobs = cut(rows, most, more=more, whole=whole, workers=count)
        if not jobs:
            return None
        ahead = not again and runner.behind is not None
        ranges = self._taken(position_of(rows[0]), position_of(rows[jobs - 1]) + 1)
        return self._give(runner, ranges, rows[jobs - 1], ahead=ahead)

    def _begin(self, runner: Sharer, limit: int) -> tuple[list[QueuedJob], bool]:
        """Free jobs: the rest of its own prefix, else the first that are not the rest of another worker's."""
        own = runner.behind
        if own is not None:
            behind, _ = self._rows(1, position_of(own) + 1)
            if behind and joined(own, behind[0]) >= WORTH_BYTES:
                return self._rows(limit, position_of(own) + 1)
        rows, more = self._rows(limit, 0)
        if not rows:
            return rows, more
        others = (each.behind for each in self.runners if each is not runner)
        near = [each for each in others if each is not None and each.key < rows[0].key]
        # they depend only on what they share with the first row
        alike = {joined(each, rows[0]): each.place for each in near if each.place[:4] == rows[0].place[:4]}
        return rows[max((elsewhere(place, rows) for place in alike.values()), default=0) :], more

    def _rows(self, limit: int, after: int) -> tuple[list[QueuedJob], bool]:
        """The first free jobs from a position, up to the next shard; and whether they continue."""
        places = list[int]()
        end = None
        for first, behind in self._free:
            if behind <= after:
                continue
            if end is None:
                start = max(first, after)
                end = min(
                    (held.first for each in self.runners for held in each.held if held.pending and held.first > start),
                    default=self._table.jobs,
                )
            if first >= end or len(places) > limit:
                break
            places += range(max(first, after), min(behind, max(first, after) + limit + 1 - len(places)))
        return [self._table.row(place) for place in places[:limit]], len(places) > limit

    def _taken(self, first: int, end: int) -> list[Range]:
        """Take the free works between two positions."""
        found = [(max(first, start), min(end, stop)) for start, stop in self._free if start < end and stop > first]
        left = [each for each in self._free if each[0] >= end or each[1] <= first]
        left += [(start, first) for start, stop in self._free if start < first < stop]
        left += [(end, stop) for start, stop in self._free if start < end < stop]
        self._free = sorted(left)
        return found

    def _take_over(self, runner: Sharer) -> Held | None:
        """Take what another worker got in advance and has not begun, else the end of the largest suitable shard."""
        others = [(each, held) for each in self.runners if each is not runner for held in each.held if held.pending]
        others.sort(key=lambda each: -each[1].pending)
        for owner, held in others:
            if held.ahead and held.pending == held.jobs:
                works = list(held.waiting.values())
                owner.held.remove(held)
                owner.jobs -= held.jobs
                return self._move(runner, owner, works, [], [(work.first, work.end) for work in works])
        for owner, held in others:
            if held.pending <= held.kept:
                continue
            places = [
                place
                for work in sorted(held.waiting.values(), key=lambda work: work.first)
                for place in range(work.first, work.end)
            ]
            rows = [self._table.row(place) for place in places]
            stay = halved(rows, speed=speed_share(runner.jobs_s, [runner.jobs_s, owner.jobs_s]) or 0.5)
            if stay is None:
                held.kept = held.pending
                continue
            return self._split(runner, owner, held, places[stay])
        return None

    def _split(self, runner: Sharer, owner: Sharer, held: Held, at: int) -> Held:
        """Assign a shard from a position on to another worker."""
        gone = [work for work in held.waiting.values() if work.end > at]
        kept = [self._table.work(work.first, at) for work in gone if work.first < at]
        ranges = [(max(at, work.first), work.end) for work in gone]
        for work in gone:
            del held.waiting[work.number]
        held.waiting.update((work.number, work) for work in kept)
        self._homes.update((work.number, held) for work in kept)
        held.pending -= sum(end - first for first, end in ranges)
        held.jobs = held.pending
        held.end = at
        owner.jobs -= sum(end - first for first, end in ranges)
        return self._move(runner, owner, gone, kept, ranges)

    def _move(
        self, runner: Sharer, owner: Sharer, gone: Sequence[Work], kept: Sequence[Work], ranges: Sequence[Range]
    ) -> Held:
        for work in gone:
            del self._homes[work.number]
        self._moved(owner, gone, kept)
        return self._give(runner, sorted(ranges), self._table.row(max(end for _, end in ranges) - 1))

    def _give(self, runner: Sharer, ranges: Sequence[Range], last: QueuedJob, *, ahead: bool = False) -> Held:
        jobs = sum(end - first for first, end in ranges)
        held = Held(ranges[0][0], ranges[-1][1], jobs, ahead, pending=jobs)
        most = max(1, min(self._most_jobs, jobs // (_FINER * runner.lanes)))
        for first, end in ranges:
            held.waiting.update((work.number, work) for work in self._table.works(first, end, most))
        self._homes.update(dict.fromkeys(held.waiting, held))
        runner.jobs += jobs
        runner.behind = last
        runner.held.append(held)
        self.stretches += 1
        self.changes += 1
        return held

    def _clock_in(self, runner: Sharer, now_s: float) -> None:
        """A worker comes for more: its works are done, or nearly."""
        if runner.began_s is None:
            runner.began_s = now_s
        elif runner.jobs > 0 and now_s > runner.began_s:
            runner.jobs_s = runner.jobs / (now_s - runner.began_s)

    def _claimed(self) -> int:
        """Approximate number of pending jobs in shards."""
        every = (held for each in self.runners for held in each.held)
        return sum(held.pending if held.pending < COUNTED_JOBS else held.jobs for held in every)
