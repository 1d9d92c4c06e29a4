"""Checks output paths before a batch is stored, so that a run that cannot write its output does not create a batch.

Creates no files and opens none for writing; `output` handles errors during writing.
"""

import os
import re
from pathlib import Path

from tokenmill.errors import UsageError
from tokenmill.jobs.models import Submission

FOREIGN_OUTPUT = "foreign_output"
"""The code of a UsageError for an output file that another batch or another program wrote."""

STDOUT = "/dev/stdout"
"""The output path that means this process's standard output, which is written like a pipe even if it is a file."""

_FORM = b'{"id":"batch_req_'  # the start of every output line
_NAMED = re.compile(re.escape(_FORM) + rb"([0-9a-f]+)_")
_READ_BYTES = 256  # of an existing file


def check_paths(how: Submission) -> None:
    """Raise UsageError if an output path cannot be written, or has content that no batch wrote."""
    paths = [Path(path) for path in (how.output, how.errors) if path is not None]
    for path in paths:
        _check(path)
        found = _beginning(path).rstrip(b"\0")  # a power failure may leave zeros in allocated space
        if not _FORM.startswith(found[: len(_FORM)]):
            raise UsageError(
                f"{path} has other content, so it is not the output of this batch",
                hint="choose another output file, or move this one away",
                code=FOREIGN_OUTPUT,
            )
    if len(paths) > 1 and _same(*paths):
        raise UsageError(
            f"{paths[0]} cannot be both the output and the errors file",
            hint="omit --errors to write errors to the output",
            code="same_output",
        )


def check_unused(how: Submission) -> None:
    """Raise UsageError if an existing file has lines of another batch; for batches that have no output yet."""
    for path in (Path(path) for path in (how.output, how.errors) if path is not None):
        before = _NAMED.match(_beginning(path))
        if before is not None:
            raise UsageError(
                f"{path} is the output of batch_{before[1].decode()}, which has other jobs, model or options",
                hint="choose another output file, or move this one away; existing answers are reused",
                code=FOREIGN_OUTPUT,
            )


def _check(path: Path) -> None:
    try:
        if path.is_dir():
            raise output_is_folder(path)
        if not path.exists() and not path.parent.is_dir():
            raise no_output_folder(path)
    except OSError as error:  # an unreadable folder, or a name that is too long
        raise unwritable_output(path, error.strerror) from error
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise unwritable_output(path, "permission denied")


def output_is_folder(path: Path) -> UsageError:
    """The error for an output path that is a folder."""
    return UsageError(f"{path} is a folder", hint="give the name of a file", code="output_is_folder")


def no_output_folder(path: Path) -> UsageError:
    """The error for an output path whose folder does not exist."""
    message = f"the folder of {path} does not exist"
    return UsageError(message, hint="create the folder and try again", code="no_output_folder")


def unwritable_output(path: Path, reason: str | None) -> UsageError:
    """The error for an output file that cannot be opened for writing."""
    return UsageError(f"cannot write {path}: {reason}", hint="check its name and permissions", code="unwritable_output")


def _same(one: Path, other: Path) -> bool:
    if not one.exists() or not other.exists():
        return one == other
    return one.is_file() and one.samefile(other)


def _beginning(path: Path) -> bytes:
    """The first bytes of a regular file; empty for others, because reading would drain a pipe, and for stdout."""
    if str(path) == STDOUT or not path.is_file():
        return b""
    try:
        with path.open("rb") as file:
            return file.read(_READ_BYTES)
    except OSError as error:
        hint = "an existing output is compared with the store; choose a file that you can read"
        raise UsageError(f"cannot read {path}: {error.strerror}", hint=hint, code="unreadable_output") from error
