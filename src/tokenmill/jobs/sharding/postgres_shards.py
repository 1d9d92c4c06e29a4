"""Shards of workers on several hosts, stored in PostgreSQL tables.

One worker at a time locks the tables, assigns shards to itself and saves them. When a worker's lease expires, its
shards become free. Read positions, and jobs that are too long for a worker, are kept only in its memory.

In SQL, workers are `runners`, shards are `stretches`, `behind` is the last job of a worker's latest shard, `room` is
its context in tokens, and `lanes` is its number of slots.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tokenmill.errors import TooLong
from tokenmill.jobs.models import QueuedJob, SortKey
from tokenmill.jobs.sharding.allocator import ShardAllocator
from tokenmill.jobs.sharding.coordination import Coordinator
from tokenmill.jobs.sharding.policy import Shard
from tokenmill.jobs.sharding.reader import PendingJobs, ShardReader
from tokenmill.jobs.sharding.table import AssignedShard, WorkerShards
from tokenmill.jobs.sharding.view import WorkerSpec
from tokenmill.jobs.store.backend import DatabaseBackend

_LOCK = -1  # advisory lock number; see `worker_lease`

T = TypeVar("T")


class LeasedShards:
    """The shard table as seen by the single worker of this process."""

    def __init__(self, store: PendingJobs, database: DatabaseBackend, coordinator: Coordinator, slots: int) -> None:
        self.reader = ShardReader(store, database)
        self.too_long: dict[int, TooLong] = {}
        self.own = WorkerShards(str(coordinator.id), slots)
        self.workers = [self.own]
        self._database = database
        self._coordinator = coordinator
        self._runner = coordinator.id
        self._rows: dict[int, AssignedShard] = {}  # by id in the table
        self._spec: WorkerSpec | None = None
        self._stale = True
        self._left = False
        database.transaction(self._join)

    def change(self, work: Callable[[], T]) -> T:
        """Call `work` in a transaction while no other worker assigns shards."""

        def locked() -> T:
            with self._locked():
                return work()

        return self._database.transaction(locked)

    def look(self, work: Callable[[], T]) -> T:
        """Call `work`; reads the tables first if they were not read since the last `refresh`."""
        if self._stale and not self._left:
            self._load()
        return work()

    def contexts(self, batch: int) -> list[int | None]:
        """Context sizes of all workers in the table; lost workers have been removed from it."""
        model_id = None if self._spec is None else self._spec.model_id
        others = [
            each for each in self._database.all("worker_specs") if each[0] != self._runner and each[1] == model_id
        ]
        found = [context for *_, context, batches in others if batches is None or batch in batches]
        return [self.own.context_tokens, *found]

    def announce(self, worker: WorkerShards, spec: WorkerSpec | None) -> None:
        """Store this worker's spec."""
        del worker  # there is only one in this table
        self._spec = spec or self._spec
        self._database.transaction(self._join)

    def refresh(self) -> None:
        """Reread the tables before the next `look`."""
        self._stale = True

    def leave(self, worker: WorkerShards) -> None:
        """Free the worker's shards; its announcement stays until the store is closed."""
        worker.assigned.clear()
        self._left = True
        self._rows.clear()

        def unregister() -> None:
            with self._database.writing(durable=False):
                self._database.run("register_worker", runner=self._runner, lanes=None, jobs=0, jobs_s=None, behind=None)
                self._database.run("drop_shards", runner=self._runner)

        self._database.transaction(unregister)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._database.writing(durable=False):
            self._database.run("lock", key=_LOCK)
            self._coordinator.extend_lease()
            self._load()
            before = {number: each.shard for number, each in self._rows.items()}
            jobs = {worker.name: worker.jobs for worker in self.workers}
            yield
            self._save(before, jobs)

    def _load(self) -> None:
        """Read the other workers, and the changes that they made to this worker's shards."""
        others = dict[int, WorkerShards]()
        for number, slots, jobs, jobs_per_s, *last_job in self._database.all("registered_workers"):
            if number == self._runner:
                self.own.jobs = jobs
            else:
                last = None if last_job[0] is None else QueuedJob._make(last_job)
                others[number] = WorkerShards(str(number), slots, last_job=last, jobs=jobs, jobs_per_s=jobs_per_s)
        rows = dict[int, AssignedShard]()
        self.own.assigned = []
        for number, runner, *ends, jobs, prefetched in self._database.all("shards"):
            shard = Shard((*ends[:4],), (*ends[4:],), jobs)
            assigned = (self._rows.get(number) if runner == self._runner else None) or AssignedShard(
                shard, prefetched=prefetched
            )
            assigned.shard = shard
            rows[number] = assigned
            if runner == self._runner:
                self.own.assigned.append(assigned)
            elif runner in others:
                others[runner].assigned.append(assigned)
        self._rows = rows
        self._stale = False
        self.workers = [self.own, *others.values()]

    def _save(self, before: dict[int, Shard], jobs: dict[str, int]) -> None:
        left = {id(each) for worker in self.workers for each in worker.assigned}
        for number, each in list(self._rows.items()):
            if id(each) not in left:
                self._database.run("drop_shard", shard=number)
                del self._rows[number]
            elif each.shard != before[number]:
                last = _columns("last", each.shard.last)
                self._database.run("shorten_shard", shard=number, jobs=each.shard.jobs, **last)
        written = {id(each) for each in self._rows.values()}
        for each in self.own.assigned:
            if id(each) not in written:
                ends = _columns("first", each.shard.first) | _columns("last", each.shard.last)
                values = {"runner": self._runner, "jobs": each.shard.jobs, "ahead": each.prefetched}
                self._rows[self._database.run("add_shard", **values, **ends).fetchone()[0]] = each
        for worker in self.workers[1:]:
            if worker.jobs != jobs[worker.name]:
                self._database.run("set_assigned_jobs", runner=int(worker.name), jobs=worker.jobs)
        self._register()

    def _join(self) -> None:
        if self._left:
            return
        with self._database.writing(durable=False):
            self._coordinator.extend_lease()
            self._register()

    def _register(self) -> None:
        own = self.own
        last_job = own.last_job.id if own.last_job is not None else None
        self._database.run(
            "register_worker",
            runner=self._runner,
            lanes=own.slots,
            jobs=own.jobs,
            jobs_s=own.jobs_per_s,
            behind=last_job,
        )
        if (spec := self._spec) is not None:
            batches = None if spec.batches is None else list(spec.batches)
            values = {"runner": self._runner, "model_id": spec.model_id, "batches": batches}
            self._database.run("set_worker_spec", room=own.context_tokens, **values)


def _columns(end: str, position: SortKey) -> dict[str, Any]:
    return {f"{end}_{name}": value for name, value in zip(("rank", "batch", "place", "id"), position, strict=True)}


def leased_view(store: PendingJobs, database: DatabaseBackend, coordinator: Coordinator, slots: int) -> ShardAllocator:
    """The view of the only worker of this process."""
    table = LeasedShards(store, database, coordinator, slots)
    return ShardAllocator(store, table, table.own)
