"""Batches as the gateway reports them, and the key by which a run finds its batch again. Pure."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from tokenmill.recipes import Line

KEY = "tokenmill_key"
"""Name of the key in a batch's metadata."""
FINAL = frozenset(("failed", "completed", "expired", "cancelled"))
ATTACHABLE = frozenset(("validating", "in_progress", "finalizing", "completed"))
"""Statuses of batches that a run may re-attach to."""
UNANSWERED = frozenset(("batch_cancelled", "batch_expired"))
"""Error codes of a line without an outcome: it was not run."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and answers computed for a batch; reused answers are not counted."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens from the prefix cache
    completion_tokens: int = 0
    answers: int = 0

    def __sub__(self, other: "Usage") -> "Usage":
        return Usage(
            self.prompt_tokens - other.prompt_tokens,
            self.cached_tokens - other.cached_tokens,
            self.completion_tokens - other.completion_tokens,
            self.answers - other.answers,
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """The state of a batch. Times are whole Unix seconds."""

    id: str
    status: str
    total: int  # lines; 0 until they are counted
    completed: int
    failed: int
    usage: Usage
    created_s: int
    began_s: int | None
    ended_s: int | None  # time of the last answer
    output_file: str | None
    error_file: str | None
    model: str | None
    metadata: Mapping[str, str] = field(default_factory=dict)
    errors: tuple[str, ...] = ()  # why its file was refused

    @property
    def final(self) -> bool:
        """Whether the status can no longer change."""
        return self.status in FINAL

    @property
    def seconds(self) -> int | None:
        """Seconds from the start of the first line to the last answer; None: not known yet."""
        return None if self.began_s is None or self.ended_s is None else self.ended_s - self.began_s


def batch_of(body: Mapping[str, Any]) -> Batch:
    """Parse the gateway's batch object."""
    counts = body.get("request_counts") or {}
    usage = body.get("usage") or {}
    ends = ("finalizing_at", "completed_at", "cancelled_at", "expired_at", "failed_at")
    errors = ((body.get("errors") or {}).get("data")) or ()
    return Batch(
        id=body["id"],
        status=body["status"],
        total=counts.get("total", 0),
        completed=counts.get("completed", 0),
        failed=counts.get("failed", 0),
        usage=_usage(usage),
        created_s=body["created_at"],
        began_s=body.get("in_progress_at"),
        ended_s=next((body[name] for name in ends if body.get(name) is not None), None),
        output_file=body.get("output_file_id"),
        error_file=body.get("error_file_id"),
        model=body.get("model"),
        metadata=body.get("metadata") or {},
        errors=tuple(_error_text(error) for error in errors),
    )


def _usage(body: Mapping[str, Any]) -> Usage:
    details = body.get("input_tokens_details") or {}
    answers = body.get("answers") or {}
    return Usage(
        body.get("input_tokens", 0),
        details.get("cached_tokens", 0),
        body.get("output_tokens", 0),
        answers.get("computed", 0),
    )


def _error_text(error: Mapping[str, Any]) -> str:
    where = f"line {error['line']}: " if error.get("line") is not None else ""
    return f"{where}{error.get('message')}"


class KeyedFile:
    """Writes the lines of a batch to a file and computes the batch's key."""

    def __init__(self, file: BinaryIO, model: str | None, *scope: str) -> None:
        """`scope` (asset, partition) is part of the key: equal lines in another scope are another batch."""
        self._file = file
        self._model = model
        self._sum = hashlib.sha256(json.dumps([model, *scope]).encode())
        self.lines = 0
        self.endpoint: str | None = None  # of the first line; None: no lines

    def add(self, line: Line) -> None:
        """Write a line, with the model if the line names none."""
        whole = dict(line)
        if self._model is not None and isinstance(whole.get("body"), Mapping) and "model" not in whole["body"]:
            whole["body"] = {"model": self._model, **whole["body"]}
        data = _bytes(whole)
        self._file.write(data)
        self._sum.update(data)
        self.lines += 1
        if self.endpoint is None:
            self.endpoint = str(whole.get("url"))

    @property
    def key(self) -> str:
        """SHA-256 of the model, the scope and all lines so far."""
        return self._sum.hexdigest()


def _bytes(line: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate: the gateway reports the line as invalid
        return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def in_order(names: Iterator[str], *files: Iterator[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Merge result files, each in the order of `names`, into that order; names without a result are skipped."""
    next_results = [next(file, None) for file in files]
    for name in names:
        for at, result in enumerate(next_results):
            if result is not None and result["custom_id"] == name:
                yield result
                next_results[at] = next(files[at], None)
                break
