"""Heads that have text in common without beginning with it: near twins, the same parts in another order, and stable
text behind text that changes.

Heads are cut where their content says so, so that an edit moves no other cut; heads that share many pieces are held
against each other. What two heads share beyond their common beginning is computed twice for no good reason. A bounded
sample of the distinct heads is looked at; figures are scaled to all of them. Pure.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal
from zlib import crc32

from tokenmill.jobs.lint_parts import Part
from tokenmill.jobs.lint_text import common_characters

MOST_HEADS = 512
MOST_CHARACTERS = 65536  # of one head
MOST_TEXT = 6_000_000  # characters of all of them
LEAST_LOST = 64  # bytes, of one head
HOLDERS = 4  # heads that are remembered for a piece
_WORDS = re.compile(r"\w+\W*|\W+")
_CUT_AT = 12  # a piece has about as many words
_NEAR_PIECES, _NEAR_SHARE = 3, 0.05
_HEAD_SHARE = 0.5

Misplacement = Literal["near", "order", "changing", "behind"]


@dataclass(slots=True)
class Head:
    """One of the distinct heads, as it is without what changes by itself."""

    line: int
    parts: tuple[Part, ...]
    text: str  # without
    own: bool = True  # it ends where the last message begins; otherwise it is the beginning of a lone text
    jobs: int = 0

    @property
    def raw(self) -> str:
        """As it stood in the file."""
        return "".join(part.text for part in self.parts)


class Heads:
    """A sample of distinct heads by checksum: every one, then every second, fourth, ..."""

    def __init__(self, most: int = MOST_HEADS) -> None:
        self._heads: dict[int, Head] = {}
        self._most, self._skip, self._held = most, 0, 0

    @property
    def scale(self) -> int:
        """How many heads one of the sample stands for."""
        return self._skip + 1

    def add(self, state: int, line: int, parts: tuple[Part, ...], text: str, *, own: bool) -> None:
        """A job with a head, whose checksum is `state`."""
        if state & self._skip:
            return
        head = self._heads.get(state)
        if head is None:
            short = text[:MOST_CHARACTERS]
            head = self._heads[state] = Head(line, parts, short, own)
            self._held += len(short)
            while len(self._heads) > self._most or self._held > MOST_TEXT and len(self._heads) > 1:
                self._thin()
        head.jobs += 1

    def _thin(self) -> None:
        self._skip = self._skip << 1 | 1
        self._heads = {state: head for state, head in self._heads.items() if not state & self._skip}
        self._held = sum(len(head.text) for head in self._heads.values())

    def all(self) -> list[Head]:
        """The sample in the order of the file."""
        return sorted(self._heads.values(), key=lambda head: head.line)


@dataclass(frozen=True, slots=True)
class Misplaced:
    """A head that has more in common with an earlier one than it begins with."""

    kind: Misplacement
    head: Head
    partner: Head
    lost_bytes: int
    at: int  # characters of the raw texts before they part


def misplaced(heads: Sequence[Head]) -> Iterator[Misplaced]:
    """Each head that could share more with one before it."""
    holders: dict[int, list[int]] = {}
    pieces: list[Counter[int]] = []
    sizes: dict[int, int] = {}
    for index, head in enumerate(heads):
        ours = Counter[int]()
        for piece in cut(head.text):
            key = crc32(piece)
            sizes[key] = len(piece)
            ours[key] += 1
        votes = Counter[int]()
        for key, count in ours.items():
            for holder in holders.get(key, ()):
                votes[holder] += sizes[key] * count
        candidates = [holder for holder, _ in votes.most_common(HOLDERS)]
        if candidates:
            found = _against(head, [heads[holder] for holder in candidates], ours, [pieces[c] for c in candidates], sizes)
            if found is not None:
                yield found
        pieces.append(ours)
        for key in ours:
            known = holders.setdefault(key, [])
            if len(known) < HOLDERS:
                known.append(index)


def _against(
    head: Head, partners: list[Head], ours: Counter[int], theirs: list[Counter[int]], sizes: dict[int, int]
) -> Misplaced | None:
    """What a head could share with the best of its partners, against what it begins with in common with any of them."""
    shared = [sum(sizes[key] * min(count, other[key]) for key, count in ours.items()) for other in theirs]
    begun = max(len(head.text[: common_characters(head.text, one.text)].encode()) for one in partners)
    best = max(range(len(partners)), key=lambda index: shared[index])
    partner, lost = partners[best], shared[best] - begun
    if lost < LEAST_LOST:
        return None
    whole = sum(sizes[key] * count for key, count in ours.items())
    changed = sum((ours - theirs[best]).values())
    if ours == theirs[best]:
        kind: Misplacement = "order"
    elif changed <= _NEAR_PIECES or whole - shared[best] <= _NEAR_SHARE * whole:
        kind = "near"
    else:
        kind = "changing"
    # A lone text may be a document that happens to have sentences of another: what is mostly the same is a head.
    if not head.own and lost < _HEAD_SHARE * whole:
        kind = "behind"
    return Misplaced(kind, head, partner, lost, common_characters(head.raw, partner.raw))


def cut(text: str) -> Iterator[bytes]:
    """Pieces of a text, ended by line feeds and by words that their checksum chooses."""
    piece = list[str]()
    for match in _WORDS.finditer(text):
        word = match[0]
        piece.append(word)
        if crc32(word.encode()) % _CUT_AT == 0 or "\n" in word:
            yield "".join(piece).encode()
            piece = []
    if piece:
        yield "".join(piece).encode()
