"""Who works with a store: one process alone, or one of several runners (`leases`)."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tokenmill.errors import StoreError, StoreInUse
from tokenmill.jobs.backend import DatabaseBackend
from tokenmill.jobs.database import Database
from tokenmill.jobs.sharding import ShardView

if TYPE_CHECKING:
    from tokenmill.jobs.store import Store


class BeingStored(StoreInUse):
    """Another process is storing the lines of the same batch; it is sealed when that is done."""


class LinesLost(StoreError):
    """What is stored of a batch is not what was acknowledged; storing goes on from what is there."""


@dataclass(frozen=True, slots=True)
class Runner:
    """One of those that work, as others see it."""

    id: int
    host: str
    pid: int
    age_s: float
    seen_s: float  # ago
    alive: bool  # its lease holds
    running: int  # jobs


class Coordinator(Protocol):
    """How a process that works stands to others. Called inside a transaction where it says so."""

    id: int | None

    def recover(self) -> None:
        """At the beginning: what nobody works on any more is pending again."""

    def tend(self) -> None:
        """From time to time: this process lives; others may not. Within no transaction."""

    def stand(self) -> None:
        """This process is one of those that work, whatever others took it for. Inside."""

    def busy(self, identity: bytes) -> bool:
        """Whether another works on an equal job; if not, nobody else begins one before the transaction ends. Inside."""

    def cancelled(self, jobs: Collection[int]) -> set[int]:
        """Batches that were cancelled with some of these jobs at work here."""

    def take_up(self, batch: int) -> None:
        """This process stores the lines of a batch; BeingStored: another does, LinesLost: it is gone. Inside."""

    def storing(self, batch: int) -> str | None:
        """Which other process stores the lines of a batch, in words; None: none."""

    def claim_output(self, batch: int) -> bool:
        """Whether this process may write the output of a batch: one may."""

    def shards(self, store: "Store", slots: int) -> ShardView:
        """The pending jobs that a worker of this process may take."""

    def leave(self) -> None:
        """At the end: nothing is at work here any more."""


class SingleProcess:
    """The one process that works; the database's lock sees to that."""

    id: int | None = None

    def __init__(self, database: DatabaseBackend) -> None:
        self._database = database

    def recover(self) -> None:
        """What ran when the process before ended did not finish."""
        with self._database.writing(durable=False):
            for (batch,) in self._database.run("with_running").fetchall():
                self._database.run("recover", batch=batch)

    def tend(self) -> None:
        """Nobody asks."""

    def stand(self) -> None:
        """It is the only one."""

    def busy(self, identity: bytes) -> bool:
        """There is no other."""
        del identity
        return False

    def cancelled(self, jobs: Collection[int]) -> set[int]:
        """Whoever wants that asks."""
        del jobs
        return set()

    def take_up(self, batch: int) -> None:
        """No other can."""

    def storing(self, batch: int) -> str | None:
        """None does."""
        del batch
        return None

    def claim_output(self, batch: int) -> bool:
        """No other writes."""
        del batch
        return True

    def shards(self, store: "Store", slots: int) -> ShardView:
        """All of them."""
        del slots
        return ShardView(store)

    def leave(self) -> None:
        """The next opening finds what ran."""


def standing(database: DatabaseBackend, at_work: Callable[[], Collection[int]]) -> Coordinator:
    """How whoever opened a database to work stands to others; `at_work` says which jobs run here."""
    if isinstance(database, Database):
        return SingleProcess(database)
    from tokenmill.jobs.leases import leased  # noqa: PLC0415  its driver is an extra

    return leased(database, at_work)
