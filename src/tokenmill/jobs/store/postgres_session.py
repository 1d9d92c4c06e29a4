"""The server process of a PostgreSQL connection, and the server's clock.

If the network fails silently, the server does not notice that a connection is lost, and its server process keeps the
locks. After a reconnect such stale processes are terminated, because they would lock this process out of its own jobs.
"""

import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg import errors

from tokenmill.jobs.store.queries import postgres_queries

Connection = psycopg.Connection[tuple[Any, ...]]
Cursor = psycopg.Cursor[tuple[Any, ...]]
_MAX_END_S = 5.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class PostgresBackend:
    """A process of the server."""

    pid: int
    began: datetime | None  # start time; distinguishes processes with the same number; None: unknown
    ahead_s: float  # server clock minus local clock in whole seconds; 0 for synchronized clocks


def backend_of(connection: Connection) -> PostgresBackend:
    """The server process of a connection."""
    before_s = time.time()
    row = ask(connection, "backend").fetchone()
    after_s = time.time()
    if row is None:
        raise AssertionError("a query without tables has a row")
    pid, began, now_s = row
    return PostgresBackend(pid, began, float(round(now_s - (before_s + after_s) / 2)))


def end(connection: Connection, stale: PostgresBackend) -> None:
    """Terminate a stale server process; without the privilege, wait until the server does."""
    until_s = time.monotonic() + _MAX_END_S
    with suppress(errors.InsufficientPrivilege):
        ask(connection, "end_backend", pid=stale.pid, began=stale.began)
        while lives(connection, stale) and time.monotonic() < until_s:
            time.sleep(_POLL_S)


def lives(connection: Connection, stale: PostgresBackend) -> bool:
    """Whether the server process still exists."""
    return ask(connection, "backend_there", pid=stale.pid, began=stale.began).fetchone() is not None


def ask(connection: Connection, name: str, **values: Any) -> Cursor:
    """Run a named query on a connection."""
    return connection.execute(postgres_queries()[name], values)
