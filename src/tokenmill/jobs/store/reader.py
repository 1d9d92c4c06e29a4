"""Read access to a store: batches, jobs and results. Takes no lock and does not wait for writers."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from types import TracebackType
from typing import Any, Self

from tokenmill.errors import StoreError, UsageError
from tokenmill.jobs.ingest.line import line_in
from tokenmill.jobs.models import Batch, BatchTotals, Counts, Job, JobId, QueuedJob, Result, SortKey, State
from tokenmill.jobs.sharding.coordination import Runner
from tokenmill.jobs.store.address import Address
from tokenmill.jobs.store.backend import AccessMode, Shutdown
from tokenmill.jobs.store.integrity import CheckReport, check_store, is_intact
from tokenmill.jobs.store.open import opened

_FEW = 20  # batches that are read one by one; more are read together
_START = (-(1 << 62), 0, b"", -1)
_BATCH_COLUMNS = (
    "id",
    "name",
    "key",
    "created_s",
    "sealed_s",
    "cancelled_s",
    "asked_s",
    "source",
    "model_id",
    "output",
    "errors",
    "reuse",
    "priority",
    "deadline_s",
    "defaults",
    "lines",
    "computed",
    "reused",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "engine_s",
)


@dataclass(frozen=True, slots=True)
class HttpSubmission:
    """A batch of a gateway as its client submitted it."""

    failed: bool  # its input file was refused, so it has no jobs
    created_s: float
    filename: str | None  # as the client named it; None: deleted


class StoreReader:
    """An open store; other processes may be running its jobs."""

    def __init__(
        self,
        address: Address,
        *,
        clock: Callable[[], float] | None = None,
        mode: AccessMode = "read",
        shutdown: Shutdown | None = None,
    ) -> None:
        """`clock` replaces the clock of the database. `shutdown` ends waiting for an unavailable server."""
        self.address = address
        self._database = opened(address, mode, shutdown)
        self._clock = clock

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the store."""
        self._database.close()

    @property
    def shared(self) -> bool:
        """Whether other processes may run jobs of the same store."""
        return self._database.shared

    def now_s(self) -> float:
        """The store's time; on a server, it is the same for all hosts."""
        return time.time() + self._database.ahead_s if self._clock is None else self._clock()

    def batches(self) -> list[Batch]:
        """All batches, the oldest first."""
        rows = self._database.all("batches")
        counts = dict[int, dict[int, int]]()
        for batch, state, jobs in self._database.all("counts_of_all"):  # read second: a sealed batch has all its lines
            counts.setdefault(batch, {})[state] = jobs
        return [self._batch(row, counts.get(row[0], {})) for row in rows]

    def submitted_over_http(self) -> dict[str, HttpSubmission]:
        """The batches that clients of a gateway submitted, by name, the oldest first."""
        rows = self._database.all("submitted_files")
        return {name: HttpSubmission(ended == "failed", created_s, file) for name, ended, created_s, file in rows}

    def open_batches(self, model_id: str | None = None) -> list[Batch]:
        """Sealed batches with pending jobs, the oldest first; of one model or of all."""
        found = {row[0] for row in self._database.all("open_batches", model_id=model_id)}
        if len(found) > _FEW:
            return [batch for batch in self.batches() if batch.id in found]
        rows = [(batch, self._database.one("batch", batch=batch)) for batch in sorted(found)]
        return [self._batch(row, dict(self._database.all("counts", batch=batch))) for batch, row in rows if row]

    def batch(self, batch: int) -> Batch:
        """Get a batch; raises StoreError if it does not exist."""
        row = self._database.one("batch", batch=batch)
        if row is None:
            raise StoreError(f"batch {batch} does not exist", hint="tokenmill status lists all batches")
        counts = self._database.all("counts", batch=batch)
        return self._batch(row, dict(counts))

    def pending(self, batch: int) -> int:
        """Number of pending jobs; 0 for a batch that was removed."""
        return sum(jobs for state, jobs in self._database.all("counts", batch=batch) if state == State.PENDING)

    def named(self, name: str) -> Batch:
        """Get a batch by name; raises UsageError if it does not exist."""
        row = self._database.one("batch_named", name=name)
        if row is None:
            message = f"batch {name!r} does not exist"
            raise UsageError(message, hint="tokenmill status lists all batches", code="batch_not_found")
        return self.batch(row[0])

    def find(self, key: bytes) -> Batch | None:
        """The batch that an earlier run of the same command created, if any."""
        row = self._database.one("batch_by_key", key=key)
        return self.batch(row[0]) if row else None

    def job(self, job: int) -> Job | None:
        """Get a job, or None."""
        row = self._database.one("job", job=job)
        return self._job(row) if row else None

    def has_answer(self, identity: bytes) -> bool:
        """Whether a request has been answered, in any batch."""
        return self._database.one("has_answer", identity=identity) is not None

    def answer_to(self, identity: bytes) -> bytes | None:
        """The body of the answer to a request; None if it is missing or damaged."""
        row = self._database.one("answer_to", identity=identity)
        return row[0] if row and is_intact(*row) else None

    def waiting(self, batches: Sequence[int], *, after: SortKey | None = None, limit: int) -> list[QueuedJob]:
        """The next pending jobs by priority, batch and place, after the key `after` of the last job read.

        A job that becomes pending again before that position is found by reading from the start again.
        """
        pages = [
            map(
                QueuedJob._make,
                self._database.all(
                    "waiting", batch=batch, now=self.now_s(), limit=limit, **_position_in(after or _START, batch)
                ),
            )
            for batch in batches
        ]
        return list(islice(merge(*pages, key=lambda waiting: waiting.key), limit))

    def due(self, before_s: float, limit: int) -> list[QueuedJob]:
        """Pending jobs whose own deadline is before a time, the nearest first."""
        return [*map(QueuedJob._make, self._database.all("due", before=before_s, now=self.now_s(), limit=limit))]

    def next_retry_s(self, batches: Sequence[int] | None = None) -> float | None:
        """The time of the first pending retry, in some batches or in all; None if no job waits for one."""
        if batches is None:
            rows = self._database.all("next_retry")
        else:
            rows = [self._database.one("next_retry_of", batch=batch) for batch in batches]
        return min((row[0] for row in rows if row[0] is not None), default=None)

    def results(self, batch: int, after: int, limit: int) -> list[Result]:
        """Up to `limit` jobs after a line, finished or not, in file order.

        A job whose answer is damaged is returned as pending, without a body; see `Store.requeue_damaged`.
        """
        rows = self._database.all(
            "results", after=JobId.of(batch, after), last=JobId.of(batch, JobId.MAX_LINE), limit=limit
        )
        return [_result(*row) for row in rows]

    def failures(self, batch: int, after: int, limit: int) -> list[Result]:
        """Failed and quarantined jobs in file order."""
        rows = self._database.all("failures", batch=batch, after=JobId.of(batch, after), limit=limit)
        return [Result(row[0], State(row[1]), *row[2:]) for row in rows]

    def failures_by_code(self, batch: int) -> dict[str, int]:
        """Number of failed and quarantined jobs by failure code."""
        return {code or "failed": count for code, count in self._database.all("failures_by_code", batch=batch)}

    def check(self) -> CheckReport:
        """Check all stored data, without changing it."""
        try:
            names = {batch.id: batch.name for batch in self.batches()}
        except StoreError:  # the check reports it too
            names = {}
        return check_store(self._database, names)

    def runners(self, batch: int | None = None) -> list[Runner]:
        """Processes that use a shared store, or that run jobs of a batch, with their running jobs. Empty for SQLite."""
        rows = self._database.all("runners") if batch is None else self._database.all("runners_of", batch=batch)
        return [Runner(*row) for row in rows]

    def being_written(self, batch: int) -> bool:
        """Whether a process has claimed the output of a batch; always False for SQLite."""
        return self._database.one("claimed", key=batch) is not None

    def ask_cancel(self, batch: int) -> None:
        """Request the cancellation of a batch; requires mode "ask"."""

        def work() -> None:
            with self._database.writing(durable=True):
                self._database.run("ask_cancel", batch=batch, now=self.now_s())

        self._database.transaction(work)

    def _job(self, row: tuple[Any, ...]) -> Job:
        job, custom_id, state, identity, place, rank, prompt_bytes, max_tokens, deadline_s, attempts, deaths = row
        block = self._database.one("block_of", job=job)
        line = line_in(block[1], job - block[0]) if block else ""
        return Job(
            job,
            custom_id,
            State(state),
            identity,
            place,
            -rank,
            prompt_bytes,
            max_tokens,
            deadline_s,
            attempts,
            deaths,
            line,
        )

    def _batch(self, row: tuple[Any, ...], states: Mapping[int, int]) -> Batch:
        columns = dict(zip(_BATCH_COLUMNS, row, strict=True))
        counts = {State(state).name.lower(): jobs for state, jobs in states.items()}
        totals = BatchTotals(*(columns[name] for name in BatchTotals.__dataclass_fields__))
        kept = {name: columns[name] for name in Batch.__dataclass_fields__ if name in columns}
        kept |= {"reuse": bool(columns["reuse"]), "defaults": json.loads(columns["defaults"])}
        return Batch(**kept, counts=Counts(**counts), totals=totals)


def _result(number: int, state: int, custom_id: str | None, identity: bytes | None, body: Any, *rest: Any) -> Result:
    code, message, answer, stored_checksum, same_request = rest
    if state != State.DONE or (same_request and is_intact(body, stored_checksum)):
        return Result(number, State(state), custom_id, identity, body, code, message)
    return Result(
        number, State.PENDING, custom_id, identity, None, None, None, damaged_answer=answer if same_request else 0
    )


def _position_in(after: SortKey, batch: int) -> dict[str, Any]:
    """Map a queue position to a batch: at its priority, older batches have been read completely, newer ones not."""
    rank, reached, place, last = after
    if batch == reached:
        return {"rank": rank, "place": place, "id": last}
    return {"rank": rank + (batch < reached), "place": b"", "id": -1}
