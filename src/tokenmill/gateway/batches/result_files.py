"""The files of a batch: `check_input` validates the input file, `write_results` writes the results.

As with OpenAI, one line that is not a request makes the whole file invalid. A line whose body no engine accepts fails
alone and is written to the error file.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from tokenmill.errors import RequestRefused, UsageError
from tokenmill.gateway.batches.files import FileStore
from tokenmill.jobs.ingest.job_file import open_jobs
from tokenmill.jobs.ingest.line import custom_id_of
from tokenmill.jobs.models import Batch, Result, State
from tokenmill.jobs.output import output_line
from tokenmill.jobs.store.http_batches import RESPONSE, RESPONSE_ID, HttpBatch, RefusedLine, StoredFile
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.jobs.store.sqlite_errors import unusable
from tokenmill.storage import lines
from tokenmill.storage.json_text import parse, shown

MAX_ERRORS = 100  # reported per file
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5": "zstd", b"PA": "Parquet"}
_PAGE_LINES = 512
_OPENAI_ERRORS = {
    "deadline": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was executed."),
}


@dataclass(frozen=True, slots=True)
class CheckedInput:
    """The result of checking an input file."""

    model: str | None = None  # None: the lines name no model
    lines: int = 0
    errors: tuple[RefusedLine, ...] = ()  # empty: the file is valid


@dataclass(slots=True)
class _Reading:
    """State of a check: what the lines so far have in common."""

    endpoint: str
    model: str | None = None
    lines: int = 0
    ids: dict[str, int] = field(default_factory=dict)


def check_input(path: Path, endpoint: str, *, should_continue: Callable[[], bool] = lambda: True) -> CheckedInput:
    """Validate a file; stops early when `should_continue` returns False."""
    reading = _Reading(endpoint)
    try:
        errors = tuple(islice(_errors(path, reading, should_continue), MAX_ERRORS))
    except UsageError as error:
        errors = (RefusedLine("invalid_file", error.message.replace(str(path), "the file")),)
    if not errors and not reading.lines:
        errors = (RefusedLine("empty_file", "the file contains no requests"),)
    return CheckedInput(reading.model, reading.lines, errors)


def _errors(path: Path, reading: _Reading, should_continue: Callable[[], bool]) -> Iterator[RefusedLine]:
    with path.open("rb") as file:
        start = file.read(2)
    if start in _COMPRESSED:
        raise UsageError(f"the file is {_COMPRESSED[start]}; upload uncompressed JSON lines")
    with open_jobs(path) as source:
        for chunk in source.chunks():
            if not should_continue():
                return
            for item in (chunk,) if isinstance(chunk, lines.BadLine) else lines.split(chunk):
                if isinstance(item, lines.BadLine):
                    yield RefusedLine("invalid_json_line", item.reason, item.number)
                elif (bad := _bad_line(item[1], item[0], reading)) is not None:
                    yield bad


def _bad_line(text: str, number: int, reading: _Reading) -> RefusedLine | None:
    """The error of a line, or None."""
    reading.lines += 1
    try:
        line = parse(text)
    except ValueError as error:
        return RefusedLine("invalid_json_line", str(error), number)
    bad = _bad_custom_id(line, number, reading) or _bad_request(line, number, reading)
    # replace unpaired surrogates, which cannot be encoded
    return bad and replace(bad, message=bad.message.encode(errors="replace").decode())


def _bad_custom_id(line: Mapping[str, Any], number: int, reading: _Reading) -> RefusedLine | None:
    if line.get("custom_id") is None:
        return RefusedLine("missing_required_parameter", "custom_id is missing", number, "custom_id")
    try:
        name = custom_id_of(line, number)
    except RequestRefused as error:
        return RefusedLine("invalid_value", error.message, number, "custom_id")
    first = reading.ids.setdefault(name, number)
    if first != number:
        message = f"duplicate custom_id {name[:60]!r} on lines {first} and {number}"
        return RefusedLine("duplicate_custom_id", message, number, "custom_id")
    return None


def _bad_request(line: Mapping[str, Any], number: int, reading: _Reading) -> RefusedLine | None:
    for key in ("method", "url", "body"):
        if line.get(key) is None:
            return RefusedLine("missing_required_parameter", f"{key} is missing", number, key)
    if line["method"] != "POST":
        return RefusedLine("invalid_method", f'method must be "POST", not {shown(line["method"])}', number, "method")
    if line["url"] != reading.endpoint:
        message = f"url is {shown(line['url'])}, but the endpoint of the batch is {reading.endpoint}"
        return RefusedLine("mismatched_endpoint", message, number, "url")
    body = line["body"]
    if not isinstance(body, dict):
        return RefusedLine("invalid_value", f"body must be an object, not {shown(body)}", number, "body")
    return _bad_model(body.get("model"), number, reading)


def _bad_model(model: Any, number: int, reading: _Reading) -> RefusedLine | None:
    if not isinstance(model, str | None):
        return RefusedLine("invalid_value", f"model must be a string, not {shown(model)}", number, "body.model")
    if reading.lines == 1:
        reading.model = model
    elif model != reading.model:
        message = (
            f"model is {shown(model)}, but {shown(reading.model)} on the first line; all lines must have the same model"
        )
        return RefusedLine("mismatched_model", message, number, "body.model")
    return None


def write_results(files: FileStore, reader: StoreReader, jobs: Batch, batch: HttpBatch, *, now_s: float) -> None:
    """Write the answers and errors of a finished batch in the order of its lines; empty files are not created.

    Everything is read from the store, so the call can be repeated after a kill. Blocks.
    """
    late = ended_late(jobs, batch)
    with ExitStack() as stack:
        output = stack.enter_context(_Draft(files, batch.output_file_id))
        errors = stack.enter_context(_Draft(files, batch.error_file_id))
        number = 0
        while page := reader.results(jobs.id, number, _PAGE_LINES):
            for result in page:
                draft = output if result.state is State.DONE else errors
                draft.append(output_line(jobs.name, _as_openai(result, late=late)))
            number = page[-1].number
        for draft, name in ((output, "output"), (errors, "error")):
            draft.keep(f"{batch.id}_{name}.jsonl", batch, now_s)


def ended_late(jobs: Batch, batch: HttpBatch) -> bool:
    """Whether the jobs were cancelled because the completion window ended, and not by a client."""
    cancelled_s = jobs.cancelled_s
    return cancelled_s is not None and cancelled_s >= batch.expires_s and batch.cancelling_s is None


def _as_openai(result: Result, *, late: bool) -> Result:
    cause = "deadline" if late and result.state is State.CANCELLED else result.code or ""
    code, message = _OPENAI_ERRORS.get(cause, (result.code, result.message))
    return result._replace(code=code, message=message)


class _Draft:
    """The draft of a result file; deleted on exit unless `keep` was called."""

    def __init__(self, files: FileStore, file: str) -> None:
        self._files = files
        self._id = file
        self._path: Path = files.draft(file)
        self._hash = hashlib.sha256()
        self._size = 0
        try:
            self._file: BinaryIO = self._path.open("wb")
        except OSError as error:
            raise unusable(self._path.parent, error) from error

    def __enter__(self) -> "_Draft":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)

    def append(self, line: bytes) -> None:
        """Append a line."""
        try:
            self._file.write(line)
        except OSError as error:
            raise unusable(self._path.parent, error) from error
        self._hash.update(line)
        self._size += len(line)

    def keep(self, name: str, batch: HttpBatch, now_s: float) -> None:
        """Turn the draft into a file, unless it is empty."""
        if not self._size:
            return
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise unusable(self._path.parent, error) from error
        expires_s = None if batch.output_kept_s is None else now_s + batch.output_kept_s
        purpose = RESPONSE if batch.id.startswith(RESPONSE_ID) else "batch_output"
        digest = self._hash.hexdigest()
        self._files.keep(StoredFile(self._id, batch.owner, name, purpose, self._size, digest, now_s, expires_s))
