"""Atomic file replacement: a reader sees the old file or the new one, also after a crash or a power cut.

`replace_file` writes bytes, `replacing` yields an open file, and `new_file` raises errors with hints for a file that
the user named. Imports only the standard library and `errors`, because the engine supervisor uses it.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from tokenmill.errors import TokenmillError, UsageError

_HINTS = {errno.ENOENT: "create the folder first", errno.ENOSPC: "free some space, or choose another folder"}


def replace_file(path: Path, data: bytes, *, mode: int = 0o666, temporary: Path | None = None) -> None:
    """Replace `path` with `data`; OSError leaves it as it was. See `replacing`."""
    with replacing(path, mode=mode, temporary=temporary) as file:
        file.write(data)


@contextmanager
def replacing(path: Path, *, mode: int = 0o666, temporary: Path | None = None) -> Iterator[BinaryIO]:
    """Yield a temporary file that durably replaces `path` when the block ends without an error.

    `mode` is subject to the umask. The temporary file has a unique name, so that
    several processes can replace a file concurrently; `temporary` names it where there is only one writer, so that
    killed writers leave at most one file behind.
    """
    part = temporary or path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if temporary is None else os.O_TRUNC)
    file = os.open(part, flags, mode)
    try:
        with os.fdopen(file, "w+b") as opened:
            yield opened
        commit(part, path)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def commit(part: Path, path: Path) -> None:
    """Rename a finished temporary file to `path`, durably: its content first, its name after."""
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush created, renamed and removed names of `folder` to disk, if its file system supports that."""
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:  # a folder can be writable without being readable
        return
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(opened)


@contextmanager
def new_file(target: Path, *, force: bool) -> Iterator[BinaryIO]:
    """`replacing` for a file that the user named.

    UsageError if `target` exists and `force` is false, or if it is not a regular file; TokenmillError if it cannot be
    written.
    """
    try:
        _check_target(target, force=force)
        with replacing(target) as file:
            yield file
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "choose a file in a writable folder")
        raise TokenmillError(f"cannot write {target}: {error.strerror}", hint=hint) from error


def _check_target(target: Path, *, force: bool) -> None:
    if target.is_dir():
        raise UsageError(f"{target} is a folder", hint="give a file name")
    # Renaming over a device or pipe would replace it with a regular file; as root, even /dev/null.
    if target.exists() and not target.is_file():
        raise UsageError(f"{target} is not a regular file", hint="give a file name")
    if target.exists() and not force:
        raise UsageError(f"{target} already exists", hint="use --force to overwrite it")
