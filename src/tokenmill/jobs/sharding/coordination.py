"""Coordination of processes that share a store: `Coordinator` for a single process, `leases` for several."""

from collections.abc import Collection
from dataclasses import dataclass

from tokenmill.errors import StoreError, StoreInUse
from tokenmill.jobs.sharding.allocator import ShardView
from tokenmill.jobs.sharding.reader import PendingJobs
from tokenmill.jobs.store.backend import DatabaseBackend


class BeingStored(StoreInUse):
    """Another process is still storing the lines of the same batch."""


class LinesLost(StoreError):
    """The store lacks acknowledged lines of a batch; storing resumes with what is there."""


@dataclass(frozen=True, slots=True)
class Runner:
    """A process that runs jobs, as others see it."""

    id: int
    host: str
    pid: int
    age_s: float
    seen_s: float  # ago
    alive: bool  # its lease has not expired
    running: int  # jobs


class Coordinator:
    """Coordination for a store that only this process uses: every claim succeeds, and nothing is leased.

    `leases.Leased` overrides it for several processes. Methods that say so are called inside a transaction.
    """

    id: int | None = None

    def __init__(self, database: DatabaseBackend) -> None:
        self._database = database

    def recover(self) -> None:
        """When the store is opened, return jobs to the queue that a previous process left running."""
        with self._database.writing(durable=False):
            for (batch,) in self._database.run("with_running").fetchall():
                self._database.run("recover", batch=batch)

    def renew_lease(self) -> None:
        """Renew the lease and recover jobs of processes whose lease has expired. Called outside of transactions."""

    def extend_lease(self) -> None:
        """Renew the lease, even one that has expired. Called inside a transaction."""

    def busy(self, identity: bytes) -> bool:
        """Whether another process runs an equal job; if not, none starts one before the transaction ends."""
        del identity
        return False

    def cancelled(self, jobs: Collection[int]) -> set[int]:
        """The batches of these running jobs that another process cancelled."""
        del jobs
        return set()

    def claim_storing(self, batch: int) -> None:
        """Claim the storing of a batch's lines.

        Raises BeingStored if another process has claimed it, LinesLost if the batch is gone. Called inside a
        transaction.
        """

    def storing(self, batch: int) -> str | None:
        """Describe the other process that stores the lines of a batch, if any."""
        del batch
        return None

    def claim_output(self, batch: int) -> bool:
        """Whether this process may write the output of a batch; only one may."""
        del batch
        return True

    def shards(self, store: PendingJobs, slots: int) -> ShardView:
        """The pending jobs that a worker of this process may take."""
        del slots
        return ShardView(store)

    def leave(self) -> None:
        """Before the store is closed, return running jobs to the queue for other processes."""
