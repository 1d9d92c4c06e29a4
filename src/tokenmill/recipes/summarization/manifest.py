"""What is in a folder of summaries: a line for each document, and which files are ours to replace.

The manifest is written before the files it speaks of, and it names the sum of a file's content before and after: so a
kill between the two leaves a file that is told apart from one that a person edited. Both are replaced whole. Nothing
here knows how a summary is made.
"""

import errno
import fcntl
import hashlib
import json
import os
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from tokenmill.errors import StoreFull, StoreInUse, TokenmillError, UsageError
from tokenmill.recipes.summarization.documents import SourceDocument
from tokenmill.storage.atomic import replace_file

MANIFEST = "manifest.jsonl"
ManifestState = Literal["done", "failed", "edited"]
DocumentChange = Literal["to do", "unchanged", "edited"]
_LONGEST_PART = 160  # bytes of one part of a file's name; file systems end at 255
_NOT_IN_NAMES = frozenset('/\\:*?"<>|~')
_GO_ON = "what is answered is kept, and the same command goes on from there"


@dataclass(frozen=True, slots=True)
class SummaryInputs:
    """What a summary depends on beside its document: where one of these differs, it is another."""

    digest_sha256: str | None
    prompts_sha256: str
    model_id: str
    sampling: Mapping[str, Any]  # keys of the request's body
    overlap: int = 0


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """A line of the manifest: a document and what became of it."""

    document: str
    source: str
    sha256: str  # of the document's text
    digest_sha256: str | None
    prompts_sha256: str
    model_id: str
    sampling: Mapping[str, Any]
    overlap: int
    state: ManifestState
    summary: str  # the file, below the folder
    summary_sha256: str | None = None  # of the file's bytes; None: there is none yet
    before_sha256: str | None = None  # of what the file held before
    model: str | None = None
    engine: str | None = None
    build: str | None = None
    failures: int = 0  # in a row; the next try is another job for the store
    pieces: int | None = None
    levels: int | None = None  # of reducing
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    code: str | None = None  # why there is no summary
    message: str | None = None

    def made_by(self, document_sha256: str, recipe: SummaryInputs) -> bool:
        """Whether this is the summary of that text by that recipe."""
        own = SummaryInputs(self.digest_sha256, self.prompts_sha256, self.model_id, self.sampling, self.overlap)
        return self.state == "done" and self.sha256 == document_sha256 and own == recipe

    @property
    def ours(self) -> frozenset[str]:
        """Sums of contents that were written here."""
        return frozenset(each for each in (self.summary_sha256, self.before_sha256) if each is not None)


@dataclass(slots=True)
class Manifest:
    """The lines of a folder by document; changed in memory, and on the disk by `save`."""

    folder: Path
    entries: dict[str, ManifestEntry] = field(default_factory=dict)

    def save(self) -> None:
        """Replace the file, if that changes it."""
        lines = [json.dumps(asdict(self.entries[name]), ensure_ascii=False) + "\n" for name in sorted(self.entries)]
        data = "".join(lines).encode()
        path = self.folder / MANIFEST
        if not path.is_file() or path.read_bytes() != data:
            put(path, data)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder; an empty one where there is none."""
    path = folder / MANIFEST
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines() would cut at U+2028, which a name may have
    except FileNotFoundError:
        return Manifest(folder)
    except NotADirectoryError as error:
        raise UsageError(f"{folder} is not a folder", hint="name the folder for the summaries") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}", hint="check the path and who may read it") from error
    entries = [_entry(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]
    return Manifest(folder, {entry.document: entry for entry in entries})


def _entry(line: str, path: Path, number: int) -> ManifestEntry:
    known = {item.name for item in fields(ManifestEntry)}
    try:
        value = json.loads(line)
        entry = ManifestEntry(**{key: item for key, item in value.items() if key in known})
        texts = (entry.document, entry.sha256, entry.summary, entry.state)
        if not all(isinstance(text, str) for text in texts) or not isinstance(entry.sampling, dict):
            raise TypeError("a value of another kind")  # noqa: TRY301  the same words for all that is wrong
    except (ValueError, TypeError, AttributeError) as error:
        hint = "move the file away: summaries that are there are taken over, and answers come out of the store"
        raise UsageError(f"line {number} of {path} is none of this program's", hint=hint) from error
    if not is_below(entry.summary):
        raise UsageError(
            f"line {number} of {path} names {entry.summary!r}, which is outside of the folder",
            hint="move the file away, and look who changed it",
        )
    return entry


def is_below(name: str) -> bool:
    """Whether a name stays inside the folder it is put behind."""
    return bool(name) and not name.startswith("/") and not {"..", "", "."} & set(name.split("/")) and "\0" not in name


def verdict(
    document: SourceDocument, file: str, manifest: Manifest, recipe: SummaryInputs, *, force: bool
) -> DocumentChange:
    """What is to be done for a document; reads its summary's file."""
    entry = manifest.entries.get(document.name)
    here = sum_of(manifest.folder / file)
    if entry is None:
        return "to do"  # a file that is there is held against what is to be written
    if here is not None and here not in entry.ours and not force:
        return "edited"
    same = entry.made_by(document.sha256, recipe) and entry.summary == file and here == entry.summary_sha256
    return "unchanged" if same else "to do"


def sum_of(path: Path) -> str | None:
    """The sum of a file; None: it is not there."""
    try:
        return sum_of_bytes(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise TokenmillError(f"cannot read {path}: {error.strerror}", hint="check who may read it") from error


def sum_of_bytes(data: bytes) -> str:
    """The same of content."""
    return hashlib.sha256(data).hexdigest()


def remove(path: Path, folder: Path) -> None:
    """Remove a file, and folders that are empty then, up to the one that all are in."""
    try:
        path.unlink(missing_ok=True)
        for parent in path.parents:
            if parent == folder or not parent.is_dir() or any(parent.iterdir()):
                return
            parent.rmdir()
    except OSError as error:
        raise TokenmillError(f"cannot remove {path}: {error.strerror}", hint="check who may write there") from error


def put(path: Path, data: bytes) -> None:
    """Replace a file whole; its folder is made where it is not there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data, temporary=path.with_name(f".{path.name}.part"))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(f"no room is left on the disk of {path}", hint=f"free some space: {_GO_ON}") from error
        raise TokenmillError(f"cannot write {path}: {error.strerror}", hint=_GO_ON) from error


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make the folder and hold it against another run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    except OSError as error:
        hint = "name a folder that you may write to"
        raise UsageError(f"cannot use {folder}: {error.strerror}", hint=hint) from error
    try:
        _lock(handle, folder)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StoreInUse(f"another run writes summaries to {folder}", hint="wait for it, or name another") from None
    except OSError as error:
        raise UsageError(
            f"cannot lock {folder}: {error.strerror}", hint="put it on a file system with locks"
        ) from error


def file_names(documents: Iterable[SourceDocument], known: Mapping[str, str]) -> dict[str, str]:
    """A file below the folder for each document, different for each; `known` ones stay."""
    wanted = {document.name: "/".join(_safe(part) for part in document.parts) for document in documents}
    files = dict[str, str]()
    taken = {folder.as_posix().casefold() for file in wanted.values() for folder in PurePosixPath(file).parents}
    for name in sorted(wanted, key=lambda name: name not in known):
        file = known.get(name) or f"{wanted[name]}.md"
        if file.casefold() in taken:
            file = f"{wanted[name]}~{_short(name)}.md"
        taken.add(file.casefold())
        files[name] = file
    return {name: files[name] for name in wanted}


def _safe(part: str) -> str:
    """A part of a name that any file system takes; where it had to be changed, a sum makes it unlike others."""
    letters = ["_" if letter in _NOT_IN_NAMES or unicodedata.category(letter)[0] == "C" else letter for letter in part]
    cleaned = "".join(letters).strip(" ").lstrip(".")
    while len(cleaned.encode()) > _LONGEST_PART:
        cleaned = cleaned[:-1]
    if cleaned == part and cleaned not in ("", MANIFEST):
        return cleaned
    return f"{cleaned}~{_short(part)}"


def _short(name: str) -> str:
    return hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
