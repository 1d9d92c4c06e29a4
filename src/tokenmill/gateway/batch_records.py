"""The values of files and batches that come by HTTP: what was handed in, how far it is, what it came to.

Pure. Times are Unix seconds. Where these are kept is not known here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tokenmill.jobs.models import Counts, Totals

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
STATUSES: tuple[Status, ...] = get_args(Status)
FINAL: frozenset[Status] = frozenset(("failed", "completed", "expired", "cancelled"))


@dataclass(frozen=True, slots=True)
class File:
    """A file that was handed in, or that a batch gave."""

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
    """What a client wants of a batch."""

    endpoint: str
    window: str
    window_s: float
    input_file_id: str
    metadata: Mapping[str, str] | None = None
    priority: int = 0
    output_kept_s: int | None = None


@dataclass(frozen=True, slots=True)
class BadLine:
    """Why a file was refused."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a batch came to."""

    completed: int  # lines of its output
    failed: int  # lines of its errors
    total: int
    totals: Totals


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch as it was handed in, and how far it is."""

    id: str
    owner: str | None
    endpoint: str
    window: str
    input_file_id: str
    metadata: Mapping[str, str] | None
    priority: int
    status: Status
    created_s: float
    expires_s: float
    output_file_id: str
    error_file_id: str
    output_kept_s: int | None
    model: str | None
    times: Mapping[str, float]
    errors: tuple[BadLine, ...]
    outcome: Outcome | None

    @property
    def final(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.status in FINAL


@dataclass(frozen=True, slots=True)
class Page:
    """Which part of a list."""

    limit: int
    after: str | None = None
    newest_first: bool = True


def of_counts(counts: Counts, totals: Totals) -> Outcome:
    """How far a batch is, as the store counts."""
    return Outcome(counts.done, counts.final - counts.done, counts.total, totals)


def packed(outcome: Outcome | None) -> str | None:
    """As one text; `unpacked` reads it."""
    if outcome is None:
        return None
    totals = {name: getattr(outcome.totals, name) for name in Totals.__dataclass_fields__}
    return json.dumps([outcome.completed, outcome.failed, outcome.total, totals])


def unpacked(row: dict[str, Any]) -> BatchRecord:
    """A row of the desk as a value."""
    for name in ("metadata", "times"):
        row[name] = json.loads(row[name]) if row[name] is not None else None
    row["errors"] = tuple(BadLine(*bad) for bad in json.loads(row["errors"] or "[]"))
    if row["outcome"] is not None:
        completed, failed, total, totals = json.loads(row["outcome"])
        row["outcome"] = Outcome(completed, failed, total, Totals(**totals))
    return BatchRecord(**row)
