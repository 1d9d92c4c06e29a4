"""What a file of jobs costs engines that take it as it is: in its own order, or with tools behind system messages."""

from tokenmill.jobs.forest import common_length
from tokenmill.jobs.lint_parts import TOOLS, Prompt

LEAST_TOOLS = 256  # bytes that are worth a word
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
