"""Splits a text into pieces of limited tokens at natural boundaries.

    headings (outer before inner) > paragraphs > sentences > lines > words > anywhere, but never inside a character

A unit is split at the next level only if it is too long. Without overlap the pieces concatenate to the text. Pure: the
token counter is an argument; token counts of parts are assumed to add up, and the caller reserves a margin.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

TokenCount = Callable[[str], int]

BYTES_PER_TOKEN = 4  # English prose, used without a tokenizer
_HEADING_LEVELS = 6
_LONGEST_CLUSTER = 32  # combining characters after a letter; no script has more
_LONGEST_TOKEN = 32  # characters of the end of a text that are examined per token of overlap
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_ATX = re.compile(r" {0,3}(#{1,6})(?:[ \t]|$)")
_UNDERLINE = re.compile(r"([=\-~^\"'#*+:.])\1{2,}\s*$")
_INNER = (
    re.compile(r"\n[ \t]*\n\s*"),
    re.compile(r"(?:[.!?…][\"'”’)\]]*\s+|[。！？]+[」』”）]*\s*)"),
    re.compile(r"\n+"),
    re.compile(r"\s+"),
)
_JOINERS = "\u200d\ufe0e\ufe0f"


class TextUnit(NamedTuple):
    """An unsplit part of a text and its tokens."""

    text: str
    tokens: int


def estimate(text: str) -> int:
    """Estimated tokens without a tokenizer."""
    return -(-len(text.encode(errors="replace")) // BYTES_PER_TOKEN)


def fits(text: str, limit: int, count: TokenCount) -> bool:
    """Whether a text has at most `limit` tokens; short texts are not counted."""
    # A text has at most as many tokens as bytes, and a character has at most four bytes.
    return 4 * len(text) <= limit or count(text) <= limit


def split(text: str, limit: int, count: TokenCount, *, overlap: int = 0) -> tuple[str, ...]:
    """Split into pieces of at most `limit` tokens; each repeats the last `overlap` tokens of its predecessor."""
    if limit < 1 or not 0 <= overlap < limit:
        raise ValueError(f"invalid piece size {limit} with overlap {overlap}")
    if fits(text, limit, count):
        return (text,)
    pieces = _packed(list(_units(text, 0, limit - overlap, count)), limit - overlap)
    if not overlap:
        return tuple(pieces)
    return (pieces[0], *(_tail(before, overlap, count) + piece for before, piece in pairwise(pieces)))


def halved(text: str, count: TokenCount) -> tuple[str, ...]:
    """Split a piece that was too long into two, rarely more; returns one if it cannot be split."""
    tokens = count(text)
    # Slightly more than half, because boundaries are rarely in the middle.
    return split(text, max(1, min(tokens - 1, -(-tokens * 11 // 20))), count)


def groups(sizes: Sequence[int], limit: int) -> list[int]:
    """Sizes of groups of adjacent items with at most `limit` in total, as even as possible."""
    return [len(group) for group in _gathered(sizes, limit)]


def _units(text: str, level: int, limit: int, count: TokenCount) -> Iterator[TextUnit]:
    """Split a text that is too long at this level or deeper."""
    if level == _HEADING_LEVELS + len(_INNER):
        yield from _anywhere(text, limit, count)
        return
    parts = list(_parts(text, level))
    for part in parts:
        tokens = count(part) if len(parts) > 1 else limit + 1  # if nothing was split, the part is still too long
        if tokens <= limit:
            yield TextUnit(part, tokens)
        else:
            yield from _units(part, level + 1, limit, count)


def _parts(text: str, level: int) -> Iterator[str]:
    if level < _HEADING_LEVELS:
        cuts = [offset for offset, rank in headings(text) if rank <= level + 1]
    else:
        cuts = [found.end() for found in _INNER[level - _HEADING_LEVELS].finditer(text)]
    for start, end in pairwise((0, *cuts, len(text))):
        if start < end:
            yield text[start:end]


def headings(text: str) -> list[tuple[int, int]]:
    """Offsets and ranks (from 1) of headings: Markdown's, and underlined ones of Markdown and reST."""
    found = list[tuple[int, int]]()
    ranks = dict[str, int]()
    fence, offset, before = "", 0, list[str]()  # `before`: the last two lines
    for line in text.splitlines(keepends=True):
        mark = _FENCE.match(line)
        if fence:
            fence = "" if mark and mark[1].startswith(fence) and not line.strip().strip(mark[1][0]) else fence
        elif heading := _ATX.match(line):
            found.append((offset, len(heading[1])))
        elif (under := _UNDERLINE.match(line)) and _is_title(before, line):
            rank = min(ranks.setdefault(under[1], len(ranks) + 1), _HEADING_LEVELS)
            found.append((offset - len(before[-1]), rank))
        elif mark:
            fence = mark[1]
        before = [*before[-1:], line]
        offset += len(line)
    return found


def _is_title(before: Sequence[str], line: str) -> bool:
    """Whether the last line can be a title that this line underlines."""
    if not before or not before[-1].strip() or _UNDERLINE.match(before[-1]) or _ATX.match(before[-1]):
        return False
    if line[0] not in "=-" and len(line.strip()) < len(
        before[-1].strip()
    ):  # in reST an underline is as long as its title
        return False
    return (
        len(before) < 2 or not before[-2].strip() or bool(_UNDERLINE.match(before[-2]))
    )  # some titles also have a line above


def _anywhere(text: str, limit: int, count: TokenCount) -> Iterator[TextUnit]:
    """Split at any character; a single character may still be too long."""
    start = 0
    while start < len(text):
        size = min(limit, len(text) - start)
        tokens = count(text[start : start + size])
        if tokens < limit // 2 and start + size < len(text):  # several characters per token: try a longer part
            size = min(size * limit // max(1, tokens), len(text) - start)
            tokens = count(text[start : start + size])
        while tokens > limit and size > 1:
            size = max(1, min(size - 1, size * limit * 9 // (tokens * 10)))
            tokens = count(text[start : start + size])
        end = _whole(text, start, start + size)
        part = text[start:end]
        yield TextUnit(part, tokens if end == start + size else count(part))
        start = end


def _whole(text: str, start: int, end: int) -> int:
    """The nearest position at or before `end` that keeps combined characters together."""
    for place in range(end, max(start, end - _LONGEST_CLUSTER), -1):
        if place == len(text) or not (_joined(text[place]) or text[place - 1] == _JOINERS[0]):
            return place
    return end


def _joined(letter: str) -> bool:
    """Whether a character combines with the previous one."""
    return unicodedata.combining(letter) > 0 or letter in _JOINERS or "\U0001f3fb" <= letter <= "\U0001f3ff"


def _packed(units: Sequence[TextUnit], limit: int) -> list[str]:
    """Join adjacent units up to the limit."""
    pieces = list[str]()
    start = 0
    for group in _gathered([unit.tokens for unit in units], limit):
        pieces.append("".join(unit.text for unit in units[start : start + len(group)]))
        start += len(group)
    return pieces


def _gathered(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """As few groups as possible, with the longest as short as possible."""
    best = _filled(sizes, limit)
    low, high = -(-sum(sizes) // max(1, len(best))), limit  # the smallest sufficient limit lies between these
    while low < high:
        middle = (low + high) // 2
        tried = _filled(sizes, middle)
        if len(tried) > len(best):
            low = middle + 1
        else:
            best = tried
            high = middle
    return best


def _filled(sizes: Sequence[int], limit: int) -> list[list[int]]:
    made = list[list[int]]()
    total = 0
    for size in sizes:
        if not made or total + size > limit:
            made.append([])
            total = 0
        made[-1].append(size)
        total += size
    return made


def _tail(text: str, limit: int, count: TokenCount) -> str:
    """The end of a text: whole sentences, or words if no sentence fits."""
    for level in (_HEADING_LEVELS + 1, _HEADING_LEVELS + 3):
        kept = list[str]()
        total = 0
        for part in reversed(list(_parts(text[-_LONGEST_TOKEN * limit :], level))):
            total += count(part)
            if total > limit:
                break
            kept.append(part)
        if kept:
            return "".join(reversed(kept))
    return ""
