"""A batch as `tokenmill status` shows it: its state, counts and source."""

from dataclasses import dataclass, replace

from tokenmill.cli.batches.workers import Workers, workers_of
from tokenmill.jobs.models import Batch, Counts
from tokenmill.jobs.store.address import Address
from tokenmill.jobs.store.reader import HttpSubmission, StoreReader


@dataclass(frozen=True, slots=True)
class SeenBatch:
    """A batch, with the processes that use its store and how it was submitted."""

    batch: Batch
    workers: Workers  # of the store
    own: Workers  # on a server, those that hold leases of its jobs
    submission: HttpSubmission | None  # None: not over HTTP

    @property
    def state(self) -> str:
        """being read, half read, waiting, running, stopped, done or cancelled.

        Batches of a gateway wait for it; those of `tokenmill run` are stopped until the command runs again.
        """
        batch = self.batch
        if batch.cancelled_s is not None:
            return "cancelled"
        if batch.finished:
            return "done"
        if batch.sealed_s is None:
            return "being read" if self.workers else "half read"
        if self.workers and batch.counts.running:
            return "running"
        waits = self.workers and (self.submission is not None or self.workers.runners is not None)
        return "waiting" if waits else "stopped"

    @property
    def counts(self) -> Counts:
        """Jobs by state; those that a killed process was running are pending again."""
        counts = self.batch.counts
        if self.workers:
            return counts
        return replace(counts, pending=counts.pending + counts.running, running=0)

    @property
    def source(self) -> str:
        """The job file; for batches over HTTP, as the client named it."""
        return (self.submission.filename if self.submission else None) or self.batch.source


def seen_batches(address: Address, reader: StoreReader, batches: list[Batch]) -> list[SeenBatch]:
    """The batches, with the processes that use the store now."""
    workers = workers_of(address, reader)
    over_http = reader.submitted_over_http()
    return [
        SeenBatch(batch, workers, workers_of(address, reader, batch), over_http.get(batch.name)) for batch in batches
    ]
