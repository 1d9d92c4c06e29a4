"""A new file appears whole under its name or not at all."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from tokenmill.errors import TokenmillError, UsageError

_HINTS = {errno.ENOENT: "create the folder first", errno.ENOSPC: "free some space, or choose another folder"}


@contextmanager
def new_file(target: Path, *, force: bool) -> Iterator[BinaryIO]:
    """Write beside `target` and rename at the end; what fails leaves nothing behind."""
    try:
        _check(target, force=force)
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            with part.open("xb") as file:
                yield file
            part.replace(target)
        finally:
            with suppress(OSError):  # its folder may be none
                part.unlink(missing_ok=True)
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "name a file in a folder you may write to")
        raise TokenmillError(f"cannot write {target}: {error.strerror}", hint=hint) from error


def _check(target: Path, *, force: bool) -> None:
    if target.is_dir():
        raise UsageError(f"{target} is a folder", hint="give the name of the file to write")
    # The rename would put an ordinary file in the place of a device or pipe: for root, of /dev/null for everybody.
    if target.exists() and not target.is_file():
        raise UsageError(f"{target} is not an ordinary file", hint="give the name of the file to write")
    if target.exists() and not force:
        raise UsageError(f"{target} exists", hint="--force overwrites it")
