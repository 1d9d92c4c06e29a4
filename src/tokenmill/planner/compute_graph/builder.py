"""Records the operations of a graph and the sizes of their results, in order of computation.

`allocator.buffer_bytes` replays the steps that `GraphBuilder` collects. Independent of models and engines.
"""

from dataclasses import dataclass, field

from tokenmill.planner.compute_graph.allocator import GraphOp

F32 = 4
I32 = 4
I64 = 8
F16 = 2


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The largest micro-batch, and the KV cells it attends to."""

    tokens: int  # -ub
    cells: int  # KV cells per stream
    window_cells: int | None = None  # KV cells per stream of the sliding-window cache
    outputs: int | None = None  # tokens with logits; None: all
    flash_attention: bool = True
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    mixes_embeddings: bool = True  # reserves an input for embeddings in addition to tokens (since 2026)
    casts_mask: bool = False  # creates the mask in 32 bits and casts it once (until 2025)
    fuses: bool = False  # CUDA sums a token's experts in one kernel that reads the unweighted results
    sequences: int = 1  # in the micro-batch, with equally many tokens each
    snapshots: int = 0  # recurrent states kept per sequence, in addition to the last, to take back drafted tokens
    copies: int = 1  # copies of every input; llama.cpp makes 4 when it pipelines whole models over several GPUs


@dataclass(slots=True)
class GraphBuilder:
    """A graph under construction; every method appends a step and returns its index."""

    batch: MicroBatch
    tokens: int  # rows of the steps added next; the last layer computes only the requested outputs
    steps: list[GraphOp] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    inputs: dict[str, int] = field(default_factory=dict)
    casts: dict[int, int] = field(default_factory=dict)
    chosen: int | None = None  # the last result of the index of sparse attention

    def add(self, name: str, per_token: int, *reads: int, in_place: bool = False, keep: bool = False) -> int:
        """Add a result of `per_token` 32-bit numbers per token."""
        return self._push(name, GraphOp(per_token * self.tokens * F32, reads, in_place=in_place, keep=keep))

    def block(self, name: str, size: int, *reads: int, in_place: bool = False) -> int:
        """Add a result, or a copy, of `size` bytes."""
        return self._push(name, GraphOp(size, reads, in_place=in_place))

    def view(self, read: int) -> int:
        """Add a view of a result; nothing can be overwritten through it."""
        owner = self.steps[read].view_of
        return self._push("view", GraphOp(0, (read,), view_of=read if owner is None else owner))

    def input(self, name: str, size: int) -> int:
        """Add an input that is filled before the graph runs; a repeated name returns the existing one."""
        if name not in self.inputs:
            copied = self.batch.copies > 1
            handles = [self._push(name, GraphOp(size, is_input=True, keep=copied)) for _ in range(self.batch.copies)]
            self.inputs[name] = handles[0]
        return self.inputs[name]

    def constant(self, name: str, size: int) -> int:
        """Add a tensor without inputs, which is allocated before all other steps."""
        return self._push(name, GraphOp(size, is_input=True))

    def cast(self, read: int) -> int:
        """Add a cast to half the width; a repeated call returns the existing one."""
        if read not in self.casts:
            self.casts[read] = self.block("cast", self.steps[read].bytes // 2, read)
        return self.casts[read]

    def store(self, *reads: int) -> int:
        """Add a write to the KV cache."""
        return self._push("store", GraphOp(0, reads, external=True))

    def hold(self, *reads: int) -> int:
        """Add a reader without output, which keeps results alive until here."""
        return self._push("held", GraphOp(0, reads, external=True))

    def norm(self, read: int, size: int) -> int:
        """Add a normalization and the product with its weights."""
        return self.add("norm", size, self.add("norm", size, read, in_place=True), in_place=True)

    def _push(self, name: str, step: GraphOp) -> int:
        self.steps.append(step)
        self.names.append(name)
        return len(self.steps) - 1
