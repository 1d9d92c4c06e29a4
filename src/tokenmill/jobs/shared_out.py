"""The pending jobs of one store shared out among the workers of one process.

        worker a   [digest 1 ........]              [digest 4 ..]
        worker b                     [digest 2 .....]            [digest 5 | taken over by c ...]
                   order of the store ------------------------------------------------------------>

Every worker has stretches of the store's order; what lies in none is free. A worker that has read all of its own gets
the next free stretch, behind the last one of its own if that was cut inside a head; when nothing is free, a part of
another's. What becomes pending again (a failure, an engine that died) belongs to who has the stretch it lies in.

A few thousand rows are read at a time, however many there are. Nothing is kept on a disk: that a job is taken once is
the store's affair, and workers of other processes do not see any of this.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tokenmill.jobs.forest import WORTH_BYTES
from tokenmill.jobs.job import Position, Waiting
from tokenmill.jobs.portion import Portion
from tokenmill.jobs.reader import Reader
from tokenmill.jobs.stretches import MOST_JOBS, Stretch, before, cut, elsewhere, fair, fair_share, halved, joined

_PAGE = 4096  # rows read at once
_LOOK = 256  # rows at least that are looked at for the end of a head
_COUNTED = 512  # pending jobs of a stretch that are counted; one with more counts as untouched
_LEAST_SPEED = 0.05  # of all together, that a worker is taken to have


@dataclass(slots=True, eq=False)
class Held:
    """A stretch and how far its worker has read it."""

    stretch: Stretch
    read: Position | None = None
    ahead: bool = False  # it was given while the worker had something else to do


@dataclass(slots=True, eq=False)
class Sharer:
    """A worker and what it has."""

    name: str
    lanes: int
    held: list[Held] = field(default_factory=list)
    behind: Waiting | None = None  # the last job of what it got last
    began_s: float | None = None
    jobs: int = 0  # of all that it got
    jobs_s: float | None = None  # a second, when it last came back for more; None: it has not yet


class SharedOut:
    """Who has which stretch. Methods may be called from several threads."""

    def __init__(self, store: Reader, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._turn = threading.Lock()
        self._workers: list[Sharer] = []

    def portion(self, name: str, lanes: int) -> Portion:
        """For one more worker with so many lanes; its stretches are anyone's again when it is closed."""
        worker = Sharer(name, lanes)
        with self._turn:
            self._workers.append(worker)
        return _Portion(self, worker)

    @property
    def stretches(self) -> tuple[tuple[str, Stretch], ...]:
        """All of them with the names of their workers, in the order of the store. Mutates nothing."""
        with self._turn:
            every = [(worker.name, held.stretch) for worker in self._workers for held in worker.held]
        return tuple(sorted(every, key=lambda each: each[1].first))

    # -- for portions; `may_take` mutates nothing ----------------------------------------------------------------------

    def window(self, worker: Sharer, batches: Sequence[int], *, again: bool, limit: int) -> list[Waiting]:
        """The next jobs of a worker, from more stretches where it has too few to be busy with."""
        with self._turn:
            if worker not in self._workers:
                return []  # a call that was on its way
            if again:
                for held in worker.held:
                    held.read = None
            rows = self._unread(worker, batches, limit)
            if len(rows) < min(limit, worker.lanes):
                self._clock_in(worker)
            while len(rows) < min(limit, worker.lanes) and self._next(worker, batches, again=again):
                rows += self._unread(worker, batches, limit - len(rows))
            # Only who has nothing at all takes from others: two that have a little would take it from each other.
            if not rows and again and self._take_over(worker, batches):
                rows = self._unread(worker, batches, limit)
            return rows

    def may_take(self, worker: Sharer, position: Position) -> bool:
        """Whether a job is no other worker's."""
        with self._turn:
            others = (held.stretch for each in self._workers if each is not worker for held in each.held)
            return not any(position in stretch for stretch in others)

    def close(self, worker: Sharer) -> None:
        """A worker is gone."""
        with self._turn:
            worker.held.clear()
            self._workers = [each for each in self._workers if each is not worker]

    # -- reading: mutates nothing but how far stretches are read -------------------------------------------------------

    def _unread(self, worker: Sharer, batches: Sequence[int], limit: int) -> list[Waiting]:
        """The next pending jobs of a worker's stretches."""
        rows = list[Waiting]()
        for held in worker.held:
            if held.stretch.first[1] in batches and len(rows) < limit:
                new = self._pending(held.stretch, limit - len(rows), after=held.read)
                held.read = new[-1].key if new else held.read
                rows += new
        return rows

    def _pending(self, stretch: Stretch, limit: int, *, after: Position | None = None) -> list[Waiting]:
        """Pending jobs of a stretch."""
        reached = after or before(stretch.first)
        return self._read([stretch.first[1]], limit, after=reached, inside=stretch.__contains__)[0]

    def _free(self, batches: Sequence[int], limit: int, *, after: Position | None) -> tuple[list[Waiting], bool]:
        """The first pending jobs behind a position that lie in no stretch, up to the next one; whether they go on."""
        every = sorted((held.stretch for each in self._workers for held in each.held), key=lambda each: each.first)
        first = self._store.waiting(batches, after=after, limit=1)
        while first and (around := next((each for each in every if first[0].key in each), None)) is not None:
            first = self._store.waiting(batches, after=around.last, limit=1)
        if not first:
            return [], False
        end = next((each.first for each in every if each.first > first[0].key), None)
        return self._read(
            batches, limit, after=before(first[0].key), inside=lambda position: end is None or position < end
        )

    def _read(
        self, batches: Sequence[int], limit: int, *, after: Position, inside: Callable[[Position], bool]
    ) -> tuple[list[Waiting], bool]:
        """Pending jobs behind a position as long as they are inside; whether there may be more."""
        rows = list[Waiting]()
        while len(rows) < limit:
            size = min(_PAGE, limit - len(rows))
            page = self._store.waiting(batches, after=after, limit=size)
            rows += [row for row in page if inside(row.key)]
            if len(page) < size or not inside(page[-1].key):
                return rows, False
            after = page[-1].key
        return rows, True

    # -- sharing out: mutates workers ----------------------------------------------------------------------------------

    def _next(self, worker: Sharer, batches: Sequence[int], *, again: bool) -> bool:
        """Give a worker the next free stretch; whether there was one."""
        worker.held = [held for held in worker.held if self._pending(held.stretch, 1)]
        workers, speed = len(self._workers), self._speed(worker)
        pending = sum(self._store.batch(batch).counts.pending for batch in batches)
        most = fair(max(0, pending - self._claimed(batches)), workers, worker.lanes, speed=speed)
        whole = fair_share(pending, workers, speed=speed)  # others have still to do what they have
        rows, more = self._begin(worker, batches, max(most, whole, _LOOK) + 1)
        jobs = cut(rows, most, more=more, whole=whole, workers=workers)
        if not jobs:
            return False
        ahead = not again and worker.behind is not None
        self._give(worker, Stretch(rows[0].key, rows[jobs - 1].key, jobs), rows[jobs - 1], ahead=ahead)
        return True

    def _begin(self, worker: Sharer, batches: Sequence[int], limit: int) -> tuple[list[Waiting], bool]:
        """Free jobs for a worker: the rest of its own head, else the first that are not the rest of another's."""
        rows, more = self._free(batches, limit, after=None)
        if not rows:
            return rows, more
        own = worker.behind
        if own is not None and _alike(own, rows[0]):
            behind, go_on = self._free(batches, limit, after=own.key)
            if behind and _alike(own, behind[0]) and joined(own, behind[0]) >= WORTH_BYTES:
                return behind, go_on
        others = [each.behind for each in self._workers if each is not worker]
        near = [each for each in others if each is not None and _alike(each, rows[0]) and each.key < rows[0].key]
        return rows[max((elsewhere(each.place, rows) for each in near), default=0) :], more

    def _take_over(self, worker: Sharer, batches: Sequence[int]) -> bool:
        """Give a worker what another got in advance and has not begun, else the last part of the largest stretch where
        that is worth it; whether there was such."""
        others = [(each, held) for each in self._workers if each is not worker for held in each.held
                  if held.stretch.first[1] in batches]  # fmt: skip
        left = [(self._pending(held.stretch, MOST_JOBS), owner, held) for owner, held in others]
        left.sort(key=lambda each: -len(each[0]))
        for rows, owner, held in left:
            if held.ahead and rows and len(rows) == held.stretch.jobs:
                owner.held.remove(held)
                owner.jobs -= held.stretch.jobs
                self._give(worker, held.stretch, rows[-1])
                return True
        for rows, owner, held in left:
            stay = halved(rows, speed=_part(worker.jobs_s, [worker.jobs_s, owner.jobs_s]) or 0.5)
            if stay is None:
                continue
            given = Stretch(rows[stay].key, held.stretch.last, len(rows) - stay)
            held.stretch = replace(held.stretch, last=rows[stay - 1].key, jobs=stay)
            owner.jobs -= given.jobs
            self._give(worker, given, rows[-1])
            return True
        return False

    def _clock_in(self, worker: Sharer) -> None:
        """A worker comes for more: all it got is done, or nearly."""
        now_s = self._clock()
        if worker.began_s is None:
            worker.began_s = now_s
        elif worker.jobs > 0 and now_s > worker.began_s:
            worker.jobs_s = worker.jobs / (now_s - worker.began_s)

    def _give(self, worker: Sharer, stretch: Stretch, last: Waiting, *, ahead: bool = False) -> None:
        worker.jobs += stretch.jobs
        worker.behind = last
        worker.held.append(Held(stretch, ahead=ahead))

    def _claimed(self, batches: Sequence[int]) -> int:
        """About how many pending jobs lie in stretches. Mutates nothing."""
        every = [held.stretch for each in self._workers for held in each.held if held.stretch.first[1] in batches]
        left = [(len(self._pending(stretch, _COUNTED)), stretch.jobs) for stretch in every]
        return sum(found if found < _COUNTED else jobs for found, jobs in left)

    def _speed(self, worker: Sharer) -> float | None:
        """A worker's part of the speed of all; None: it is not known. Mutates nothing."""
        return _part(worker.jobs_s, [each.jobs_s for each in self._workers])


class _Portion:
    """One worker's: see `portion.Portion`."""

    def __init__(self, shared: SharedOut, worker: Sharer) -> None:
        self._shared, self._worker = shared, worker

    def window(self, batches: Sequence[int], *, again: bool, limit: int) -> list[Waiting]:
        return self._shared.window(self._worker, batches, again=again, limit=limit)

    def has(self, waiting: Waiting) -> bool:
        return self._shared.may_take(self._worker, waiting.key)

    def tend(self) -> None:
        pass  # it lives in this process

    def close(self) -> None:
        self._shared.close(self._worker)


def _alike(one: Waiting, other: Waiting) -> bool:
    """Whether two jobs are of one batch and priority: only these are neighbours."""
    return one.key[:2] == other.key[:2]


def _part(own: float | None, every: Sequence[float | None]) -> float | None:
    """One of some speeds as a part of all; those that are unknown are taken as the mean of the others."""
    known = [speed for speed in every if speed is not None]
    if own is None or not known:
        return None
    total = len(every) * sum(known) / len(known)
    return min(1 - _LEAST_SPEED, max(_LEAST_SPEED, own / total)) if len(every) > 1 else 1.0
