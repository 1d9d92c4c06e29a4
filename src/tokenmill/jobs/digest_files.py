"""Collects the text files of a digest from files and folders, without hidden, ignored and binary files.

Names are relative to the deepest common folder, so that a copy elsewhere produces the same digest. `.gitignore` files
inside that folder apply; those above it do not. Nothing depends on times, owners or the order of directory entries.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

from tokenmill.errors import UsageError
from tokenmill.jobs.digest import DigestDocument
from tokenmill.units import MIB, format_bytes

MAX_BYTES = 32 * MIB  # per file
MAX_FILES = 50_000
_SNIFFED = 8192
_FILE_HINT = "check the path and its permissions"


@dataclass(frozen=True, slots=True)
class Found:
    """Files that were read, and files that were skipped with the reason."""

    documents: tuple[DigestDocument, ...]
    skipped: tuple[tuple[str, str], ...]  # name, reason


_Rules = tuple[tuple[str, GitIgnoreSpec], ...]
"""Patterns of .gitignore files, each with its folder below the root: "" or "path/"."""


def gather(places: Sequence[Path], *, leave_out: Path | None = None) -> Found:
    """All text files in some files and folders, except `leave_out`, the digest itself."""
    if not places:
        raise UsageError("no files given", hint="for example: tokenmill digest docs/ README.md -o digest.md")
    absolute = [_real(place) for place in places]
    for place, real in zip(places, absolute, strict=True):
        if not real.exists():
            raise UsageError(f"no file or folder at {place}", hint=_FILE_HINT)
    root = _root(absolute)
    own = _real(leave_out) if leave_out is not None else None
    documents = list[DigestDocument]()
    skipped = list[tuple[str, str]]()
    seen = set[Path]()
    for path in _files(absolute, root):
        if path in seen or path == own:
            continue
        seen.add(path)
        if len(seen) > MAX_FILES:
            raise UsageError(f"more than {MAX_FILES:,} files", hint="name only the folders that are needed")
        name = os.fsencode(path.relative_to(root).as_posix()).decode(errors="replace")  # names need not be Unicode
        text, why_not = _text(path)
        if text is None:
            skipped.append((name, why_not))
        else:
            documents.append(DigestDocument(name, text))
    return Found(tuple(documents), tuple(sorted(skipped)))


def _real(place: Path) -> Path:
    return Path(os.path.abspath(place.expanduser()))  # noqa: PTH100  resolve() would follow links, and names with them


def _root(places: Sequence[Path]) -> Path:
    if len(places) == 1:
        return places[0] if places[0].is_dir() else places[0].parent
    return Path(os.path.commonpath([place if place.is_dir() else place.parent for place in places]))


def _files(places: Iterable[Path], root: Path) -> Iterator[Path]:
    for place in places:
        if place.is_dir():
            below = place.relative_to(root).as_posix() + "/" if place != root else ""
            yield from _walk(place, below, _rules_above(place, root))
        else:
            yield place  # explicitly named files are included, hidden or not


def _rules_above(place: Path, root: Path) -> _Rules:
    """Rules of the folders from the root down to a path, without patterns that would ignore the path itself."""
    folders = [folder for folder in reversed(place.parents) if folder == root or root in folder.parents]
    rules = list[tuple[str, GitIgnoreSpec]]()
    for folder in folders:
        below = place.relative_to(folder).as_posix() + "/"
        patterns = [pattern for pattern in _rules(folder).patterns if not pattern.match_file(below)]
        rules.append(("" if folder == root else folder.relative_to(root).as_posix() + "/", GitIgnoreSpec(patterns)))
    return tuple(rules)


def _walk(folder: Path, below: str, rules: _Rules) -> Iterator[Path]:
    """Yield the files of a folder in order of their names; links to folders are not followed."""
    rules = (*rules, (below, _rules(folder)))
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise UsageError(f"cannot read {folder}: {error.strerror}", hint=_FILE_HINT) from error
    for entry in entries:
        if entry.name.startswith("."):
            continue
        path = below + entry.name
        is_folder = entry.is_dir(follow_symlinks=False)
        if _ignored(path + "/" * is_folder, rules):
            continue
        if is_folder:
            yield from _walk(folder / entry.name, path + "/", rules)
        elif entry.is_file():
            yield folder / entry.name


def _rules(folder: Path) -> GitIgnoreSpec:
    """The patterns of a folder's .gitignore; none if it cannot be read."""
    try:
        lines = (folder / ".gitignore").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return GitIgnoreSpec([])
    valid = list[str]()
    for line in lines:
        with suppress(ValueError, re.error):  # git ignores malformed patterns, too
            GitIgnoreSpec.from_lines([line])
            valid.append(line)
    return GitIgnoreSpec.from_lines(valid)


def _ignored(path: str, rules: _Rules) -> bool:
    """Whether the deepest .gitignore with a matching pattern excludes a path; a folder's path ends with a slash."""
    checks = (spec.check_file(path.removeprefix(folder)).include for folder, spec in reversed(rules))
    return next((include for include in checks if include is not None), False)


def _text(path: Path) -> tuple[str | None, str]:
    """A file's text, or None and the reason."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            return None, f"{format_bytes(size)}, more than {format_bytes(MAX_BYTES)}"
        data = path.read_bytes()
    except OSError as error:
        return None, error.strerror or str(error)
    if b"\0" in data[:_SNIFFED]:
        return None, "not text"
    try:
        return data.decode(), ""
    except UnicodeDecodeError:
        return None, "not UTF-8"
