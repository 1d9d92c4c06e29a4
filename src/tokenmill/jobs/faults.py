"""What can go wrong with the store's folder, in words; SQLite's and the system's errors are mapped here once."""

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenmill.errors import StoreError, StoreFull, StoreInUse

_READ_ONLY = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH)
_DAMAGED = "is damaged", "move store.db* aside and run the same command: all is computed anew, the output file stays"
_GO_ON = "everything that was acknowledged is kept, and the same command goes on from there"

_WORDS = dict.fromkeys(
    _READ_ONLY, ("cannot be written to", "check who owns the folder and whether its file system is read-only")
) | {
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_NOTADB: _DAMAGED,
    sqlite3.SQLITE_CANTOPEN: ("cannot be opened", "check that its folder is there and who may use it"),
    # SQLite does not pass errno on: a quota or a limit on file sizes ends here, as does a dying disk.
    sqlite3.SQLITE_IOERR: ("could not be read or written", f"see dmesg and df; {_GO_ON}"),
}


def full(where: Path) -> StoreFull:
    """No room is left."""
    return StoreFull(f"no room is left on the disk of {where}", hint=f"free some space: {_GO_ON}")


def gone(where: Path) -> StoreError:
    """The file under our feet is not there any more."""
    return StoreError(f"{where} was removed or replaced while it was in use",
                      hint="put the folder back if it was moved; without it the batch starts anew")  # fmt: skip


@contextmanager
def told(path: Path) -> Iterator[None]:
    """SQLite's errors as ours."""
    try:
        yield
    except sqlite3.Error as error:
        raise _mapped(error, path) from error


def _mapped(error: sqlite3.Error, path: Path) -> StoreError:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # the rest of it is detail
    if code == sqlite3.SQLITE_FULL:
        return full(path)
    if code in _READ_ONLY and not path.exists():
        return gone(path)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreInUse(f"{path} is locked by another program",
                          hint="close what has it open (fuser names it), then run the same command again")  # fmt: skip
    what, hint = _WORDS.get(code, ("", "this is a bug; please report it"))
    return StoreError(f"{path} {what}: {error}" if what else f"{path}: {error}", hint=hint)


def unusable(folder: Path, error: OSError) -> StoreError:
    """The folder itself."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return full(folder)
    hint = "check the path and who may write there"
    if error.errno in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS):
        hint = "this file system has no locks: put the state folder on a local disk"
    return StoreError(f"cannot use {folder}: {error.strerror or error}", hint=hint)
