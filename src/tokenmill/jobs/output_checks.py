"""Checks the output paths before anything is stored, so that a run that cannot write does not create a batch.

Opens nothing for writing and creates nothing; errors during writing are handled by `output`.
"""

import os
import re
from pathlib import Path

from tokenmill.errors import UsageError
from tokenmill.jobs.models import Submission

_FORM = b'{"id":"batch_req_'  # the start of every output line
_NAMED = re.compile(re.escape(_FORM) + rb"([0-9a-f]+)_")
_LOOKED_AT = 256  # bytes read of an existing file


def check_paths(how: Submission) -> None:
    """Raise UsageError if an output cannot be written, for any batch."""
    paths = [Path(path) for path in (how.output, how.errors) if path is not None]
    for path in paths:
        _check(path)
        found = _beginning(path).rstrip(b"\0")  # zeros: a power cut left them in allocated space
        if not _FORM.startswith(found[: len(_FORM)]):
            raise UsageError(
                f"{path} holds something else: it is not the output of this batch",
                hint="name another output, or move that file away",
            )
    if len(paths) > 1 and _same(*paths):
        raise UsageError(
            f"{paths[0]} cannot hold results and errors both",
            hint="leave --errors out: errors are lines of the output then",
        )


def check_unused(how: Submission) -> None:
    """Raise UsageError if an existing file has lines of another batch, before this one has written any."""
    for path in (Path(path) for path in (how.output, how.errors) if path is not None):
        before = _NAMED.match(_beginning(path))
        if before is not None:
            raise UsageError(
                f"{path} is the output of batch_{before[1].decode()}, which had other jobs, another model or options",
                hint="name another output, or move that file away; answers that exist are not computed again",
            )


def _check(path: Path) -> None:
    try:
        if path.is_dir():
            raise UsageError(f"{path} is a folder", hint="give the name of the file to write")
        if not path.exists() and not path.parent.is_dir():
            raise UsageError(f"the folder of {path} is not there", hint="create it and run the same again")
    except OSError as error:  # an unreadable folder, or a name that is too long
        raise UsageError(f"cannot write {path}: {error.strerror}", hint="name a file that you may write") from error
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"cannot write {path}: it is not allowed", hint="name a file that you may write")


def _same(one: Path, other: Path) -> bool:
    if not one.exists() or not other.exists():
        return one == other
    return one.is_file() and one.samefile(other)


def _beginning(path: Path) -> bytes:
    """The first bytes of a regular file; empty for anything else, because reading would drain a pipe."""
    if not path.is_file():
        return b""
    try:
        with path.open("rb") as file:
            return file.read(_LOOKED_AT)
    except OSError as error:
        hint = "what is in an output is held against the store: name a file that you may read"
        raise UsageError(f"cannot read {path}: {error.strerror}", hint=hint) from error
