"""Reads documents from files, folders and tables under stable names, with the reason for each skipped one.

A document in a folder is named by its relative path, a table row by the table and its id; with several inputs, each
input's own name comes first, so equal content elsewhere has equal names. Text is UTF-8 (or UTF-16 with a BOM); other
files are skipped. Line endings are normalized.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.errors import UsageError
from tokenmill.recipes.summarization.html import declared_encoding, page_text
from tokenmill.storage.json_text import compact_json, shown
from tokenmill.storage.rows import read_rows
from tokenmill.units import MIB, format_bytes

MOST_BYTES = 64 * MIB  # limit per file, except tables
TEXT_COLUMN = "text"
_PAGES = (".html", ".htm", ".xhtml")
_TABLES = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
_PACKED = (".gz", ".zst")
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_FORMATS = {
    b"%PDF-": "a PDF",
    b"PK\x03\x04": "a ZIP file, such as DOCX or EPUB",
    b"\xd0\xcf\x11\xe0": "an old Office file",
}
_WILD = {"**/": "(?:.*/)?", "/**": "/.*", "*": "[^/]*", "?": "[^/]"}
_FILE_HINT = "check the path and its permissions"


@dataclass(frozen=True, slots=True)
class SourceDocument:
    """A named text."""

    parts: tuple[str, ...]  # parts of its name: folders, file, row id
    text: str
    source: str  # origin, for display
    sha256: str = ""  # hash of its text

    @property
    def name(self) -> str:
        """Its name, independent of the folder's location."""
        return "/".join(self.parts)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A skipped file or row and the reason."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class FoundDocuments:
    """Documents in order, and what was skipped."""

    documents: tuple[SourceDocument, ...]
    skipped: tuple[Skipped, ...] = ()
    contains_output: bool = False  # the folder excluded by `leave_out` is inside an input


@dataclass(frozen=True, slots=True)
class DocumentOptions:
    """Which documents to read."""

    globs: tuple[str, ...] = ()  # patterns of relative paths; empty: all
    text_column: str | None = None  # of tables
    id_column: str | None = None
    leave_out: Path | None = None  # excluded folder: the output


def gather_documents(places: Sequence[Path], how: DocumentOptions) -> FoundDocuments:
    """Read all documents of files and folders; raises UsageError if an input does not exist."""
    absolute = list(dict.fromkeys(_absolute(place) for place in places))
    for place in absolute:
        if not place.exists():
            raise UsageError(f"no file or folder at {place}", hint=_FILE_HINT)
    patterns = [_pattern(glob) for glob in how.globs]
    documents = dict[str, SourceDocument]()
    skipped = list[Skipped]()
    seen = set[Path]()
    leave_out = _absolute(how.leave_out) if how.leave_out else None
    for place, label in zip(absolute, _labels(absolute), strict=True):
        for path in _files(place, label, patterns, leave_out, skipped):
            if path in seen:
                continue
            seen.add(path)
            parts = _parts(path, place, label)
            try:
                for document in _read(path, parts, how, skipped):
                    _add(documents, document, path)
            except UsageError as error:
                skipped.append(Skipped("/".join(parts), error.message))
    contains_output = (
        leave_out is not None and leave_out.is_dir() and any(leave_out.is_relative_to(each) for each in absolute)
    )
    return FoundDocuments(tuple(documents.values()), tuple(skipped), contains_output)


def _absolute(place: Path) -> Path:
    return Path(os.path.abspath(place.expanduser()))  # noqa: PTH100  resolve() would follow links and so change names


def _labels(places: Sequence[Path]) -> list[tuple[str, ...]]:
    """Name prefix of each input: none for a single folder, else the end of its path."""
    if len(places) == 1 and places[0].is_dir():
        return [()]
    paths = [place.parts[1:] for place in places]

    def tail(path: tuple[str, ...]) -> tuple[str, ...]:
        sizes = range(1, len(path) + 1)
        return next((path[-size:] for size in sizes if sum(o[-size:] == path[-size:] for o in paths) == 1), path)

    # A file's own name is added later.
    return [tail(path) if place.is_dir() else tail(path)[:-1] for place, path in zip(places, paths, strict=True)]


def _files(
    place: Path,
    label: tuple[str, ...],
    patterns: Sequence[re.Pattern[str]],
    leave_out: Path | None,
    skipped: list[Skipped],
) -> Iterator[Path]:
    """Files of an input, sorted; hidden ones only if named explicitly."""
    if not place.is_dir():
        yield place
        return

    def unreadable(error: OSError) -> None:
        folder = "/".join(_parts(Path(error.filename), place, label))
        skipped.append(Skipped(folder, error.strerror or str(error)))

    for folder, folders, names in os.walk(place, onerror=unreadable):
        here = Path(folder)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if here == leave_out:
            folders[:] = []
            continue
        for name in sorted(names):
            path = here / name
            if name.startswith(".") or not path.is_file():
                continue
            below = path.relative_to(place).as_posix()
            if not patterns or any(pattern.fullmatch(below) for pattern in patterns):
                yield path


def _parts(path: Path, place: Path, label: tuple[str, ...]) -> tuple[str, ...]:
    """The parts of a document's name."""
    below = (path.name,) if path == place and not place.is_dir() else path.relative_to(place).parts
    return tuple(_printable(part) for part in (*label, *below))


def _pattern(glob: str) -> re.Pattern[str]:
    """Compile a glob; without a slash it matches file names at any depth."""
    whole = glob if "/" in glob else f"**/{glob}"
    parts = re.findall(r"\*\*/|/\*\*$|\*|\?|\[!?[^\]]+\]|.", whole.removeprefix("/"), re.DOTALL)
    made = [
        _WILD.get(part) or (part.replace("[!", "[^", 1).replace("\\", "\\\\") if len(part) > 1 else re.escape(part))
        for part in parts
    ]
    try:
        return re.compile("".join(made), re.DOTALL)
    except re.error as error:
        raise UsageError(
            f"invalid pattern {glob!r}: {error}", hint="use a pattern such as '*.md' or 'guide/**/*.txt'"
        ) from error


def _printable(name: str) -> str:
    return os.fsencode(name).decode(errors="replace")  # file names may be invalid UTF-8


def _add(documents: dict[str, SourceDocument], document: SourceDocument, path: Path) -> None:
    """Add a document, renamed if two inputs have the same name."""
    if document.name in documents:
        last = f"{document.parts[-1]}~{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"
        document = SourceDocument((*document.parts[:-1], last), document.text, document.source)
    summed = SourceDocument(
        document.parts, document.text, document.source, hashlib.sha256(document.text.encode()).hexdigest()
    )
    documents[summed.name] = summed


def _read(path: Path, parts: tuple[str, ...], how: DocumentOptions, skipped: list[Skipped]) -> Iterable[SourceDocument]:
    """The documents of one file; raises UsageError with the reason if it has none."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in _PACKED]
    last = suffixes[-1] if suffixes else ""
    try:
        if last in _TABLES:
            return _from_rows(list(read_rows(path)), path, parts, how, skipped)
        if last == ".json":
            return _from_json(_text(path), path, parts, how, skipped)
        text = page_text(_text(path, page=True)) if last in _PAGES else _text(path)
    except OSError as error:
        raise UsageError(error.strerror or str(error)) from error
    if not text.strip():
        raise UsageError("empty")
    return [SourceDocument(parts, text, _printable(str(path)))]


def _text(path: Path, *, page: bool = False) -> str:
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise UsageError(f"{format_bytes(size)}, more than {format_bytes(MOST_BYTES)}")
    data = path.read_bytes()
    for beginning, what in _FORMATS.items():
        if data.startswith(beginning):
            raise UsageError(f"{what}, not text")
    encoding = "utf-16" if data.startswith(_UTF16) else "utf-8-sig"
    if encoding == "utf-8-sig" and b"\0" in data:
        raise UsageError("not text")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        text = _decoded(data, declared_encoding(data) if page else None)
    return _plain_lines(text)


def _decoded(data: bytes, encoding: str | None) -> str:
    try:
        return data.decode(encoding or "no", errors="replace")
    except (LookupError, UnicodeError):
        raise UsageError("not UTF-8") from None


def _plain_lines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _from_json(
    text: str, path: Path, parts: tuple[str, ...], how: DocumentOptions, skipped: list[Skipped]
) -> Iterable[SourceDocument]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not JSON: {error}") from error
    if isinstance(value, list) and all(isinstance(row, dict) for row in value):
        return _from_rows(value, path, parts, how, skipped)
    column = how.text_column or TEXT_COLUMN
    if not isinstance(value, dict) or column not in value:
        raise UsageError(f"it has no key {column!r} (set by --text-column)")
    return [SourceDocument(parts, _cell(value[column]), _printable(str(path)))]


def _from_rows(
    rows: Sequence[Mapping[str, Any]], path: Path, parts: tuple[str, ...], how: DocumentOptions, skipped: list[Skipped]
) -> Iterable[SourceDocument]:
    """One document per row; rows without text are skipped, a table without the columns is rejected."""
    column = how.text_column or TEXT_COLUMN
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if not rows:
        raise UsageError("empty")
    for wanted, option in ((column, "--text-column"), (how.id_column, "--id-column")):
        if wanted is not None and wanted not in columns:
            known = ", ".join(columns[:8])
            raise UsageError(f"it has no column {wanted!r} (set by {option}); its columns: {known}")
    documents = list[SourceDocument]()
    numbers = dict[str, int]()
    width = max(4, len(str(len(rows))))
    for number, row in enumerate(rows, 1):
        key = f"row-{number:0{width}}" if how.id_column is None else _cell(row.get(how.id_column))
        if not key.strip():
            skipped.append(Skipped("/".join((*parts, f"row {number}")), f"no id in {how.id_column!r}"))
            continue
        if (before := numbers.setdefault(key, number)) != number:
            raise UsageError(f"rows {before} and {number} have the same id {shown(key)}")
        text = _cell(row.get(column))
        if not text.strip():
            skipped.append(Skipped("/".join((*parts, key)), "empty"))
            continue
        documents.append(SourceDocument((*parts, key), text, f"{_printable(str(path))}, row {number}"))
    return documents


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and math.isnan(value):  # an empty cell in some tables
        return ""
    text = _plain_lines(value if isinstance(value, str) else compact_json(value))
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError("it contains a lone surrogate") from None
    return text
