"""The files of a digest: folders walked, hidden and ignored files left out, text told from everything else.

Names are relative to the deepest folder that holds all that was asked for, so that a copy elsewhere has the same. What
.gitignore files inside that folder say is followed; those above it are not known. Nothing depends on times, owners or
the order in which a file system lists its files.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenmill.errors import UsageError
from tokenmill.jobs.digest import Document
from tokenmill.units import MIB, format_bytes

MOST_BYTES = 32 * MIB  # of one file
MOST_FILES = 50_000
_SNIFFED = 8192
_WILD = {"**/": "(?:.*/)?", "/**": "/.*", "*": "[^/]*", "?": "[^/]"}
_FILE_HINT = "check the path and who may read it"


@dataclass(frozen=True, slots=True)
class Found:
    """What was read, and what was not and why."""

    documents: tuple[Document, ...]
    skipped: tuple[tuple[str, str], ...]  # name, reason


@dataclass(frozen=True, slots=True)
class _Rule:
    """One line of a .gitignore."""

    pattern: re.Pattern[str]  # of the path below the file's folder
    folder: str  # "" or "path/"
    keeps: bool  # a line with !
    folders_only: bool


def gather(places: Sequence[Path], *, leave_out: Path | None = None) -> Found:
    """All text files of some files and folders; `leave_out` is where the digest goes."""
    if not places:
        raise UsageError("no files given", hint="for example: tokenmill digest docs/ README.md -o digest.md")
    absolute = [_real(place) for place in places]
    for place, real in zip(places, absolute, strict=True):
        if not real.exists():
            raise UsageError(f"no file or folder at {place}", hint=_FILE_HINT)
    root = _root(absolute)
    own = _real(leave_out) if leave_out is not None else None
    documents = list[Document]()
    skipped = list[tuple[str, str]]()
    seen = set[Path]()
    for path in _files(absolute, root):
        if path in seen or path == own:
            continue
        seen.add(path)
        if len(seen) > MOST_FILES:
            raise UsageError(f"more than {MOST_FILES:,} files", hint="name the folders that matter")
        name = os.fsencode(path.relative_to(root).as_posix()).decode(errors="replace")  # names need not be Unicode
        text, why_not = _text(path)
        if text is None:
            skipped.append((name, why_not))
        else:
            documents.append(Document(name, text))
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
            yield place  # what is named is wanted, hidden or not


def _rules_above(place: Path, root: Path) -> tuple[_Rule, ...]:
    """Rules of the folders from the root to a place, as if the walk had begun at the root."""
    folders = [folder for folder in reversed(place.parents) if folder == root or root in folder.parents]
    rules = list[_Rule]()
    for folder in folders:
        rules += _rules(folder / ".gitignore", "" if folder == root else folder.relative_to(root).as_posix() + "/")
    return tuple(rules)


def _walk(folder: Path, below: str, rules: tuple[_Rule, ...]) -> Iterator[Path]:
    """Files of a folder, names in order; links to folders are not followed."""
    rules = (*rules, *_rules(folder / ".gitignore", below))
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise UsageError(f"cannot read {folder}: {error.strerror}", hint=_FILE_HINT) from error
    for entry in entries:
        if entry.name.startswith("."):
            continue
        path = below + entry.name
        is_folder = entry.is_dir(follow_symlinks=False)
        if _ignored(path, rules, is_folder=is_folder):
            continue
        if is_folder:
            yield from _walk(folder / entry.name, path + "/", rules)
        elif entry.is_file():
            yield folder / entry.name


def _rules(path: Path, below: str) -> list[_Rule]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    rules = []
    for line in lines:
        text = line if line.endswith("\\ ") else line.rstrip()
        keeps = text.startswith("!")
        text = text.removeprefix("!")
        if not text or text.startswith("#"):
            continue
        folders_only = text.endswith("/")
        rules.append(_Rule(_pattern(text.rstrip("/")), below, keeps, folders_only))
    return rules


def _pattern(glob: str) -> re.Pattern[str]:
    """A .gitignore pattern as an expression; one with a slash inside is held against the whole path."""
    anchored = "/" in glob
    parts = list[str]()
    for found in re.findall(r"\*\*/|/\*\*$|\*|\?|\[!?[^\]]+\]|\\?.", glob.removeprefix("/")):
        if found in _WILD:
            parts.append(_WILD[found])
        elif found.startswith("[") and len(found) > 1:
            parts.append(found.replace("[!", "[^", 1).replace("\\", "\\\\"))
        else:
            parts.append(re.escape(found[-1]))
    try:
        return re.compile(("" if anchored else "(?:.*/)?") + "".join(parts))
    except re.error:  # a class such as [z-a]: git matches nothing with it either
        return re.compile(r"(?!)")


def _ignored(path: str, rules: Iterable[_Rule], *, is_folder: bool) -> bool:
    """Whether the last rule that matches a path leaves it out."""
    ignored = False
    for rule in rules:
        if (is_folder or not rule.folders_only) and rule.pattern.fullmatch(path.removeprefix(rule.folder)):
            ignored = not rule.keeps
    return ignored


def _text(path: Path) -> tuple[str | None, str]:
    """A file's text, or why it has none."""
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            return None, f"{format_bytes(size)}, more than {format_bytes(MOST_BYTES)}"
        data = path.read_bytes()
    except OSError as error:
        return None, error.strerror or str(error)
    if b"\0" in data[:_SNIFFED]:
        return None, "not text"
    try:
        return data.decode(), ""
    except UnicodeDecodeError:
        return None, "not UTF-8"
