"""The SQLite file of a store: one writer, any number of readers.

`store.db` is in WAL mode, so readers and the writer do not wait for each other. The process that runs jobs holds
`store.lock`. A transaction is durable (on disk when committed, such as answers), not durable (its changes can be
derived again), or deferred (committed together with the next one). Processes without the lock may write too, such as a
gateway that receives a file; while they wait they lock `store.wait`, and no transaction is deferred. The log is written
back to the file and truncated when the store is opened and closed, when the disk is full, and when it exceeds a limit
that depends on the free space. Does not depend on the tables.
"""

import fcntl
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.parse import quote

from tokenmill.errors import StoreError, StoreInUse
from tokenmill.jobs.store.backend import FOREIGN_DATABASE, NO_BATCHES, STORE_TOO_NEW, STORE_TOO_OLD, AccessMode
from tokenmill.jobs.store.queries import migrations, newest, queries, schema
from tokenmill.jobs.store.sqlite_errors import is_disk_full, mapped_errors, removed, unusable
from tokenmill.storage.private import FILE_MODE, private_file, private_folder
from tokenmill.units import KIB, MIB

FILE = "store.db"
LOCK = "store.lock"
WAIT = "store.wait"
APPLICATION_ID = 0x746D696C  # "tmil"
OLDEST_SQLITE = (3, 35, 0)  # RETURNING
BUSY_WAIT_S = 10.0
PAGE_BYTES = 4 * KIB  # of a new store; small, because changed pages are logged completely
CACHE_BYTES = 96 * MIB
MAX_LOG_BYTES = 128 * MIB  # size at which the log is written back to the file, if the disk has enough space
LOG_SHARE_OF_FREE = 4  # the log may use one part in this many of the free space, so that the file can absorb it
MIN_LOG_PAGES = 64
CLOSE_WAIT_S = 1.0  # for readers; after that, the log is not written back

T = TypeVar("T")


class Database:
    """An open store.db; see `backend.DatabaseBackend`."""

    shared = False
    ahead_s = 0.0

    def __init__(self, folder: Path, mode: AccessMode) -> None:
        if sqlite3.sqlite_version_info < OLDEST_SQLITE:
            raise StoreError(
                f"SQLite {sqlite3.sqlite_version} is too old", hint="use a Python with SQLite 3.35 or newer"
            )
        self.path = folder / FILE
        self.deferred = False
        self._guard = threading.RLock()
        self._log_bytes = 0
        with ExitStack() as stack:
            self._lock = _locked(folder) if mode == "work" else None
            self._wait: int | None = None
            stack.callback(self._unlock)
            try:
                self._connection = _connected(self.path, mode)
                self._inode = self.path.stat().st_ino
                if mode != "read":
                    self._wait = os.open(folder / WAIT, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
            except OSError as error:
                raise unusable(folder, error) from error
            self._page_bytes: int = self._connection.execute("PRAGMA page_size").fetchone()[0]
            stack.pop_all()

    def run(self, name: str, /, **values: Any) -> sqlite3.Cursor:
        """Run a named query; a query that writes must be inside `writing`."""
        with mapped_errors(self.path):
            return self._connection.execute(queries()[name], values)

    def many(self, name: str, rows: Iterable[tuple[Any, ...]]) -> int:
        """Run a named query for many rows; returns the number of changed rows."""
        with mapped_errors(self.path):
            return self._connection.executemany(queries()[name], rows).rowcount

    def all(self, name: str, /, **values: Any) -> list[Any]:
        """All rows of a read-only query, from one snapshot."""
        with self._guard, mapped_errors(self.path):
            return self._connection.execute(queries()[name], values).fetchall()

    def one(self, name: str, /, **values: Any) -> Any:
        """The first row of a read-only query, or None."""
        rows = self.all(name, **values)
        return rows[0] if rows else None

    @contextmanager
    def writing(self, *, durable: bool, deferred: bool = False) -> Iterator[None]:
        """See `backend.DatabaseBackend`."""
        with self._guard, mapped_errors(self.path), self._announced():
            self._check_here()
            deferred = deferred and not self._is_awaited()
            if not durable and not deferred:
                self.flush()  # this transaction may be large, and a savepoint would copy every page that it changes
            joined = self.deferred
            if joined:
                self._connection.execute("SAVEPOINT joined")
            else:
                self._limit_log()
                self._connection.execute(f"PRAGMA synchronous = {'FULL' if durable or deferred else 'NORMAL'}")
                self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                if joined:
                    self._connection.execute("RELEASE joined")
                if not deferred:
                    self._connection.execute("COMMIT")
                self.deferred = deferred
            except BaseException:
                self._undo(joined=joined)
                raise

    @contextmanager
    def _announced(self) -> Iterator[None]:
        """Without the lock, signal to its holder that a transaction waits."""
        if self._lock is not None or self._wait is None:
            yield
            return
        fcntl.flock(self._wait, fcntl.LOCK_SH)
        try:
            yield
        finally:
            fcntl.flock(self._wait, fcntl.LOCK_UN)

    def _is_awaited(self) -> bool:
        """Whether a process without the lock waits to write; deferred transactions would starve it."""
        if self._wait is None:
            return False
        try:
            fcntl.flock(self._wait, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._wait, fcntl.LOCK_UN)
        return False

    def _undo(self, *, joined: bool) -> None:
        """Roll back one transaction; on an error such as a full disk, SQLite has rolled back deferred changes too."""
        if joined and self._connection.in_transaction:
            self._connection.execute("ROLLBACK TO joined")
            self._connection.execute("RELEASE joined")
        elif self._connection.in_transaction:
            self._connection.execute("ROLLBACK")
        self.deferred = self._connection.in_transaction

    def flush(self) -> None:
        """Commit deferred changes."""
        with self._guard, mapped_errors(self.path):
            if self.deferred:
                self.deferred = False
                try:
                    self._connection.execute("COMMIT")
                finally:
                    self._undo(joined=False)

    def transaction(self, work: Callable[[], T]) -> T:
        """Run a transaction; if the disk is full, write the log back, which frees its space, and run it once more."""
        try:
            return work()
        except StoreError as error:
            if not is_disk_full(error) or (self._connection.in_transaction and not self.deferred):
                raise
            with self._guard, mapped_errors(self.path):
                with suppress(StoreError):
                    self.flush()  # a failure loses only the running state of jobs, which is known here
                checkpoint(self._connection)
                self._limit_log()
            return work()

    def problems(self) -> list[str]:
        """Messages of SQLite's integrity check."""
        try:
            with self._guard, mapped_errors(self.path):
                found = [row[0] for row in self._connection.execute("PRAGMA integrity_check").fetchall()]
        except StoreError as error:
            return [error.message]
        return [] if found == ["ok"] else found

    def close(self) -> None:
        """Write the log back, close the file and release the lock."""
        try:
            with self._guard, mapped_errors(self.path):
                try:
                    if self._lock is not None:
                        self._connection.execute(f"PRAGMA busy_timeout = {CLOSE_WAIT_S * 1000:.0f}")
                        self.flush()
                        checkpoint(self._connection)
                finally:
                    self._connection.close()
        finally:
            self._unlock()

    def _limit_log(self) -> None:
        """Set the size at which the log is written back to the file, by the current free space."""
        free = shutil.disk_usage(self.path.parent).free
        allowed = max(MIN_LOG_PAGES * self._page_bytes, min(MAX_LOG_BYTES, free // LOG_SHARE_OF_FREE))
        if not allowed // 2 < self._log_bytes <= allowed:
            self._log_bytes = allowed
            self._connection.execute(f"PRAGMA wal_autocheckpoint = {allowed // self._page_bytes}")
            self._connection.execute(f"PRAGMA journal_size_limit = {allowed}")

    def _check_here(self) -> None:
        # SQLite would continue to write into an unlinked file, and every answer in it would be lost.
        try:
            here = self.path.stat().st_ino == self._inode
        except OSError:
            here = False
        if not here:
            raise removed(self.path)

    def _unlock(self) -> None:
        for held in (self._lock, self._wait):
            if held is not None:
                os.close(held)
        self._lock = self._wait = None


def _locked(folder: Path) -> int:
    """Acquire the lock file; the system releases it when the process ends."""
    try:
        private_folder(folder)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 100, 0).decode("ascii", "replace").strip()
            os.close(lock)
            raise StoreInUse(
                f"process {holder or 'with unknown number'} is running the batches in {folder}",
                hint="wait for it or stop it; only one process can run batches, but tokenmill status works meanwhile",
            ) from None
        except OSError:
            os.close(lock)
            raise
    except OSError as error:
        raise unusable(folder, error) from error
    with suppress(OSError):  # only informs users; the disk may be full
        os.ftruncate(lock, 0)
        os.pwrite(lock, b"%d\n" % os.getpid(), 0)
    return lock


def _connected(path: Path, mode: AccessMode) -> sqlite3.Connection:
    if mode != "work" and not path.is_file():
        raise _no_batches(path)
    access = {"work": "rwc", "ask": "rw", "read": "ro"}[mode]
    if mode == "work":
        private_file(path)  # SQLite gives its log the same mode
    with mapped_errors(path):
        connection = sqlite3.connect(
            f"file:{quote(str(path))}?mode={access}",
            uri=True,
            timeout=BUSY_WAIT_S,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            version = _version(connection, path)  # before changing anything, because it may belong to another program
            if mode == "work":
                connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
                if connection.execute("PRAGMA journal_mode = WAL").fetchone() != ("wal",):
                    _refuse_disk(path)
                connection.execute(f"PRAGMA cache_size = {-CACHE_BYTES // KIB}")
                connection.execute("PRAGMA temp_store = MEMORY")  # also for statement journals
                checkpoint(connection)
            _create_or_migrate(connection, path, version, work=mode == "work")
        except BaseException:
            connection.close()
            raise
    return connection


def _no_batches(path: Path) -> StoreError:
    return StoreError(f"there are no batches in {path.parent}", hint="start one with tokenmill run", code=NO_BATCHES)


def checkpoint(connection: sqlite3.Connection) -> None:
    """Write the log back to the file and truncate it, as far as readers and free space allow."""
    with suppress(sqlite3.OperationalError):  # locked, or no space; damage raises another class
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _refuse_disk(path: Path) -> NoReturn:
    raise StoreError(
        f"the file system of {path} does not support databases shared by several processes",
        hint="put the state folder on a local disk",
    )


def _version(connection: sqlite3.Connection, path: Path) -> int:
    """The version of the store, 0 for a new one; raises StoreError for the database of another program."""
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    application: int = connection.execute("PRAGMA application_id").fetchone()[0]
    empty = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0
    if not empty and application != APPLICATION_ID:
        raise StoreError(
            f"{path} is the database of another program", hint="use another state folder", code=FOREIGN_DATABASE
        )
    if version > newest():
        raise StoreError(
            f"{path} was written by a newer tokenmill: it has version {version}, this one supports up to {newest()}",
            hint="upgrade tokenmill, or use another state folder",
            code=STORE_TOO_NEW,
        )
    return version


def _create_or_migrate(connection: sqlite3.Connection, path: Path, version: int, *, work: bool) -> None:
    """Create or migrate the tables."""
    if version == newest():
        return
    if not work and version == 0:  # its creation failed
        raise _no_batches(path)
    if not work:
        raise StoreError(
            f"{path} has store version {version}, and this tokenmill reads version {newest()}",
            hint="upgrade it with tokenmill run or tokenmill store check --repair",
            code=STORE_TOO_OLD,
        )
    steps = [schema()] if version == 0 else [text for number, text in migrations().items() if number > version]
    migrate(connection, steps, newest())


def migrate(connection: sqlite3.Connection, steps: Iterable[str], version: int) -> None:
    """Run migration scripts in one transaction, and set the new version."""
    script = "\n".join(
        (
            "BEGIN IMMEDIATE;",
            *steps,
            f"PRAGMA application_id = {APPLICATION_ID};",
            f"PRAGMA user_version = {version};",
            "COMMIT;",
        )
    )
    try:
        connection.executescript(script)
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
