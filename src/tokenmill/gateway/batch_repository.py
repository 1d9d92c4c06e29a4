"""What was handed in by HTTP and what became of it: files and batches, remembered in the folder of the batch room.

    desk.db        a row for every file and every batch
    files/ID       the bytes of a file; an id is drawn here and is never taken from a client
    files/.ID      bytes that are not a file yet: whole or not, nobody can ask for them

A file counts when its row is there, and its row comes last; a row goes first. So a kill leaves at most bytes without a
row, which `sweep` removes. Jobs and answers are the store's business. Methods block, and may be called from any thread.
"""

import hashlib
import json
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from tokenmill.errors import StoreError
from tokenmill.gateway.batch_records import (
    FINAL,
    BadLine,
    BatchRecord,
    File,
    HttpBatchRequest,
    Outcome,
    Page,
    Status,
    packed,
    unpacked,
)
from tokenmill.jobs.faults import told

FILE = "desk.db"
FOLDER = "files"
_VERSION = 1
_BUSY_S = 10.0
_ORPHAN_S = 3600.0  # bytes without a row: nobody takes so long between the one and the other
_SCHEMA = """
CREATE TABLE files (
    seq       INTEGER PRIMARY KEY AUTOINCREMENT,
    id        TEXT NOT NULL UNIQUE,
    owner     TEXT,                        -- a key's name; NULL: whoever came without one
    filename  TEXT NOT NULL,               -- as the client calls it: for people only
    purpose   TEXT NOT NULL,
    bytes     INTEGER NOT NULL,
    sha256    TEXT NOT NULL,
    created_s REAL NOT NULL,
    expires_s REAL
);
CREATE TABLE batches (
    seq            INTEGER PRIMARY KEY AUTOINCREMENT,
    id             TEXT NOT NULL UNIQUE,   -- its name in the store, too
    owner          TEXT,
    endpoint       TEXT NOT NULL,
    window         TEXT NOT NULL,
    input_file_id  TEXT NOT NULL,
    metadata       TEXT,                   -- JSON
    priority       INTEGER NOT NULL,
    status         TEXT NOT NULL,
    created_s      REAL NOT NULL,
    expires_s      REAL NOT NULL,
    output_file_id TEXT NOT NULL,          -- drawn at once: the store names a batch's output from the start
    error_file_id  TEXT NOT NULL,
    output_kept_s  INTEGER,                -- how long its results are kept; NULL: until they are deleted
    model          TEXT,                   -- what its lines ask for
    times          TEXT NOT NULL,          -- JSON: when it came to each status
    errors         TEXT,                   -- JSON: why the file was refused
    outcome        TEXT                    -- JSON: counts and totals at its end
);
CREATE INDEX batches_open ON batches (seq) WHERE status NOT IN ('failed', 'completed', 'expired', 'cancelled');
CREATE INDEX batches_input ON batches (input_file_id);
"""


class BatchRepository:
    """The open folder."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self.now_s = clock
        self._guard = threading.RLock()
        self._path = folder / FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / FOLDER).mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot use {folder}: {error.strerror}", hint="see that it may be written to") from error
        with told(self._path):
            self._connection = sqlite3.connect(
                self._path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                self._connection.execute("PRAGMA synchronous = FULL")
                self._bring_up()
            except BaseException:
                self._connection.close()
                raise

    def _bring_up(self) -> None:
        with self._writing():
            version: int = self._connection.execute("PRAGMA user_version").fetchone()[0]
            if version > _VERSION:
                raise StoreError(
                    f"{self._path} was written by a newer tokenmill", hint="use that one, or another state folder"
                )
            if version == 0:
                for statement in _SCHEMA.split(";\n"):
                    self._connection.execute(statement)
                self._connection.execute(f"PRAGMA user_version = {_VERSION}")

    def close(self) -> None:
        """Let go of it."""
        with self._guard:
            self._connection.close()

    # Files.

    def path(self, file: str) -> Path:
        """Where the bytes of a file are; its id is one of ours, so that this is in the folder."""
        return self.folder / FOLDER / file

    def draft(self) -> tuple[str, Path]:
        """The id of a file to come, and where its bytes are to be written before they are one."""
        file = f"file-{secrets.token_hex(12)}"
        return file, self.draft_of(file)

    def draft_of(self, file: str) -> Path:
        """Where the bytes of a file are written before they are one."""
        return self.path(f".{file}")

    def keep(self, file: File) -> File:
        """Make a file of a draft whose bytes are on the disk; doing it again changes nothing."""
        with suppress(FileNotFoundError):  # it was done before, and a kill came between
            self.draft_of(file.id).rename(self.path(file.id))
        _sync_folder(self.folder / FOLDER)
        with self._writing():
            self._connection.execute(
                "INSERT INTO files (id, owner, filename, purpose, bytes, sha256, created_s, expires_s) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING",
                (
                    file.id,
                    file.owner,
                    file.filename,
                    file.purpose,
                    file.bytes,
                    file.sha256,
                    file.created_s,
                    file.expires_s,
                ),
            )
        return file

    def file(self, file: str) -> File | None:
        """One that is kept; None: there is none, or its time is over."""
        rows = self._files("WHERE id = ?", (file,))
        return next((row for row in rows if row.expires_s is None or row.expires_s > self.now_s()), None)

    def files(self, owner: str | None, page: Page, *, purpose: str | None = None) -> list[File] | None:
        """A part of the list of files that an owner may see, one more than asked for if there is one.

        None: there is no file that the part could come after.
        """
        chosen = "(expires_s IS NULL OR expires_s > ?)" + (" AND purpose = ?" if purpose is not None else "")
        values: list[Any] = [self.now_s(), *([purpose] if purpose is not None else [])]
        where = self._part("files", owner, page, chosen)
        return None if where is None else self._files(where[0], (*values, *where[1]))

    def drop(self, file: str) -> str | None:
        """Remove a file; the batch that still needs it, and then it stays."""
        with self._writing():
            users = self._tickets(f"WHERE input_file_id = ? AND status NOT IN ({_final()}) LIMIT 1", (file,))
            if users:
                return users[0].id
            self._connection.execute("DELETE FROM files WHERE id = ?", (file,))
        self.path(file).unlink(missing_ok=True)
        return None

    def sweep(self) -> int:
        """Remove files whose time is over, and bytes that never became files; how many."""
        with self._guard, told(self._path):
            over = self._connection.execute("SELECT id FROM files WHERE expires_s <= ?", (self.now_s(),)).fetchall()
        gone = sum(self.drop(file) is None for (file,) in over)
        for path in (self.folder / FOLDER).iterdir():
            with suppress(FileNotFoundError):
                old = time.time() - path.stat().st_mtime > _ORPHAN_S
                if old and not self._files("WHERE id = ?", (path.name,)):
                    path.unlink()
                    gone += 1
        return gone

    # Batches.

    def take(self, order: HttpBatchRequest, owner: str | None) -> BatchRecord | None:
        """A new batch, remembered when this returns; None: its file has gone meanwhile."""
        now_s = self.now_s()
        batch = f"batch_{secrets.token_hex(8)}"
        output = self.draft()[0]
        errors = self.draft()[0]
        with self._writing():
            if not self._files("WHERE id = ?", (order.input_file_id,)):
                return None
            self._connection.execute(
                "INSERT INTO batches (id, owner, endpoint, window, input_file_id, metadata, priority, status, "
                "created_s, expires_s, output_file_id, error_file_id, output_kept_s, times) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, 'validating', ?, ?, ?, ?, ?, '{}')",
                (
                    batch,
                    owner,
                    order.endpoint,
                    order.window,
                    order.input_file_id,
                    json.dumps(order.metadata) if order.metadata is not None else None,
                    order.priority,
                    now_s,
                    now_s + order.window_s,
                    output,
                    errors,
                    order.output_kept_s,
                ),
            )
        return self._ticket(batch)

    def ticket(self, batch: str) -> BatchRecord | None:
        """One batch; None: there is none."""
        return next(iter(self._tickets("WHERE id = ?", (batch,))), None)

    def tickets(
        self, owner: str | None, page: Page, *, metadata: Mapping[str, str] | None = None
    ) -> list[BatchRecord] | None:
        """A part of the list of batches, as `files`; `metadata`: only of those whose own holds all of it."""
        pairs = (metadata or {}).items()
        holds = "EXISTS (SELECT 1 FROM json_each(batches.metadata) WHERE key = ? AND value = ?)"
        where = self._part("batches", owner, page, " AND ".join([holds] * len(pairs)) or "1")
        return None if where is None else self._tickets(where[0], (*chain.from_iterable(pairs), *where[1]))

    def unfinished(self) -> list[BatchRecord]:
        """Batches that something is still to be done for, the oldest first."""
        return self._tickets(f"WHERE status NOT IN ({_final()}) ORDER BY seq", ())

    def move(
        self,
        batch: str,
        status: Status,
        *,
        since: Sequence[Status],
        model: str | None = None,
        errors: Sequence[BadLine] = (),
        outcome: Outcome | None = None,
    ) -> bool:
        """Bring a batch to a status, unless it has left those it may come from; whether it was brought there."""
        with self._writing():
            ticket = self._ticket(batch)
            if ticket.status not in since:
                return False
            times = {**ticket.times, status: self.now_s()}
            bad = [[bad.code, bad.message, bad.line, bad.param] for bad in errors]
            self._connection.execute(
                "UPDATE batches SET status = ?, times = ?, model = coalesce(?, model), errors = coalesce(?, errors), "
                "outcome = coalesce(?, outcome) WHERE id = ?",
                (status, json.dumps(times), model, json.dumps(bad) if bad else None, packed(outcome), batch),
            )
        return True

    # How rows are read.

    def _part(self, table: str, owner: str | None, page: Page, chosen: str) -> tuple[str, tuple[Any, ...]] | None:
        """The end of a query for a part of a list, and its values behind those of `chosen`."""
        where = [chosen]
        values = list[Any]()
        if owner is not None:
            where.append("(owner IS NULL OR owner = ?)")
            values.append(owner)
        if page.after is not None:
            with self._guard, told(self._path):
                query = f"SELECT seq FROM {table} WHERE id = ?"  # noqa: S608  our words
                place = self._connection.execute(query, (page.after,)).fetchone()
            if place is None:
                return None
            where.append(f"seq {'<' if page.newest_first else '>'} ?")
            values.append(place[0])
        order = "DESC" if page.newest_first else "ASC"
        return f"WHERE {' AND '.join(where)} ORDER BY seq {order} LIMIT ?", (*values, page.limit + 1)

    def _files(self, where: str, values: Sequence[Any]) -> list[File]:
        with self._guard, told(self._path):
            query = f"SELECT {', '.join(File.__dataclass_fields__)} FROM files {where}"  # noqa: S608  our words
            return [File(*row) for row in self._connection.execute(query, values)]

    def _tickets(self, where: str, values: Sequence[Any]) -> list[BatchRecord]:
        names = tuple(BatchRecord.__dataclass_fields__)
        with self._guard, told(self._path):
            query = f"SELECT {', '.join(names)} FROM batches {where}"  # noqa: S608  our words
            rows = self._connection.execute(query, values).fetchall()
        return [unpacked(dict(zip(names, row, strict=True))) for row in rows]

    def _ticket(self, batch: str) -> BatchRecord:
        return self._tickets("WHERE id = ?", (batch,))[0]

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._guard, told(self._path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")


def sum_of(path: Path) -> str:
    """The sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _final() -> str:
    return ", ".join(f"'{status}'" for status in sorted(FINAL))


def _sync_folder(folder: Path) -> None:
    """Names are on the disk when this returns."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
