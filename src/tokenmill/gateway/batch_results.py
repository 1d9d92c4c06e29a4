"""The files that a batch ends with: answers in one, what has none in the other, both in the order of its lines.

Every byte comes from the store, so that a file that a kill cut short is simply made again.
"""

import hashlib
import os
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from tokenmill.gateway.batch_records import BatchRecord, File
from tokenmill.gateway.batch_repository import BatchRepository
from tokenmill.jobs.faults import unusable
from tokenmill.jobs.models import Batch, Result, State
from tokenmill.jobs.output import output_line
from tokenmill.jobs.reader import Reader

_PAGE_LINES = 512
_WORDS = {
    "deadline": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was executed."),
}
"""OpenAI's codes and words for what the store calls otherwise."""


def write_results(desk: BatchRepository, reader: Reader, batch: Batch, ticket: BatchRecord) -> None:
    """Write both files of a batch whose every job has its outcome; one without lines is not made. Blocks."""
    late = ended_late(ticket, batch)
    with ExitStack() as stack:
        output = stack.enter_context(_Growing(desk, ticket.output_file_id))
        errors = stack.enter_context(_Growing(desk, ticket.error_file_id))
        number = 0
        while page := reader.results(batch.id, number, _PAGE_LINES):
            for result in page:
                into = output if result.state is State.DONE else errors
                into.append(output_line(batch.name, _said(result, late=late)))
            number = page[-1].number
        for growing, what in ((output, "output"), (errors, "error")):
            growing.keep(f"{ticket.id}_{what}.jsonl", ticket)


def ended_late(ticket: BatchRecord, batch: Batch) -> bool:
    """Whether what ran was broken off because the time was over, and not because somebody wanted so."""
    cancelled_s = batch.cancelled_s
    return cancelled_s is not None and cancelled_s >= ticket.expires_s and "cancelling" not in ticket.times


def _said(result: Result, *, late: bool) -> Result:
    cause = "deadline" if late and result.state is State.CANCELLED else result.code or ""
    code, message = _WORDS.get(cause, (result.code, result.message))
    return result._replace(code=code, message=message)


class _Growing:
    """A draft that lines are appended to."""

    def __init__(self, desk: BatchRepository, file: str) -> None:
        self._desk = desk
        self._id = file
        self._path: Path = desk.draft_of(file)
        self._sum = hashlib.sha256()
        self._size = 0
        try:
            self._file: BinaryIO = self._path.open("wb")
        except OSError as error:
            raise unusable(self._path.parent, error) from error

    def __enter__(self) -> "_Growing":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)  # what was kept has another name by now

    def append(self, line: bytes) -> None:
        """One more line."""
        try:
            self._file.write(line)
        except OSError as error:
            raise unusable(self._path.parent, error) from error
        self._sum.update(line)
        self._size += len(line)

    def keep(self, name: str, ticket: BatchRecord) -> None:
        """Make a file of it, unless it is empty."""
        if not self._size:
            return
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise unusable(self._path.parent, error) from error
        now_s = self._desk.now_s()
        kept_s = ticket.output_kept_s
        self._desk.keep(
            File(
                self._id,
                ticket.owner,
                name,
                "batch_output",
                self._size,
                self._sum.hexdigest(),
                now_s,
                None if kept_s is None else now_s + kept_s,
            )
        )
