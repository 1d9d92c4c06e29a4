"""Maps errors of SQLite and the file system to StoreErrors with a cause and a hint."""

import errno
import os
import shlex
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tokenmill.errors import StoreError, StoreFull, StoreInUse
from tokenmill.units import KIB

STORE_DAMAGED = "store_damaged"
"""The code of a StoreError for a damaged database file."""

_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_READ_ONLY = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH)
_RESUME_HINT = "finished answers are kept; run the same command again to resume"
_FULL_BYTES = 64 * KIB  # SQLite cannot begin a transaction with less; its log index alone takes 32 KiB

_MESSAGES = dict.fromkeys(
    _READ_ONLY, ("cannot be written", "check the owner of the folder and whether its file system is read-only")
) | {
    sqlite3.SQLITE_CANTOPEN: ("cannot be opened", "check that its folder exists, and its permissions"),
    # SQLite hides errno; quotas, file size limits and failing disks are all reported like this.
    sqlite3.SQLITE_IOERR: ("could not be read or written", f"see dmesg and df; {_RESUME_HINT}"),
    sqlite3.SQLITE_NOMEM: ("could not be used", f"the machine is out of memory; {_RESUME_HINT}"),
    sqlite3.SQLITE_PROTOCOL: ("could not be locked", "put the state folder on a local disk"),
}


def full(where: Path) -> StoreFull:
    """The error for a full disk."""
    return StoreFull(f"the disk of {where} is full", hint=f"free some space; {_RESUME_HINT}")


def is_disk_full(error: StoreError) -> bool:
    """Whether a write failed for lack of space; SQLite reports an exceeded quota as a failed write."""
    code = getattr(error.__cause__, "sqlite_errorcode", None)
    return isinstance(error, StoreFull) or code == sqlite3.SQLITE_IOERR_WRITE


def removed(where: Path) -> StoreError:
    """The error for a file that was removed or replaced."""
    return StoreError(
        f"{where} was removed or replaced while it was in use",
        hint="move the folder back if it was moved; otherwise the same command starts a new batch",
        code="store_removed",
    )


@contextmanager
def mapped_errors(path: Path) -> Iterator[None]:
    """Map SQLite's errors to StoreErrors."""
    try:
        yield
    except sqlite3.Error as error:
        raise _mapped(error, path) from error


def _mapped(error: sqlite3.Error, path: Path) -> StoreError:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # the upper bits are details
    if code == sqlite3.SQLITE_FULL:
        return full(path)
    if code in _DAMAGED:
        return _damaged(path, error)
    if code in _READ_ONLY and not path.exists():
        return removed(path)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreInUse(
            f"{path} is locked by another program",
            hint="close that program (fuser shows it), then run the same command again",
        )
    what, hint = _MESSAGES.get(code, ("", "this is a bug; please report it"))
    if (code in _MESSAGES or code == sqlite3.SQLITE_ERROR) and (cause := _cause(path)) is not None:
        return cause
    return StoreError(f"{path} {what}: {error}" if what else f"{path}: {error}", hint=hint)


def _damaged(path: Path, error: sqlite3.Error) -> StoreError:
    return StoreError(f"{path} is damaged: {error}", hint=start_over(path.parent), code=STORE_DAMAGED)


def start_over(folder: Path) -> str:
    """The hint for a database that cannot be repaired."""
    name = shlex.quote(str(folder))
    return (
        f"to compute everything again, move the store away (mv {name} {name}.damaged) and the output file as "
        "well, then run the same command"
    )


def _cause(path: Path) -> StoreError | None:
    """The cause of an error as found in the file system, if any."""
    folder = path.parent
    with suppress(OSError):
        if shutil.disk_usage(folder).free < _FULL_BYTES:
            return full(path)
        for each in (folder, path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
            if each != folder and each.is_dir():
                return StoreError(f"{each} is a folder", hint="move it away, or use another --store")
            if each.exists() and not os.access(each, os.R_OK | os.W_OK):
                return _not_permitted(each)
    return None


def _not_permitted(path: Path) -> StoreError:
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return StoreError(
            f"{path} is on a read-only file system",
            hint="copy the store to a writable disk: SQLite writes next to a database even to read it",
        )
    info = path.stat()
    return StoreError(
        f"no permission to read and write {path} (owner {info.st_uid}, mode {info.st_mode & 0o777:o}, "
        f"this process is user {os.geteuid()})",
        hint="run as its owner, or change its owner or mode; SQLite writes next to a database even to read it",
    )


def unusable(folder: Path, error: OSError) -> StoreError:
    """The error for a folder that cannot be used."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return full(folder)
    hint = "check the path and its permissions"
    if error.errno in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS):
        hint = "the file system does not support locks: put the state folder on a local disk"
    return StoreError(f"cannot use {folder}: {error.strerror or error}", hint=hint)
