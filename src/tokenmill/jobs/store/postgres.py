"""PostgreSQL backend of the store, for processes on several hosts.

A durable transaction is on the server's disk when it returns. A transaction that conflicts with another is rolled back
and repeated. A lost connection is re-established; the time limit for waiting for an unavailable server applies to all
callers together. Does not depend on the tables.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from tokenmill.version import __version__, install_hint

try:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict, make_conninfo
    from psycopg.pq import PGconn, Ping
    from psycopg.types.string import StrBinaryDumper, StrDumperUnknown, TextBinaryLoader, TextLoader
except ImportError as error:
    from tokenmill.errors import StoreError as _StoreError

    raise _StoreError(
        "a store on PostgreSQL requires the driver psycopg, which is not installed",
        hint=install_hint("postgres"),
    ) from error

from tokenmill.errors import StoreError
from tokenmill.jobs.store.address import PostgresAddress
from tokenmill.jobs.store.backend import (
    FOREIGN_DATABASE,
    NO_BATCHES,
    STORE_TOO_NEW,
    STORE_TOO_OLD,
    AccessMode,
    QueryResult,
    Shutdown,
)
from tokenmill.jobs.store.postgres_errors import (
    Conflict,
    ConnectionLost,
    ServerUnreachable,
    Stopped,
    mapped_errors,
    unreachable,
)
from tokenmill.jobs.store.postgres_session import Connection, PostgresBackend, ask, backend_of, end, lives
from tokenmill.jobs.store.queries import postgres_migrations, postgres_queries, postgres_schema

VERSION, OLDEST = 4, 1  # version that is written, and the oldest that can be migrated
OLDEST_SERVER = 120000  # 12
MAX_OUTAGE_S = 60.0  # waiting time for an unavailable server; longer than a restart takes
_FIRST_WAIT_S = 0.1
_MAX_WAIT_S = 5.0
_MAX_CONFLICTS = 10
_SET_UP = 0x746D696C  # "tmil": lock of the process that creates the tables
# These detect a network that silently drops packets within half a minute.
_CONNECTION_SETTINGS: dict[str, Any] = {
    "connect_timeout": 10,
    "tcp_user_timeout": 25_000,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "application_name": "tokenmill",
}
# The server releases the locks of a suspended or lost host well before its lease expires.
IDLE_S = 20
_SERVER_SETTINGS = {
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "25s",
}
_DURABLE = "BEGIN; SET LOCAL synchronous_commit TO on"
_NOT_DURABLE = "BEGIN; SET LOCAL synchronous_commit TO off"
_COMING = ("int8", "text", "bytea", "bytea", "int8", "int8", "int8", "float8", "text", "text", "int8")

# PostgreSQL text cannot contain U+0000, but JSON can. It is stored as a noncharacter and a digit, and that
# noncharacter is doubled.
_MARK = "\uffff"
_NUL = _MARK + "0"

T = TypeVar("T")
_log = logging.getLogger("tokenmill")


def _escape(text: str) -> str:
    return text.replace(_MARK, _MARK * 2).replace("\0", _NUL) if "\0" in text or _MARK in text else text


def _unescape(text: str) -> str:
    return _MARK.join(part.replace(_NUL, "\0") for part in text.split(_MARK * 2)) if _MARK in text else text


class _DumpText(StrDumperUnknown):
    def dump(self, obj: str) -> Any:
        return super().dump(_escape(obj))


class _DumpRowText(StrBinaryDumper):
    def dump(self, obj: str) -> Any:
        return super().dump(_escape(obj))


class _LoadText(TextLoader):
    def load(self, data: Any) -> Any:
        return _unescape(str(super().load(data)))


class _LoadBinaryText(TextBinaryLoader):
    def load(self, data: Any) -> Any:
        return _unescape(str(super().load(data)))


class Postgres:
    """An open store on a server; see `backend.DatabaseBackend`."""

    shared = True
    deferred = False

    def __init__(self, server: PostgresAddress, mode: AccessMode, shutdown: Shutdown) -> None:
        self.server = server
        self._shutdown = shutdown
        self._mode = mode
        self._guard = threading.RLock()
        self._writing = self._closed = False
        self._last_reply_s = time.monotonic()
        self._unavailable_since_s: float | None = None  # None: the server is available
        self._timed_out = False  # the time limit for an outage was reached
        self._last_attempt_s = 0.0  # time of the last failed attempt to connect
        self.connected: list[Callable[[], None]] = []  # called after a reconnect
        self._connection = _waited_for(server, lambda: _connected(server, mode), shutdown)
        with mapped_errors(server, self._connection):
            self._backend = backend_of(self._connection)
        self._stale = list[PostgresBackend]()  # server processes of lost connections, which may still hold locks

    @property
    def ahead_s(self) -> float:
        """The difference as measured when the connection was made."""
        return self._backend.ahead_s

    def run(self, name: str, /, **values: Any) -> QueryResult:
        """Run a named query; a query that writes must be inside `writing`."""
        with mapped_errors(self.server, self._connection):
            found = self._connection.execute(postgres_queries()[name], values, binary=True)
        self._last_reply_s = time.monotonic()
        return found

    def many(self, name: str, rows: Iterable[tuple[Any, ...]]) -> int:
        """Run a named query for many rows, with COPY if it supports that; returns the number of changed rows."""
        texts = postgres_queries()
        with mapped_errors(self.server, self._connection), self._connection.cursor() as cursor:
            if f"{name}_rows" not in texts:
                cursor.executemany(texts[name], rows)
                return cursor.rowcount
            with cursor.copy(texts[f"{name}_rows"]) as copy:
                copy.set_types(_COMING)
                for row in rows:
                    copy.write_row(row)
            return cursor.execute(texts[name]).rowcount

    def all(self, name: str, /, **values: Any) -> list[Any]:
        """All rows of a read-only query, from one snapshot."""
        with self._guard:
            if self._writing:
                return self.run(name, **values).fetchall()
            return self.transaction(lambda: self.run(name, **values).fetchall())

    def one(self, name: str, /, **values: Any) -> Any:
        """The first row of a read-only query, or None."""
        rows = self.all(name, **values)
        return rows[0] if rows else None

    def flush(self) -> None:
        """Do nothing: no transaction is deferred, because started jobs must be visible to other processes."""

    @contextmanager
    def writing(self, *, durable: bool, deferred: bool = False) -> Iterator[None]:
        """A transaction: committed at the end, rolled back by any exception. `durable`: on disk when this returns."""
        del deferred
        with self._guard, mapped_errors(self.server, self._connection):
            if self._writing:
                raise AssertionError("a transaction within another")
            self._connection.execute(_DURABLE if durable else _NOT_DURABLE)  # the role may have another default
            self._writing = True
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                with suppress(psycopg.Error):  # a lost connection has ended the transaction
                    self._connection.execute("ROLLBACK")
                raise
            finally:
                self._writing = False

    def transaction(self, work: Callable[[], T], *, patient: bool = True) -> T:
        """Call a repeatable function; call it again after a conflict or a lost connection.

        Unless `patient`, reconnecting to an unavailable server is attempted only once.
        """
        with self._guard:
            if self._writing:
                return work()
            conflicts = 0
            while True:
                began_s = time.monotonic()
                try:
                    return work()
                except Conflict:
                    conflicts += 1
                    if conflicts > _MAX_CONFLICTS:
                        raise
                except ConnectionLost as lost:
                    self._connect_again(lost, max(began_s, self._last_reply_s), patient=patient)

    def problems(self) -> list[str]:
        """Empty: the server reports damaged pages when they are read."""
        return []

    def close(self) -> None:
        """Close the connection permanently."""
        with self._guard, suppress(psycopg.Error):
            self._closed = True
            self._connection.close()

    def _connect_again(self, why: ConnectionLost, last_reply_s: float, *, patient: bool) -> None:
        """Reconnect, within the time limit for an outage."""
        if self._unavailable_since_s is None:
            self._unavailable_since_s = last_reply_s
        until_s = self._unavailable_since_s + MAX_OUTAGE_S
        wait_s = _FIRST_WAIT_S
        lately = time.monotonic() - self._last_attempt_s < _MAX_WAIT_S
        if self._closed or (self._timed_out and lately):
            raise why
        if lately and self._shutdown.is_set():
            raise Stopped(self.server, self._shutdown.exit_code)
        while True:
            try:
                self._reconnect()
            except ConnectionLost:
                self._last_attempt_s = time.monotonic()
                self._timed_out |= self._last_attempt_s + wait_s > until_s
                if self._timed_out or not patient:
                    raise why from None
                self.pause(wait_s)
                wait_s = min(2 * wait_s, _MAX_WAIT_S)
            else:
                self._unavailable_since_s = None
                self._timed_out = False
                self._last_reply_s = time.monotonic()
                return

    def pause(self, wait_s: float) -> None:
        """Wait before the next attempt; raises Stopped if this process must exit."""
        _pause(self.server, wait_s, self._shutdown)

    def has_stale_backends(self) -> bool:
        """Whether server processes of lost connections still exist and may hold locks."""
        with mapped_errors(self.server, self._connection):
            self._stale = [stale for stale in self._stale if lives(self._connection, stale)]
        return bool(self._stale)

    def _reconnect(self) -> None:
        with suppress(psycopg.Error):
            self._connection.close()
        self._connection = _connected(self.server, self._mode)
        try:
            with mapped_errors(self.server, self._connection):
                self._stale.append(self._backend)
                self._backend = backend_of(self._connection)
                for stale in self._stale:
                    end(self._connection, stale)
                self.has_stale_backends()
            for callback in self.connected:
                callback()
        except BaseException:  # the next caller gets the same error
            self._connection.close()
            raise


def has_tables(server: PostgresAddress) -> bool:
    """Whether a store exists there."""
    connection = _waited_for(server, lambda: _reached(server), Shutdown())
    try:
        with mapped_errors(server, connection):
            return _version(connection, server) is not None
    finally:
        connection.close()


def _pause(server: PostgresAddress, wait_s: float, shutdown: Shutdown) -> None:
    if shutdown.wait(wait_s):
        raise Stopped(server, shutdown.exit_code)


def _waited_for(server: PostgresAddress, connect: Callable[[], Connection], shutdown: Shutdown) -> Connection:
    """Connect for the first time; a server that is starting up or shutting down is retried for `MAX_OUTAGE_S`.

    A server that does not respond at all is an error immediately, because its address may be wrong.
    """
    until_s = time.monotonic() + MAX_OUTAGE_S
    wait_s = _FIRST_WAIT_S
    waiting = ready = False
    while True:
        try:
            return connect()
        except ConnectionLost as lost:
            state = _ping(server) if isinstance(lost, ServerUnreachable) else Ping.REJECT
            # It may have become ready meanwhile; a ready server that refuses connections does so permanently.
            again = {Ping.REJECT: True, Ping.OK: not ready, Ping.NO_RESPONSE: waiting}.get(state, False)
            if not again or time.monotonic() + wait_s > until_s:
                raise
        ready = state == Ping.OK
        if state == Ping.REJECT and not waiting:
            _log.warning("%s is starting up or shutting down; waiting up to %.0f s for it", server, MAX_OUTAGE_S)
            waiting = True
        _pause(server, wait_s, shutdown)
        wait_s = min(2 * wait_s, _MAX_WAIT_S)


def _ping(server: PostgresAddress) -> Ping:
    """State of a server that refused a connection; REJECT: it is starting up or shutting down (SQLSTATE 57P03).

    libpq does not expose the SQLSTATE of a refused connection, and its message may be translated.
    """
    return Ping(PGconn.ping(make_conninfo(server.url, **_connection_settings(server)).encode()))


def _connection_settings(server: PostgresAddress) -> dict[str, Any]:
    """Default connection parameters that the URL does not set."""
    given = conninfo_to_dict(server.url)
    return {name: value for name, value in _CONNECTION_SETTINGS.items() if name not in given}


def _connected(server: PostgresAddress, mode: AccessMode) -> Connection:
    connection = _reached(server)
    try:
        with mapped_errors(server, connection):
            _check_server(connection, server)
            limits = {"idle_in_transaction_session_timeout": f"{IDLE_S}s", **_SERVER_SETTINGS}
            connection.execute("; ".join(f"SET {name} = '{value}'" for name, value in limits.items()))
            adapters = connection.adapters
            for dumper in (_DumpRowText, _DumpText):  # for copied rows, and for values
                adapters.register_dumper(str, dumper)
            for loader in (_LoadText, _LoadBinaryText):
                adapters.register_loader("text", loader)
            if mode == "work":
                _create_or_migrate(connection, server)
                ask(connection, "coming")
            else:
                _check_version(connection, server)
            if mode == "read":
                connection.execute("SET default_transaction_read_only = on")
    except BaseException:
        connection.close()
        raise
    return connection


def _reached(server: PostgresAddress) -> Connection:
    try:
        return psycopg.connect(server.url, autocommit=True, **_connection_settings(server))
    except psycopg.Error as error:
        raise unreachable(server, error) from None  # libpq's message about a URL may contain the password


def _check_server(connection: Connection, server: PostgresAddress) -> None:
    if connection.info.server_version < OLDEST_SERVER:
        raise StoreError(
            f"the server of {server} is too old: PostgreSQL {connection.info.server_version // 10000}",
            hint="use PostgreSQL 12 or newer",
        )
    if connection.info.parameter_status("server_encoding") != "UTF8":
        raise StoreError(
            f"the database of {server} is not in UTF-8", hint="createdb --encoding=UTF8 --template=template0 tokenmill"
        )


def _version(connection: Connection, server: PostgresAddress) -> int | None:
    """The version of the store, or None; raises StoreError for the database of another program."""
    found = [name for (name,) in ask(connection, "tables").fetchall()]
    if not found:
        return None
    if "tokenmill" not in found:
        message = f"{server} has tables of another program"
        own = "?options=-csearch_path%3Dtokenmill"
        raise StoreError(message, hint=f"use another database, or a schema: {own}", code=FOREIGN_DATABASE)
    version = max((int(number) for (number,) in ask(connection, "version").fetchall()), default=0)
    if version > VERSION:
        raise StoreError(
            f"{server} was written by a newer tokenmill: it has version {version}, this one supports up to {VERSION}",
            hint=f"install a newer tokenmill on this host (this is {__version__})",
            code=STORE_TOO_NEW,
        )
    if version < OLDEST:
        raise StoreError(
            f"{server} has store version {version}, which is too old to be upgraded",
            hint="use the tokenmill version that wrote it, or another database",
            code=STORE_TOO_OLD,
        )
    return version


def _check_version(connection: Connection, server: PostgresAddress) -> None:
    version = _version(connection, server)
    if version is None:
        raise StoreError(f"there are no batches in {server}", hint="start one with tokenmill run", code=NO_BATCHES)
    if version < VERSION:
        raise StoreError(
            f"{server} has store version {version}, and this tokenmill reads version {VERSION}",
            hint="upgrade it with tokenmill run or tokenmill work",
            code=STORE_TOO_OLD,
        )


def _create_or_migrate(connection: Connection, server: PostgresAddress) -> None:
    """Create or migrate the tables, under a lock."""
    if _version(connection, server) == VERSION:
        return
    with connection.transaction():
        ask(connection, "lock_setup", key=_SET_UP)
        version = _version(connection, server)
        if version is None:
            if ask(connection, "schema_there").fetchone() == (None,):
                message = f"the schema in {server} does not exist"
                raise StoreError(message, hint="create it with CREATE SCHEMA tokenmill", code="schema_missing")
            connection.execute(postgres_schema())
            return
        for number, text in postgres_migrations().items():
            if number > version:
                connection.execute(text)
