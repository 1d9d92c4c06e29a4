"""The other end of a connection to PostgreSQL: which of the server's processes it is, and how its clock goes.

A connection can be gone here and not there: a cable was cut, a router forgot it. The server's process then holds its
locks until the network says so, and would keep us from what is ours.
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
_LONGEST_END_S = 5.0
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class PostgresBackend:
    """A process of the server."""

    pid: int
    began: datetime | None  # with the number it is this one and no other; None: the server does not say
    ahead_s: float  # its clock before ours, in whole seconds: clocks that are kept in step are the same


def backend_of(connection: Connection) -> PostgresBackend:
    """Whom a connection leads to."""
    before_s = time.time()
    row = ask(connection, "backend").fetchone()
    after_s = time.time()
    if row is None:
        raise AssertionError("a query without tables has a row")
    pid, began, now_s = row
    return PostgresBackend(pid, began, float(round(now_s - (before_s + after_s) / 2)))


def end(connection: Connection, ghost: PostgresBackend) -> None:
    """See to it that a process which served us before is gone; where that is not for us to do, the server will."""
    until_s = time.monotonic() + _LONGEST_END_S
    with suppress(errors.InsufficientPrivilege):
        ask(connection, "end_backend", pid=ghost.pid, began=ghost.began)
        while lives(connection, ghost) and time.monotonic() < until_s:
            time.sleep(_LOOK_S)


def lives(connection: Connection, ghost: PostgresBackend) -> bool:
    """Whether it is still there, as far as the server says."""
    return ask(connection, "backend_there", pid=ghost.pid, began=ghost.began).fetchone() is not None


def ask(connection: Connection, name: str, **values: Any) -> Cursor:
    """Run a named query on a connection."""
    return connection.execute(postgres_queries()[name], values)
