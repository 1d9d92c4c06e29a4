"""Bytes of prompts that engines have to compute, counted over a stream of jobs in flat memory.

`Tree` counts the minimum, for several spellings of each prompt together: every shared prefix is computed once. A prompt
is cut into chunks, and a chunk counts if no prompt before it began with the same text up to its end. Seen prefixes are
kept as checksums; beyond a limit only every second, fourth, ... of them, and the sums are scaled.

    prompt 1   |chunk a|chunk b|chunk c|            nodes: a, ab, abc
    prompt 2   |chunk a|chunk b|chunk d|   new: abd, the rest is shared

A spelling is one bit of a mask; spellings that are equal for a prompt are walked together. `FileOrder` counts what one
slot computes in the order of the file, `ToolsBehind` what tools behind system messages cost.
"""

from collections import Counter
from zlib import crc32

from tokenmill.jobs.lint.parts import TOOLS, Prompt
from tokenmill.jobs.scheduler.prefix_groups import common_length

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


# The end of a shared prefix is known to a chunk: fine ones first, then at most an eighth of the length before it.
HEAD_ENDS = _ends(((HEAD_CHUNK, 4096), (512, 32768), (4096, 1 << 20)))
LONE_ENDS = _ends(((TAIL_CHUNK, 128), (64, 4096), (512, 32768), (4096, 1 << 20)))  # of prompts without a prefix
TAIL_ENDS = _ends(((TAIL_CHUNK, 128), (64, 512), (512, 4096), (4096, 1 << 20)))


class PromptTree:
    """The prefixes of all prompts so far; every call but `shared` adds to it."""

    def __init__(self, most_nodes: int = MOST_NODES) -> None:
        self._nodes: dict[
            int, int
        ] = {}  # checksum of a prefix -> bytes of its last chunk, and the spellings that have it
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
        """Bytes that are left when every shared prefix is taken once, in one spelling."""
        return sum(node >> _MASK_BITS for node in self._nodes.values() if node & bit) * (self._skip + 1)

    def shared(self, bit: int) -> int:
        """Bytes that need not be computed again, in one spelling."""
        return max(0, self.total(bit) - self.distinct(bit))


LEAST_TOOLS = 256  # bytes from which tools are counted
MOST_TOOLS = 4096
MOST_DISTINCT = 1 << 19
MOST_SYSTEMS = 1 << 16


class Repeats:
    """How many values came again; exact up to a limit, then from every second, fourth, ... of them."""

    def __init__(self, most: int = MOST_DISTINCT) -> None:
        self._seen: set[int] = set()
        self._most = most
        self._skip = 0
        self.count = 0

    def add(self, digest: bytes) -> bool:
        """One value, as a digest of at least eight bytes; True: it came before."""
        key = int.from_bytes(digest[:8], "big")
        if key & self._skip:
            return False
        if key in self._seen:
            self.count += self._skip + 1
            return True
        self._seen.add(key)
        if len(self._seen) > self._most:
            self._skip = self._skip << 1 | 1
            self._seen = {key for key in self._seen if not key & self._skip}
        return False


class FileOrder:
    """Bytes that one slot computes which works from the first line to the last and keeps one prompt."""

    def __init__(self) -> None:
        self.computed_bytes = 0
        self._head = self._tail = ""

    def add(self, head: str, tail: str, sizes: tuple[int, int]) -> None:
        """The next prompt, in two texts and their bytes."""
        same = head == self._head
        kept = sizes[0] + _common_bytes(tail, self._tail) if same else _common_bytes(head, self._head)
        self.computed_bytes += sum(sizes) - kept
        self._head = head
        self._tail = tail


class ToolsBehind:
    """Tools with the system messages that they are used with, for templates that write tools second."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}
        self._pairs: set[tuple[int, int]] = set()

    def add(self, prompt: Prompt) -> None:
        """One more prompt with tools."""
        first, *others = prompt.head
        if first.label != TOOLS or len(first.text) < LEAST_TOOLS or len(self._pairs) >= MOST_SYSTEMS:
            return
        if first.text not in self._bytes and len(self._bytes) >= MOST_TOOLS:
            return
        self._bytes.setdefault(first.text, len(first.text.encode()))
        self._pairs.add((hash(first.text), hash(tuple(part.text for part in others))))

    def cost_bytes(self) -> int:
        """Bytes of tools that are computed again behind another system message."""
        systems: dict[int, int] = {}
        for tools, _ in self._pairs:
            systems[tools] = systems.get(tools, 0) + 1
        return sum(size * (systems.get(hash(text), 1) - 1) for text, size in self._bytes.items())


def _common_bytes(one: str, other: str) -> int:
    return len(one[: common_length(one, other)].encode())
