"""Builds a digest of files: one text within a token budget, identical bytes for identical content.

Every file is enclosed in tags with its name. If not everything fits, the budget is shared fairly: files that need less
than an equal share are whole, the others get equal parts, the beginning and an outline of the rest; files for which
only a name would fit are only counted. Pure: texts in, text out; the token counter is a parameter.

    budget   |####### a ######|### b ###|######## c (beginning) ########|######## d (beginning) ########|
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

MIN_TOKENS = 128  # a shorter part of a file is useless
MAX_TOKEN_BYTES = 32  # bytes: text with more bytes per token than this need not be counted
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
    """What became of one file."""

    name: str
    tokens: int  # of its whole text
    shown: Shown


@dataclass(frozen=True, slots=True)
class Digest:
    """The text and what is in it."""

    text: str
    tokens: int
    entries: tuple[Entry, ...]

    @property
    def sha256(self) -> str:
        """SHA-256 of the text; digests with the same value are the same prefix."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def estimate(text: str) -> int:
    """Tokens of a text at four bytes each, rounded up."""
    return -(-len(text.encode()) // 4)


def build(documents: Sequence[DigestDocument], budget: int, count: TokenCount = estimate) -> Digest:
    """Build a digest of at most `budget` tokens; the order of the documents does not matter."""
    ordered = sorted(
        (DigestDocument(one.name, normal(one.text)) for one in documents), key=lambda one: one.name.split("/")
    )
    needs = [_need(one, budget, count) for one in ordered]
    room = budget
    text = ""
    tokens = 0
    shown = list[Shown]()
    for _ in range(TRIES):
        text, shown = _written(ordered, needs, room, count)
        tokens = count(text)
        if tokens <= budget:
            break
        room -= tokens - budget  # joined parts may have a few tokens more than separate ones
    else:
        text = ""
        tokens = 0
        shown = ["none"] * len(ordered)
    entries = (Entry(one.name, need, how) for one, need, how in zip(ordered, needs, shown, strict=True))
    return Digest(text, tokens, tuple(entries))


def _need(one: DigestDocument, budget: int, count: TokenCount) -> int:
    """Tokens of a whole file; estimated if it cannot fit anyway."""
    whole = _whole(one)
    return count(whole) if len(whole) <= MAX_TOKEN_BYTES * budget else estimate(whole)


def normal(text: str) -> str:
    """A text with line feeds alone, without a byte order mark, with one line feed at its end."""
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
        kept = [index for index in kept if parts[index]]  # a file of which nothing fits releases its share
    text = "\n".join([*(part for part in parts.values() if part), *([note] if note else [])])
    return text, [_how(index in parts, needs[index] <= level) for index in range(len(documents))]


def _how(there: bool, whole: bool) -> Shown:
    return ("whole" if whole else "part") if there else "none"


def _shown(one: DigestDocument, need: int, level: int, count: TokenCount) -> str | None:
    return _whole(one) if need <= level else _part(one, level, count)


def _kept(needs: Sequence[int], budget: int) -> list[int]:
    """The files that are shown: all, unless their shares would be uselessly small; then the smallest."""
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
    """As many lines from the beginning as fit, and an outline of the rest; None if not even a few words fit."""
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
    """The longest of the texts 1 to `high` that fits, or None."""
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
    """Number of leading lines within a number of characters; never all."""
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
    behind = [(number, line) for number, line in headings if number >= kept]
    outline = list[str]()
    room = OUTLINE_SHARE * level
    for number, line in behind:
        shown = f"{number + 1}: {line.rstrip()[:_MAX_OUTLINE]}\n"
        room -= count(shown)
        if room < 0:
            break
        outline.append(shown)
    left = len(lines) - kept
    marker = f"[{left} more line{'' if left == 1 else 's'} not shown{'; outline of them:' if outline else ''}]\n"
    opening = _opening(one.name, f' lines="1-{kept} of {len(lines)}"')
    return f"{opening}\n{''.join(lines[:kept])}{marker}{''.join(outline)}</file>\n"


def _left_out(names: Sequence[str], most: int, count: TokenCount) -> str:
    """A line about files that are not shown, with as many of their names as fit."""
    if not names:
        return ""
    note = f"[{len(names)} more file{'' if len(names) == 1 else 's'} not shown"

    def named(size: int) -> str:
        return f"{note}: {', '.join(names[:size])}{'' if size == len(names) else ', ...'}]\n"

    return _most(len(names), named, most, count) or f"{note}]\n"


def _opening(name: str, more: str = "") -> str:
    escaped = name.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace("\n", "&#10;")
    return f'<file path="{escaped}"{more}>'
