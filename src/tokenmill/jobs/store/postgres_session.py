"""The server process of a PostgreSQL connection, and the server's clock.

A connection can be lost here but not on the server, after a cable was cut or a router dropped it. The server process
then keeps its locks until the network reports the loss, which would lock us out of our own jobs.
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
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class PostgresBackend:
    """A process of the server."""

    pid: int
    began: datetime | None  # identifies the process together with the number; None: unknown
    ahead_s: float  # server clock minus local clock in whole seconds; 0 for synchronised clocks


def backend_of(connection: Connection) -> PostgresBackend:
    """The server process of a connection."""
    before_s = time.time()
    row = ask(connection, "backend").fetchone()
    after_s = time.time()
    if row is None:
        raise AssertionError("a query without tables has a row")
    pid, began, now_s = row
    return PostgresBackend(pid, began, float(round(now_s - (before_s + after_s) / 2)))


def end(connection: Connection, ghost: PostgresBackend) -> None:
    """Terminate an earlier server process of ours; without the privilege, the server does so eventually."""
    until_s = time.monotonic() + _MAX_END_S
    with suppress(errors.InsufficientPrivilege):
        ask(connection, "end_backend", pid=ghost.pid, began=ghost.began)
        while lives(connection, ghost) and time.monotonic() < until_s:
            time.sleep(_LOOK_S)


def lives(connection: Connection, ghost: PostgresBackend) -> bool:
    """Whether the server process still exists."""
    return ask(connection, "backend_there", pid=ghost.pid, began=ghost.began).fetchone() is not None


def ask(connection: Connection, name: str, **values: Any) -> Cursor:
    """Run a named query on a connection."""
    return connection.execute(postgres_queries()[name], values)
