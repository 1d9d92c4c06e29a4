"""Which worker has which shard: the protocol of the table, and the workers in it.

Implemented by `local_shards` for the workers of one process and by `postgres_shards` for workers on several hosts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from tokenmill.errors import TooLong
from tokenmill.jobs.models import QueuedJob, SortKey
from tokenmill.jobs.sharding.policy import Shard
from tokenmill.jobs.sharding.reader import ShardReader
from tokenmill.jobs.sharding.view import WorkerSpec

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class AssignedShard:
    """A shard and the position up to which its worker has read it."""

    shard: Shard
    cursor: SortKey | None = None
    prefetched: bool = False  # assigned while the worker still had other jobs


@dataclass(slots=True, eq=False)
class WorkerShards:
    """A worker and its shards."""

    name: str
    slots: int
    assigned: list[AssignedShard] = field(default_factory=list)
    last_job: QueuedJob | None = None  # last job of the most recent shard
    began_s: float | None = None
    jobs: int = 0  # total of all assigned shards
    jobs_per_s: float | None = None  # when its last shard was assigned; None: unknown
    context_tokens: int | None = None  # None: unknown


class ShardTable(Protocol):
    """Stores which worker has which shard."""

    @property
    def reader(self) -> ShardReader:
        """Reads the pending jobs."""

    too_long: dict[int, TooLong]  # jobs left to workers with a larger context

    def change(self, work: Callable[[], T]) -> T:
        """Call `work` while no other worker assigns shards, and store its changes; `work` may be called repeatedly."""

    def look(self, work: Callable[[], T]) -> T:
        """Call `work` with the last known state of all workers."""

    @property
    def workers(self) -> Sequence[WorkerShards]:
        """All workers; valid inside `change` and `look`."""

    def contexts(self, batch: int) -> list[int | None]:
        """Context sizes of present and expected workers of a batch; None: unknown. Valid inside `change` and `look`."""

    def announce(self, worker: WorkerShards, spec: WorkerSpec | None) -> None:
        """Announce a worker's spec; None: its last spec with the current context."""

    def refresh(self) -> None:
        """Reread the workers before the next `look`."""

    def leave(self, worker: WorkerShards) -> None:
        """Remove a worker and its shards."""
