"""Finds prefixes that share text without starting with it: nearly equal ones, the same parts in another order, and
stable text behind text that varies.

Prefixes are cut where their content says so, so that an edit moves no other cut; prefixes that share many pieces are
compared. Text that two prefixes share beyond their common start is computed twice. Only a bounded sample of the
distinct prefixes is compared; figures are scaled to all of them. Pure.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal
from zlib import crc32

from tokenmill.jobs.lint.parts import Part
from tokenmill.jobs.scheduler.prefix_groups import common_length

MOST_HEADS = 512
MOST_CHARACTERS = 65536  # of one prefix
MOST_TEXT = 6_000_000  # characters of all of them
LEAST_LOST = 64  # bytes, of one prefix
HOLDERS = 4  # prefixes that are remembered for a piece
_WORDS = re.compile(r"\w+\W*|\W+")
_CUT_AT, _MOST_WORDS = 12, 64  # a piece has about as many words, and never more
_NEAR_BYTES = 256
_NEAR_SHARE = 0.05
_HEAD_SHARE = 0.5
_ORDER_SHARE = 0.8
_CONTEXT = 200  # characters that are more than a date or a name
_OFTEN = 1.5  # jobs with one prefix, on average: a digest

Misplacement = Literal["near", "order", "changing", "behind"]


@dataclass(slots=True)
class Head:
    """One of the distinct prefixes, as it is without what changes by itself."""

    line: int
    parts: tuple[Part, ...]
    text: str  # without
    own: bool = True  # it ends where the last message begins; otherwise it is the beginning of a lone text
    jobs: int = 0

    @property
    def raw(self) -> str:
        """As it stood in the file."""
        return "".join(part.text for part in self.parts)


class SharedHeads:
    """A sample of distinct prefixes by checksum: every one, then every second, fourth, ..."""

    def __init__(self, most: int = MOST_HEADS) -> None:
        self._heads: dict[int, Head] = {}
        self._most = most
        self._skip = 0
        self._held = 0

    @property
    def scale(self) -> int:
        """How many prefixes one of the sample stands for."""
        return self._skip + 1

    def add(self, state: int, line: int, parts: tuple[Part, ...], text: str, *, own: bool) -> None:
        """A prefix by its checksum; one that is known stays as it is."""
        if state & self._skip or state in self._heads:
            return
        short = text[:MOST_CHARACTERS]
        self._heads[state] = Head(line, parts, short, own)
        self._held += len(short)
        while len(self._heads) > self._most or (self._held > MOST_TEXT and len(self._heads) > 1):
            self._thin()

    def job(self, state: int) -> None:
        """One more job with this prefix."""
        head = self._heads.get(state)
        if head is not None:
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
    """A prefix that has more in common with an earlier one than it begins with."""

    kind: Misplacement
    head: Head
    partner: Head
    lost_bytes: int
    at: int  # characters of the raw texts before they part


def misplaced(heads: Sequence[Head]) -> Iterator[Misplaced]:
    """Each prefix that could share more with one before it."""
    holders: dict[bytes, list[int]] = {}
    known: list[list[bytes]] = []
    for index, head in enumerate(heads):
        pieces = [*cut(head.text)]
        votes = Counter[int]()
        for piece in pieces:
            for holder in holders.get(piece, ()):
                votes[holder] += len(piece)
        candidates = [holder for holder, _ in votes.most_common(HOLDERS)]
        if candidates:
            found = _against(head, pieces, [(heads[candidate], known[candidate]) for candidate in candidates])
            if found is not None:
                yield found
        known.append(pieces)
        for piece in pieces:
            have = holders.setdefault(piece, [])
            if len(have) < HOLDERS and (not have or have[-1] != index):
                have.append(index)


def with_context(heads: Sequence[Head]) -> list[Head]:
    """Prefixes that end with a system message whose beginning others have, and whose long rest is its own.

    A digest for some of the jobs looks the same, but several jobs have it; a date or an id is short.
    """
    ending = [head for head in heads if head.own and head.parts and head.parts[-1].label.endswith("(system)")]
    found: list[Head] = []
    ordered = sorted(ending, key=lambda head: head.text)
    for at, head in enumerate(ordered):
        near = ordered[max(0, at - 1) : at] + ordered[at + 1 : at + 2]
        common = max((common_length(head.text, other.text) for other in near), default=0)
        if common >= LEAST_LOST and len(head.text) - common >= _CONTEXT:
            found.append(head)
    alone = sum(head.jobs for head in found) < _OFTEN * len(found)
    return sorted(found, key=lambda head: head.line) if len(found) > 2 and alone else []


def _against(head: Head, pieces: list[bytes], partners: list[tuple[Head, list[bytes]]]) -> Misplaced | None:
    """The loss of a prefix: what it could share with its best partner, less its longest common start with any."""
    begun = max(len(head.text[: common_length(head.text, one.text)].encode()) for one, _ in partners)
    ours = Counter(pieces)
    shared = [_bytes(ours & Counter(theirs)) for _, theirs in partners]
    best = max(range(len(partners)), key=lambda index: shared[index])
    partner, theirs = partners[best]
    whole = _bytes(ours)
    same = max(shared[best], _ends(head.text, partner.text))  # pieces miss what an edit leaves of the one around it
    lost = same - begun
    if lost < LEAST_LOST:
        return None
    if shared[best] >= _ORDER_SHARE * whole and _in_order(pieces, theirs) < _ORDER_SHARE * shared[best]:
        kind: Misplacement = "order"
    elif whole - same <= max(_NEAR_BYTES, _NEAR_SHARE * whole):
        kind = "near"
    else:
        kind = "changing"
    # A lone text may be a document that happens to have sentences of another: only mostly equal texts are prefixes.
    if not head.own and lost < _HEAD_SHARE * whole:
        kind = "behind"
    return Misplaced(kind, head, partner, lost, common_length(head.raw, partner.raw))


def _ends(one: str, other: str) -> int:
    """Bytes that two texts have in common at their beginnings and ends."""
    begun = common_length(one, other)
    ended = common_length(one[begun:][::-1], other[begun:][::-1])
    return len(one.encode()) - len(one[begun : len(one) - ended].encode())


def _bytes(pieces: Counter[bytes]) -> int:
    return sum(len(piece) * count for piece, count in pieces.items())


def _in_order(ours: list[bytes], theirs: list[bytes]) -> int:
    """Bytes of the most pieces that two texts have in the same order: the longest rising run of places."""
    places: dict[bytes, list[int]] = {}
    for place in reversed(range(len(theirs))):
        places.setdefault(theirs[place], []).append(place)
    ends, sizes = list[int](), [0]  # the last place of the best run of each length, and the bytes in it
    for piece in ours:
        if places.get(piece):
            place = places[piece].pop()
            length = bisect_left(ends, place)
            ends[length:] = [place, *ends[length + 1 :]]
            size = sizes[length] + len(piece)
            sizes[length + 1 :] = [size, *sizes[length + 2 :]]
    return max(sizes)


def cut(text: str) -> Iterator[bytes]:
    """Pieces of a text, ended by line feeds and by words that their checksum chooses."""
    piece = list[str]()
    for match in _WORDS.finditer(text):
        word = match[0]
        piece.append(word)
        if crc32(word.encode()) % _CUT_AT == 0 or "\n" in word or len(piece) == _MOST_WORDS:
            yield "".join(piece).encode()
            piece = []
    if piece:
        yield "".join(piece).encode()
