"""How much of a stream of prompts is shared, for several spellings of each at once, in flat memory.

The bytes to compute, when every shared head is computed once, are those of the distinct heads: each prompt is cut into
chunks, and a chunk counts when no prompt before it began with the same text up to its end. What has been seen is kept
as checksums; beyond a limit only every second, fourth, ... of them, and the sums are scaled.

    prompt 1   |chunk a|chunk b|chunk c|            nodes: a, ab, abc
    prompt 2   |chunk a|chunk b|chunk d|   new: abd, the rest is shared

A spelling is one bit of a mask. Spellings that are alike for a prompt are walked together, so that a prompt costs as
many walks as it has different spellings.
"""

from collections import Counter
from zlib import crc32

MOST_NODES = 1 << 19
_MASK_BITS = 16
HEAD_CHUNK, TAIL_CHUNK = 64, 16  # bytes: so much of one text may seem not to be shared although it is


def _ends(steps: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    ends = list[int]()
    at = 0
    for size, limit in steps:
        ends += range(at + size, limit + 1, size)
        at = limit
    return tuple(ends)


# Where a shared head ends is known to a chunk: finer at first, then to an eighth of what lies before or better.
HEAD_ENDS = _ends(((HEAD_CHUNK, 4096), (512, 32768), (4096, 1 << 20)))
LONE_ENDS = _ends(((TAIL_CHUNK, 128), (64, 4096), (512, 32768), (4096, 1 << 20)))  # of prompts without a head
TAIL_ENDS = _ends(((TAIL_CHUNK, 128), (64, 512), (512, 4096), (4096, 1 << 20)))


class Tree:
    """The heads of all prompts so far; every call but `shared` adds to it."""

    def __init__(self, most_nodes: int = MOST_NODES) -> None:
        self._nodes: dict[int, int] = {}  # checksum of a head -> bytes of its last chunk, and who has it
        self._most = most_nodes
        self._skip = 0  # checksums with any of these bits are not kept
        self._total: Counter[int] = Counter()

    def walk(self, data: bytes, state: int, mask: int, ends: tuple[int, ...]) -> int:
        """Add a text behind the one that `state` stands for, in the spellings of `mask`; the state behind it."""
        nodes = self._nodes
        skip = self._skip
        start = 0
        for end in ends:
            if start >= len(data):
                break
            piece = data[start:end]
            start = end
            state = crc32(piece, state)
            if state & skip:
                continue
            known = nodes.get(state)
            if known is None:
                nodes[state] = len(piece) << _MASK_BITS | mask
            elif known & mask != mask:
                nodes[state] = known | mask
        if start < len(data):  # beyond a megabyte: one chunk
            state = crc32(data[start:], state)
            if not state & skip:
                nodes[state] = nodes.get(state, len(data) - start << _MASK_BITS) | mask
        if len(nodes) > self._most:
            self._thin()
        return state

    def count(self, size: int, mask: int) -> None:
        """Add to the bytes that prompts have in all in some spellings."""
        self._total[mask] += size

    def _thin(self) -> None:
        while len(self._nodes) > self._most:
            self._skip = self._skip << 1 | 1
            self._nodes = {state: node for state, node in self._nodes.items() if not state & self._skip}

    def total(self, bit: int) -> int:
        """Bytes of all prompts in one spelling."""
        return sum(size for mask, size in self._total.items() if mask & bit)

    def distinct(self, bit: int) -> int:
        """Bytes that are left when every shared head is taken once, in one spelling."""
        return sum(node >> _MASK_BITS for node in self._nodes.values() if node & bit) * (self._skip + 1)

    def shared(self, bit: int) -> int:
        """Bytes that need not be computed again, in one spelling."""
        return max(0, self.total(bit) - self.distinct(bit))
