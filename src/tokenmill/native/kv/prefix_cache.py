"""Which tokens lie in the KV cells, what of a prompt need not be computed, and what goes when room is needed.

It knows tokens, cells and sequence ids, acts through `Cells`, and orders by ordinals. It knows no clock, no priority
and no llama.cpp; what runs when is the schedule's business.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tokenmill.native.kv.radix import TokenArray, as_tokens, common
from tokenmill.native.kv.sequence_pool import CellOps, SequencePool, SequenceUse

KeepPolicy = Literal["nothing", "prompt", "all"]
# A cut walks every cell of the cache, so room is made in pieces worth the walk, but never a large part of the cache.
_MOST_TRIMMED = 256
_TRIMMED_SHARE = 32


@dataclass(frozen=True, slots=True)
class Match:
    """How much of a prompt need not be computed."""

    ready: int  # leading tokens that can be copied now
    coming: int  # leading tokens that are there, or that `leader` has promised to compute
    leader: int | None = None  # the sequence that computes them; None: nothing more is coming


@dataclass(frozen=True, slots=True)
class Opened:
    """A new running sequence."""

    sequence: int
    reused: int  # tokens it begins with


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """One segment of the forest, for a person to look at."""

    depth: int  # segments above it
    start: int  # position of its first token
    tokens: int
    hits: int  # sequences that began with a copy of it, or of a part
    pinned: bool
    locked: bool  # a running sequence needs it
    last_used: int  # an ordinal: larger is later


class PrefixCache:
    """Heads of prompts in the cells, shared by running sequences and kept for later ones.

        tree of segments                                cells (each has a position and a set of sequences)
        root                                            positions    held by
        └── [0,100) the digest, forked                  0 to 99      {0, 1, 2}
            ├── [100,132) prompt and answer of 0        100 to 131   {0}
            ├── [100,108) of 1, which promised 40 more  100 to 107   {1}
            └── 2, an idle keeper, ends at 100

    A sequence holds the cells of its whole path, and running ones lock theirs. A *keeper* is the id of a closed
    sequence that goes on holding a path which nothing else would keep; one with another keeper below it is let go.
    Room is made by cutting the least recently used idle leaves from their ends, so a head outlives its tails.

    Idle cells are not free: attention walks over them at every step. So of the tails that batch work leaves beyond a
    fork (a point where two sequences have parted, and the root) only the newest stays, and those that a prompt which
    waits will begin with. The newest, because jobs come depth first: nobody shares more with the next one, though it
    may not be here yet. The others, because several are at work at once: where eight of them are the first of a
    digest each and end together, all eight are wanted.
    """

    def __init__(
        self,
        cells: CellOps,
        *,
        total_cells: int,
        sequences: int,
        shares: bool,
        streams: bool = False,
        least_copied: int = 1,
    ) -> None:
        """`streams`: each sequence has cells of its own; it begins with what is there, or with a copy of another's.

        `least_copied`: tokens that such a copy must save.
        """
        self.total_cells = total_cells
        self.sequences = sequences
        self.shares = shares
        self.streams = streams
        self.evicted = 0  # tokens dropped to make room, ever
        self._cells = cells
        self._least_trimmed = max(1, min(_MOST_TRIMMED, total_cells // _TRIMMED_SHARE))
        self._least_copied = least_copied
        self._taken: set[int] = set()
        self._begin_anew()

    def clear(self) -> None:
        """Forget all sequences and heads, because the cache was emptied or built anew; mutates. Pins stay."""
        pins = self._holders.pins
        self._begin_anew()
        self._holders.pins = pins
        self._taken.clear()

    def _begin_anew(self) -> None:
        """Nobody holds anything; mutates."""
        self._holders = SequencePool(self._cells, self.sequences, leaves=self.streams, least_copied=self._least_copied)
        self._tree = self._holders.tree

    @property
    def used(self) -> int:
        """Cells that hold something. Mutates nothing."""
        return self._tree.size

    @property
    def free(self) -> int:
        """Cells that hold nothing. Mutates nothing."""
        return self.total_cells - self._tree.size

    @property
    def available(self) -> int:
        """Cells that are free, or would be if everything idle went. Mutates nothing."""
        locked = self._holders.locked()
        kept = sum(len(node.tokens) for node in locked)
        kept += sum(end - node.start for node, end in self._holders.guarded().items() if node not in locked)
        return self.total_cells - kept

    def length(self, sequence: int) -> int:
        """Tokens a sequence has in the cells. Mutates nothing."""
        return self._tree.ends[sequence].end

    def look(self, tokens: Sequence[int]) -> Match:
        """How much of a prompt is there or coming; never its last token, whose logits are wanted. Mutates nothing."""
        if not self.shares and not self.streams:
            return Match(0, 0)
        wanted = as_tokens(tokens)
        limit = len(wanted) - 1
        ready = self._tree.walk(wanted, limit)[1] if self.shares else self._holders.head_for(wanted)[1]
        coming = ready
        leader = None
        for sequence, held in self._holders.held.items():
            prompt = held.prompt
            # Without the token right after what is known to come, it cannot give more: a cheap test that mostly fails.
            if held.running and coming < min(limit, len(prompt)) and prompt[coming] == wanted[coming]:
                promised = common(prompt, wanted, 0, limit)
                if promised >= coming + self._least_copied:
                    coming = promised
                    leader = sequence
        return Match(ready, coming, leader)

    def fits(self, tokens: Sequence[int], more: int) -> bool:
        """Whether a prompt and `more` cells beside it could be had from what is free or idle. Mutates nothing."""
        wanted = as_tokens(tokens)
        node, ready = self._tree.walk(wanted, len(wanted) - 1) if self.shares else (self._tree.root, 0)
        locked = self._holders.locked()
        guarded = self._holders.guarded()
        would_lock = sum(
            max(0, min(above.end, ready) - guarded.get(above, above.start))
            for above in node.upward()
            if above not in locked
        )
        return len(wanted) - ready + more <= self.available - would_lock

    def holder(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """A sequence that holds the longest cached head of these tokens, and that length. Mutates nothing."""
        wanted = as_tokens(tokens)
        node, reached = self._tree.walk(wanted, len(wanted)) if self.shares else (self._tree.root, 0)
        return (next(node.holders()), reached) if reached else None

    def heads(self) -> list[CachedPrefix]:
        """Every segment. Mutates nothing."""
        locked = self._holders.locked()
        guarded = self._holders.guarded()
        return [
            CachedPrefix(
                depth=sum(1 for _ in node.upward()) - 1,
                start=node.start,
                tokens=len(node.tokens),
                hits=node.hits,
                pinned=node in guarded,
                locked=node in locked,
                last_used=node.last_used,
            )
            for node in self._tree.nodes()
        ]

    def open(self, tokens: Sequence[int]) -> Opened | None:
        """Begin a sequence with what is cached of its prompt; None where no id can be had.

        Mutates: copies the head, locks it and promises the rest. Where ids are short, the oldest keeper goes.
        """
        wanted = as_tokens(tokens)
        limit = len(wanted) - 1 if self.shares else 0
        node, ready = self._tree.walk(wanted, limit)
        before = self.used
        claimed = self._holders.claim(node, ready)
        self.evicted += before - self.used
        if claimed is None:
            return None
        sequence, holds_head = claimed
        held = SequenceUse(wanted, running=True)
        if holds_head:
            head = self._tree.ends[sequence]
            splits = False
            self._holders.held[sequence] = held
        else:
            node, ready = self._tree.walk(wanted, limit)  # a keeper may have gone, and nodes with it
            splits = ready < node.end
            head = self._holders.begin(sequence, node, ready, held)
            ready += self._holders.take_up(sequence)
        self._holders.touch(head, hits=1)
        head.forked |= splits
        return Opened(sequence, ready)

    def filled(self, sequence: int, count: int) -> None:
        """The next `count` tokens of a prompt have been computed; mutates: others may copy them now."""
        start = self.length(sequence)
        self._tree.extend(sequence, self._holders.held[sequence].prompt[start : start + count])

    def appended(self, sequence: int, token: int) -> None:
        """A token beyond the prompt has been computed; mutates."""
        self._tree.extend(sequence, array("i", (token,)))

    def close(
        self, sequence: int, keep: KeepPolicy, *, prompt_tokens: int | None = None, wanted: Iterable[TokenArray] = ()
    ) -> None:
        """End a running sequence; mutates: what is kept is idle from now on, and what is pinned is kept anyway.

        The prompt is what it was opened with, unless another number of tokens is given. Older tails go, but for those
        that `wanted` prompts will begin with.
        """
        held = self._holders.held[sequence]
        length = self.length(sequence)
        end = length if keep == "all" else 0
        fork = None
        if keep == "prompt":
            end = min(length, len(held.prompt) if prompt_tokens is None else prompt_tokens)
            fork = self._holders.last_fork(sequence, end)
        end = max(end, self._holders.guarded_length(sequence)) if self.shares else 0
        held.running = False
        held.from_batch = keep != "all"
        self._holders.touch(self._tree.ends[sequence])
        self._holders.settle(sequence, end)
        if fork is not None:
            self._holders.drop_tails(fork, wanted)

    def pause(self, sequence: int) -> None:
        """Stop a running sequence that will be opened again with all it has; mutates: that is idle until then."""
        held = self._holders.held[sequence]
        held.running = False
        held.paused = True
        self._holders.touch(self._tree.ends[sequence])
        self._holders.settle(sequence, self.length(sequence) if self.shares else 0)

    def forget(self, tokens: Sequence[int]) -> None:
        """Let go of what was paused with these tokens, unless it is pinned: nobody comes back for it; mutates."""
        wanted = as_tokens(tokens)
        paused = self._holders.paused_at(*self._tree.walk(wanted, len(wanted)))
        if paused is not None:
            self._holders.held[paused].paused = False
            self._holders.settle(paused, self._holders.guarded_length(paused))

    def room(self, count: int) -> bool:
        """Make `count` cells free; mutates: idle cells go, oldest tails first. If it cannot: False, and none goes."""
        if count <= self.free:
            return True
        if count > self.available:
            return False
        while self.free < count:
            self.evicted += self._holders.evict(count - self.free, self._least_trimmed)
        return True

    def pin(self, tokens: Sequence[int]) -> None:
        """Never evict what is, or will be, cached of this head; mutates. Pinning twice is pinning once."""
        wanted = as_tokens(tokens)
        self._holders.pins[wanted.tobytes()] = wanted[:]

    def unpin(self, tokens: Sequence[int]) -> None:
        """Let a head be evicted again if it was pinned; mutates."""
        self._holders.pins.pop(as_tokens(tokens).tobytes(), None)

    @property
    def pins(self) -> tuple[TokenArray, ...]:
        """The pinned heads. Mutates nothing."""
        return tuple(self._holders.pins.values())

    def take(self) -> int | None:
        """An empty id to load a saved head into; mutates: the oldest keeper may go. None where there is none."""
        before = self.used
        claimed = self._holders.claim(self._tree.root, 0) if self.shares else None
        self.evicted += before - self.used
        if claimed is None:
            return None
        self._taken.add(claimed[0])
        return claimed[0]

    def adopted(self, sequence: int, tokens: Sequence[int]) -> None:
        """A taken id has been loaded with these tokens, for which there was room; mutates: they are idle now."""
        wanted = as_tokens(tokens)
        self._taken.remove(sequence)
        held = SequenceUse(array("i"), running=False)
        node, reached = self._tree.walk(wanted, len(wanted))
        if reached == len(wanted):  # it is there already, and once is enough
            self._cells.cut(sequence, 0)
            self._holders.begin(sequence, node, reached, held)
        else:
            self._holders.begin(sequence, self._tree.root, 0, held)
            self._tree.extend(sequence, wanted)
        self._holders.touch(self._tree.ends[sequence])
        self._holders.settle(sequence, len(wanted))

    def given_back(self, sequence: int) -> None:
        """A taken id was not loaded after all; mutates."""
        self._taken.remove(sequence)
        self._holders.put_back(sequence)
