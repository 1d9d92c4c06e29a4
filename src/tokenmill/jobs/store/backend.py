"""The database protocol of the store, implemented by SQLite and PostgreSQL: named queries and transactions."""

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, TypeVar

AccessMode = Literal["work", "ask", "read"]
"""`work`: run jobs; `ask`: write requests for the process that runs jobs; `read`: only read."""

NO_BATCHES = "no_batches"
"""The code of a StoreError for a folder or database without a store."""
STORE_TOO_NEW = "store_too_new"
"""The code of a StoreError for a store that a newer tokenmill wrote."""
STORE_TOO_OLD = "store_too_old"
"""The code of a StoreError for a store that must be upgraded before it can be read."""
FOREIGN_DATABASE = "foreign_database"
"""The code of a StoreError for the database of another program."""

T = TypeVar("T")


class Shutdown(threading.Event):
    """Set when this process must exit; the store then stops waiting for an unavailable server."""

    def __init__(self) -> None:
        super().__init__()
        self.exit_code = 1

    def request(self, exit_code: int) -> None:
        """Request the exit; may be called from any thread."""
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
        """Whether this is a server, which other processes use too and which may crash while this process continues."""

    @property
    def ahead_s(self) -> float:
        """How far the database's clock is ahead of the local one."""

    def run(self, name: str, /, **values: Any) -> QueryResult:
        """Run a named query; a query that writes must be inside `writing`."""

    def many(self, name: str, rows: Iterable[tuple[Any, ...]]) -> int:
        """Run a named query for many rows; returns the number of changed rows."""

    def all(self, name: str, /, **values: Any) -> list[Any]:
        """All rows of a read-only query, from one snapshot."""

    def one(self, name: str, /, **values: Any) -> Any:
        """The first row of a read-only query, or None."""

    @property
    def deferred(self) -> bool:
        """Whether uncommitted changes wait for the next transaction or `flush`."""

    def writing(self, *, durable: bool, deferred: bool = False) -> AbstractContextManager[None]:
        """A transaction: committed at the end, rolled back by any exception.

        `durable`: on disk when this returns. `deferred`: visible to this process immediately, to others after the next
        transaction or `flush`, which must follow soon, because other processes cannot write until then.
        """

    def flush(self) -> None:
        """Commit deferred changes."""

    def transaction(self, work: Callable[[], T]) -> T:
        """Call a repeatable function; call it again after a conflict, a lost connection or a full disk."""

    def problems(self) -> list[str]:
        """Damage reported by the database's own check; empty for a server, which checks pages when reading them."""

    def close(self) -> None:
        """Close the database."""
