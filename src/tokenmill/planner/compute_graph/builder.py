"""Paper and pencil for `graph`: a list of results with their sizes, in the order they are computed."""

from dataclasses import dataclass, field

from tokenmill.planner.compute_graph.allocator import GraphOp

F32 = 4
I32 = 4
I64 = 8
F16 = 2


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch at its largest, and the cache it looks at."""

    tokens: int  # -ub
    cells: int  # KV cells one stream may look at
    window_cells: int | None = None  # of the smaller cache that sliding windows have
    outputs: int | None = None  # tokens whose logits are wanted; None: all
    flash_attention: bool = True
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    mixes_embeddings: bool = True  # room for ready-made embeddings beside tokens, since 2026
    casts_mask: bool = False  # the mask comes in 32 bits and is cast once, until 2025
    fuses: bool = False  # CUDA adds up a token's experts in one kernel, which reads what came before their weighing
    copies: int = 1  # of every input; llama.cpp makes 4 when whole models run over several GPUs as a pipeline


@dataclass(slots=True)
class GraphBuilder:
    """A graph being drawn; every method adds to it and returns the handle of a result."""

    batch: MicroBatch
    tokens: int  # rows of what is drawn next; the last layer goes on with the wanted outputs alone
    steps: list[GraphOp] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    inputs: dict[str, int] = field(default_factory=dict)
    casts: dict[int, int] = field(default_factory=dict)

    def add(self, name: str, per_token: int, *reads: int, in_place: bool = False, keep: bool = False) -> int:
        """A result of `per_token` 32-bit numbers for each token."""
        return self._push(name, GraphOp(per_token * self.tokens * F32, reads, in_place=in_place, keep=keep))

    def block(self, name: str, size: int, *reads: int) -> int:
        """A result of `size` bytes, or a copy of as many."""
        return self._push(name, GraphOp(size, reads))

    def view(self, read: int) -> int:
        """Another look at a result; nothing can be written over through it."""
        owner = self.steps[read].view_of
        return self._push("view", GraphOp(0, (read,), view_of=read if owner is None else owner))

    def input(self, name: str, size: int) -> int:
        """Something that is filled in before the graph runs; asked for twice, it is the same."""
        if name not in self.inputs:
            copied = self.batch.copies > 1
            handles = [self._push(name, GraphOp(size, is_input=True, keep=copied)) for _ in range(self.batch.copies)]
            self.inputs[name] = handles[0]
        return self.inputs[name]

    def cast(self, read: int) -> int:
        """A result in half its bits; asked for twice, it is the same."""
        if read not in self.casts:
            self.casts[read] = self.block("cast", self.steps[read].bytes // 2, read)
        return self.casts[read]

    def store(self, *reads: int) -> int:
        """A write into the cache."""
        return self._push("store", GraphOp(0, reads, external=True))

    def hold(self, *reads: int) -> int:
        """Nothing but a reader, that keeps results alive until here."""
        return self._push("held", GraphOp(0, reads, external=True))

    def norm(self, read: int, size: int) -> int:
        """Normalise, then multiply by the weights."""
        return self.add("norm", size, self.add("norm", size, read, in_place=True), in_place=True)

    def _push(self, name: str, step: GraphOp) -> int:
        self.steps.append(step)
        self.names.append(name)
        return len(self.steps) - 1
