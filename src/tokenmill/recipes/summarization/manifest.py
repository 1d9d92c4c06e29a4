"""The manifest of a folder of summaries: one line per document, and the hashes that show which files may be replaced.

The manifest is written before the summaries, with the hashes of each file before and after. So an edited file is
recognized even after a kill between the two writes. Writes are atomic.
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
_LONGEST_PART = 160  # bytes per part of a file name; file systems allow 255
_NOT_IN_NAMES = frozenset('/\\:*?"<>|~')
_RESUME_HINT = "answers are kept; the same command resumes"


@dataclass(frozen=True, slots=True)
class SummaryInputs:
    """Inputs of a summary other than its document; if one changes, a new summary is made."""

    digest_sha256: str | None
    prompts_sha256: str
    model_id: str
    sampling: Mapping[str, Any]  # keys of the request body
    overlap: int = 0


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """A manifest line: a document and its outcome."""

    document: str
    source: str
    sha256: str  # hash of the document's text
    digest_sha256: str | None
    prompts_sha256: str
    model_id: str
    sampling: Mapping[str, Any]
    overlap: int
    state: ManifestState
    summary: str  # path relative to the folder
    summary_sha256: str | None = None  # hash of the file; None: not written yet
    before_sha256: str | None = None  # hash of the previous content
    model: str | None = None
    engine: str | None = None
    build: str | None = None
    failures: int = 0  # consecutive failures; each retry is a new job for the store
    pieces: int | None = None
    levels: int | None = None  # levels of reduction
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    code: str | None = None  # error code of a failed document
    message: str | None = None

    def matches(self, document_sha256: str, recipe: SummaryInputs) -> bool:
        """Whether this is the summary of that text with those inputs."""
        own = SummaryInputs(self.digest_sha256, self.prompts_sha256, self.model_id, self.sampling, self.overlap)
        return self.state == "done" and self.sha256 == document_sha256 and own == recipe

    @property
    def ours(self) -> frozenset[str]:
        """Hashes of contents that this recipe wrote."""
        return frozenset(each for each in (self.summary_sha256, self.before_sha256) if each is not None)


@dataclass(slots=True)
class Manifest:
    """Manifest lines by document; `save` writes changes."""

    folder: Path
    entries: dict[str, ManifestEntry] = field(default_factory=dict)

    def save(self) -> None:
        """Write the file if it has changed."""
        lines = [json.dumps(asdict(self.entries[name]), ensure_ascii=False) + "\n" for name in sorted(self.entries)]
        data = "".join(lines).encode()
        path = self.folder / MANIFEST
        if not path.is_file() or path.read_bytes() != data:
            put(path, data)


def read_manifest(folder: Path) -> Manifest:
    """Read a folder's manifest; a missing file gives an empty one."""
    path = folder / MANIFEST
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines() would cut at U+2028, which a name may have
    except FileNotFoundError:
        return Manifest(folder)
    except NotADirectoryError as error:
        raise UsageError(f"{folder} is not a folder", hint="use a folder for --output") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}", hint="check the path and its permissions") from error
    entries = [_entry(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]
    return Manifest(folder, {entry.document: entry for entry in entries})


def _entry(line: str, path: Path, number: int) -> ManifestEntry:
    known = {item.name for item in fields(ManifestEntry)}
    try:
        value = json.loads(line)
        entry = ManifestEntry(**{key: item for key, item in value.items() if key in known})
        texts = (entry.document, entry.sha256, entry.summary, entry.state)
        if not all(isinstance(text, str) for text in texts) or not isinstance(entry.sampling, dict):
            raise TypeError("wrong type of a value")  # noqa: TRY301  the same message for all invalid lines
    except (ValueError, TypeError, AttributeError) as error:
        hint = "move the file away: existing summaries are recognized, and answers are taken from the store"
        raise UsageError(f"line {number} of {path} is not a valid manifest entry", hint=hint) from error
    if not is_below(entry.summary):
        raise UsageError(
            f"line {number} of {path}: the path {entry.summary!r} is outside of the folder",
            hint="move the file away and find out what changed it",
        )
    return entry


def is_below(name: str) -> bool:
    """Whether a relative path stays inside its folder."""
    return bool(name) and not name.startswith("/") and not {"..", "", "."} & set(name.split("/")) and "\0" not in name


def change_of(
    document: SourceDocument, file: str, manifest: Manifest, recipe: SummaryInputs, *, force: bool
) -> DocumentChange:
    """What to do with a document; reads its summary file."""
    entry = manifest.entries.get(document.name)
    here = sha256_of_file(manifest.folder / file)
    if entry is None:
        return "to do"  # an existing file is compared when the summary is written
    if here is not None and here not in entry.ours and not force:
        return "edited"
    same = entry.matches(document.sha256, recipe) and entry.summary == file and here == entry.summary_sha256
    return "unchanged" if same else "to do"


def sha256_of_file(path: Path) -> str | None:
    """The hash of a file; None if it does not exist."""
    try:
        return sha256_of(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise TokenmillError(f"cannot read {path}: {error.strerror}", hint="check its permissions") from error


def sha256_of(data: bytes) -> str:
    """The hash of content."""
    return hashlib.sha256(data).hexdigest()


def remove(path: Path, folder: Path) -> None:
    """Remove a file, and parent folders that become empty."""
    try:
        path.unlink(missing_ok=True)
        for parent in path.parents:
            if parent == folder or not parent.is_dir() or any(parent.iterdir()):
                return
            parent.rmdir()
    except OSError as error:
        raise TokenmillError(f"cannot remove {path}: {error.strerror}", hint="check its permissions") from error


def put(path: Path, data: bytes) -> None:
    """Replace a file atomically, creating its folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data, temporary=path.with_name(f".{path.name}.part"))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(f"the disk of {path} is full", hint=f"free some space; {_RESUME_HINT}") from error
        raise TokenmillError(f"cannot write {path}: {error.strerror}", hint=_RESUME_HINT) from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create the folder and lock it against other runs."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    except OSError as error:
        hint = "use a folder with write permission"
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
        raise StoreInUse(
            f"another run is writing summaries to {folder}", hint="wait for it to end, or use another folder"
        ) from None
    except OSError as error:
        raise UsageError(
            f"cannot lock {folder}: {error.strerror}", hint="use a file system that supports locks"
        ) from error


def file_names(documents: Iterable[SourceDocument], known: Mapping[str, str]) -> dict[str, str]:
    """A unique relative path per document; paths in `known` are kept."""
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
    """A portable file name; if it was changed, a hash makes it unique."""
    letters = ["_" if letter in _NOT_IN_NAMES or unicodedata.category(letter)[0] == "C" else letter for letter in part]
    cleaned = "".join(letters).strip(" ").lstrip(".")
    while len(cleaned.encode()) > _LONGEST_PART:
        cleaned = cleaned[:-1]
    if cleaned == part and cleaned not in ("", MANIFEST):
        return cleaned
    return f"{cleaned}~{_short(part)}"


def _short(name: str) -> str:
    return hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
