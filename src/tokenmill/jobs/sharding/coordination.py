"""Coordination of processes that share a store: `Coordinator` for a single process, `worker_lease` for several."""

from collections.abc import Collection
from dataclasses import dataclass

from tokenmill.errors import StoreError, StoreInUse
from tokenmill.jobs.sharding.reader import PendingJobs
from tokenmill.jobs.sharding.view import ShardView
from tokenmill.jobs.store.backend import DatabaseBackend


class BeingStored(StoreInUse):
    """Another process is still storing the lines of the same batch."""


class LinesLost(StoreError):
    """Acknowledged lines of a batch are missing in the store; storing the file again adds them."""


@dataclass(frozen=True, slots=True)
class Runner:
    """A process that uses a shared store."""

    id: int
    host: str
    pid: int
    age_s: float
    seen_s: float  # seconds since its last sign of life
    alive: bool  # its lease has not expired
    running: int  # number of its running jobs


class Coordinator:
    """Coordination for a store that only this process uses: every claim succeeds and nothing is leased.

    `worker_lease.Leased` overrides it for several processes.
    """

    id: int | None = None

    def __init__(self, database: DatabaseBackend) -> None:
        self._database = database

    def recover(self) -> None:
        """Requeue jobs that a previous process left running; called when the store is opened."""
        with self._database.writing(durable=False):
            for (batch,) in self._database.run("with_running").fetchall():
                self._database.run("recover", batch=batch)

    def renew_lease(self) -> None:
        """Renew the lease, and requeue jobs of processes whose lease has expired. Called outside of transactions."""

    def extend_lease(self) -> None:
        """Renew the lease, even one that has expired. Called inside a transaction."""

    def busy(self, identity: bytes) -> bool:
        """Whether another process runs a job with this identity; if not, none starts before the transaction ends."""
        del identity
        return False

    def cancelled(self, jobs: Collection[int]) -> set[int]:
        """Batches of these running jobs that another process has cancelled."""
        del jobs
        return set()

    def claim_storing(self, batch: int) -> None:
        """Claim the exclusive right to store a batch's lines.

        Raises BeingStored if another process has claimed it, LinesLost if the batch was removed. Called inside a
        transaction.
        """

    def storing(self, batch: int) -> str | None:
        """A description of the other process that stores the lines of a batch, if any."""
        del batch
        return None

    def claim_output(self, batch: int) -> bool:
        """Claim the output of a batch; returns whether this process may write it."""
        del batch
        return True

    def shards(self, store: PendingJobs, slots: int) -> ShardView:
        """The pending jobs that a worker of this process may take."""
        del slots
        return ShardView(store)

    def leave(self) -> None:
        """Requeue the running jobs of this process; called before the store is closed."""
