"""The jobs that a worker may run: `ShardView` for the only worker of a store, `allocator` for one of several."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill.errors import TooLong
from tokenmill.jobs.models import QueuedJob, SortKey
from tokenmill.jobs.sharding.reader import PendingJobs


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The jobs that a worker can run, as announced to other workers."""

    model_id: str
    context_tokens: int | None  # per job; None: unknown so far
    batches: tuple[int, ...] | None = None  # None: all batches of the model


class ShardView:
    """The jobs that a worker may run: all pending ones, if it is the only worker of the store.

    Must be called from one thread at a time.
    """

    shared = False  # whether other workers run jobs of the same batches

    def __init__(self, store: PendingJobs) -> None:
        self._store = store
        self._cursor: SortKey | None = None

    def register(self, spec: WorkerSpec, slots: int) -> None:
        """Announce which jobs the worker can run, and its number of slots."""

    def window(self, batches: Sequence[int], *, again: bool, limit: int) -> list[QueuedJob]:
        """The next pending jobs of these batches by priority, batch and place; fewer than `limit` if there are no more.

        With `again`, reading restarts from the beginning.
        """
        if again:
            self._cursor = None
        rows = self._store.waiting(batches, after=self._cursor, limit=limit)
        self._cursor = rows[-1].key if rows else self._cursor
        return rows

    def join(self, batch: int, limit: int) -> list[QueuedJob]:
        """The first pending jobs of a batch that joins the others."""
        return self._store.waiting([batch], limit=limit)

    def has(self, waiting: QueuedJob) -> bool:
        """Whether the worker may run a job that was not read with `window`."""
        del waiting
        return True

    def too_long(self, job: int, error: TooLong) -> TooLong | None:
        """The error for a job or answer that is too long for this worker; None if the job is left to other workers."""
        del job
        return error

    def unrunnable(self) -> list[tuple[int, TooLong]]:
        """Jobs left to other workers that no remaining worker can run; each is returned once, to be failed.

        A job of which only the answer was too long is not returned but assigned again, and gets a truncated answer.
        """
        return []

    def refresh(self) -> None:
        """Invalidate cached data about other workers; must be called about once per second."""

    def close(self) -> None:
        """Stop taking jobs; jobs of the worker's shards that were not started become free."""
