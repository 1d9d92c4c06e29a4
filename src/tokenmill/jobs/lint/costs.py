"""Counts the prompt bytes that engines must compute, over a stream of jobs and in constant memory.

`PromptTree` counts the minimum, with every shared prefix computed once, for several spellings of each prompt. A prompt
is split into chunks, and a chunk counts unless an earlier prompt began with the same text up to its end. Prefixes are
stored as checksums; beyond a limit only every second, fourth, and so on is stored, and the sums are scaled.

    prompt 1   |chunk a|chunk b|chunk c|            nodes: a, ab, abc
    prompt 2   |chunk a|chunk b|chunk d|   new: abd, the rest is shared

A spelling is one bit of a mask; spellings that are equal for a prompt are walked together. `FileOrder` counts what a
single slot computes in file order, `ToolsBehind` the cost of templates that put tools after the system message.
"""

from collections import Counter
from zlib import crc32

from tokenmill.jobs.lint.parts import TOOLS, Prompt
from tokenmill.jobs.scheduler.prefix_groups import common_length

MAX_NODES = 1 << 19
_MASK_BITS = 16
PREFIX_CHUNK, TAIL_CHUNK = 64, 16  # bytes; sharing is underestimated by less than this per text


def _ends(steps: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    ends = list[int]()
    at = 0
    for size, limit in steps:
        ends += range(at + size, limit + 1, size)
        at = limit
    return tuple(ends)


# Chunk sizes grow with the position, so that the end of a shared prefix is known to an eighth of its length.
PREFIX_ENDS = _ends(((PREFIX_CHUNK, 4096), (512, 32768), (4096, 1 << 20)))
LONE_ENDS = _ends(((TAIL_CHUNK, 128), (64, 4096), (512, 32768), (4096, 1 << 20)))  # prompts of a single text
TAIL_ENDS = _ends(((TAIL_CHUNK, 128), (64, 512), (512, 4096), (4096, 1 << 20)))


class PromptTree:
    """The prefixes of all prompts so far, as a set of checksums."""

    def __init__(self, most_nodes: int = MAX_NODES) -> None:
        self._nodes: dict[
            int, int
        ] = {}  # checksum of a prefix -> bytes of its last chunk, and the spellings that have it
        self._most = most_nodes
        self._skip = 0  # checksums with any of these bits are not stored
        self._total: Counter[int] = Counter()

    def walk(self, data: bytes, state: int, mask: int, ends: tuple[int, ...]) -> int:
        """Add the text that follows the one with checksum `state`, in the spellings of `mask`; return its checksum."""
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
        if start < len(data):  # the rest after a megabyte is one chunk
            state = crc32(data[start:], state)
            if not state & skip:
                nodes[state] = nodes.get(state, len(data) - start << _MASK_BITS) | mask
        if len(nodes) > self._most:
            self._thin()
        return state

    def count(self, size: int, mask: int) -> None:
        """Add to the total bytes of the spellings in `mask`."""
        self._total[mask] += size

    def _thin(self) -> None:
        while len(self._nodes) > self._most:
            self._skip = self._skip << 1 | 1
            self._nodes = {state: node for state, node in self._nodes.items() if not state & self._skip}

    def total(self, bit: int) -> int:
        """Total bytes of all prompts in one spelling."""
        return sum(size for mask, size in self._total.items() if mask & bit)

    def distinct(self, bit: int) -> int:
        """Bytes of all prompts in one spelling, each shared prefix counted once."""
        return sum(node >> _MASK_BITS for node in self._nodes.values() if node & bit) * (self._skip + 1)

    def shared(self, bit: int) -> int:
        """Bytes in one spelling that can be reused."""
        return max(0, self.total(bit) - self.distinct(bit))


MIN_TOOLS_BYTES = 256  # shorter tools are not counted
MAX_TOOLS = 4096
MAX_DISTINCT = 1 << 19
MAX_SYSTEMS = 1 << 16


class Repeats:
    """Counts repeated values: exactly up to a limit, then by sampling every second, fourth, and so on."""

    def __init__(self, most: int = MAX_DISTINCT) -> None:
        self._seen: set[int] = set()
        self._most = most
        self._skip = 0
        self.count = 0

    def add(self, digest: bytes) -> bool:
        """Add a value, given as a digest of at least eight bytes; returns whether it is a repetition."""
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
    """Counts the bytes that a single slot computes if it runs all lines in order and caches the last prompt."""

    def __init__(self) -> None:
        self.computed_bytes = 0
        self._prefix = self._tail = ""

    def add(self, prefix: str, tail: str, sizes: tuple[int, int]) -> None:
        """Add the next prompt: prefix and last message, with their sizes in bytes."""
        same = prefix == self._prefix
        kept = sizes[0] + _common_bytes(tail, self._tail) if same else _common_bytes(prefix, self._prefix)
        self.computed_bytes += sum(sizes) - kept
        self._prefix = prefix
        self._tail = tail


class ToolsBehind:
    """Counts the combinations of tools and system messages, for templates that put tools after the system message."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}
        self._pairs: set[tuple[int, int]] = set()

    def add(self, prompt: Prompt) -> None:
        """Add a prompt with tools."""
        first, *others = prompt.prefix
        if first.label != TOOLS or len(first.text) < MIN_TOOLS_BYTES or len(self._pairs) >= MAX_SYSTEMS:
            return
        if first.text not in self._bytes and len(self._bytes) >= MAX_TOOLS:
            return
        self._bytes.setdefault(first.text, len(first.text.encode()))
        self._pairs.add((hash(first.text), hash(tuple(part.text for part in others))))

    def cost_bytes(self) -> int:
        """Bytes of tools that are recomputed because they follow different system messages."""
        systems: dict[int, int] = {}
        for tools, _ in self._pairs:
            systems[tools] = systems.get(tools, 0) + 1
        return sum(size * (systems.get(hash(text), 1) - 1) for text, size in self._bytes.items())


def _common_bytes(one: str, other: str) -> int:
    return len(one[: common_length(one, other)].encode())
