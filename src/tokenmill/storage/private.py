"""Folders and files that only their owner may read: prompts, answers and keys.

`private_folder` and `private_file` create them, `make_private` removes the access that an older version left. Access
rights of files inside a private folder do not matter, except while someone moves or copies them.
"""

import os
import stat
from collections.abc import Iterable
from pathlib import Path

FOLDER_MODE = 0o700
FILE_MODE = 0o600
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def private_folder(folder: Path) -> None:
    """Create a folder and its missing parents, readable by the owner only; existing folders keep their mode."""
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(mode=FOLDER_MODE, exist_ok=True)
    folder.mkdir(exist_ok=True)  # raises if it is a file


def private_file(path: Path) -> None:
    """Create an empty file, readable by the owner only; an existing file stays unchanged."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))


def make_private(paths: Iterable[Path]) -> tuple[Path, ...]:
    """Remove the access of group and others from folders and files that exist; returns those that had it.

    Links and paths of other owners are left alone. Raises OSError if the file system refuses.
    """
    return tuple(path for path in paths if _mended(path))


def _mended(path: Path) -> bool:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    mode = stat.S_IMODE(found.st_mode)
    known = stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)
    if not known or found.st_uid != os.getuid() or not mode & _OTHERS:
        return False
    path.chmod(mode & ~_OTHERS)
    return True
