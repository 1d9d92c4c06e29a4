"""Prefix cache: records the tokens in the KV cells, finds reusable prefixes of a prompt, and evicts old ones.

`PrefixCache` changes the KV cache through `CellOps` and orders uses by ordinals. It knows no clock, no priorities and
no llama.cpp; `StepScheduler` decides which request runs when.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from tokenmill.native.kv.radix import TokenArray, as_tokens, common
from tokenmill.native.kv.sequence_pool import CellOps, SequencePool, SequenceUse

KeepPolicy = Literal["nothing", "prompt", "all"]
# llama.cpp walks all cells for each cut, so evictions have a minimum size, which is a small part of the cache.
_MOST_EVICTED = 256
_EVICTED_SHARE = 32
_MAX_LEADERS = 512  # unfinished prompts that are compared with a new one, newest first: neighbours share most


@dataclass(frozen=True, slots=True)
class Match:
    """The cached part of a prompt, and the part that a running sequence is computing."""

    ready: int  # leading tokens that can be reused now
    coming: int  # leading tokens that are cached or that `leader` is going to compute
    leader: int | None = None  # the running sequence that computes them; None: no sequence does


SHOWN_TOKENS = 24  # of each segment, in `CachedPrefix.beginning`


@dataclass(frozen=True, slots=True)
class OpenedSequence:
    """A new running sequence."""

    sequence: int
    reused: int  # tokens of its prompt that were cached


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """One segment of the prefix tree, for display."""

    depth: int  # number of segments above it
    start: int  # position of its first token
    tokens: int
    hits: int  # sequences that reused it or a part of it
    pinned: bool
    locked: bool  # a running sequence needs it
    last_used: int  # ordinal: larger is later
    beginning: tuple[int, ...]  # its first tokens


class PrefixCache:
    """Cached prefixes of prompts, shared by running sequences and retained for later ones.

        tree of segments                                cells (each has a position and a set of sequences)
        root                                            positions    owned by
        └── [0,100) the digest, forked                  0 to 99      {0, 1, 2}
            ├── [100,132) prompt and answer of 0        100 to 131   {0}
            ├── [100,108) of 1, with 40 more to come    100 to 107   {1}
            └── 2, retained, ends at 100

    A sequence owns the cells of its whole path; a running sequence locks them. A *retained* sequence is the id of a
    closed one that still owns a path which no other sequence does; it is released when another retained sequence ends
    below it. Eviction cuts the least recently used idle leaves from their ends, so a prefix is evicted after its tails.

    Idle cells are not free, because attention reads them in every step. So below a fork (a point where two sequences
    diverged, or the root) only two kinds of tails of batch requests are retained: the newest, because jobs are
    submitted depth first and the next one shares most with it, though it may not be queued yet; and those that a
    queued prompt begins with, because several requests run concurrently: if eight of them each compute a different
    prefix first and end together, all eight prefixes are needed.
    """

    def __init__(
        self,
        cells: CellOps,
        *,
        total_cells: int,
        sequences: int,
        shares: bool,
        cuts: bool = True,
        streams: bool = False,
        least_copied: int = 1,
    ) -> None:
        """Create an empty cache.

        shares: sequences can share cells.
        cuts: sequences can be cut back to any position. If not, a prefix can be reused only where a sequence ends: at
        the positions where `keep_state` was called.
        streams: each sequence has cells of its own, and reuses them or a copy of another sequence's.
        least_copied: minimum tokens that such a copy must save.
        """
        self.total_cells = total_cells
        self.sequences = sequences
        self.shares = shares
        self.cuts = cuts or not shares  # without sharing, no state is kept
        self.streams = streams
        self.evicted = 0  # tokens evicted since the start
        self._cells = cells
        self._least_evicted = max(1, min(_MOST_EVICTED, total_cells // _EVICTED_SHARE))
        self._least_copied = least_copied
        self._reserved: set[int] = set()
        self._reset()

    def clear(self) -> None:
        """Forget all sequences and prefixes after the KV cache was emptied or rebuilt. Pins stay."""
        pins = self._pool.pins
        self._reset()
        self._pool.pins = pins
        self._reserved.clear()

    def _reset(self) -> None:
        self._pool = SequencePool(
            self._cells, self.sequences, cuts=self.cuts, streams=self.streams, least_copied=self._least_copied
        )
        self._tree = self._pool.tree
        self._prefilling: dict[int, None] = {}  # running sequences whose prompt is not complete, oldest first

    @property
    def used(self) -> int:
        """Number of cells in use."""
        return self._tree.size

    @property
    def free(self) -> int:
        """Number of empty cells."""
        return self.total_cells - self._tree.size

    @property
    def available(self) -> int:
        """Number of cells that are empty or can be evicted."""
        pinned = self._pool.pinned_nodes() if self._pool.pins else {}
        idle = sum(end - node.start for node, end in pinned.items() if not node.locks)
        return self.total_cells - self._tree.locked_tokens - idle

    def length(self, sequence: int) -> int:
        """Return how many tokens of a sequence are in the cells."""
        return self._tree.ends[sequence].end

    def match(self, tokens: Sequence[int]) -> Match:
        """Find the cached part of a prompt; never its last token, whose logits are needed.

        A leader that cannot be cut back must stop where the prompts diverge: see `keep_state`.
        """
        if not self.shares and not self.streams:
            return Match(0, 0)
        wanted = as_tokens(tokens)
        limit = len(wanted) - 1
        ready = self._pool.find(wanted, limit)[1] if self.shares else self._pool.longest_source(wanted)[1]
        coming = ready
        leader = None
        for sequence in islice(reversed(self._prefilling), _MAX_LEADERS):
            prompt = self._pool.uses[sequence].prompt
            # Without the next token after `coming` it cannot match more: a cheap test that mostly fails.
            if coming < min(limit, len(prompt)) and prompt[coming] == wanted[coming]:
                shared = common(prompt, wanted, 0, limit)
                if shared >= coming + self._least_copied and (self.cuts or self.length(sequence) <= shared):
                    coming = shared
                    leader = sequence
        return Match(ready, coming, leader)

    def fits(self, tokens: Sequence[int], more: int) -> bool:
        """Whether a prompt and `more` further cells fit in the available cells."""
        wanted = as_tokens(tokens)
        node, ready = self._pool.find(wanted, len(wanted) - 1) if self.shares else (self._tree.root, 0)
        pinned = self._pool.pinned_nodes()
        would_lock = sum(
            max(0, min(above.end, ready) - pinned.get(above, above.start)) for above in node.upward() if not above.locks
        )
        return len(wanted) - ready + more <= self.available - would_lock

    def find(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Return a sequence that owns the longest cached prefix of these tokens, and the length of that prefix."""
        wanted = as_tokens(tokens)
        node, reached = self._pool.find(wanted, len(wanted)) if self.shares else (self._tree.root, 0)
        return (next(iter(self._pool.owners(node))), reached) if reached else None

    def segments(self) -> list[CachedPrefix]:
        """Return every segment of the prefix tree."""
        pinned = self._pool.pinned_nodes()
        return [
            CachedPrefix(
                depth=sum(1 for _ in node.upward()) - 1,
                start=node.start,
                tokens=len(node.tokens),
                hits=node.hits,
                pinned=node in pinned,
                locked=bool(node.locks),
                last_used=node.last_used,
                beginning=tuple(int(token) for token in node.tokens[:SHOWN_TOKENS]),
            )
            for node in self._tree.nodes()
        ]

    def open(self, tokens: Sequence[int]) -> OpenedSequence | None:
        """Start a sequence with the cached prefix of its prompt, and lock that prefix; None if no id is available.

        If all ids are in use, the least recently used retained sequence is released.
        """
        wanted = as_tokens(tokens)
        limit = len(wanted) - 1 if self.shares else 0
        node, ready = self._pool.find(wanted, limit)
        before = self.used
        claimed = self._pool.claim(node, ready)
        self.evicted += before - self.used
        if claimed is None:
            return None
        sequence, owns_prefix = claimed
        use = SequenceUse(wanted, running=True)
        if owns_prefix:
            prefix = self._tree.ends[sequence]
            splits = False
            self._pool.resume(sequence, use)
        else:
            node, ready = self._pool.find(wanted, limit)  # again: `claim` may have released a sequence and its nodes
            splits = ready < node.end
            prefix = self._pool.begin(sequence, node, ready, use)
            ready += self._pool.reuse_stream(sequence)
        self._pool.touch(prefix, hits=1)
        prefix.forked |= splits
        self._prefilling[sequence] = None
        return OpenedSequence(sequence, ready)

    def record_prefill(self, sequence: int, count: int) -> None:
        """Record that the next `count` tokens of a prompt were computed: other sequences can reuse them from now on."""
        start = self.length(sequence)
        prompt = self._pool.uses[sequence].prompt
        self._tree.extend(sequence, prompt[start : start + count])
        if start + count >= len(prompt):
            self._prefilling.pop(sequence, None)

    def keep_state(self, sequence: int) -> None:
        """Retain the prefix that a running sequence has computed so far, so that others can continue from there.

        Only needed if sequences cannot be cut back. Without an available id, nothing is retained.
        """
        before = self.used
        self._pool.keep_state(sequence)
        self.evicted += before - self.used

    def record_token(self, sequence: int, token: int) -> None:
        """Record that a token after the prompt was computed."""
        self._tree.extend(sequence, array("i", (token,)))

    def close(
        self, sequence: int, keep: KeepPolicy, *, prompt_tokens: int | None = None, wanted: Iterable[TokenArray] = ()
    ) -> None:
        """End a running sequence and retain the part that `keep` names; pinned tokens are retained in any case.

        keep: "prompt" also drops older tails of batch requests below the last fork.
        prompt_tokens: length of the prompt; by default that of the tokens with which the sequence was opened.
        wanted: queued prompts; the tails that they begin with are not dropped.
        """
        use = self._pool.uses[sequence]
        length = self.length(sequence)
        end = length if keep == "all" else 0
        fork = None
        if keep == "prompt":
            end = min(length, len(use.prompt) if prompt_tokens is None else prompt_tokens)
            fork = self._pool.last_fork(sequence, end)
        end = max(end, self._pool.pinned_length(sequence)) if self.shares else 0
        self._stop(sequence)
        use.from_batch = keep != "all"
        self._pool.touch(self._tree.ends[sequence])
        self._pool.retain(sequence, end)
        if fork is not None:
            self._pool.drop_tails(fork, wanted)

    def pause(self, sequence: int) -> None:
        """Stop a running sequence and retain all of it until it is opened again."""
        self._stop(sequence).paused = True
        self._pool.touch(self._tree.ends[sequence])
        self._pool.retain(sequence, self.length(sequence) if self.shares else 0)

    def _stop(self, sequence: int) -> SequenceUse:
        self._prefilling.pop(sequence, None)
        return self._pool.idle(sequence)

    def release_paused(self, tokens: Sequence[int]) -> None:
        """Release the sequence that was paused with these tokens, except for pinned ones: it will not be resumed."""
        wanted = as_tokens(tokens)
        paused = self._pool.paused_at(*self._pool.find(wanted, len(wanted)))
        if paused is not None:
            self._pool.uses[paused].paused = False
            self._pool.retain(paused, self._pool.pinned_length(paused))

    def make_room(self, count: int) -> bool:
        """Free `count` cells by evicting idle ones, oldest first; False, without evicting any, if there are too few."""
        if count <= self.free:
            return True
        if count > self.available:
            return False
        while self.free < count:
            self.evicted += self._pool.evict(count - self.free, self._least_evicted)
        return True

    def padding_position(self, sequence: int) -> int:
        """Return the position at which an idle stream can compute a padding token; `remove_padding` must follow."""
        return self._pool.padding_position(sequence, self.total_cells // self.sequences)

    def remove_padding(self, sequence: int, position: int) -> None:
        """Remove the padding token of an idle stream."""
        self._cells.cut(sequence, position)

    def pin(self, tokens: Sequence[int]) -> None:
        """Never evict this prefix, cached now or later. Pinning it again has no effect."""
        wanted = as_tokens(tokens)
        self._pool.pins[wanted.tobytes()] = wanted[:]

    def unpin(self, tokens: Sequence[int]) -> None:
        """Allow a prefix to be evicted again, if it was pinned."""
        self._pool.pins.pop(as_tokens(tokens).tobytes(), None)

    @property
    def pins(self) -> tuple[TokenArray, ...]:
        """The pinned prefixes."""
        return tuple(self._pool.pins.values())

    def reserve_id(self) -> int | None:
        """Return an empty id into which a saved prefix can be loaded; None if no id is available.

        It must be passed to `adopt` or `release_id`.
        """
        before = self.used
        claimed = self._pool.claim(self._tree.root, 0) if self.shares else None
        self.evicted += before - self.used
        if claimed is None:
            return None
        self._reserved.add(claimed[0])
        return claimed[0]

    def adopt(self, sequence: int, tokens: Sequence[int]) -> None:
        """Record that a reserved id was loaded with these tokens. There must have been room for them."""
        wanted = as_tokens(tokens)
        self._reserved.remove(sequence)
        use = SequenceUse(array("i"), running=False)
        node, reached = self._pool.find(wanted, len(wanted))
        if reached == len(wanted):  # cached already: drop the loaded copy
            self._cells.cut(sequence, 0)
            self._pool.begin(sequence, node, reached, use)
        else:
            self._pool.begin(sequence, self._tree.root, 0, use)
            self._tree.extend(sequence, wanted)
        self._pool.touch(self._tree.ends[sequence])
        self._pool.retain(sequence, len(wanted))

    def release_id(self, sequence: int) -> None:
        """Return a reserved id that was not loaded."""
        self._reserved.remove(sequence)
        self._pool.put_back(sequence)
