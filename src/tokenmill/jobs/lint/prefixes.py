"""Finds prefixes that share text but do not start with it: nearly equal prefixes, the same parts in another order, and
stable text after variable text.

Prefixes are split by content-defined chunking, so that an edit does not move other boundaries, and prefixes that share
many chunks are compared. Text that two prefixes share after their common start is computed twice. Only a bounded sample
of the distinct prefixes is compared; the results are scaled up to all of them. Pure.
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

MAX_PREFIXES = 512
MAX_CHARACTERS = 65536  # of one prefix
MAX_TEXT = 6_000_000  # characters of all prefixes
MIN_LOST_BYTES = 64  # per prefix
HOLDERS = 4  # prefixes remembered per chunk
_WORDS = re.compile(r"\w+\W*|\W+")
_CUT_AT, _MAX_WORDS = 12, 64  # mean and maximum number of words in a chunk
_NEAR_BYTES = 256
_NEAR_SHARE = 0.05
_PREFIX_SHARE = 0.5
_ORDER_SHARE = 0.8
_CONTEXT = 200  # characters; longer than a date or a name
_OFTEN = 1.5  # mean jobs per prefix from which a prefix counts as shared, such as a digest

Misplacement = Literal["near", "order", "changing", "behind"]


@dataclass(slots=True)
class Prefix:
    """A distinct prefix."""

    line: int
    parts: tuple[Part, ...]
    text: str  # without variable text
    own: bool = True  # it ends where the last message begins; otherwise it is the beginning of a single text
    jobs: int = 0

    @property
    def raw(self) -> str:
        """The text as in the file."""
        return "".join(part.text for part in self.parts)


class SharedPrefixes:
    """A bounded sample of distinct prefixes by checksum: all at first, then every second, fourth, and so on."""

    def __init__(self, most: int = MAX_PREFIXES) -> None:
        self._prefixes: dict[int, Prefix] = {}
        self._most = most
        self._skip = 0
        self._held = 0

    @property
    def scale(self) -> int:
        """Number of prefixes that each sampled one represents."""
        return self._skip + 1

    def add(self, state: int, line: int, parts: tuple[Part, ...], text: str, *, own: bool) -> None:
        """Add a prefix with its checksum, unless it is known."""
        if state & self._skip or state in self._prefixes:
            return
        short = text[:MAX_CHARACTERS]
        self._prefixes[state] = Prefix(line, parts, short, own)
        self._held += len(short)
        while len(self._prefixes) > self._most or (self._held > MAX_TEXT and len(self._prefixes) > 1):
            self._thin()

    def job(self, state: int) -> None:
        """Count a job with this prefix."""
        prefix = self._prefixes.get(state)
        if prefix is not None:
            prefix.jobs += 1

    def _thin(self) -> None:
        self._skip = self._skip << 1 | 1
        self._prefixes = {state: prefix for state, prefix in self._prefixes.items() if not state & self._skip}
        self._held = sum(len(prefix.text) for prefix in self._prefixes.values())

    def all(self) -> list[Prefix]:
        """The sample in file order."""
        return sorted(self._prefixes.values(), key=lambda prefix: prefix.line)


@dataclass(frozen=True, slots=True)
class Misplaced:
    """A prefix that shares more text with an earlier prefix than their common start."""

    kind: Misplacement
    prefix: Prefix
    partner: Prefix
    lost_bytes: int
    at: int  # position in characters at which the raw texts diverge


def misplaced(prefixes: Sequence[Prefix]) -> Iterator[Misplaced]:
    """Yield each prefix that could share more with an earlier one."""
    holders: dict[bytes, list[int]] = {}
    known: list[list[bytes]] = []
    for index, prefix in enumerate(prefixes):
        pieces = [*cut(prefix.text)]
        votes = Counter[int]()
        for piece in pieces:
            for holder in holders.get(piece, ()):
                votes[holder] += len(piece)
        candidates = [holder for holder, _ in votes.most_common(HOLDERS)]
        if candidates:
            found = _against(prefix, pieces, [(prefixes[candidate], known[candidate]) for candidate in candidates])
            if found is not None:
                yield found
        known.append(pieces)
        for piece in pieces:
            have = holders.setdefault(piece, [])
            if len(have) < HOLDERS and (not have or have[-1] != index):
                have.append(index)


def with_context(prefixes: Sequence[Prefix]) -> list[Prefix]:
    """Prefixes whose system message begins like others and ends with a long unique text, such as retrieved context.

    Digests are excluded because several jobs share them, dates and ids because they are short.
    """
    ending = [
        prefix for prefix in prefixes if prefix.own and prefix.parts and prefix.parts[-1].label.endswith("(system)")
    ]
    found: list[Prefix] = []
    ordered = sorted(ending, key=lambda prefix: prefix.text)
    for at, prefix in enumerate(ordered):
        near = ordered[max(0, at - 1) : at] + ordered[at + 1 : at + 2]
        common = max((common_length(prefix.text, other.text) for other in near), default=0)
        if common >= MIN_LOST_BYTES and len(prefix.text) - common >= _CONTEXT:
            found.append(prefix)
    alone = sum(prefix.jobs for prefix in found) < _OFTEN * len(found)
    return sorted(found, key=lambda prefix: prefix.line) if len(found) > 2 and alone else []


def _against(prefix: Prefix, pieces: list[bytes], partners: list[tuple[Prefix, list[bytes]]]) -> Misplaced | None:
    """The loss of a prefix: the bytes that it could share with its best partner, minus its longest common start."""
    begun = max(len(prefix.text[: common_length(prefix.text, one.text)].encode()) for one, _ in partners)
    ours = Counter(pieces)
    shared = [_bytes(ours & Counter(theirs)) for _, theirs in partners]
    best = max(range(len(partners)), key=lambda index: shared[index])
    partner, theirs = partners[best]
    whole = _bytes(ours)
    same = max(shared[best], _ends(prefix.text, partner.text))  # chunks miss the unchanged text around an edit
    lost = same - begun
    if lost < MIN_LOST_BYTES:
        return None
    if shared[best] >= _ORDER_SHARE * whole and _in_order(pieces, theirs) < _ORDER_SHARE * shared[best]:
        kind: Misplacement = "order"
    elif whole - same <= max(_NEAR_BYTES, _NEAR_SHARE * whole):
        kind = "near"
    else:
        kind = "changing"
    # A single text may be a document that quotes another one: only mostly equal texts count as prefixes.
    if not prefix.own and lost < _PREFIX_SHARE * whole:
        kind = "behind"
    return Misplaced(kind, prefix, partner, lost, common_length(prefix.raw, partner.raw))


def _ends(one: str, other: str) -> int:
    """Bytes of the common start and the common end of two texts."""
    begun = common_length(one, other)
    ended = common_length(one[begun:][::-1], other[begun:][::-1])
    return len(one.encode()) - len(one[begun : len(one) - ended].encode())


def _bytes(pieces: Counter[bytes]) -> int:
    return sum(len(piece) * count for piece, count in pieces.items())


def _in_order(ours: list[bytes], theirs: list[bytes]) -> int:
    """Bytes of the chunks that two texts have in the same order, by their longest increasing subsequence."""
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
    """Yield content-defined chunks of a text, which end at line feeds and at words chosen by their checksum."""
    piece = list[str]()
    for match in _WORDS.finditer(text):
        word = match[0]
        piece.append(word)
        if crc32(word.encode()) % _CUT_AT == 0 or "\n" in word or len(piece) == _MAX_WORDS:
            yield "".join(piece).encode()
            piece = []
    if piece:
        yield "".join(piece).encode()
