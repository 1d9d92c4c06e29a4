"""The pending jobs of one store shared out among the workers of one process.

        worker a   [digest 1 ........]              [digest 4 ..]
        worker b                     [digest 2 .....]            [digest 5 | taken over by c ...]
                   order of the store ------------------------------------------------------------>

Every worker has stretches of the store's order; what lies in none is free. A worker that has read all of its own gets
the next free stretch, behind the last one of its own if that was cut inside a head; when nothing is free, a part of
another's. What becomes pending again (a failure, an engine that died) belongs to who has the stretch it lies in. What
is too long for a worker is none of its business any more, wherever it lies.

A few thousand rows are read at a time, however many there are. Nothing is kept on a disk: that a job is taken once is
the store's affair, and workers of other processes do not see any of this.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from tokenmill.errors import TooLong
from tokenmill.jobs.forest import WORTH_BYTES
from tokenmill.jobs.models import JobId, SortKey, Waiting
from tokenmill.jobs.reader import Reader
from tokenmill.jobs.retries import CutShort
from tokenmill.jobs.shard_view import ShardView, WorkerSpec, most_room, of_the_largest
from tokenmill.jobs.shards import MOST_JOBS, Shard, before, cut, elsewhere_of, fair, fair_share, halved, joined

_PAGE = 4096  # rows read at once
_LOOK = 256  # rows at least that are looked at for the end of a head
_COUNTED = 512  # pending jobs of a stretch that are counted; one with more counts as untouched
_LEAST_SPEED = 0.1  # of an equal share, that a worker is taken to have
_WALK = 8  # pages of jobs that are too long for a worker, read at once in search of one that is not


@dataclass(slots=True, eq=False)
class HeldShard:
    """A stretch and how far its worker has read it."""

    stretch: Shard
    read: SortKey | None = None
    ahead: bool = False  # it was given while the worker had something else to do


@dataclass(slots=True, eq=False)
class WorkerShards:
    """A worker and what it has."""

    name: str
    lanes: int
    held: list[HeldShard] = field(default_factory=list)
    behind: Waiting | None = None  # the last job of what it got last
    began_s: float | None = None
    jobs: int = 0  # of all that it got
    jobs_s: float | None = None  # a second, when it last came back for more; None: it has not yet
    room: int | None = None  # tokens of a job that it can do at most; None: not known, or not yet
    walked: SortKey | None = None  # how far it looked for a free job that is not too long for it; None: to the end


class ShardAllocator:
    """Who has which stretch. Methods may be called from several threads."""

    def __init__(
        self,
        store: Reader,
        *,
        clock: Callable[[], float] = time.monotonic,
        coming: Callable[[], Iterable[int | None]] = tuple,
    ) -> None:
        """`coming`: the contexts of workers that will be there soon, in tokens; None: one that is not known."""
        self._store = store
        self._clock = clock
        self._coming = coming
        self._turn = threading.Lock()
        self._workers: list[WorkerShards] = []
        self._needs: dict[int, TooLong] = {}  # jobs that were too long for a worker

    def portion(self, name: str, lanes: int) -> ShardView:
        """For one more worker with so many lanes; its stretches are anyone's again when it is closed."""
        worker = WorkerShards(name, lanes)
        with self._turn:
            self._workers.append(worker)
        return _Portion(self, worker)

    @property
    def stretches(self) -> tuple[tuple[str, Shard], ...]:
        """All of them with the names of their workers, in the order of the store. Mutates nothing."""
        with self._turn:
            every = [(worker.name, held.stretch) for worker in self._workers for held in worker.held]
        return tuple(sorted(every, key=lambda each: each[1].first))

    # -- for portions; `may_take` mutates nothing ----------------------------------------------------------------------

    def window(self, worker: WorkerShards, batches: Sequence[int], *, again: bool, limit: int) -> list[Waiting]:
        """The next jobs of a worker, from more stretches where it has too few to be busy with."""
        with self._turn:
            if worker not in self._workers:
                return []  # a call that was on its way
            if again:
                for held in worker.held:
                    held.read = None
            rows = self._unread(worker, batches, limit)
            enough = min(limit, worker.lanes)
            if len(rows) < enough:
                self._clock_in(worker)
            while len(rows) < enough and self._next(worker, batches, again=again):
                rows += self._unread(worker, batches, limit - len(rows))
            # Only who has nothing at all takes from others: two that have a little would take it from each other.
            if not rows and again and self._take_over(worker, batches):
                rows = self._unread(worker, batches, limit)
            return rows

    def may_take(self, worker: WorkerShards, position: SortKey) -> bool:
        """Whether a job is no other worker's, nor too long for this one."""
        with self._turn:
            if not self._fits(worker, position):
                return False
            others = (held.stretch for each in self._workers if each is not worker for held in each.held)
            return not any(position in stretch for stretch in others)

    def ready(self, worker: WorkerShards, means: WorkerSpec, lanes: int) -> None:
        """What a worker can do."""
        with self._turn:
            worker.room = means.room
            worker.lanes = lanes

    def too_long(self, worker: WorkerShards, job: int, error: TooLong) -> TooLong | None:
        """A job is too long for a worker: it is left to others (None), or nobody can do it."""
        with self._turn:
            # What an engine refuses says more than what it is said to take.
            room = min(error.context_tokens, error.needed_tokens - 1)
            worker.room = room if worker.room is None else min(room, worker.room)
            largest = most_room(self._rooms(JobId.batch(job)))
            if largest < error.needed_tokens:
                return of_the_largest(error, largest)
            self._needs[job] = error
            return None

    def hopeless(self) -> list[tuple[int, TooLong]]:
        """Jobs that are too long for all that live; they are told of once.

        Where only the answer was, a short one is better than none: it is given out again.
        """
        with self._turn:
            rooms = {batch: most_room(self._rooms(batch)) for batch in {JobId.batch(job) for job in self._needs}}
            found = [
                (job, of_the_largest(error, rooms[JobId.batch(job)]))
                for job, error in self._needs.items()
                if rooms[JobId.batch(job)] < error.needed_tokens
            ]
            cut = {job for job, _ in found if isinstance(self._needs.pop(job), CutShort)}
            return [(job, error) for job, error in found if job not in cut]

    def close(self, worker: WorkerShards) -> None:
        """A worker is gone."""
        with self._turn:
            worker.held.clear()
            self._workers = [each for each in self._workers if each is not worker]

    # -- what is too long for whom: mutates nothing --------------------------------------------------------------------

    def _fits(self, worker: WorkerShards, position: SortKey) -> bool:
        error = self._needs.get(position[3])
        return error is None or worker.room is None or error.needed_tokens <= worker.room

    def _rooms(self, batch: int) -> list[int | None]:
        """The contexts of all that work on a batch, or will soon."""
        del batch  # all have the same
        return [*(each.room for each in self._workers), *self._coming()]

    # -- reading: mutates nothing but how far was read -----------------------------------------------------------------

    def _unread(self, worker: WorkerShards, batches: Sequence[int], limit: int) -> list[Waiting]:
        """The next pending jobs of a worker's stretches, none behind one of a better priority that is free."""
        rows = list[Waiting]()
        unread = sorted(
            (held for held in worker.held if held.stretch.first[1] in batches), key=lambda held: held.stretch.first
        )
        free = self._first_free(worker, batches, self._taken, None) if unread else None
        for held in unread:
            if len(rows) < limit and (free is None or held.stretch.first[0] <= free.rank):
                new = self._pending(worker, held.stretch, limit - len(rows), after=held.read)
                held.read = new[-1].key if new else held.read
                rows += new
        return rows

    def _pending(
        self, worker: WorkerShards, stretch: Shard, limit: int, *, after: SortKey | None = None
    ) -> list[Waiting]:
        """Pending jobs of a stretch, for a worker that may not be able to do all of them."""
        rows = list[Waiting]()
        reached = after or before(stretch.first)
        more = True
        while more and len(rows) < limit:
            size = min(limit - len(rows), stretch.jobs + 1)  # one more than there should be shows that it ends
            found, more = self._read([stretch.first[1]], size, after=reached, inside=stretch.__contains__)
            rows += [row for row in found if self._fits(worker, row.key)]
            reached = found[-1].key if found else reached
        return rows

    def _several(self, worker: WorkerShards, stretches: Sequence[Shard]) -> list[list[Waiting]]:
        """Pending jobs of each of some stretches, for a worker that may not be able to do all of them."""
        return [self._pending(worker, stretch, MOST_JOBS) for stretch in stretches]

    def _counts(self, every: Sequence[tuple[WorkerShards, Shard]], most: int) -> list[int]:
        """How many pending jobs each stretch has that a worker can do, counted up to so many."""
        return [len(self._pending(worker, stretch, most)) for worker, stretch in every]

    def _free(
        self, worker: WorkerShards, batches: Sequence[int], limit: int, *, after: SortKey | None
    ) -> tuple[list[Waiting], bool]:
        """The first pending jobs behind a position that lie in no stretch, up to the next one or to one that is too
        long for the worker; whether they go on."""
        every = self._taken
        first = self._first_free(worker, batches, every, after)
        if first is None:
            return [], False
        end = next((each.first for each in every if each.first > first.key), None)
        return self._read(
            batches,
            limit,
            after=before(first.key),
            inside=lambda position: (end is None or position < end) and self._fits(worker, position),
        )

    @property
    def _taken(self) -> list[Shard]:
        """All stretches, in their order."""
        return sorted((held.stretch for each in self._workers for held in each.held), key=lambda each: each.first)

    def _first_free(
        self, worker: WorkerShards, batches: Sequence[int], every: Sequence[Shard], after: SortKey | None
    ) -> Waiting | None:
        """The first pending job behind a position that a worker can do and that is in no stretch; None: there is none
        as far as was looked, and the next look goes on from there."""
        walked = worker.walked
        worker.walked = None
        after = after if walked is None or (after is not None and after > walked) else walked
        pages = 0
        while page := self._store.waiting(batches, after=after, limit=_PAGE if pages else 1):
            if pages > _WALK:
                worker.walked = after
                return None
            for row in page:
                after = row.key
                if (around := next((each for each in every if row.key in each), None)) is not None:
                    after = around.last
                    break
                if self._fits(worker, row.key):
                    return row
            else:
                pages += 1
        return None

    def _read(
        self, batches: Sequence[int], limit: int, *, after: SortKey, inside: Callable[[SortKey], bool]
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

    def _next(self, worker: WorkerShards, batches: Sequence[int], *, again: bool) -> bool:
        """Give a worker the next free stretch; whether there was one."""
        left = self._counts([(worker, held.stretch) for held in worker.held], 1)
        worker.held = [held for held, jobs in zip(worker.held, left, strict=True) if jobs]
        workers = len(self._workers)
        speed = self._speed(worker)
        pending = sum(self._store.pending(batch) for batch in batches)
        most = fair(max(0, pending - self._claimed(batches)), workers, worker.lanes, speed=speed)
        whole = fair_share(pending, workers, speed=speed)  # others have still to do what they have
        rows, more = self._begin(worker, batches, max(most, whole, _LOOK) + 1)
        jobs = cut(rows, most, more=more, whole=whole, workers=workers)
        if not jobs:
            return False
        ahead = not again and worker.behind is not None
        self._give(worker, Shard(rows[0].key, rows[jobs - 1].key, jobs), rows[jobs - 1], ahead=ahead)
        return True

    def _begin(self, worker: WorkerShards, batches: Sequence[int], limit: int) -> tuple[list[Waiting], bool]:
        """Free jobs for a worker: the rest of its own head, else the first that are not the rest of another's."""
        rows, more = self._free(worker, batches, limit, after=None)
        if not rows:
            return rows, more
        own = worker.behind
        if own is not None and _alike(own, rows[0]):
            behind, go_on = self._free(worker, batches, limit, after=own.key)
            if behind and _alike(own, behind[0]) and joined(own, behind[0]) >= WORTH_BYTES:
                return behind, go_on
        others = [each.behind for each in self._workers if each is not worker]
        near = [each for each in others if each is not None and _alike(each, rows[0]) and each.key < rows[0].key]
        return rows[elsewhere_of((each.place for each in near), rows) :], more

    def _take_over(self, worker: WorkerShards, batches: Sequence[int]) -> bool:
        """Give a worker what another got in advance and has not begun, else the last part of the largest stretch where
        that is worth it; whether there was such."""
        others = [
            (each, held)
            for each in self._workers
            if each is not worker
            for held in each.held
            if held.stretch.first[1] in batches
        ]
        counts = self._counts([(worker, held.stretch) for _, held in others], MOST_JOBS)
        left = [(jobs, *each) for jobs, each in zip(counts, others, strict=True) if jobs]
        left.sort(key=lambda each: -each[0])
        unbegun = [(jobs, owner, held) for jobs, owner, held in left if held.ahead and jobs == held.stretch.jobs]
        for rows, owner, held in self._read_in_turn(worker, unbegun):
            if len(rows) == held.stretch.jobs:  # its owner may begin at any moment
                owner.held.remove(held)
                owner.jobs -= held.stretch.jobs
                self._give(worker, held.stretch, rows[-1])
                return True
        for rows, owner, held in self._read_in_turn(worker, left):
            stay = halved(rows, speed=_part(worker.jobs_s, [worker.jobs_s, owner.jobs_s]) or 0.5)
            if stay is None:
                continue
            given = Shard(rows[stay].key, held.stretch.last, len(rows) - stay)
            held.stretch = replace(held.stretch, last=rows[stay - 1].key, jobs=stay)
            owner.jobs -= given.jobs
            self._give(worker, given, rows[-1])
            return True
        return False

    def _read_in_turn(
        self, worker: WorkerShards, left: Sequence[tuple[int, WorkerShards, HeldShard]]
    ) -> Iterator[tuple[list[Waiting], WorkerShards, HeldShard]]:
        """Stretches of which the numbers of pending jobs are known with these jobs, about a page at a time."""
        start = 0
        while start < len(left):
            end = start
            jobs = 0
            while end < len(left) and (end == start or jobs + left[end][0] <= _PAGE):
                jobs += left[end][0]
                end += 1
            group = left[start:end]
            found = self._several(worker, [held.stretch for *_, held in group])
            yield from ((rows, owner, held) for rows, (_, owner, held) in zip(found, group, strict=True))
            start = end

    def _clock_in(self, worker: WorkerShards) -> None:
        """A worker comes for more: all it got is done, or nearly."""
        now_s = self._clock()
        if worker.began_s is None:
            worker.began_s = now_s
        elif worker.jobs > 0 and now_s > worker.began_s:
            worker.jobs_s = worker.jobs / (now_s - worker.began_s)

    def _give(self, worker: WorkerShards, stretch: Shard, last: Waiting, *, ahead: bool = False) -> None:
        worker.jobs += stretch.jobs
        worker.behind = last
        worker.held.append(HeldShard(stretch, ahead=ahead))

    def _claimed(self, batches: Sequence[int]) -> int:
        """About how many pending jobs lie in stretches. Mutates nothing."""
        every = [
            (each, held.stretch) for each in self._workers for held in each.held if held.stretch.first[1] in batches
        ]
        left = zip(self._counts(every, _COUNTED), every, strict=True)
        return sum(found if found < _COUNTED else stretch.jobs for found, (_, stretch) in left)

    def _speed(self, worker: WorkerShards) -> float | None:
        """A worker's part of the speed of all; None: it is not known. Mutates nothing."""
        return _part(worker.jobs_s, [each.jobs_s for each in self._workers])


class _Portion:
    """One worker's: see `portion.Portion`."""

    def __init__(self, shared: ShardAllocator, worker: WorkerShards) -> None:
        self._shared = shared
        self._worker = worker

    def ready(self, means: WorkerSpec, lanes: int) -> None:
        self._shared.ready(self._worker, means, lanes)

    def window(self, batches: Sequence[int], *, again: bool, limit: int) -> list[Waiting]:
        return self._shared.window(self._worker, batches, again=again, limit=limit)

    def has(self, waiting: Waiting) -> bool:
        return self._shared.may_take(self._worker, waiting.key)

    def too_long(self, job: int, error: TooLong) -> TooLong | None:
        return self._shared.too_long(self._worker, job, error)

    def hopeless(self) -> list[tuple[int, TooLong]]:
        return self._shared.hopeless()

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
    least = _LEAST_SPEED / len(every)
    return min(1 - least, max(least, own / total)) if len(every) > 1 else 1.0
