"""The pending jobs of a store shared out among runners on several hosts: `shared_out` with its state on the server.

Who has which stretch is in the tables of runners and stretches. One runner at a time reads them, chooses and writes
down what it chose; what a runner had goes with it when its lease is over. How far it has read, and which jobs are too
long for it, is its own affair: others meet that once themselves. How long those may be that it can do, all know.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tokenmill.errors import TooLong
from tokenmill.jobs.backend import DatabaseBackend
from tokenmill.jobs.coordination import Coordinator
from tokenmill.jobs.models import SortKey, Waiting
from tokenmill.jobs.shard_allocator import HeldShard, ShardAllocator, WorkerShards
from tokenmill.jobs.shard_view import ShardView, WorkerSpec
from tokenmill.jobs.shards import MOST_JOBS, Between, Shard, gaps
from tokenmill.jobs.store import Store

_ALLOT = -1  # the number of a lock; see `leases`
_SPAN = ((0, "rank"), (2, "place"), (3, "id"))  # of a position, within its batch


class LeasedShardAllocator(ShardAllocator):
    """Who has which stretch, as this runner sees it when it has its turn."""

    def __init__(self, store: Store, database: DatabaseBackend, standing: Coordinator, lanes: int) -> None:
        super().__init__(store)
        self._database = database
        self._standing = standing
        self._runner = standing.id
        self._known: dict[int, HeldShard] = {}  # stretches by their numbers in the table
        self._means: WorkerSpec | None = None
        self._stale = True
        self._closed = False
        self.own = WorkerShards(str(self._runner), lanes)
        database.whole(self._join)

    def window(self, worker: WorkerShards, batches: Sequence[int], *, again: bool, limit: int) -> list[Waiting]:
        """The next jobs of this runner."""

        def turn() -> list[Waiting]:
            if self._closed:
                return []
            with self._alone():
                return super(LeasedShardAllocator, self).window(worker, batches, again=again, limit=limit)

        return self._database.whole(turn)

    def may_take(self, worker: WorkerShards, position: SortKey) -> bool:
        """Whether a job is no other runner's, as it was when it was last asked for."""
        if self._stale:
            self._load()
        return super().may_take(worker, position)

    def ready(self, worker: WorkerShards, means: WorkerSpec, lanes: int) -> None:
        """What this runner can do, for all to see."""
        super().ready(worker, means, lanes)
        self._means = means
        self._database.whole(self._join)

    def too_long(self, worker: WorkerShards, job: int, error: TooLong) -> TooLong | None:
        """A job is too long for this runner."""
        known = worker.room
        found = super().too_long(worker, job, error)
        if worker.room != known:
            self._database.whole(self._join)
        return found

    def forget(self) -> None:
        """What is known of others is old by now."""
        self._stale = True

    def close(self, worker: WorkerShards) -> None:
        """Its stretches are anyone's."""
        super().close(worker)
        self._closed = True
        self._known.clear()

        def sign_out() -> None:
            with self._database.writing(durable=False):
                self._database.run("sign", runner=self._runner, lanes=None, jobs=0, jobs_s=None, behind=None)
                self._database.run("drop_stretches", runner=self._runner)

        self._database.whole(sign_out)

    # -- reading for a choice, at one go however many runners there are: mutates nothing -----------------------------

    def _first_free(
        self, worker: WorkerShards, batches: Sequence[int], every: Sequence[Shard], after: SortKey | None
    ) -> Waiting | None:
        """The server passes over what is too long, so that it is never looked for in parts."""
        row = self._database.one("first_between", **self._among(gaps(every, batches, after), worker))
        return None if row is None else Waiting._make(row)

    def _several(self, worker: WorkerShards, stretches: Sequence[Shard]) -> list[list[Waiting]]:
        found: list[list[Waiting]] = [[] for _ in stretches]
        values = self._among([each.between for each in stretches], worker)
        for at, *row in self._database.all("waiting_between", limit=MOST_JOBS, **values):
            found[at - 1].append(Waiting._make(row))
        return found

    def _counts(self, every: Sequence[tuple[WorkerShards, Shard]], most: int) -> list[int]:
        found = [0] * len(every)
        for whose in (self.own, None):  # of others it is not known what is too long for them
            places = [at for at, (worker, _) in enumerate(every) if (worker is self.own) == (whose is self.own)]
            if places:
                values = self._among([every[at][1].between for at in places], whose)
                rows = self._database.all("count_between", most=most, **values)
                for at, (jobs,) in zip(places, rows, strict=True):
                    found[at] = jobs
        return found

    def _among(self, spans: Sequence[Between], worker: WorkerShards | None) -> dict[str, Any]:
        """The values of a query for parts of the order, of jobs that are not too long for a worker."""
        room = None if worker is None else worker.room
        unfit = [job for job, error in self._needs.items() if room is not None and error.needed_tokens > room]
        ends = {f"to_{name}s": [span.until[at] for span in spans] for at, name in _SPAN}
        starts = {f"{name}s": [span.after[at] for span in spans] for at, name in _SPAN}
        batches = [span.after[1] for span in spans]
        return {"batches": batches, **starts, **ends, "unfit": unfit, "now": self._store.now_s()}

    # -- the tables --------------------------------------------------------------------------------------------------

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """A transaction in which no other runner chooses; what was chosen is written down at its end."""
        with self._database.writing(durable=False):
            self._database.run("turn", key=_ALLOT)
            self._standing.stand()
            self._load()
            before = {number: held.stretch for number, held in self._known.items()}
            jobs = {worker.name: worker.jobs for worker in self._workers}
            yield
            self._save(before, jobs)

    def _load(self) -> None:
        """Others as they are in the tables; of one's own only what others took of it."""
        others = dict[int, WorkerShards]()
        known = dict[int, HeldShard]()
        for number, lanes, jobs, jobs_s, *behind in self._database.all("signed_in"):
            if number == self._runner:
                self.own.jobs = jobs
            else:
                others[number] = WorkerShards(
                    str(number),
                    lanes,
                    jobs=jobs,
                    jobs_s=jobs_s,
                    behind=None if behind[0] is None else Waiting._make(behind),
                )
        own = list[HeldShard]()
        for number, runner, *ends, jobs, ahead in self._database.all("stretches"):
            stretch = Shard((*ends[:4],), (*ends[4:],), jobs)
            held = (self._known.get(number) if runner == self._runner else None) or HeldShard(stretch, ahead=ahead)
            held.stretch = stretch
            known[number] = held
            if runner == self._runner:
                own.append(held)
            elif runner in others:
                others[runner].held.append(held)
        self.own.held = own
        self._known = known
        self._stale = False
        self._workers = [self.own, *others.values()]

    def _save(self, before: dict[int, Shard], jobs: dict[str, int]) -> None:
        left = {id(held) for worker in self._workers for held in worker.held}
        for number, held in list(self._known.items()):
            if id(held) not in left:
                self._database.run("drop_stretch", stretch=number)
                del self._known[number]
            elif held.stretch != before[number]:
                last = _columns("last", held.stretch.last)
                self._database.run("shorten_stretch", stretch=number, jobs=held.stretch.jobs, **last)
        written = {id(held) for held in self._known.values()}
        for held in self.own.held:
            if id(held) not in written:
                ends = _columns("first", held.stretch.first) | _columns("last", held.stretch.last)
                row = self._database.run(
                    "add_stretch", runner=self._runner, jobs=held.stretch.jobs, ahead=held.ahead, **ends
                ).fetchone()
                self._known[row[0]] = held
        for worker in self._workers[1:]:
            if worker.jobs != jobs[worker.name]:
                self._database.run("owe", runner=int(worker.name), jobs=worker.jobs)
        self._sign_in()

    def _rooms(self, batch: int) -> list[int | None]:
        """Of all in the table: what one had that is gone from it is pending again."""
        model_id = None if self._means is None else self._means.model_id
        others = [each for each in self._database.all("means") if each[0] != self._runner and each[1] == model_id]
        return [self.own.room, *(room for *_, room, batches in others if batches is None or batch in batches)]

    def _join(self) -> None:
        if self._closed:
            return
        with self._database.writing(durable=False):
            self._standing.stand()
            self._sign_in()

    def _sign_in(self) -> None:
        behind = self.own.behind.id if self.own.behind is not None else None
        self._database.run(
            "sign", runner=self._runner, lanes=self.own.lanes, jobs=self.own.jobs, jobs_s=self.own.jobs_s, behind=behind
        )
        if (means := self._means) is not None:
            batches = None if means.batches is None else list(means.batches)
            self._database.run(
                "able", runner=self._runner, model_id=means.model_id, room=self.own.room, batches=batches
            )


def _columns(end: str, position: SortKey) -> dict[str, Any]:
    return {f"{end}_{name}": value for name, value in zip(("rank", "batch", "place", "id"), position, strict=True)}


class _Portion:
    """This runner's: see `portion.Portion`."""

    def __init__(self, shared: LeasedShardAllocator, store: Store) -> None:
        self._shared = shared
        self._store = store

    def ready(self, means: WorkerSpec, lanes: int) -> None:
        self._shared.ready(self._shared.own, means, lanes)

    def window(self, batches: Sequence[int], *, again: bool, limit: int) -> list[Waiting]:
        return self._shared.window(self._shared.own, batches, again=again, limit=limit)

    def has(self, waiting: Waiting) -> bool:
        return self._shared.may_take(self._shared.own, waiting.key)

    def too_long(self, job: int, error: TooLong) -> TooLong | None:
        return self._shared.too_long(self._shared.own, job, error)

    def hopeless(self) -> list[tuple[int, TooLong]]:
        return self._shared.hopeless()

    def tend(self) -> None:
        self._store.tend()
        self._shared.forget()

    def close(self) -> None:
        self._shared.close(self._shared.own)


def leased_portion(store: Store, database: DatabaseBackend, standing: Coordinator, lanes: int) -> ShardView:
    """For the one worker of a runner, with so many lanes."""
    return _Portion(LeasedShardAllocator(store, database, standing, lanes), store)


def announce(store: Store, means: WorkerSpec) -> None:
    """Tell the other runners what this one will do as soon as it can: load an engine first, say."""
    if (portion := store.portion(1)) is not None:
        portion.ready(means, 1)
        portion.close()  # it is no worker yet; what it will do stays known until it leaves the store
