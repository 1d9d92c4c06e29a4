"""Shards of the workers of one process, in memory."""

import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from tokenmill.errors import TooLong
from tokenmill.jobs.sharding.allocator import ShardAllocator
from tokenmill.jobs.sharding.policy import Shard
from tokenmill.jobs.sharding.reader import PendingJobs, ShardReader
from tokenmill.jobs.sharding.table import WorkerShards
from tokenmill.jobs.sharding.view import WorkerSpec

T = TypeVar("T")


class LocalShards:
    """The shard table of the workers of one process, in memory."""

    def __init__(
        self,
        store: PendingJobs,
        reader: ShardReader,
        *,
        clock: Callable[[], float] = time.monotonic,
        expected: Callable[[], Iterable[int | None]] = tuple,
    ) -> None:
        """`expected` returns the context sizes of expected workers in tokens; None: unknown."""
        self.reader = reader
        self.too_long: dict[int, TooLong] = {}
        self.workers: list[WorkerShards] = []
        self._store = store
        self._clock = clock
        self._expected = expected
        self._lock = threading.RLock()

    def add(self, name: str, slots: int) -> ShardAllocator:
        """Add a worker; returns its view."""
        worker = WorkerShards(name, slots)
        with self._lock:
            self.workers.append(worker)
        return ShardAllocator(self._store, self, worker, clock=self._clock)

    @property
    def shards(self) -> tuple[tuple[str, Shard], ...]:
        """All shards with the names of their workers, in queue order."""
        with self._lock:
            every = [(worker.name, each.shard) for worker in self.workers for each in worker.assigned]
        return tuple(sorted(every, key=lambda each: each[1].first))

    def change(self, work: Callable[[], T]) -> T:
        """Call `work` while no other worker assigns shards."""
        with self._lock:
            return work()

    def look(self, work: Callable[[], T]) -> T:
        """Call `work` while no other worker assigns shards."""
        return self.change(work)

    def contexts(self, batch: int) -> list[int | None]:
        """Context sizes of all workers, present and expected; all run the same batches."""
        del batch
        return [*(each.context_tokens for each in self.workers), *self._expected()]

    def announce(self, worker: WorkerShards, spec: WorkerSpec | None) -> None:
        """Do nothing: the table contains `worker` itself."""

    def refresh(self) -> None:
        """Do nothing: the table is always up to date."""

    def leave(self, worker: WorkerShards) -> None:
        """Remove a worker and its shards."""
        with self._lock:
            worker.assigned.clear()
            self.workers.remove(worker)
