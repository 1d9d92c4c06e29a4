"""Maps the errors of the PostgreSQL driver to StoreErrors, once, with the cause and a hint.

No message shows a password: it is removed from messages of the server and libpq, which quote their input.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg import errors

from tokenmill.errors import StoreError, StoreFull, StoreInUse
from tokenmill.jobs.store.address import PostgresAddress

_GO_ON = "everything that was acknowledged is kept, and the same command goes on from there"


class Conflict(StoreError):
    """A transaction was rolled back because it conflicted with another; repeating it succeeds."""


class ConnectionLost(StoreError):
    """The connection was lost; unacknowledged changes may or may not be stored."""


class ServerUnreachable(ConnectionLost):
    """No connection could be made."""


class Stopped(ConnectionLost):
    """The server is unavailable, and this process must exit instead of waiting for it."""

    def __init__(self, server: PostgresAddress, code: int) -> None:
        super().__init__(f"stopped while {server} was away", hint=_GO_ON)
        # The exit code of a signal, not of the class.
        self.exit_code = code  # type: ignore[misc]


class Taken(StoreInUse):
    """A row with this key exists already."""


# In addition to class 08: ended by the server, or about to be, for example while idle in a transaction (25P03).
_ENDED = ("57P01", "57P02", "57P03", "57P05", "25P03", "25P04")
_CAUSES: tuple[tuple[tuple[type[psycopg.Error], ...], type[StoreError], str], ...] = (
    ((errors.DeadlockDetected, errors.SerializationFailure), Conflict, "the same command goes on from there"),
    (
        (errors.QueryCanceled, errors.LockNotAvailable),
        StoreError,
        "another session cancelled it, or a statement_timeout or lock_timeout is too short for it: "
        "ALTER ROLE ... SET statement_timeout = 0 allows any time",
    ),
    ((errors.InsufficientPrivilege,), StoreError, "the user needs to create and change tables in the schema"),
    ((errors.ReadOnlySqlTransaction,), StoreError, "name the primary server, not a standby, and one that may write"),
)


@contextmanager
def mapped_errors(
    server: PostgresAddress, connection: "psycopg.Connection[tuple[object, ...]] | None" = None
) -> Iterator[None]:
    """Map the driver's errors."""
    try:
        yield
    except psycopg.Error as error:
        raise mapped(error, server, connected=connection is not None and not connection.closed) from error


def mapped(error: psycopg.Error, server: PostgresAddress, *, connected: bool) -> StoreError:
    """Map one error."""
    words = server.redacted(" ".join(str(error).split()))
    if not connected or error.sqlstate in _ENDED or (error.sqlstate or "").startswith("08"):
        return ConnectionLost(f"the connection to {server} was lost: {words}", hint=_GO_ON)
    if isinstance(error, errors.DiskFull | errors.OutOfMemory):
        return StoreFull(f"no room is left on the server of {server}", hint=f"free some space: {_GO_ON}")
    if isinstance(error, errors.UniqueViolation):  # the server's message is about an index
        return Taken(f"another process stores the same in {server}", hint="the same command finds it")
    for causes, kind, hint in _CAUSES:
        if isinstance(error, causes):
            return kind(f"{server}: {words}", hint=hint)
    return StoreError(f"{server}: {words}", hint="this is a bug; please report it")


def unreachable(server: PostgresAddress, error: psycopg.Error) -> StoreError:
    """The error for a connection that could not be made."""
    if isinstance(error, psycopg.ProgrammingError):  # its message quotes parts of the URL
        return StoreError(
            f"{server} is no URL that can be connected to",
            hint="postgresql://user@host:5432/database; what is special is written as %XX",
        )
    words = server.redacted(" ".join(str(error).split())).removeprefix("connection failed: ")
    return ServerUnreachable(
        f"cannot connect to {server}: {words}",
        hint="check the URL, that the server runs, and whether it lets this host and user in",
    )
