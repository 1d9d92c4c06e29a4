"""Replays how ggml's graph allocator packs the intermediate results of one graph into one buffer.

A compute buffer is larger than the largest sum of live tensors: blocks are reused best-fit, a hole that is one page
too small is skipped, and an unread view keeps its source alive. Replaying the same rules gives the exact size.
`buffer_bytes` is the entry point. Independent of models.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

ALIGNMENT = 128  # CUDA's; with the CPU's 32 the total differs by less than a page


@dataclass(frozen=True, slots=True)
class GraphOp:
    """One operation: its result, its inputs, and the rules for allocating the result."""

    bytes: int
    reads: tuple[int, ...] = ()  # inputs, as indices of earlier steps
    view_of: int | None = None  # aliases this step, which must not be a view, and allocates nothing
    in_place: bool = False  # may overwrite the first input of its size that has no other reader and no view
    external: bool = False  # writes into memory outside the buffer (the cache)
    keep: bool = False  # a result of the whole graph, never freed
    is_input: bool = False  # filled before the graph runs, and allocated before all other steps


@dataclass(slots=True)
class _Buffer:
    """Free blocks by offset; the last one is unbounded."""

    free: list[list[int]] = field(default_factory=lambda: [[0, 1 << 62]])
    peak: int = 0

    def take(self, size: int) -> int:
        """Allocate `size` bytes in the smallest sufficient hole, else at the end; return the offset."""
        fits = [index for index, block in enumerate(self.free[:-1]) if block[1] >= size]
        # like ggml: of equally small holes, the last one
        best = min(fits, key=lambda index: (self.free[index][1], -index), default=len(self.free) - 1)
        block = self.free[best]
        offset = block[0]
        block[0] += size
        block[1] -= size
        if block[1] == 0:
            del self.free[best]
        self.peak = max(self.peak, offset + size)
        return offset

    def give_back(self, offset: int, size: int) -> None:
        """Free an allocated block and merge it with its neighbours."""
        if size == 0:
            return
        index = next(i for i, block in enumerate(self.free) if block[0] > offset)
        self.free.insert(index, [offset, size])
        for left in (index, index - 1):
            if left >= 0 and self.free[left][0] + self.free[left][1] == self.free[left + 1][0]:
                self.free[left][1] += self.free[left + 1][1]
                del self.free[left + 1]


class _Replay:
    """State of one replay of a graph."""

    def __init__(self, steps: Sequence[GraphOp], alignment: int) -> None:
        self.steps = steps
        self.alignment = alignment
        self.buffer = _Buffer()
        self.place: dict[int, tuple[int, int]] = {}  # step -> offset, bytes
        self.readers, self.views = [0] * len(steps), [0] * len(steps)  # those not yet executed
        for step in steps:
            for read in step.reads:
                self.readers[read] += 1
            if step.view_of is not None:
                self.views[step.view_of] += 1

    def allocate(self, index: int) -> None:
        """Allocate the output of a step."""
        step = self.steps[index]
        if index in self.place or step.external or step.view_of is not None:
            return
        if step.in_place:
            for read in step.reads:
                alone = self.readers[read] == 1 and self.views[read] == 0 and not self.steps[read].keep
                if alone and read in self.place and self.steps[read].bytes == step.bytes:
                    self.place[index] = self.place.pop(read)
                    return
        size = -(-step.bytes // self.alignment) * self.alignment
        self.place[index] = self.buffer.take(size), size

    def has_read(self, read: int) -> None:
        """Record that a step was read once; free it after its last read."""
        self.readers[read] -= 1
        if self.readers[read] or self.views[read]:
            return
        owner = self.steps[read].view_of
        if owner is None:
            owner = read
        else:
            self.views[owner] -= 1
        unused = self.readers[owner] == 0 and self.views[owner] == 0
        if unused and owner in self.place and not self.steps[owner].keep:
            self.buffer.give_back(*self.place.pop(owner))


def buffer_bytes(steps: Sequence[GraphOp], alignment: int = ALIGNMENT) -> int:
    """Size of the buffer that holds the graph's intermediate results."""
    replay = _Replay(steps, alignment)
    for index, step in enumerate(steps):
        if step.is_input:
            replay.allocate(index)
    for index, step in enumerate(steps):
        if not step.is_input:
            replay.allocate(index)
        for read in step.reads:
            replay.has_read(read)
    return replay.buffer.peak
