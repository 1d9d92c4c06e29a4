"""Files and batches submitted over HTTP: `HttpBatches`.

An HTTP batch and its job batch have the same name. The row of the HTTP batch stores the client's request; its status is
derived from the job batch until it ends. File contents are not stored here.
"""

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeVar, get_args

from tokenmill.errors import StoreError, StoreInUse
from tokenmill.jobs.models import BatchTotals, Counts
from tokenmill.jobs.store.address import Address
from tokenmill.jobs.store.backend import DatabaseBackend
from tokenmill.jobs.store.open import has_batches, opened

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
STATUSES: tuple[Status, ...] = get_args(Status)
FINAL: frozenset[Status] = frozenset(("failed", "completed", "expired", "cancelled"))
MAX_PAGE_FILES, MAX_PAGE_BATCHES, DEFAULT_PAGE_BATCHES = 10_000, 100, 20  # in a page
MAX_METADATA_KEYS, MAX_METADATA_KEY_LENGTH, MAX_METADATA_VALUE_LENGTH = 16, 64, 512
WINDOW = r"^[1-9][0-9]{0,8}(s|m|h|d)$"
MAX_WINDOW_S = 366 * 86400
RESPONSE = "response"  # purpose of files that belong to responses; not listed, like batches with their ids
RESPONSE_ID = "resp_"
_LAST = 1 << 62  # greater than every `seq`
_SCANNED = 500  # rows per query when filtering by metadata
_UPGRADE_WAIT_S = 10.0  # for another process that creates or migrates the store
_UPGRADE_POLL_S = 0.1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that a client uploaded, or the results of a batch."""

    id: str
    owner: str | None
    filename: str
    purpose: str
    bytes: int
    sha256: str
    created_s: float
    expires_s: float | None = None


@dataclass(frozen=True, slots=True)
class HttpBatchRequest:
    """A request to create a batch."""

    endpoint: str
    window: str
    window_s: float
    input_file_id: str
    metadata: Mapping[str, str] | None = None
    priority: int = 0
    output_kept_s: int | None = None
    id: str | None = None  # None: a new one


@dataclass(frozen=True, slots=True)
class RefusedLine:
    """An error in the input file of a batch."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Counts and totals of an HTTP batch."""

    completed: int  # lines of the output file
    failed: int  # lines of the error file
    total: int
    totals: BatchTotals

    @classmethod
    def of(cls, counts: Counts, totals: BatchTotals) -> "Outcome":
        """The outcome of a job batch so far."""
        return cls(counts.done, counts.final - counts.done, counts.total, totals)


@dataclass(frozen=True, slots=True)
class HttpBatch:
    """A batch that was submitted over HTTP."""

    id: str
    owner: str | None
    endpoint: str
    completion_window: str
    input_file_id: str
    metadata: Mapping[str, str] | None
    priority: int
    created_s: float
    expires_s: float
    output_file_id: str
    error_file_id: str
    output_kept_s: int | None  # None: results are kept until they are deleted
    model: str | None
    status: Status
    in_progress_s: float | None
    finalizing_s: float | None
    cancelling_s: float | None
    ended_s: float | None
    errors: tuple[RefusedLine, ...]
    outcome: Outcome | None  # None: no job is stored yet

    @property
    def final(self) -> bool:
        """Whether the batch has ended."""
        return self.status in FINAL


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a list."""

    limit: int
    after: str | None = None
    newest_first: bool = True


_COLUMNS = (
    "seq",
    *(field.name for field in fields(HttpBatch) if field.name not in ("errors", "outcome")),
    "ended",
    "errors",
    "outcome",
    "job_batch",
    "done",
    "undone",
    "total",
    *(field.name for field in fields(BatchTotals)),
)


class HttpBatches:
    """Files and HTTP batches of a store. Any process may write them, even while another process runs the jobs.

    Methods block and may be called from several threads. Writing methods return when the change is on disk.
    """

    def __init__(self, address: Address, *, clock: Callable[[], float] = time.time) -> None:
        """Create or migrate the store if necessary; raises StoreInUse if another process prevents it."""
        create_or_migrate(address)
        self.now_s = clock
        self._writer = opened(address, "ask")
        try:
            self._reader = opened(address, "read")  # so that reads do not wait for transactions
        except BaseException:
            self._writer.close()
            raise

    def close(self) -> None:
        """Close both connections."""
        self._reader.close()
        self._writer.close()

    # -- files ---------------------------------------------------------------------------------------------------------

    def add_file(self, file: StoredFile) -> None:
        """Add a file, unless it exists."""
        self._write(lambda run: run("add_file", **asdict(file)))

    def file(self, file: str) -> StoredFile | None:
        """Get a file; None if it does not exist or has expired."""
        row = self._reader.one("file", id=file)
        found = StoredFile(*row) if row else None
        return found if found and (found.expires_s is None or found.expires_s > self.now_s()) else None

    def has_file(self, file: str) -> bool:
        """Whether a file exists, expired or not."""
        return self._reader.one("file", id=file) is not None

    def files(self, owner: str | None, page: Page, *, purpose: str | None = None) -> list[StoredFile] | None:
        """A page of the files that an owner may see, with one more if there are more; None if `page.after` is unknown.

        An owner sees its own files and those without an owner; None sees all files.
        """
        after = self._reader.one("file_seq", id=page.after) if page.after is not None else None
        if page.after is not None and after is None:
            return None
        values = {"owner": owner, "purpose": purpose, "now": self.now_s(), "limit": page.limit + 1}
        if page.newest_first:
            rows = self._reader.all("files_before", seq=after[0] if after else _LAST, **values)
        else:
            rows = self._reader.all("files_after", seq=after[0] if after else 0, **values)
        return [StoredFile(*row) for row in rows]

    def expired_files(self) -> list[str]:
        """The ids of expired files."""
        return [row[0] for row in self._reader.all("expired_files", now=self.now_s())]

    def delete_file(self, file: str) -> str | None:
        """Delete a file; if an unfinished batch needs it, return the id of the batch instead."""

        def work(run: Callable[..., Any]) -> str | None:
            run("lock_file", id=file)
            user = run("user_of_file", id=file).fetchone()
            if user is None:
                run("delete_file", id=file)
            return user[0] if user else None

        return self._write(work)

    # -- batches -------------------------------------------------------------------------------------------------------

    def create(self, request: HttpBatchRequest, owner: str | None) -> HttpBatch | None:
        """Create a batch; None if its input file does not exist."""
        now_s = self.now_s()
        batch = request.id or f"batch_{secrets.token_hex(8)}"
        values = {
            "id": batch,
            "owner": owner,
            "endpoint": request.endpoint,
            "completion_window": request.window,
            "input_file_id": request.input_file_id,
            "metadata": json.dumps(request.metadata) if request.metadata is not None else None,
            "priority": request.priority,
            "created_s": now_s,
            "expires_s": now_s + request.window_s,
            "output_file_id": new_file_id(),
            "error_file_id": new_file_id(),
            "output_kept_s": request.output_kept_s,
        }

        def work(run: Callable[..., Any]) -> bool:
            there: bool = run("lock_file", id=request.input_file_id).fetchone() is not None
            if there:
                run("add_http_batch", **_NOT_STARTED, **values)
            return there

        return self.batch(batch) if self._write(work) else None

    def import_rows(self, files: Sequence[Mapping[str, Any]], batches: Sequence[Mapping[str, Any]]) -> None:
        """Add rows of another database in one transaction; existing rows stay unchanged."""

        def work(run: Callable[..., Any]) -> None:
            for file in files:
                run("add_file", **file)
            for batch in batches:
                run("add_http_batch", **batch)

        self._write(work)

    def batch(self, batch: str) -> HttpBatch | None:
        """Get a batch, or None."""
        row = self._reader.one("http_batch", id=batch)
        return _batch_of(row) if row else None

    def batches(
        self, owner: str | None, page: Page, *, metadata: Mapping[str, str] | None = None
    ) -> list[HttpBatch] | None:
        """Like `files`, for batches, the newest first; optionally only those with all these metadata entries."""
        after = self._reader.one("http_batch_seq", id=page.after) if page.after is not None else (_LAST,)
        if after is None:
            return None
        seq: int = after[0]
        limit = page.limit + 1
        found = list[HttpBatch]()
        while len(found) < limit:
            most = max(limit, _SCANNED) if metadata else limit
            rows = self._reader.all("http_batches_before", seq=seq, owner=owner, limit=most)
            found += [batch for batch in map(_batch_of, rows) if _has(batch, metadata or {})]
            if len(rows) < most:
                break
            seq = rows[-1][0]
        return found[:limit]

    def unfinished(self) -> list[HttpBatch]:
        """Batches that have not ended, the oldest first."""
        return [_batch_of(row) for row in self._reader.all("unfinished_http_batches")]

    def set_model(self, batch: str, model: str | None) -> None:
        """Store the model named in the lines of a batch."""
        self._write(lambda run: run("set_http_batch_model", id=batch, model=model))

    def cancel(self, batch: str) -> bool:
        """Request the cancellation of a batch; returns False if it has ended or is being cancelled."""
        return self._write(lambda run: bool(run("cancel_http_batch", id=batch, now=self.now_s()).rowcount))

    def finalize(self, batch: str) -> bool:
        """Set the status finalizing; returns False if it was set before or the batch is being cancelled."""
        return self._write(lambda run: bool(run("finalize_http_batch", id=batch, now=self.now_s()).rowcount))

    def end(
        self,
        batch: str,
        status: Status,
        *,
        even_cancelling: bool,
        errors: Sequence[RefusedLine] = (),
        outcome: Outcome | None = None,
    ) -> bool:
        """End a batch; returns False if it has ended, or is being cancelled and `even_cancelling` is not set."""
        values = {
            "ended": status,
            "errors": json.dumps([[bad.code, bad.message, bad.line, bad.param] for bad in errors]) if errors else None,
            "outcome": _packed(outcome),
            "cancelling": int(even_cancelling),
        }
        return self._write(lambda run: bool(run("end_http_batch", id=batch, now=self.now_s(), **values).rowcount))

    def _write(self, work: Callable[[Callable[..., Any]], T]) -> T:
        def whole() -> T:
            with self._writer.writing(durable=True):
                return work(self._writer.run)

        return self._writer.transaction(whole)


def new_file_id() -> str:
    """A new file id."""
    return f"file-{secrets.token_hex(12)}"


def create_or_migrate(address: Address) -> None:
    """Create or migrate a store if necessary, or wait for another process that does."""
    until_s = time.monotonic() + _UPGRADE_WAIT_S
    while True:
        try:
            opened(address, "ask").close()
        except StoreError:
            try:
                opened(address, "work").close()
            except StoreInUse:
                if time.monotonic() > until_s:
                    raise
                time.sleep(_UPGRADE_POLL_S)
                continue
        return


def batches_by_status(address: Address) -> Mapping[str, int] | None:
    """The number of HTTP batches by status; None if the store cannot be read."""
    counts: dict[str, int] = dict.fromkeys(STATUSES, 0)
    database: DatabaseBackend | None = None
    try:
        if not has_batches(address):
            return counts
        database = opened(address, "read")
        return counts | dict(database.all("http_batches_by_status"))
    except StoreError:
        return None
    finally:
        if database is not None:
            database.close()


_NOT_STARTED: Mapping[str, None] = dict.fromkeys(
    ("model", "in_progress_s", "finalizing_s", "cancelling_s", "ended_s", "ended", "errors", "outcome")
)


def _has(batch: HttpBatch, metadata: Mapping[str, str]) -> bool:
    own = batch.metadata or {}
    return all(own.get(key) == value for key, value in metadata.items())


def _batch_of(row: Sequence[Any]) -> HttpBatch:
    columns = dict(zip(_COLUMNS, row, strict=True))
    known = {field.name: columns[field.name] for field in fields(HttpBatch)}
    metadata, errors = columns["metadata"], json.loads(columns["errors"] or "[]")
    known["metadata"] = json.loads(metadata) if metadata is not None else None
    known["errors"] = tuple(RefusedLine(*bad) for bad in errors)
    known["outcome"] = _outcome_of(columns)
    return HttpBatch(**known)


def _outcome_of(columns: Mapping[str, Any]) -> Outcome | None:
    """The outcome as stored at the end of a batch, otherwise the current counts of its job batch."""
    if columns["outcome"] is not None:
        completed, failed, total, totals = json.loads(columns["outcome"])
        return Outcome(completed, failed, total, BatchTotals(**totals))
    if columns["job_batch"] is None:
        return None
    totals = BatchTotals(**{field.name: columns[field.name] for field in fields(BatchTotals)})
    return Outcome(columns["done"], columns["undone"], columns["total"], totals)


def _packed(outcome: Outcome | None) -> str | None:
    if outcome is None:
        return None
    return json.dumps([outcome.completed, outcome.failed, outcome.total, asdict(outcome.totals)])
