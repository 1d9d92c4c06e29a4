"""PostgreSQL under the store, for runners on several hosts: the same queries, transactions that hold or never were.

A transaction is acknowledged before it is on the server's disk, or only then (durable). Of two that are in each other's
way one is undone and done again; a connection that breaks is made anew, and a server that is away is waited for once,
whoever asks. Which tables there are is not known here.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version as version_of
from typing import Any, TypeVar

try:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict, make_conninfo
    from psycopg.pq import PGconn, Ping
    from psycopg.types.string import StrBinaryDumper, StrDumperUnknown, TextBinaryLoader, TextLoader
except ImportError as error:
    from tokenmill.errors import StoreError as _StoreError

    raise _StoreError(
        "a store on PostgreSQL needs the driver psycopg, which is not installed",
        hint="pip install 'tokenmill[postgres]'",
    ) from error

from tokenmill.errors import StoreError
from tokenmill.jobs.store.address import PostgresAddress
from tokenmill.jobs.store.backend import AccessMode, QueryResult, Shutdown
from tokenmill.jobs.store.postgres_errors import Conflict, ConnectionLost, ServerUnreachable, Stopped, told, unreachable
from tokenmill.jobs.store.postgres_session import Connection, PostgresBackend, ask, backend_of, end, lives
from tokenmill.jobs.store.queries import postgres_migrations, postgres_queries, postgres_schema

VERSION, OLDEST = 4, 1  # that is written, and that can be brought there
OLDEST_SERVER = 120000  # 12
PATIENCE_S = 60.0  # for a server that is away; longer than it takes to start one again
_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 5.0
_MOST_CONFLICTS = 10
_SET_UP = 0x746D696C  # "tmil": whoever makes the tables
# A network that drops packets without a word is noticed within half a minute.
_LINE: dict[str, Any] = {
    "connect_timeout": 10,
    "tcp_user_timeout": 25_000,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "application_name": "tokenmill",
}
# The server lets go of what a host holds that sleeps or is gone, well before its lease is over.
IDLE_S = 20
_SERVER_LINE = {
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "25s",
}
_DURABLE = "BEGIN; SET LOCAL synchronous_commit TO on"
_SOON = "BEGIN; SET LOCAL synchronous_commit TO off"
_COMING = ("int8", "text", "bytea", "bytea", "int8", "int8", "int8", "float8", "text", "text", "int8")

# PostgreSQL has no text with U+0000 in it, which JSON has: it is written as a noncharacter and a sign, and that
# noncharacter as itself twice.
_MARK = "\uffff"
_NUL = _MARK + "0"

T = TypeVar("T")
_log = logging.getLogger("tokenmill")


def _kept(text: str) -> str:
    return text.replace(_MARK, _MARK * 2).replace("\0", _NUL) if "\0" in text or _MARK in text else text


def _meant(text: str) -> str:
    return _MARK.join(part.replace(_NUL, "\0") for part in text.split(_MARK * 2)) if _MARK in text else text


class _Text(StrDumperUnknown):
    def dump(self, obj: str) -> Any:
        return super().dump(_kept(obj))


class _TextInRows(StrBinaryDumper):
    def dump(self, obj: str) -> Any:
        return super().dump(_kept(obj))


class _Said(TextLoader):
    def load(self, data: Any) -> Any:
        return _meant(str(super().load(data)))


class _SaidInBinary(TextBinaryLoader):
    def load(self, data: Any) -> Any:
        return _meant(str(super().load(data)))


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
        self._heard_s = time.monotonic()
        self._away_s: float | None = None  # since when the server is; None: it is there
        self._given_up = False  # it was waited for long enough
        self._tried_s = 0.0  # when it was last looked for in vain
        self.connected: list[Callable[[], None]] = []  # to be done on a connection that was made anew
        self._connection = _waited_for(server, lambda: _connected(server, mode), shutdown)
        with told(server, self._connection):
            self._backend = backend_of(self._connection)
        self._ghosts = list[PostgresBackend]()  # others that served us, and may not know that we are gone

    @property
    def ahead_s(self) -> float:
        """As it was when the connection was made."""
        return self._backend.ahead_s

    def run(self, name: str, /, **values: Any) -> QueryResult:
        """Run a named query; inside `writing`, or reading."""
        with told(self.server, self._connection):
            found = self._connection.execute(postgres_queries()[name], values, binary=True)
        self._heard_s = time.monotonic()
        return found

    def many(self, name: str, rows: Iterable[tuple[Any, ...]]) -> int:
        """Run a named query for many rows; how many rows it changed. Where there is a way to copy them, they are."""
        texts = postgres_queries()
        with told(self.server, self._connection), self._connection.cursor() as cursor:
            if f"{name}_rows" not in texts:
                cursor.executemany(texts[name], rows)
                return cursor.rowcount
            with cursor.copy(texts[f"{name}_rows"]) as copy:
                copy.set_types(_COMING)
                for row in rows:
                    copy.write_row(row)
            return cursor.execute(texts[name]).rowcount

    def all(self, name: str, /, **values: Any) -> list[Any]:
        """All rows of a query that reads, at one moment."""
        with self._guard:
            if self._writing:
                return self.run(name, **values).fetchall()
            return self.whole(lambda: self.run(name, **values).fetchall())

    def one(self, name: str, /, **values: Any) -> Any:
        """The first row of a query that reads; None: there is none."""
        rows = self.all(name, **values)
        return rows[0] if rows else None

    def flush(self) -> None:
        """Nothing to do: what one runner starts must be visible to the others, so no transaction is deferred."""

    @contextmanager
    def writing(self, *, durable: bool, deferred: bool = False) -> Iterator[None]:
        """A transaction: committed at the end, undone by any exception. `durable`: on the disk when this returns."""
        del deferred
        with self._guard, told(self.server, self._connection):
            if self._writing:
                raise AssertionError("a transaction within another")
            self._connection.execute(_DURABLE if durable else _SOON)  # a role may have its own idea of it
            self._writing = True
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                with suppress(psycopg.Error):  # it is gone with its connection
                    self._connection.execute("ROLLBACK")
                raise
            finally:
                self._writing = False

    def whole(self, work: Callable[[], T], *, patient: bool = True) -> T:
        """Do what may be done again from its beginning: it is, where others came in between or a connection broke.

        Not `patient`: a server that is away is looked for once, and not waited for.
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
                    if conflicts > _MOST_CONFLICTS:
                        raise
                except ConnectionLost as lost:
                    self._connect_again(lost, max(began_s, self._heard_s), patient=patient)

    def problems(self) -> list[str]:
        """Nothing: the server reports a damaged page when it is read."""
        return []

    def close(self) -> None:
        """Let go of the server, for good."""
        with self._guard, suppress(psycopg.Error):
            self._closed = True
            self._connection.close()

    def _connect_again(self, why: ConnectionLost, heard_s: float, *, patient: bool) -> None:
        """Within the time that a server is waited for in all, since it was last heard."""
        if self._away_s is None:
            self._away_s = heard_s
        until_s = self._away_s + PATIENCE_S
        wait_s = _FIRST_WAIT_S
        lately = time.monotonic() - self._tried_s < _LONGEST_WAIT_S
        if self._closed or (self._given_up and lately):
            raise why
        if lately and self._shutdown.is_set():
            raise Stopped(self.server, self._shutdown.exit_code)
        while True:
            try:
                self._reconnect()
            except ConnectionLost:
                self._tried_s = time.monotonic()
                self._given_up |= self._tried_s + wait_s > until_s
                if self._given_up or not patient:
                    raise why from None
                self.pause(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            else:
                self._away_s = None
                self._given_up = False
                self._heard_s = time.monotonic()
                return

    def pause(self, wait_s: float) -> None:
        """Wait before the server is tried again; Stopped if this process is to end."""
        _pause(self.server, wait_s, self._shutdown)

    def haunted(self) -> bool:
        """Whether a connection that broke here is still there for the server, with all that it holds."""
        with told(self.server, self._connection):
            self._ghosts = [ghost for ghost in self._ghosts if lives(self._connection, ghost)]
        return bool(self._ghosts)

    def _reconnect(self) -> None:
        with suppress(psycopg.Error):
            self._connection.close()
        self._connection = _connected(self.server, self._mode)
        try:
            with told(self.server, self._connection):
                self._ghosts.append(self._backend)
                self._backend = backend_of(self._connection)
                for ghost in self._ghosts:
                    end(self._connection, ghost)
                self.haunted()
            for again in self.connected:
                again()
        except BaseException:  # whoever comes next is told the same
            self._connection.close()
            raise


def has_tables(server: PostgresAddress) -> bool:
    """Whether a store is there."""
    connection = _waited_for(server, lambda: _reached(server), Shutdown())
    try:
        with told(server, connection):
            return _version(connection, server) is not None
    finally:
        connection.close()


def _pause(server: PostgresAddress, wait_s: float, shutdown: Shutdown) -> None:
    if shutdown.wait(wait_s):
        raise Stopped(server, shutdown.exit_code)


def _waited_for(server: PostgresAddress, connect: Callable[[], Connection], shutdown: Shutdown) -> Connection:
    """The first connection to a server; one that is starting up or shutting down is retried for `PATIENCE_S`.

    A server that does not answer at all is an error at once, because its address may be wrong.
    """
    until_s = time.monotonic() + PATIENCE_S
    wait_s = _FIRST_WAIT_S
    waiting = ready = False
    while True:
        try:
            return connect()
        except ConnectionLost as lost:
            state = _ping(server) if isinstance(lost, ServerUnreachable) else Ping.REJECT
            # it may have become ready in between; one that refuses us when it is ready does so for good
            again = {Ping.REJECT: True, Ping.OK: not ready, Ping.NO_RESPONSE: waiting}.get(state, False)
            if not again or time.monotonic() + wait_s > until_s:
                raise
        ready = state == Ping.OK
        if state == Ping.REJECT and not waiting:
            _log.warning("%s is starting up or shutting down; waiting up to %.0f s for it", server, PATIENCE_S)
            waiting = True
        _pause(server, wait_s, shutdown)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def _ping(server: PostgresAddress) -> Ping:
    """What a server says that refused a connection; REJECT: it is starting up or shutting down (SQLSTATE 57P03).

    libpq does not pass the SQLSTATE of a refused connection on, and its message may be translated.
    """
    return Ping(PGconn.ping(make_conninfo(server.url, **_line(server)).encode()))


def _line(server: PostgresAddress) -> dict[str, Any]:
    """How the connection is kept, but for what the URL itself says about that."""
    given = conninfo_to_dict(server.url)
    return {name: value for name, value in _LINE.items() if name not in given}


def _connected(server: PostgresAddress, mode: AccessMode) -> Connection:
    connection = _reached(server)
    try:
        with told(server, connection):
            _check_server(connection, server)
            limits = {"idle_in_transaction_session_timeout": f"{IDLE_S}s", **_SERVER_LINE}
            connection.execute("; ".join(f"SET {name} = '{value}'" for name, value in limits.items()))
            adapters = connection.adapters
            for dumper in (_TextInRows, _Text):  # the last is for values, the first for rows that are copied
                adapters.register_dumper(str, dumper)
            for loader in (_Said, _SaidInBinary):
                adapters.register_loader("text", loader)
            if mode == "work":
                _bring_up(connection, server)
                ask(connection, "coming")
            else:
                _look_into(connection, server)
            if mode == "read":
                connection.execute("SET default_transaction_read_only = on")
    except BaseException:
        connection.close()
        raise
    return connection


def _reached(server: PostgresAddress) -> Connection:
    try:
        return psycopg.connect(server.url, autocommit=True, **_line(server))
    except psycopg.Error as error:
        raise unreachable(server, error) from None  # what libpq says of a URL may hold the password


def _check_server(connection: Connection, server: PostgresAddress) -> None:
    if connection.info.server_version < OLDEST_SERVER:
        raise StoreError(
            f"the server of {server} is too old: {connection.info.server_version // 10000}",
            hint="PostgreSQL 12 or newer is needed",
        )
    if connection.info.parameter_status("server_encoding") != "UTF8":
        raise StoreError(
            f"the database of {server} is not in UTF-8", hint="createdb --encoding=UTF8 --template=template0 tokenmill"
        )


def _version(connection: Connection, server: PostgresAddress) -> int | None:
    """The version of the store, None where there is none; refuses what is not ours to touch."""
    found = [name for (name,) in ask(connection, "tables").fetchall()]
    if not found:
        return None
    if "tokenmill" not in found:
        said = f"{server} has tables of another program"
        own = "?options=-csearch_path%3Dtokenmill"
        raise StoreError(said, hint=f"give tokenmill a database of its own, or a schema: {own}")
    version = max((int(number) for (number,) in ask(connection, "version").fetchall()), default=0)
    if version > VERSION:
        raise StoreError(
            f"{server} was written by a newer tokenmill: the store's version is {version}, {VERSION} is known here",
            hint=f"upgrade tokenmill on this host, {version_of('tokenmill')} is installed: pip install --upgrade "
            "'tokenmill[postgres]'",
        )
    if version < OLDEST:
        raise StoreError(
            f"{server} is of an older version, {version}, which is not known here",
            hint="use the tokenmill that wrote it, or another database",
        )
    return version


def _look_into(connection: Connection, server: PostgresAddress) -> None:
    version = _version(connection, server)
    if version is None:
        raise StoreError(f"there are no batches in {server}", hint="tokenmill run starts one")
    if version < VERSION:
        raise StoreError(
            f"{server} is of an older version, {version}", hint="tokenmill run or work brings it up to date"
        )


def _bring_up(connection: Connection, server: PostgresAddress) -> None:
    """Create the tables, or bring older ones up to date; of several that come at once, one does."""
    if _version(connection, server) == VERSION:
        return
    with connection.transaction():
        ask(connection, "set_up_turn", key=_SET_UP)
        version = _version(connection, server)
        if version is None:
            if ask(connection, "schema_there").fetchone() == (None,):
                raise StoreError(f"{server} names no schema that is there", hint="create it: CREATE SCHEMA tokenmill")
            connection.execute(postgres_schema())
            return
        for number, text in postgres_migrations().items():
            if number > version:
                connection.execute(text)
