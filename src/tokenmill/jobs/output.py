"""Writes the output of a batch: OpenAI batch output lines, one per job, in file order.

A line is appended once all lines before it are final, so the lines in the file do not change while the batch runs. All
bytes come from the store: on opening, the file is compared with the store line by line and truncated where they differ,
for example after a power failure or because a failed job was retried; removed complete lines are logged. A job whose
stored answer is damaged is requeued, not written. A file that this batch did not write is not changed.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from tokenmill.errors import StoreFull, StoreInUse, TokenmillError, UsageError
from tokenmill.jobs.models import Batch, Result, State
from tokenmill.jobs.output_checks import (
    FOREIGN_OUTPUT,
    STDOUT,
    no_output_folder,
    output_is_folder,
    unwritable_output,
)
from tokenmill.jobs.store.store import Store
from tokenmill.units import KIB, MIB, number_of

_PAGE_LINES = 512
_WRITE_BYTES = MIB
_TAIL_BYTES = 64 * KIB
_LINE_ENDS = 2
_log = logging.getLogger(__name__)
_RESUME_HINT = "finished answers are kept; run the same command again to resume"


def output_line(name: str, result: Result) -> bytes:
    """The output line of a finished job; the same bytes every time."""
    start = f'{{"id":"{_id_prefix(name)}{result.number}","custom_id":{json.dumps(result.custom_id)},"response":'
    if result.state is State.DONE and result.body is not None and result.identity is not None:
        request = f'{start}{{"status_code":200,"request_id":"req_{result.identity[:12].hex()}","body":'
        return b'%b%b},"error":null}\n' % (request.encode(), result.body)
    code = result.code or result.state.name.lower()
    error = {"code": code, "message": result.message or result.state.word, "line": result.number}
    text = json.dumps(error, ensure_ascii=False, separators=(",", ":"))
    return f'{start}null,"error":{text}}}\n'.encode()


def _id_prefix(name: str) -> str:
    return f"batch_req_{name.removeprefix('batch_')}_"


def written_to(batch: Batch) -> int | None:
    """Number of the last line in the files of a batch; None if there are no files."""
    paths = [Path(path) for path in (batch.output, batch.errors) if path]
    found = [_last_number(path, _id_prefix(batch.name)) for path in paths if path.is_file()]
    return max(found) if found else None


def _last_number(path: Path, prefix: str) -> int:
    """Number of the last complete line of a file."""
    start = path.stat().st_size
    tail = b""
    with path.open("rb") as file:
        while start and tail.count(b"\n") < _LINE_ENDS:
            start = max(0, start - max(_TAIL_BYTES, len(tail)))
            file.seek(start)
            tail = file.read()
    whole = tail[: tail.rfind(b"\n") + 1].splitlines()
    match = re.match(rb'\{"id":"%b(\d+)"' % re.escape(prefix).encode(), whole[-1]) if whole else None
    return int(match[1]) if match else 0


class Output:
    """The open output file of a batch, and its errors file if it has one; locked for one writer."""

    def __init__(self, store: Store, batch: Batch, *, replace: bool = False) -> None:
        """Open and repair the files; with `replace`, files of other content are emptied instead of refused."""
        if batch.output is None:
            raise UsageError(f"{batch.name} has no output file", hint="set one with --output", code="no_output")
        self._store = store
        self._batch = batch
        self._number = 0  # of the last written line
        self._failed = 0  # checksum of the failures up to it; see `_sum`
        self._answers = _File(Path(batch.output))
        self._errors = None
        try:
            self._errors = _File(Path(batch.errors)) if batch.errors else None
            self._repair(replace=replace)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def written(self) -> int:
        """The number of the last line in the file."""
        return self._number

    def advance(self) -> int:
        """Append the lines that became final; returns their number."""
        count = 0
        for result in self._final():
            self._number = result.number  # set first, because a line that could not be written stays buffered
            line = output_line(self._batch.name, result)
            self._failed += self._sum(result, line)
            self._file(result).append(line)
            count += 1
        for file in self._files():
            file.flush()
        return count

    def finish(self) -> bool:
        """Append the final lines and sync them to disk; returns whether the output is complete.

        If another process has retried jobs whose errors are in the file, these lines are rewritten first.
        """
        self.advance()
        if self._store.shared and self._store.batch(self._batch.id).finished and self._outdated():
            for file in self._files():
                file.rewind()
            self._repair(replace=False)
            self.advance()
        for file in self._files():
            file.sync()
        batch = self._store.batch(self._batch.id)
        return batch.finished and not self._store.results(batch.id, self._number, 1)

    def close(self) -> None:
        """Close the files without writing."""
        for file in self._files():
            file.close()

    def _files(self) -> Iterator["_File"]:
        yield self._answers
        if self._errors is not None:
            yield self._errors

    def _file(self, result: Result) -> "_File":
        return self._answers if self._errors is None or result.state is State.DONE else self._errors

    def _final(self) -> Iterator[Result]:
        """Yield finished jobs after the last written line, up to the first unfinished one. Requeues damaged answers."""
        number = self._number
        while page := self._store.results(self._batch.id, number, _PAGE_LINES):
            for result in page:
                if result.damaged_answer is not None:
                    self._store.requeue_damaged(self._batch.id)
                if not result.state.final:
                    return
                yield result
            number = page[-1].number

    def _outdated(self) -> bool:
        """Whether failures that are in the files have changed in the store."""
        if not all(file.regular for file in self._files()):
            return False  # pipes cannot be rewritten
        number = 0
        failed = 0
        while page := self._store.failures(self._batch.id, number, _PAGE_LINES):
            number = page[-1].number
            failed += sum(
                self._sum(result, output_line(self._batch.name, result))
                for result in page
                if result.number <= self._number
            )
        return failed != self._failed

    def _sum(self, result: Result, line: bytes) -> int:
        """A checksum of a failure's line; the sum over all failures shows whether any has changed.

        Other lines never change: answers are final, and resuming cancelled jobs requires the claim on the output.
        """
        if not self._store.shared or result.state not in (State.FAILED, State.QUARANTINED):
            return 0
        return int.from_bytes(hashlib.blake2b(line, digest_size=16).digest())

    def _repair(self, *, replace: bool) -> None:
        """Compare the files with the store and truncate them where they differ."""
        self._number = self._failed = 0
        for result in self._final():
            line = output_line(self._batch.name, result)
            if not self._file(result).matches(line):
                break  # both files are rewritten from here
            self._number = result.number
            self._failed += self._sum(result, line)
        own = f'{{"id":"{_id_prefix(self._batch.name)}'.encode()
        foreign = [file for file in self._files() if not file.continues_with(own)]
        if foreign and not replace:
            raise foreign[0].foreign()
        if foreign:
            self._number = self._failed = 0
        for file in self._files():
            file.cut(whole=bool(foreign))


class _File:
    """A file that grows at its end, or a sink such as a pipe or /dev/null."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ends = 0
        self._pending = list[bytes]()
        self._pending_bytes = 0
        self._fd = _opened(path)
        info = os.fstat(self._fd)
        self.regular = stat.S_ISREG(info.st_mode) and str(path) != STDOUT
        self._inode = info.st_ino
        try:
            if self.regular:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise StoreInUse(f"another process writes {path}", hint="wait for it, or choose another output") from None
        self._reader = os.fdopen(os.dup(self._fd), "rb") if self.regular else None

    def rewind(self) -> None:
        """Restart the comparison from the beginning of the file."""
        if self._reader is not None:
            self._reader.close()  # discards its read-ahead
            os.lseek(self._fd, 0, os.SEEK_SET)
            self._reader = os.fdopen(os.dup(self._fd), "rb")
            self._ends = 0

    def matches(self, line: bytes) -> bool:
        """Whether the next bytes of the file are this line, which then counts as written."""
        if self._reader is None or self._reader.read(len(line)) != line:
            return False
        self._ends += len(line)
        return True

    def continues_with(self, own: bytes) -> bool:
        """Whether the rest of the file begins like a line of this batch, or is a torn write."""
        if self._reader is None:
            return True
        self._reader.seek(self._ends)
        rest = self._reader.read(len(own))
        # A power failure leaves an incomplete line, or zeros in allocated space.
        return own.startswith(rest.rstrip(b"\0"))

    def foreign(self) -> UsageError:
        """The error for a file that this batch did not write."""
        where = "has other content" if self._ends == 0 else f"was changed after byte {self._ends}"
        return UsageError(
            f"{self.path} {where}, so it is not the output of this batch",
            hint="choose another output file, or move this one away",
            code=FOREIGN_OUTPUT,
        )

    def cut(self, *, whole: bool) -> None:
        """Remove everything after the matching lines, or with `whole` everything. Removed complete lines are logged."""
        if self._reader is None:
            return
        self._ends = 0 if whole else self._ends
        self._reader.seek(self._ends)
        lines = 0
        while part := self._reader.read(_WRITE_BYTES):
            lines += part.count(b"\n")
        if lines:
            _log.warning(
                "%s: removed %s after byte %d, because the store has newer results; they are written again",
                self.path,
                number_of(lines, "line"),
                self._ends,
            )
        self._truncate()

    def append(self, line: bytes) -> None:
        """Buffer a line, to be written together with others or by `flush`."""
        self._pending.append(line)
        self._pending_bytes += len(line)
        if self._pending_bytes >= _WRITE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the buffered lines completely or not at all."""
        if not self._pending:
            return
        data = memoryview(b"".join(self._pending))
        self._check_here()
        try:
            done = 0
            while done < len(data):
                done += os.write(self._fd, data[done:])
        except OSError as error:
            if self.regular:
                self._truncate()
            raise self._unwritable(error) from error
        self._ends += len(data)
        self._pending = []
        self._pending_bytes = 0

    def sync(self) -> None:
        """Sync to disk."""
        try:
            if self.regular:
                os.fsync(self._fd)
        except OSError as error:
            raise self._unwritable(error) from error

    def close(self) -> None:
        """Close the file."""
        if self._reader is not None:
            self._reader.close()
        os.close(self._fd)

    def _truncate(self) -> None:
        os.ftruncate(self._fd, self._ends)
        os.lseek(self._fd, self._ends, os.SEEK_SET)

    def _check_here(self) -> None:
        try:
            here = not self.regular or self.path.stat().st_ino == self._inode
        except OSError:
            here = False
        if not here:
            raise TokenmillError(
                f"{self.path} was removed or replaced while it was being written",
                hint=_RESUME_HINT,
                code="output_removed",
            )

    def _unwritable(self, error: OSError) -> TokenmillError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StoreFull(f"the disk of {self.path} is full", hint=f"free some space; {_RESUME_HINT}")
        return TokenmillError(f"cannot write {self.path}: {error.strerror}", hint=_RESUME_HINT)


def _opened(path: Path) -> int:
    """A descriptor to write to; UsageError if the path cannot be opened."""
    if str(path) == STDOUT:
        return os.dup(1)  # opened by its path, a file would be overwritten from its beginning
    try:
        # A pipe opened for reading too would never end for its reader.
        access = os.O_WRONLY if path.exists() and not path.is_file() else os.O_RDWR | os.O_CREAT
        return os.open(path, access | os.O_CLOEXEC, 0o644)
    except FileNotFoundError as error:
        raise no_output_folder(path) from error
    except IsADirectoryError as error:
        raise output_is_folder(path) from error
    except OSError as error:
        raise unwritable_output(path, error.strerror) from error
