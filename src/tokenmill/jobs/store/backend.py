"""The database protocol of the store, implemented by SQLite and PostgreSQL: named queries and transactions."""

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, TypeVar

AccessMode = Literal["work", "ask", "read"]
"""`work`: runs jobs; `ask`: requests a cancellation from the process that does; `read`: only reads."""

T = TypeVar("T")


class Shutdown(threading.Event):
    """Set when this process must exit: the store then stops waiting for a server that does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.exit_code = 1

    def request(self, exit_code: int) -> None:
        """Request the exit; from any thread."""
        self.exit_code = exit_code
        self.set()


class QueryResult(Protocol):
    """The result of a query."""

    @property
    def rowcount(self) -> int:
        """Number of changed rows."""

    def fetchone(self) -> Any:
        """The next row, or None."""

    def fetchall(self) -> list[Any]:
        """All remaining rows."""


class DatabaseBackend(Protocol):
    """An open database."""

    @property
    def shared(self) -> bool:
        """Whether it is a server: other processes write too, and it may crash while this process continues."""

    @property
    def ahead_s(self) -> float:
        """How far its clock is ahead of the local one."""

    def run(self, name: str, /, **values: Any) -> QueryResult:
        """Run a named query, inside `writing` or for reading."""

    def many(self, name: str, rows: Iterable[tuple[Any, ...]]) -> int:
        """Run a named query for many rows; returns the number of changed rows."""

    def all(self, name: str, /, **values: Any) -> list[Any]:
        """All rows of a reading query, from one snapshot."""

    def one(self, name: str, /, **values: Any) -> Any:
        """The first row of a reading query, or None."""

    @property
    def deferred(self) -> bool:
        """Whether uncommitted changes wait for the next transaction or `flush`."""

    def writing(self, *, durable: bool, deferred: bool = False) -> AbstractContextManager[None]:
        """A transaction: committed at the end, rolled back by any exception.

        `durable`: on disk when this returns. `deferred`: this process sees the changes immediately, others when the
        next transaction commits or after `flush`; call that soon, because other processes cannot write until then.
        """

    def flush(self) -> None:
        """Commit deferred changes."""

    def transaction(self, work: Callable[[], T]) -> T:
        """Run a function that can be repeated; repeats it after a conflict, a lost connection or a full disk."""

    def problems(self) -> list[str]:
        """Damage reported by the database itself; a server checks its pages when they are read."""

    def close(self) -> None:
        """Close the database."""
