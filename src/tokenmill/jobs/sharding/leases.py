"""One of several runners on a store: it holds what it has by a lease.

A runner's lease is of all that it has. A thread of its own renews it, whatever else the process does; when it is over
by the server's clock, or when the process is gone from this host, what the runner had at work is pending again: once
without a word, the next time as a suspect that is tried alone, and after that it is set aside. A runner that comes back
late finds its jobs with others; an answer that it brings all the same is kept, once.
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
from tokenmill.jobs.sharding.allocator import ShardView
from tokenmill.jobs.sharding.coordination import BeingStored, Coordinator, LinesLost
from tokenmill.jobs.sharding.leased import leased_view
from tokenmill.jobs.sharding.reader import PendingJobs
from tokenmill.jobs.store.backend import DatabaseBackend
from tokenmill.jobs.store.postgres import Postgres
from tokenmill.jobs.store.postgres_errors import ConnectionLost

LEASE_S = 45.0
TEND_S = 5.0  # between two looks around; a tick that comes late eight times over costs nothing
FOLD_S = 10.0
GHOST_S = 40.0  # longer than the server believes in a connection of which nothing comes
_GHOST_LOOK_S = 0.5
MOST_DEATHS = 2
LOST = "runner_lost"
_FOLD = -2  # the number of a lock; those of outputs are the numbers of their batches


class Leased(Coordinator):
    """One of several runners."""

    _database: Postgres

    def __init__(self, database: Postgres, at_work: Callable[[], Collection[int]], *, lease_s: float = LEASE_S) -> None:
        super().__init__(database)
        self._at_work = at_work
        self._lease_s = lease_s
        own = Pid.here(os.getpid())
        self._who = {
            "host": socket.gethostname(),
            "kernel": _kernel(),
            "pid": os.getpid(),
            "ticks": own.ticks if own is not None else 0,
        }
        self._tended_s = self._folded_s = time.monotonic()
        self._claims: set[int] = set()
        self._taken: StoreInUse | None = None  # another has an output that was claimed here
        self._left = threading.Event()
        with database.writing(durable=True):  # else its number could be given away once more after a crash
            self.id = int(database.run("add_runner", lease_s=lease_s, **self._who).fetchone()[0])
        database.connected.append(self._connected_again)

    def recover(self) -> None:
        """What those had who are gone is pending again; what others have is theirs. From here on the lease is kept."""
        self._database.whole(self._gather)
        every_s = min(TEND_S, self._lease_s / 8)
        keeping = (weakref.ref(self), self._left, every_s)  # not kept for a store that nobody has any more
        threading.Thread(target=_keep, args=keeping, name="lease", daemon=True).start()

    def tend(self, *, patient: bool = True) -> None:
        """Renew the lease, take from those whose lease is over, keep the tables short."""
        now_s = time.monotonic()
        if now_s - self._tended_s < min(TEND_S, self._lease_s / 8):
            return
        self._tended_s = now_s
        self._database.whole(self._renew, patient=patient)
        self._database.whole(self._gather, patient=patient)
        if now_s - self._folded_s >= FOLD_S:
            self._folded_s = now_s
            self._database.whole(self._fold, patient=patient)

    def stand(self) -> None:
        """Renew the lease; one that was over, and forgotten, too."""
        if not self._left.is_set():
            self._database.run("renew", runner=self.id, lease_s=self._lease_s, **self._who)

    def busy(self, identity: bytes) -> bool:
        """Whether an equal job runs, or is being started by another in this moment."""
        key = int.from_bytes(identity[:8], "little", signed=True)
        if not self._database.run("claim_identity", key=key).fetchone()[0]:
            return True
        # Asked after the lock is ours, so that what its last holder wrote is seen.
        return self._database.run("at_work", identity=identity).fetchone() is not None

    def cancelled(self, jobs: Collection[int]) -> set[int]:
        """Another process cancelled these batches."""
        return {row[0] for row in self._database.all("cancelled_of", jobs=list(jobs))} if jobs else set()

    def take_up(self, batch: int) -> None:
        """Store the lines of a batch, unless another does."""
        if self._database.run("take_up", batch=batch, runner=self.id).rowcount == 0:
            if self._database.run("batch", batch=batch).fetchone() is None:
                raise LinesLost(
                    "this batch is gone from the store: removed, or lost by the server with its lines",
                    hint="the same command stores it again",
                )
            who = self.storing(batch) or "another process"
            raise BeingStored(f"{who} is storing the lines of this batch", hint="run the same again when it is done")

    def storing(self, batch: int) -> str | None:
        """Whoever has taken it up and has not left."""
        row = self._database.one("reader_of", batch=batch, runner=self.id)
        return f"process {row[1]} on {row[0]}" if row else None

    def claim_output(self, batch: int) -> bool:
        """The server's lock on it, held until the end."""
        if batch not in self._claims and self._database.one("claim", key=batch)[0]:
            self._claims.add(batch)
        return batch in self._claims

    def shards(self, store: PendingJobs, slots: int) -> ShardView:
        """Shards that are leased with this process."""
        return leased_view(store, self._database, self, slots)

    def leave(self) -> None:
        """Hand everything back, which was no attempt; where the server is away, the lease ends by itself."""
        self._left.set()  # seen inside every transaction from here on: none stands up again behind this one
        with suppress(ConnectionLost), self._database.writing(durable=False):
            self._database.run("hand_back", runner=self.id, kept=[])
            self._database.run("drop_runner", runner=self.id)
            self._database.run("unclaim")

    def _renew(self) -> None:
        with self._database.writing(durable=False):
            self.stand()

    def _gather(self) -> None:
        """Runners that are gone go from the table, and what they had at work is pending again, or set aside."""
        with self._database.writing(durable=False):
            for runner, pid, ticks in self._database.run("runners_here", kernel=self._who["kernel"]).fetchall():
                if runner != self.id and _gone(pid, ticks):
                    self._database.run("drop_runner", runner=runner)
            self._database.run("drop_expired")
            self._database.run("lost", most=MOST_DEATHS, code=LOST, message="the runner was lost with it at work")

    def _fold(self) -> None:
        with self._database.writing(durable=False):
            if self._database.run("try_turn", key=_FOLD).fetchone()[0]:
                self._database.run("fold_counts")
                self._database.run("fold_totals")

    def _connected_again(self) -> None:
        """Locks went with the connection; and what was being started when it broke may run without our knowing."""
        if self._taken is not None:
            raise self._taken
        with self._database.writing(durable=False):
            self.stand()
            self._database.run("hand_back", runner=self.id, kept=list(self._at_work()))
        for batch in self._claims:
            if not self._claimed_again(batch):
                self._taken = StoreInUse(
                    "another runner writes the output since the connection was lost",
                    hint="the same command goes on from there",
                )
                raise self._taken

    def _claimed_again(self, batch: int) -> bool:
        """Whether an output is ours again. The server may not know yet that our old connection is gone."""
        until_s = time.monotonic() + GHOST_S
        while not self._database.run("claim", key=batch).fetchone()[0]:
            if time.monotonic() >= until_s or not self._database.haunted():
                # It may have gone between the two.
                return bool(self._database.run("claim", key=batch).fetchone()[0])
            self._database.pause(_GHOST_LOOK_S)
            with self._database.writing(durable=False):
                self.stand()
        return True


def _keep(runner: "weakref.ref[Leased]", left: threading.Event, every_s: float) -> None:
    """Keep a lease until its runner leaves. What goes wrong is for those to say who work: they meet it, too."""
    while not left.wait(every_s):
        leased = runner()
        if leased is None:
            return
        with suppress(StoreError):
            leased.tend(patient=False)
        del leased


def leased(database: DatabaseBackend, at_work: Callable[[], Collection[int]]) -> Leased:
    """A runner on PostgreSQL."""
    if not isinstance(database, Postgres):
        raise TypeError("leases are kept by a server")
    return Leased(database, at_work)


def _kernel() -> str:
    """Where numbers of processes mean the same: one boot of one machine, one namespace of processes."""
    boot = boot_id()
    try:
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115  it leads nowhere
    except OSError:
        namespace = ""
    return f"{boot} {namespace}" if boot and namespace else uuid4().hex  # unknown: only the lease counts


def _gone(pid: int, ticks: int) -> bool:
    """Whether the process that began then is surely no more, or only what its parent has not read yet."""
    process = Pid.here(pid)
    if process is not None:
        return Pid.of(pid) is None or ticks not in (0, process.ticks)
    try:  # /proc may hide what others run (hidepid): that it cannot be read says nothing
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's: it lives
        return False
    return False
