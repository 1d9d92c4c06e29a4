"""The folder of pulled models: contents, completeness and disk space.

Next to each pulled file, a note (`FILE.pulled.json`) stores its size, time and sha256, so that checking the file takes
one stat instead of hashing it. Does not access the network.
"""

import errno
import fcntl
import glob
import hashlib
import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenmill.errors import ChecksumMismatch, NoSpace, PullError
from tokenmill.storage.atomic import replace_file
from tokenmill.units import format_bytes

DownloadProgress = Callable[[int, int | None], None]
"""Called with (downloaded bytes, total bytes)."""
Notify = Callable[[str], None]
"""Called with one sentence for the user."""

_NOTE = ".pulled.json"
_PART = re.compile(r"(?P<file>.+\.gguf)\.[0-9a-f]{12}\.part", re.IGNORECASE)
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})", re.IGNORECASE)
_MOVE_HINT = "set models_dir in tokenmill.toml to a folder that you can write to"


@dataclass(frozen=True, slots=True)
class Pulled:
    """One model in the folder."""

    name: str  # the name for `pull`: smollm2, hf:REPO:QUANT; a path for other files
    path: Path  # the file, or the first split
    files: tuple[Path, ...]
    bytes: int
    missing: int = 0  # number of missing splits
    partial_bytes: int = 0  # bytes of interrupted downloads
    was_here: bool = True  # False: this pull downloaded it
    fetched_bytes: int = 0  # downloaded by this pull

    @property
    def complete(self) -> bool:
        """Whether no split is missing."""
        return self.missing == 0


@dataclass(frozen=True, slots=True)
class PullNote:
    """Facts about a file when it was pulled."""

    name: str
    bytes: int
    mtime_ns: int
    sha256: str | None  # None: not known
    published: bool = True  # False: the source has no published hash, and this is that of the downloaded bytes


def split_of(file_name: str) -> tuple[str, int, int]:
    """(stem, index, count) of a GGUF's file name; a file that is not split is 1 of 1."""
    stem = file_name[: -len(".gguf")] if file_name.lower().endswith(".gguf") else file_name
    match = _SPLIT.fullmatch(stem)
    return (match["stem"], int(match["index"]), int(match["count"])) if match else (stem, 1, 1)


def sha256_of(path: Path, read: Callable[[int], None] | None = None) -> str:
    """Hash one file; `read` receives the size of every block."""
    with path.open("rb", buffering=0) as file:
        source = file if read is None else _CountedReads(file, read)
        return hashlib.file_digest(source, "sha256").hexdigest()


class _CountedReads:
    """A file that reports progress, with the methods that `hashlib.file_digest` uses."""

    def __init__(self, file: io.FileIO, read: Callable[[int], None]) -> None:
        self._file = file
        self._read = read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:
        count = self._file.readinto(buffer)
        self._read(count)
        return count


def write_note(path: Path, name: str, sha256: str | None, *, published: bool = True) -> None:
    """Write the note of a checked file; `published` if the source published the hash."""
    stat = path.stat()
    note = path.with_name(path.name + _NOTE)
    written = asdict(PullNote(name, stat.st_size, stat.st_mtime_ns, sha256, published))
    replace_file(note, json.dumps(written).encode(), temporary=note.with_name(note.name + ".tmp"))


def read_note(path: Path) -> PullNote | None:
    """The note of a file; None if it is missing or unreadable."""
    try:
        return PullNote(**json.loads(path.with_name(path.name + _NOTE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def is_whole(path: Path, name: str, sha256: str | None, *, verify: bool = False) -> bool:
    """Whether `path` has the given sha256; hashes the file only if its note does not match, or with `verify`.

    Removes a file with another hash; with `verify`, also raises `ChecksumMismatch`.
    """
    if not path.is_file():
        return False
    note = read_note(path)
    stat = path.stat()
    known = note is not None and (note.bytes, note.mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    if known and not verify and note is not None and sha256 in (None, note.sha256):
        return True
    expected = sha256 or (note.sha256 if note else None)
    if expected is None:
        return known
    found = sha256_of(path)
    if found != expected:
        forget(path)
        if verify:
            raise ChecksumMismatch(
                f"{path} was damaged and has been removed: its sha256 was {found} instead of {expected}",
                hint=f"tokenmill models pull {name}",
            )
        return False
    write_note(path, name, expected, published=sha256 is not None or (note is not None and note.published))
    return True


def part_of(path: Path, identity: str) -> Path:
    """Path of a download's part file.

    `identity` is hexadecimal and identifies the content, so that two versions never share a file.
    """
    return path.with_name(f"{path.name}.{identity[:12]}.part")


def drop_other_parts(path: Path, part: Path) -> None:
    """Remove part files of other versions."""
    for other in path.parent.glob(glob.escape(path.name) + ".*.part*"):
        if not other.name.startswith(part.name):
            other.unlink()


def forget(path: Path) -> None:
    """Remove a file and its note."""
    path.unlink(missing_ok=True)
    path.with_name(path.name + _NOTE).unlink(missing_ok=True)


def check_space(name: str, folder: Path, needed_bytes: int, keep_free_bytes: int) -> None:
    """Raise `NoSpace` if the disk of `folder` has too little free space for a download."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes - needed_bytes < keep_free_bytes:
        raise NoSpace(
            f"{name} needs {format_bytes(needed_bytes)} more in {folder}, but only {format_bytes(free_bytes)} are free "
            f"and {format_bytes(keep_free_bytes)} must stay free",
            hint="free disk space, set models_dir in tokenmill.toml to another disk, or lower pull.keep_free_bytes",
        )


@contextmanager
def locked(folder: Path, name: str, notify: Notify) -> Iterator[None]:
    """Lock a model's folder, so that a second pull of the model waits for the first."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            notify(f"another process is pulling {name}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Raise OSErrors of a full or inaccessible disk as `NoSpace` or `PullError`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(
                f"the disk of {folder} is full; downloaded bytes are kept", hint="free disk space and pull again"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise PullError(f"cannot use {folder}: {error.strerror}", hint=_MOVE_HINT) from error
        raise


def pulled(models_path: Path) -> tuple[Pulled, ...]:
    """All models in the folder, including incomplete ones, sorted by name."""
    sets: dict[tuple[Path, str, int], dict[int, Path]] = {}
    with disk_errors(models_path):
        for path in sorted(models_path.rglob("*.gguf*")) if models_path.is_dir() else ():
            match = _PART.fullmatch(path.name)
            name = match["file"] if match else path.name
            if name.lower().endswith(".gguf") and path.is_file():
                stem, index, count = split_of(name)
                sets.setdefault((path.parent, stem, count), {}).setdefault(index, path)
        found = [_one(models_path, files, count) for (_, _, count), files in sets.items()]
    return tuple(sorted(found, key=lambda model: model.name))


def _one(models_path: Path, by_index: dict[int, Path], count: int) -> Pulled:
    paths = [path for _, path in sorted(by_index.items())]
    parts = [path for path in paths if path.suffix == ".part"]
    files = tuple(path for path in paths if path.suffix != ".part")
    first = files[0] if files else parts[0]
    return Pulled(
        name=_name(models_path, first),
        path=first,
        files=files,
        bytes=sum(path.stat().st_size for path in files),
        missing=count - len(files),
        partial_bytes=sum(path.stat().st_size for path in parts),
    )


def _name(models_path: Path, path: Path) -> str:
    note = read_note(path)
    folders = path.relative_to(models_path).parts[:-1]
    if note:
        return note.name
    if path.suffix == ".part" and len(folders) == 1:
        return folders[0]
    if path.suffix == ".part" and len(folders) == 3:
        return f"hf:{folders[0]}/{folders[1]}:{folders[2]}"
    return str(path.relative_to(models_path))
