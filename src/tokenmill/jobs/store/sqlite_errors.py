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
"""The code of a StoreError for a database file that SQLite cannot read."""

_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_READ_ONLY = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH)
_GO_ON = "everything that was acknowledged is kept, and the same command goes on from there"
_FULL_BYTES = 64 * KIB  # SQLite cannot begin a transaction with less: its log index alone takes 32 KiB

_WORDS = dict.fromkeys(
    _READ_ONLY, ("cannot be written to", "check who owns the folder and whether its file system is read-only")
) | {
    sqlite3.SQLITE_CANTOPEN: ("cannot be opened", "check that its folder is there and who may use it"),
    # SQLite hides errno: quotas, file size limits and failing disks all end here.
    sqlite3.SQLITE_IOERR: ("could not be read or written", f"see dmesg and df; {_GO_ON}"),
    sqlite3.SQLITE_NOMEM: ("could not be used", f"the machine is out of memory: free some; {_GO_ON}"),
    sqlite3.SQLITE_PROTOCOL: ("could not be locked", "put the state folder on a local disk"),
}


def full(where: Path) -> StoreFull:
    """The error for a full disk."""
    return StoreFull(f"no room is left on the disk of {where}", hint=f"free some space: {_GO_ON}")


def is_disk_full(error: StoreError) -> bool:
    """Whether a write failed for lack of space; SQLite reports a disk quota as a failed write."""
    code = getattr(error.__cause__, "sqlite_errorcode", None)
    return isinstance(error, StoreFull) or code == sqlite3.SQLITE_IOERR_WRITE


def gone(where: Path) -> StoreError:
    """The error for a file that was removed or replaced."""
    return StoreError(
        f"{where} was removed or replaced while it was in use",
        hint="put the folder back if it was moved; without it the batch starts anew",
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
        return gone(path)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreInUse(
            f"{path} is locked by another program",
            hint="close what has it open (fuser names it), then run the same command again",
        )
    what, hint = _WORDS.get(code, ("", "this is a bug; please report it"))
    if (code in _WORDS or code == sqlite3.SQLITE_ERROR) and (cause := _cause(path)) is not None:
        return cause
    return StoreError(f"{path} {what}: {error}" if what else f"{path}: {error}", hint=hint)


def _damaged(path: Path, error: sqlite3.Error) -> StoreError:
    return StoreError(f"{path} is damaged: {error}", hint=start_over(path.parent), code=STORE_DAMAGED)


def start_over(folder: Path) -> str:
    """The hint for a database that cannot be repaired."""
    name = shlex.quote(str(folder))
    return (
        f"to compute everything again, move the store away (mv {name} {name}.damaged), move the output file away as "
        "well, then run the same command"
    )


def _cause(path: Path) -> StoreError | None:
    """The cause that the file system reveals, if any."""
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
            hint="copy the store to a disk that can be written: SQLite writes next to it even to read",
        )
    info = path.stat()
    return StoreError(
        f"no permission to read and write {path} (owner {info.st_uid}, mode {info.st_mode & 0o777:o}, "
        f"this process is user {os.geteuid()})",
        hint="run as its owner, or change the owner or the mode; SQLite writes next to a database even to read it",
    )


def unusable(folder: Path, error: OSError) -> StoreError:
    """The error for a folder that cannot be used."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return full(folder)
    hint = "check the path and who may write there"
    if error.errno in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS):
        hint = "this file system has no locks: put the state folder on a local disk"
    return StoreError(f"cannot use {folder}: {error.strerror or error}", hint=hint)
