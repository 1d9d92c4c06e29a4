"""The SQLite file under the store: one writer, any number of readers, transactions that hold or never were.

`store.db` is in WAL mode: a status never waits for a commit, nor a commit for a status. `store.lock` is held by the one
process that works. A transaction is written without waiting for the disk (what it says can be found out again) or
durably (answers: on the disk before it counts). Which tables there are is not known here.
"""

import fcntl
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.parse import quote

from tokenmill.errors import StoreError, StoreInUse
from tokenmill.jobs.faults import gone, told, unusable
from tokenmill.jobs.queries import migrations, newest, queries, schema
from tokenmill.jobs.tables import Mode
from tokenmill.units import KIB, MIB

FILE, LOCK = "store.db", "store.lock"
APPLICATION_ID = 0x746D696C  # "tmil"
OLDEST_SQLITE = (3, 35, 0)  # RETURNING
BUSY_WAIT_S = 10.0
PAGE_BYTES = 16 * KIB  # lines are stored in long pieces: a quarter of the calls that SQLite's usual pages take
CACHE_BYTES = 96 * MIB
WAL_BYTES = 128 * MIB  # written back to the file when it has grown to this

T = TypeVar("T")


class Database:
    """An open store.db; `tables.Tables` says what it does."""

    shared, ahead_s = False, 0.0

    def __init__(self, folder: Path, mode: Mode) -> None:
        if sqlite3.sqlite_version_info < OLDEST_SQLITE:
            raise StoreError(f"SQLite {sqlite3.sqlite_version} is too old", hint="Python needs SQLite 3.35 or newer")
        self.path = folder / FILE
        self._guard = threading.RLock()
        with ExitStack() as stack:
            self._lock = _locked(folder) if mode == "work" else None
            stack.callback(self._unlock)
            try:
                self._connection = _connected(self.path, mode)
                self._inode = self.path.stat().st_ino
            except OSError as error:
                raise unusable(folder, error) from error
            stack.pop_all()

    def run(self, name: str, /, **values: Any) -> sqlite3.Cursor:
        """Run a named query; inside `writing`, or reading."""
        with told(self.path):
            return self._connection.execute(queries()[name], values)

    def many(self, name: str, rows: Iterable[tuple[Any, ...]]) -> int:
        """Run a named query for many rows; how many rows it changed."""
        with told(self.path):
            return self._connection.executemany(queries()[name], rows).rowcount

    def all(self, name: str, /, **values: Any) -> list[Any]:
        """All rows of a query that reads, at one moment."""
        with self._guard, told(self.path):
            return self._connection.execute(queries()[name], values).fetchall()

    def one(self, name: str, /, **values: Any) -> Any:
        """The first row of a query that reads; None: there is none."""
        rows = self.all(name, **values)
        return rows[0] if rows else None

    @contextmanager
    def writing(self, *, durable: bool) -> Iterator[None]:
        """A transaction: committed at the end, undone by any exception. `durable`: on the disk when this returns."""
        with self._guard, told(self.path):
            self._check_here()
            self._connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    def whole(self, work: Callable[[], T]) -> T:
        """Do it: nobody can come in between."""
        return work()

    def close(self) -> None:
        """Let go of the file and the lock."""
        try:
            with self._guard, told(self.path):
                self._connection.close()
        finally:
            self._unlock()

    def _check_here(self) -> None:
        # SQLite would go on writing into a file that has no name any more, and every answer in it would be lost.
        try:
            here = self.path.stat().st_ino == self._inode
        except OSError:
            here = False
        if not here:
            raise gone(self.path)

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _locked(folder: Path) -> int:
    """The lock file, held; the system lets go of it when the process ends, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 100, 0).decode("ascii", "replace").strip()
            os.close(lock)
            raise StoreInUse(
                f"process {holder or 'of unknown number'} works with the batches in {folder}",
                hint="wait for it or end it; one process works at a time, any number may ask for the status",
            ) from None
        except OSError:
            os.close(lock)
            raise
    except OSError as error:
        raise unusable(folder, error) from error
    with suppress(OSError):  # who holds it is only said for people; the disk may be full
        os.ftruncate(lock, 0)
        os.pwrite(lock, b"%d\n" % os.getpid(), 0)
    return lock


def _connected(path: Path, mode: Mode) -> sqlite3.Connection:
    if mode != "work" and not path.is_file():
        raise StoreError(f"there are no batches in {path.parent}", hint="tokenmill run starts one")
    access = {"work": "rwc", "ask": "rw", "read": "ro"}[mode]
    with told(path):
        connection = sqlite3.connect(f"file:{quote(str(path))}?mode={access}", uri=True, timeout=BUSY_WAIT_S,
                                     isolation_level=None, check_same_thread=False)  # fmt: skip
        try:
            version = _version(connection, path)  # before anything is changed: it may not be ours
            if mode == "work":
                connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
                if connection.execute("PRAGMA journal_mode = WAL").fetchone() != ("wal",):
                    _refuse_disk(path)
                connection.execute(f"PRAGMA cache_size = {-CACHE_BYTES // KIB}")
                connection.execute(f"PRAGMA wal_autocheckpoint = {WAL_BYTES // PAGE_BYTES}")
                connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
            _bring_up(connection, path, version, work=mode == "work")
        except BaseException:
            connection.close()
            raise
    return connection


def _refuse_disk(path: Path) -> NoReturn:
    raise StoreError(f"the file system of {path} cannot hold a database that several processes read",
                     hint="put the state folder on a local disk")  # fmt: skip


def _version(connection: sqlite3.Connection, path: Path) -> int:
    """The version of the store, 0 for a new one; refuses what is not ours to touch."""
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    application: int = connection.execute("PRAGMA application_id").fetchone()[0]
    empty = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0
    if not empty and application != APPLICATION_ID:
        raise StoreError(f"{path} is the database of another program", hint="give tokenmill a state folder of its own")
    if version > newest():
        raise StoreError(
            f"{path} was written by a newer tokenmill: the store's version is {version}, {newest()} is known here",
            hint="use that tokenmill, or another state folder",
        )
    return version


def _bring_up(connection: sqlite3.Connection, path: Path, version: int, *, work: bool) -> None:
    """Create or migrate."""
    if version == newest():
        return
    if not work:
        raise StoreError(f"{path} is of an older version", hint="a command that works on batches brings it up to date")
    steps = [schema()] if version == 0 else [text for number, text in migrations().items() if number > version]
    migrate(connection, steps, newest())


def migrate(connection: sqlite3.Connection, steps: Iterable[str], version: int) -> None:
    """Run scripts in one transaction and note the version they lead to."""
    script = "\n".join(("BEGIN IMMEDIATE;", *steps, f"PRAGMA application_id = {APPLICATION_ID};",
                        f"PRAGMA user_version = {version};", "COMMIT;"))  # fmt: skip
    try:
        connection.executescript(script)
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
