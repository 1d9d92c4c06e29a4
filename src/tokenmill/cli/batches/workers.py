"""The processes that work on the batches of a store, for `status` and `cancel`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tokenmill.jobs.models import Batch
from tokenmill.jobs.output import written_to
from tokenmill.jobs.sharding.coordination import Runner
from tokenmill.jobs.store.address import Address
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.jobs.store.sqlite import LOCK
from tokenmill.units import number_of


@dataclass(frozen=True, slots=True)
class Workers:
    """The processes that work on the batches of a store."""

    process: int | None = None  # for a store in a folder
    runners: tuple[Runner, ...] | None = None  # for a store on a server; None: the store is a folder

    def __bool__(self) -> bool:
        return self.process is not None or bool(self.runners)

    @property
    def words(self) -> str:
        """A description, such as `process 4711`."""
        if self.runners is None:
            return f"process {self.process}"
        busy = [runner for runner in self.runners if runner.running]
        each = ", ".join(f"{runner.host} ({runner.pid}): {number_of(runner.running, 'job')}" for runner in busy)
        return f"{number_of(len(busy), 'runner')}: {each}"

    def document(self) -> dict[str, Any]:
        """The JSON form."""
        if self.runners is None:
            return {"worker": self.process}
        return {
            "worker": None,
            "runners": [
                {
                    "host": runner.host,
                    "pid": runner.pid,
                    "running": runner.running,
                    "seconds": round(runner.age_s, 1),
                    "seen_seconds_ago": round(runner.seen_s, 1),
                }
                for runner in self.runners
            ],
        }


def workers_of(address: Address, reader: StoreReader, batch: Batch | None = None) -> Workers:
    """The processes that use a store now; on a server with `batch`, those that hold leases of its jobs."""
    if isinstance(address, Path):
        return Workers(worker_of(address))
    runners = [] if batch is not None and batch.finished else reader.runners(None if batch is None else batch.id)
    return Workers(runners=tuple(runner for runner in runners if runner.alive))


def unwritten(reader: StoreReader, batch: Batch) -> str | None:
    """A notice if every job is done, but the process that writes the output was stopped before other workers did the
    rest; else None."""
    if not reader.shared or not batch.finished or batch.output is None or reader.being_written(batch.id):
        return None
    last = written_to(batch)
    if last is None or last >= batch.lines:
        return None
    return (
        f"{last:,} of {number_of(batch.lines, 'line')} are in the results file; "
        "to write the rest, run the same tokenmill run command on its host"
    )


def worker_of(folder: Path) -> int | None:
    """The process that uses the batches in a folder, or None.

    Does not try the lock, because that could make a starting process fail to get it.
    """
    lock = folder / LOCK
    try:
        holder = int(lock.read_text() or "0")
        inode = lock.stat().st_ino
        held = Path("/proc/locks").read_text()
    except (OSError, ValueError):
        return None
    rows = (row.split() for row in held.splitlines())
    locked = any(row[1:2] == ["FLOCK"] and row[5].endswith(f":{inode}") for row in rows if len(row) > 5)
    return holder if holder and locked and psutil.pid_exists(holder) else None
