"""Builds a digest of files: one text within a token budget, identical bytes for identical content.

Every file is enclosed in tags with its name. If not everything fits, the budget is shared fairly: files that need less
than an equal share are included completely; the others get equal shares for their beginning and an outline of the rest.
Files whose share would be too small are only listed. Pure; the token counter is a parameter.

    budget   |####### a ######|### b ###|######## c (beginning) ########|######## d (beginning) ########|
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

MIN_TOKENS = 128  # minimum tokens of a truncated file
MAX_TOKEN_BYTES = 32  # texts with more bytes per available token are not tokenized, because they cannot fit
NAMES_SHARE = 0.1  # of the budget, for names of files that are not shown
OUTLINE_SHARE = 0.2  # of the budget of a truncated file
TRIES = 8
_OUTLINE = re.compile(
    r"#{1,6} \S|(?:export |pub(?:\([a-z]+\))? |public |private |protected |static |abstract |async |final )*"
    r"(?:def|class|func|fn|function|interface|struct|enum|trait|impl|type|module|CREATE (?:TABLE|VIEW)) \S"
)
_MAX_OUTLINE = 120  # characters per line

Shown = Literal["whole", "part", "none"]
TokenCount = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class DigestDocument:
    """A file's name, relative to the common root, and its text."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Entry:
    """How a file is included."""

    name: str
    tokens: int  # of the complete file
    shown: Shown


@dataclass(frozen=True, slots=True)
class Digest:
    """The text of a digest and its files."""

    text: str
    tokens: int
    entries: tuple[Entry, ...]

    @property
    def sha256(self) -> str:
        """SHA-256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def estimate(text: str) -> int:
    """Estimated tokens of a text at four bytes per token, rounded up."""
    return -(-len(text.encode()) // 4)


def build(documents: Sequence[DigestDocument], budget: int, count: TokenCount = estimate) -> Digest:
    """Build a digest of at most `budget` tokens; the order of the documents does not matter."""
    ordered = sorted(
        (DigestDocument(one.name, normal(one.text)) for one in documents), key=lambda one: one.name.split("/")
    )
    needs = [_need(one, budget, count) for one in ordered]
    available = budget
    text = ""
    tokens = 0
    shown = list[Shown]()
    for _ in range(TRIES):
        text, shown = _written(ordered, needs, available, count)
        tokens = count(text)
        if tokens <= budget:
            break
        available -= tokens - budget  # the joined text may have a few more tokens than its parts
    else:
        text = ""
        tokens = 0
        shown = ["none"] * len(ordered)
    entries = (Entry(one.name, need, how) for one, need, how in zip(ordered, needs, shown, strict=True))
    return Digest(text, tokens, tuple(entries))


def _need(one: DigestDocument, budget: int, count: TokenCount) -> int:
    """Tokens of a complete file, estimated if it certainly does not fit."""
    whole = _whole(one)
    return count(whole) if len(whole) <= MAX_TOKEN_BYTES * budget else estimate(whole)


def normal(text: str) -> str:
    """Normalize line endings to line feeds, remove the byte order mark, and end the text with one line feed."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    return text.rstrip("\n") + "\n" if text.strip() else ""


def _written(
    documents: Sequence[DigestDocument], needs: Sequence[int], budget: int, count: TokenCount
) -> tuple[str, list[Shown]]:
    """The digest's text for a token budget, and how each file is shown."""
    kept = _kept(needs, budget)
    while True:
        missing = [one.name for index, one in enumerate(documents) if index not in kept]
        note = _left_out(missing, round(NAMES_SHARE * budget), count)
        level = _level([needs[index] for index in kept], budget - count(note))
        parts = {index: _shown(documents[index], needs[index], level, count) for index in kept}
        if all(parts.values()):
            break
        kept = [index for index in kept if parts[index]]  # the share of a file of which nothing fits goes to the others
    text = "\n".join([*(part for part in parts.values() if part), *([note] if note else [])])
    return text, [_how(index in parts, needs[index] <= level) for index in range(len(documents))]


def _how(there: bool, whole: bool) -> Shown:
    return ("whole" if whole else "part") if there else "none"


def _shown(one: DigestDocument, need: int, level: int, count: TokenCount) -> str | None:
    return _whole(one) if need <= level else _part(one, level, count)


def _kept(needs: Sequence[int], budget: int) -> list[int]:
    """The files to include: all, or the smallest ones if the shares would otherwise be too small."""
    total = 0
    kept = list[int]()
    for index in sorted(range(len(needs)), key=lambda index: (needs[index], index)):
        total += min(needs[index], MIN_TOKENS)
        if total > budget * (1 - NAMES_SHARE) and kept:
            break
        kept.append(index)
    return sorted(kept)


def _level(needs: Sequence[int], budget: int) -> int:
    """Maximum tokens per file so that all files together fit the budget."""
    left = budget
    for done, need in enumerate(sorted(needs)):
        share = left // (len(needs) - done)
        if need > share:
            return max(0, share)
        left -= need
    return max(needs, default=0)


def _whole(one: DigestDocument) -> str:
    return f"{_opening(one.name)}\n{one.text}</file>\n"


def _part(one: DigestDocument, level: int, count: TokenCount) -> str | None:
    """The leading lines that fit, and an outline of the rest; None if nothing fits."""
    lines = [line + "\n" for line in one.text.split("\n")[:-1]]
    if not lines:
        return None
    headings = [(number, line) for number, line in enumerate(lines) if _OUTLINE.match(line)]

    def cut(kept: int) -> str:
        return _cut(one, lines, kept, headings, level, count)

    longest = _prefix(lines, MAX_TOKEN_BYTES * level)
    if best := _most(longest, cut, level, count):
        return best
    return _most(min(len(lines[0]), MAX_TOKEN_BYTES * level), lambda size: _cut_inside(one, lines, size), level, count)


def _most(high: int, made: Callable[[int], str], level: int, count: TokenCount) -> str | None:
    """The longest text that fits, of those made for 1 to `high`; None if none fits."""
    best = None
    low = 0
    beyond = high + 1
    while beyond - low > 1:  # `low` fits, `beyond` does not
        middle = (low + beyond) // 2
        text = made(middle)
        if count(text) <= level:
            best = text
            low = middle
        else:
            beyond = middle
    return best


def _prefix(lines: Sequence[str], most: int) -> int:
    """Number of leading lines within a number of characters, but never all lines."""
    for number, line in enumerate(lines):
        most -= len(line)
        if most < 0:
            return number
    return len(lines) - 1


def _cut_inside(one: DigestDocument, lines: Sequence[str], size: int) -> str:
    more = f" and {len(lines) - 1} more lines" if len(lines) > 1 else ""
    opening = _opening(one.name, f' characters="1-{size} of {len(one.text)}"')
    return f"{opening}\n{lines[0][:size].rstrip()}\n[the rest of this line{more} not shown]\n</file>\n"


def _cut(
    one: DigestDocument,
    lines: Sequence[str],
    kept: int,
    headings: Sequence[tuple[int, str]],
    level: int,
    count: TokenCount,
) -> str:
    following = [(number, line) for number, line in headings if number >= kept]
    outline = list[str]()
    available = OUTLINE_SHARE * level
    for number, line in following:
        shown = f"{number + 1}: {line.rstrip()[:_MAX_OUTLINE]}\n"
        available -= count(shown)
        if available < 0:
            break
        outline.append(shown)
    left = len(lines) - kept
    marker = f"[{left} more line{'' if left == 1 else 's'} not shown{'; outline of them:' if outline else ''}]\n"
    opening = _opening(one.name, f' lines="1-{kept} of {len(lines)}"')
    return f"{opening}\n{''.join(lines[:kept])}{marker}{''.join(outline)}</file>\n"


def _left_out(names: Sequence[str], most: int, count: TokenCount) -> str:
    """A line about the files that are not included, with as many of their names as fit."""
    if not names:
        return ""
    note = f"[{len(names)} more file{'' if len(names) == 1 else 's'} not shown"

    def named(size: int) -> str:
        return f"{note}: {', '.join(names[:size])}{'' if size == len(names) else ', ...'}]\n"

    return _most(len(names), named, most, count) or f"{note}]\n"


def _opening(name: str, more: str = "") -> str:
    escaped = name.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace("\n", "&#10;")
    return f'<file path="{escaped}"{more}>'
