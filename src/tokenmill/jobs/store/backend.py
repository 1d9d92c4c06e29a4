"""The protocol of a store's database, SQLite or PostgreSQL: named queries and transactions."""

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, TypeVar

AccessMode = Literal["work", "ask", "read"]
"""`work`: runs jobs; `ask`: requests a cancellation from the process that does; `read`: only reads."""

T = TypeVar("T")


class Shutdown(threading.Event):
    """Set when this process is to end: the store then stops waiting for a database server that does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.exit_code = 1

    def request(self, exit_code: int) -> None:
        """Ask for the end of the process; from any thread."""
        self.exit_code = exit_code
        self.set()


class QueryResult(Protocol):
    """What a query found or changed."""

    @property
    def rowcount(self) -> int:
        """Rows that were changed."""

    def fetchone(self) -> Any:
        """The next row; None: there is none."""

    def fetchall(self) -> list[Any]:
        """All of them."""


class DatabaseBackend(Protocol):
    """An open database."""

    @property
    def shared(self) -> bool:
        """Whether it is a server's: others write to it, too, and it may crash while this process goes on."""

    @property
    def ahead_s(self) -> float:
        """How far its clock is ahead of the one here."""

    def run(self, name: str, /, **values: Any) -> QueryResult:
        """Run a named query; inside `writing`, or reading."""

    def many(self, name: str, rows: Iterable[tuple[Any, ...]]) -> int:
        """Run a named query for many rows; how many rows it changed."""

    def all(self, name: str, /, **values: Any) -> list[Any]:
        """All rows of a query that reads, at one moment."""

    def one(self, name: str, /, **values: Any) -> Any:
        """The first row of a query that reads; None: there is none."""

    @property
    def deferred(self) -> bool:
        """Whether changes wait for the next transaction or `flush`."""

    def writing(self, *, durable: bool, deferred: bool = False) -> AbstractContextManager[None]:
        """A transaction: committed at the end, undone by any exception.

        `durable`: on the disk when this returns. `deferred`: this process sees the changes immediately, others when the
        next transaction commits or after `flush`; call that soon, because other processes cannot write until then.
        """

    def flush(self) -> None:
        """Commit deferred changes."""

    def whole(self, work: Callable[[], T]) -> T:
        """Do what may be done again from its beginning: it is, where others came in between or a connection broke."""

    def problems(self) -> list[str]:
        """What the database itself finds damaged, in its own words; a server checks its pages when they are read."""

    def close(self) -> None:
        """Let go of it."""
