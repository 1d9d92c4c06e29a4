"""Maps errors of the PostgreSQL driver to StoreErrors with a cause and a hint.

Passwords are removed from the messages of the server and libpq, which quote their input.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg import errors

from tokenmill.errors import StoreError, StoreFull, StoreInUse
from tokenmill.jobs.store.address import PostgresAddress

_RESUME_HINT = "finished answers are kept; run the same command again to resume"


class Conflict(StoreError):
    """A transaction was rolled back because it conflicted with another; it can be repeated."""


class ConnectionLost(StoreError):
    """The connection was lost; unacknowledged changes may or may not be stored."""


class ServerUnreachable(ConnectionLost):
    """No connection could be made."""


class Stopped(ConnectionLost):
    """The server is unavailable, and this process must exit instead of waiting for it."""

    def __init__(self, server: PostgresAddress, code: int) -> None:
        super().__init__(f"stopped while {server} was unavailable", hint=_RESUME_HINT)
        # The exit code of a signal, not of the class.
        self.exit_code = code  # type: ignore[misc]


class Taken(StoreInUse):
    """A row with the same key exists."""


# SQLSTATEs in addition to class 08: the server ended the connection, for example while idle in a transaction (25P03).
_ENDED = ("57P01", "57P02", "57P03", "57P05", "25P03", "25P04")
_CAUSES: tuple[tuple[tuple[type[psycopg.Error], ...], type[StoreError], str], ...] = (
    ((errors.DeadlockDetected, errors.SerializationFailure), Conflict, _RESUME_HINT),
    (
        (errors.QueryCanceled, errors.LockNotAvailable),
        StoreError,
        "another session cancelled the query, or statement_timeout or lock_timeout is too short: "
        "ALTER ROLE ... SET statement_timeout = 0 removes the limit",
    ),
    ((errors.InsufficientPrivilege,), StoreError, "the user must be allowed to create and change tables in the schema"),
    ((errors.ReadOnlySqlTransaction,), StoreError, "use the address of the primary server, and a user that may write"),
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
        return ConnectionLost(f"the connection to {server} was lost: {words}", hint=_RESUME_HINT)
    if isinstance(error, errors.DiskFull | errors.OutOfMemory):
        return StoreFull(f"the server of {server} is out of disk space or memory", hint=f"free some; {_RESUME_HINT}")
    if isinstance(error, errors.UniqueViolation):  # the server's message only names an index
        return Taken(f"another process has stored the same row in {server}", hint="run the same command again")
    for causes, kind, hint in _CAUSES:
        if isinstance(error, causes):
            return kind(f"{server}: {words}", hint=hint)
    return StoreError(f"{server}: {words}", hint="this is a bug; please report it")


def unreachable(server: PostgresAddress, error: psycopg.Error) -> StoreError:
    """The error for a connection that could not be made."""
    if isinstance(error, psycopg.ProgrammingError):  # its message quotes parts of the URL
        return StoreError(
            f"invalid server URL {server}",
            hint="use postgresql://user@host:5432/database; quote special characters as %XX",
        )
    words = server.redacted(" ".join(str(error).split())).removeprefix("connection failed: ")
    return ServerUnreachable(
        f"cannot connect to {server}: {words}",
        hint="check the URL, that the server is running, and that it accepts connections from this host and user",
    )
