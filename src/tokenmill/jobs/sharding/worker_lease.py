"""Leases of processes that share a PostgreSQL store.

A process has one lease for its jobs, shards and claims, renewed by a background thread. When the lease expires by the
server's clock, or the process has ended on this host, its running jobs become pending: normally at first, the second
time as suspects that are retried alone; then they are quarantined. If a process continues after its lease has expired,
its jobs may run elsewhere; an answer that it still commits is stored once.
"""

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from uuid import uuid4

from tokenmill.engine.process.identity import Pid, boot_id
from tokenmill.errors import StoreError, StoreInUse
from tokenmill.jobs.sharding.coordination import BeingStored, Coordinator, LinesLost
from tokenmill.jobs.sharding.postgres_shards import leased_view
from tokenmill.jobs.sharding.reader import PendingJobs
from tokenmill.jobs.sharding.view import ShardView
from tokenmill.jobs.store.backend import DatabaseBackend
from tokenmill.jobs.store.postgres import Postgres
from tokenmill.jobs.store.postgres_errors import ConnectionLost

LEASE_S = 45.0
RENEW_S = 5.0  # renewal interval; eight late renewals in a row are harmless
FOLD_S = 10.0
STALE_S = 40.0  # waiting time for stale backends; longer than the server keeps a silent connection
_STALE_POLL_S = 0.5
MAX_CRASHES = 2
LOST = "runner_lost"
_FOLD = -2  # advisory lock number; outputs use the numbers of their batches


class Leased(Coordinator):
    """Coordination of several processes on a store."""

    _database: Postgres

    def __init__(self, database: Postgres, running: Callable[[], Collection[int]], *, lease_s: float = LEASE_S) -> None:
        super().__init__(database)
        self._running = running
        self._lease_s = lease_s
        own = Pid.here(os.getpid())
        self._who = {
            "host": socket.gethostname(),
            "kernel": _kernel(),
            "pid": os.getpid(),
            "ticks": own.ticks if own is not None else 0,
        }
        self._renewed_s = self._folded_s = time.monotonic()
        self._claims: set[int] = set()
        self._output_lost: StoreInUse | None = None  # another process has claimed an output that was claimed here
        self._left = threading.Event()
        with database.writing(durable=True):  # so that the id is not assigned again after a crash of the server
            self.id = int(database.run("add_runner", lease_s=lease_s, **self._who).fetchone()[0])
        database.connected.append(self._restore_claims)

    def recover(self) -> None:
        """Requeue jobs of lost processes, and start renewing the lease."""
        self._database.transaction(self._recover_lost)
        every_s = min(RENEW_S, self._lease_s / 8)
        keeping = (
            weakref.ref(self),
            self._left,
            every_s,
        )  # a weak reference, so that an abandoned store can be collected
        threading.Thread(target=_renew_until_left, args=keeping, name="lease", daemon=True).start()

    def renew_lease(self, *, patient: bool = True) -> None:
        """Renew the lease, recover jobs from expired ones, and compact the tables."""
        now_s = time.monotonic()
        if now_s - self._renewed_s < min(RENEW_S, self._lease_s / 8):
            return
        self._renewed_s = now_s
        self._database.transaction(self._renew, patient=patient)
        self._database.transaction(self._recover_lost, patient=patient)
        if now_s - self._folded_s >= FOLD_S:
            self._folded_s = now_s
            self._database.transaction(self._fold, patient=patient)

    def extend_lease(self) -> None:
        """Renew the lease, even one that has expired and was removed."""
        if not self._left.is_set():
            self._database.run("renew", runner=self.id, lease_s=self._lease_s, **self._who)

    def busy(self, identity: bytes) -> bool:
        """Whether a job with this identity runs, or is being started by another process."""
        key = int.from_bytes(identity[:8], "little", signed=True)
        if not self._database.run("claim_identity", key=key).fetchone()[0]:
            return True
        # Queried after the lock is acquired, so that the previous holder's writes are visible.
        return self._database.run("identity_running", identity=identity).fetchone() is not None

    def cancelled(self, jobs: Collection[int]) -> set[int]:
        """Batches of these jobs that another process has cancelled."""
        return {row[0] for row in self._database.all("cancelled_of", jobs=list(jobs))} if jobs else set()

    def claim_storing(self, batch: int) -> None:
        """Claim the storing of a batch's lines, unless another process has."""
        if self._database.run("claim_storing", batch=batch, runner=self.id).rowcount == 0:
            if self._database.run("batch", batch=batch).fetchone() is None:
                raise LinesLost(
                    "this batch is missing in the store: it was removed, or lost by the server",
                    hint="run the same command to store it again",
                )
            owner = self.storing(batch) or "another process"
            raise BeingStored(f"{owner} is storing the lines of this batch", hint="run the same command again later")

    def storing(self, batch: int) -> str | None:
        """A description of the live process that has claimed the storing."""
        row = self._database.one("reader_of", batch=batch, runner=self.id)
        return f"process {row[1]} on {row[0]}" if row else None

    def claim_output(self, batch: int) -> bool:
        """Claim the output with an advisory lock, held until the connection closes."""
        if batch not in self._claims and self._database.one("claim", key=batch)[0]:
            self._claims.add(batch)
        return batch in self._claims

    def shards(self, store: PendingJobs, slots: int) -> ShardView:
        """Shards under the lease of this process."""
        return leased_view(store, self._database, self, slots)

    def leave(self) -> None:
        """Release jobs and claims without counting an attempt; if the server is unavailable, the lease expires."""
        self._left.set()  # from now on no transaction renews the lease
        with suppress(ConnectionLost), self._database.writing(durable=False):
            self._database.run("release_jobs", runner=self.id, kept=[])
            self._database.run("drop_runner", runner=self.id)
            self._database.run("unclaim")

    def _renew(self) -> None:
        with self._database.writing(durable=False):
            self.extend_lease()

    def _recover_lost(self) -> None:
        """Remove lost processes, and requeue or quarantine the jobs that they ran."""
        with self._database.writing(durable=False):
            for runner, pid, ticks in self._database.run("runners_here", kernel=self._who["kernel"]).fetchall():
                if runner != self.id and _has_ended(pid, ticks):
                    self._database.run("drop_runner", runner=runner)
            self._database.run("drop_expired")
            self._database.run(
                "recover_lost", most=MAX_CRASHES, code=LOST, message="in flight when its worker was lost"
            )

    def _fold(self) -> None:
        with self._database.writing(durable=False):
            if self._database.run("try_lock", key=_FOLD).fetchone()[0]:
                self._database.run("fold_counts")
                self._database.run("fold_totals")

    def _restore_claims(self) -> None:
        """Restore the claims after a reconnect, and release jobs whose start was interrupted."""
        if self._output_lost is not None:
            raise self._output_lost
        with self._database.writing(durable=False):
            self.extend_lease()
            self._database.run("release_jobs", runner=self.id, kept=list(self._running()))
        for batch in self._claims:
            if not self._reclaim(batch):
                self._output_lost = StoreInUse(
                    "another worker has claimed the output after the connection was lost",
                    hint="finished answers are kept; run the same command again to resume",
                    code="output_claimed",
                )
                raise self._output_lost

    def _reclaim(self, batch: int) -> bool:
        """Claim an output again; waits for the lock of the lost connection. Returns whether it was claimed."""
        until_s = time.monotonic() + STALE_S
        while not self._database.run("claim", key=batch).fetchone()[0]:
            if time.monotonic() >= until_s or not self._database.has_stale_backends():
                # The stale backend may have ended between the two queries.
                return bool(self._database.run("claim", key=batch).fetchone()[0])
            self._database.pause(_STALE_POLL_S)
            with self._database.writing(durable=False):
                self.extend_lease()
        return True


def _renew_until_left(runner: "weakref.ref[Leased]", left: threading.Event, every_s: float) -> None:
    """Renew a lease until its process leaves. Errors are ignored, because the worker raises them too."""
    while not left.wait(every_s):
        leased = runner()
        if leased is None:
            return
        with suppress(StoreError):
            leased.renew_lease(patient=False)
        del leased


def leased(database: DatabaseBackend, running: Callable[[], Collection[int]]) -> Leased:
    """The coordinator of a store on PostgreSQL."""
    if not isinstance(database, Postgres):
        raise TypeError("leases require a PostgreSQL store")
    return Leased(database, running)


def _kernel() -> str:
    """An identifier of this boot and PID namespace, in which process numbers are unique."""
    boot = boot_id()
    try:
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115  the link has no target to resolve
    except OSError:
        namespace = ""
    return f"{boot} {namespace}" if boot and namespace else uuid4().hex  # unknown: rely on the lease only


def _has_ended(pid: int, ticks: int) -> bool:
    """Whether the process with this start time has certainly ended, or is a zombie."""
    process = Pid.here(pid)
    if process is not None:
        return Pid.of(pid) is None or ticks not in (0, process.ticks)
    try:  # /proc may hide processes of other users (hidepid): an unreadable entry proves nothing
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # a live process of another user
        return False
    return False
