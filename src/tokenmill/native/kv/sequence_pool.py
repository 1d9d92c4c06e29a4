"""Sequence ids and the cells they own: running sequences, retained sequences and pins.

`SequencePool` keeps the prefix tree and the KV cache in step: every change of the tree that frees cells or ids is made
here, together with the same change of the cache. `PrefixCache` decides when to evict; this module picks the cells.
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from typing import Protocol

from tokenmill.native.kv.radix import RadixNode, RadixTree, TokenArray, common

_EMPTY: TokenArray = array("i")
_MAX_SOURCES = 128  # running and released streams each that are compared with a prompt


class CellOps(Protocol):
    """Operations on the cells of a KV cache that need no computation."""

    def copy(self, source: int, target: int, end: int) -> None:
        """Make `target` own the cells that `source` has before position `end`, and no others.

        `target` must be empty, unless each sequence has cells of its own.
        """

    def cut(self, sequence: int, start: int) -> object:
        """Release a sequence's cells from position `start` on."""


@dataclass(slots=True)
class SequenceUse:
    """The current use of a sequence id."""

    prompt: TokenArray  # of a running sequence: the tokens that it is going to compute
    running: bool
    from_batch: bool = False  # retained after a batch request: no later prompt needs its tokens after the last fork
    paused: bool = False  # retained after a preemption: its request resumes with all of it


class SequencePool:
    """The prefix tree and the sequence ids that own its cells.

    A *retained* sequence is idle: its request has ended, and its id keeps a cached prefix that no other sequence owns.
    If sequences cannot be cut back, a retained sequence is a state: it can be reused only where it ends, and none makes
    another redundant.
    """

    def __init__(
        self, cells: CellOps, sequences: int, *, cuts: bool = True, streams: bool = False, least_copied: int = 1
    ) -> None:
        """Create `sequences` empty ids.

        cuts: sequences can be cut back to any position.
        streams: each id has cells of its own, and a released id keeps them, for copies, until it is used again.
        least_copied: minimum tokens that a copy from another id must save.
        """
        self.tree = RadixTree()
        self.uses: dict[int, SequenceUse] = {}
        self._retained: set[int] = set()  # idle sequences among `uses`
        self.pins: dict[bytes, TokenArray] = {}
        self._cuts = cuts
        self._streams = streams
        self._released = dict[int, TokenArray]()  # by id: tokens that are still in its stream
        self._least_copied = least_copied
        self._cells = cells
        self._unused = list(range(sequences))
        self._ordinal = 0

    # -- reading -----------------------------------------------------------------------------------------------------

    def find(self, tokens: TokenArray, limit: int) -> tuple[RadixNode, int]:
        """Return the node and the position up to which the cached prefix of tokens[:limit] can be reused."""
        return self.tree.walk(tokens, limit, to_end=not self._cuts)

    def owners(self, node: RadixNode) -> Iterable[int]:
        """Return the sequences from which the prefix that ends with a node can be copied."""
        return node.sequences_through() if self._cuts else node.sequences

    def pinned_nodes(self) -> dict[RadixNode, int]:
        """Return the nodes that pins protect, each with the position up to which it is protected."""
        nodes: dict[RadixNode, int] = {}
        for pin in self.pins.values():
            node, reached = self.find(pin, len(pin))
            for above in node.upward():
                nodes[above] = max(nodes.get(above, 0), min(above.end, reached))
        return nodes

    def pinned_length(self, sequence: int) -> int:
        """Return how many leading tokens of a sequence are pinned."""
        if not self.pins:
            return 0
        pinned = self.pinned_nodes()
        return max((pinned.get(node, 0) for node in self.tree.ends[sequence].upward()), default=0)

    def last_fork(self, sequence: int, end: int) -> RadixNode:
        """Return the deepest forked node on a sequence's path that ends at or before `end`, or the root."""
        path = self.tree.ends[sequence].upward()
        return next((node for node in path if node.forked and node.end <= end), self.tree.root)

    def paused_at(self, node: RadixNode, position: int) -> int | None:
        """Return the paused sequence that ends at exactly this position, if there is one."""
        if position != node.end:
            return None
        return next((sequence for sequence in node.sequences if self.uses[sequence].paused), None)

    # -- changing paths ----------------------------------------------------------------------------------------------

    def touch(self, node: RadixNode, *, hits: int = 0) -> None:
        """Mark a whole path as used now, so that no node is older than one below it."""
        self._ordinal += 1
        for above in node.upward():
            above.last_used = self._ordinal
            above.hits += hits

    def begin(self, sequence: int, node: RadixNode, position: int, use: SequenceUse) -> RadixNode:
        """Give an empty sequence the path down to `position` of a node, and return the node in which it ends."""
        end = self.tree.attach(sequence, node, position)
        self.uses[sequence] = use
        if use.running:
            self.tree.lock(sequence)
        else:
            self._retained.add(sequence)
        if position:
            self._cells.copy(next(other for other in self.owners(end) if other != sequence), sequence, position)
        return end

    def keep_state(self, sequence: int) -> None:
        """Retain a copy of a running sequence as it is now, unless there is one or no id is available."""
        node = self.tree.ends[sequence]
        if self._retained.isdisjoint(node.sequences):
            self.touch(node)
            claimed = self.claim(self.tree.root, 0)
            if claimed is not None:
                self.begin(claimed[0], node, node.end, SequenceUse(_EMPTY, running=False))

    def reuse_stream(self, sequence: int) -> int:
        """Give an empty sequence the longest prefix that `longest_source` finds, and return its length."""
        prompt = self.uses[sequence].prompt
        source, count = self.longest_source(prompt, sequence)
        former = self._released.pop(sequence, None)
        if source is not None:
            self._cells.copy(source, sequence, count)
        elif former is not None:
            self._cells.cut(sequence, count)
        if count:
            self.tree.extend(sequence, prompt[:count])
        return count

    def longest_source(self, prompt: TokenArray, sequence: int | None = None) -> tuple[int | None, int]:
        """Return where `sequence`, by default the next unused id, gets the longest prefix of a prompt, and its length.

        The source is None for its own stream, else the id whose cells are worth a copy. The last token of the prompt
        never counts, because its logits are needed.
        """
        if sequence is None and self._unused:
            sequence = self._unused[0]
        former = self._released.get(sequence, _EMPTY) if sequence is not None else _EMPTY
        limit = len(prompt) - 1
        source = None
        longest = common(former, prompt, 0, limit)
        least = longest + self._least_copied
        for other, tokens in self._sources():
            # Without the next token after the longest match it cannot match more: a cheap test that mostly fails.
            if other != sequence and longest < min(limit, len(tokens)) and tokens[longest] == prompt[longest]:
                same = common(tokens, prompt, 0, limit)
                if same > longest and same >= least:
                    source = other
                    longest = same
        return source, longest

    def _sources(self) -> Iterator[tuple[int, TokenArray]]:
        """The streams from which a prefix can be copied; of many, those that were opened or released last.

        Jobs come depth first, so the ones before share most with the next.
        """
        if not self._streams:
            return
        running = ((other, self.tree.ends[other].tokens) for other in islice(reversed(self.uses), _MAX_SOURCES))
        yield from islice(reversed(self._released.items()), _MAX_SOURCES)
        yield from running

    def padding_position(self, sequence: int, cells: int) -> int:
        """Return the position after the tokens that an idle stream still has; a full stream of `cells` is emptied."""
        length = len(self._released.get(sequence, _EMPTY))
        if length < cells:
            return length
        del self._released[sequence]
        self._cells.cut(sequence, 0)
        return 0

    def resume(self, sequence: int, use: SequenceUse) -> None:
        """Let a retained sequence run."""
        self._retained.remove(sequence)
        self.uses[sequence] = use
        self.tree.lock(sequence)

    def idle(self, sequence: int) -> SequenceUse:
        """Stop a running sequence, which `retain` must follow."""
        use = self.uses[sequence]
        use.running = False
        self.tree.unlock(sequence)
        self._retained.add(sequence)
        return use

    def release(self, sequence: int) -> None:
        """Remove an idle sequence and free its id."""
        self.tree.detach(sequence)
        self._retained.discard(sequence)
        del self.uses[sequence]
        self.put_back(sequence)

    def put_back(self, sequence: int) -> None:
        """Empty an id that is not in the tree and make it available."""
        if sequence not in self._released:
            self._cells.cut(sequence, 0)
        heappush(self._unused, sequence)

    def retain(self, sequence: int, position: int) -> None:
        """Shorten an idle sequence to `position`, and release every retained sequence that it makes redundant.

        Only one retained sequence stays on a path: the one that ends deepest. Running sequences below do not count,
        because they may end without retaining anything. A sequence that cannot be shortened is released.
        """
        if self._streams:
            self._released[sequence] = self.tree.ends[sequence].tokens[:]  # with streams, a path is a single node
        is_shorter = position < self.tree.ends[sequence].end
        if is_shorter:
            self.tree.retreat(sequence, position if self._cuts else 0)
        node = self.tree.ends[sequence]
        if node is self.tree.root or self._is_redundant(sequence, node):
            self.release(sequence)
            return
        if is_shorter:
            self._cells.cut(sequence, position)
        if self._cuts:
            others = [other for above in node.upward() for other in above.sequences if other != sequence]
            for other in self._retained.intersection(others):
                self.release(other)

    def _is_redundant(self, sequence: int, node: RadixNode) -> bool:
        """Whether another retained sequence provides the path down to a node."""
        others = self._retained - {sequence}
        if not self._cuts:
            return not others.isdisjoint(node.sequences)
        return any(node in self.tree.ends[other].upward() for other in others)

    def drop_tails(self, fork: RadixNode, wanted: Iterable[TokenArray]) -> None:
        """Drop the tails of batch requests below a fork, except the newest and those that `wanted` prompts continue."""
        ends = dict.fromkeys(self.tree.ends[sequence] for sequence in sorted(self._retained))
        tails = [node for node in ends if node.parent is fork and self._is_batch_tail(node)]
        if len(tails) < 2:
            return
        prompts = [prompt for prompt in wanted if _continues(prompt, fork)]
        newest = max(tails, key=lambda child: child.last_used)
        for child in tails:
            if child is not newest and not any(prompt[fork.end] == child.tokens[0] for prompt in prompts):
                (sequence,) = child.sequences
                self.retain(sequence, max(fork.end, self.pinned_length(sequence)))

    def evict(self, wanted: int, least: int) -> int:
        """Cut the end of the least recently used idle leaf, and return how many tokens were evicted.

        It cuts `wanted` tokens and at least `least`, but never more than the leaf has or a pin allows. A sequence that
        cannot be cut back is released.
        """
        pinned = self.pinned_nodes()
        leaves = ((sequence, self.tree.ends[sequence]) for sequence in self.uses if sequence in self._retained)
        sequence, leaf = min(
            (
                (sequence, leaf)
                for sequence, leaf in leaves
                if not leaf.children and len(leaf.sequences) == 1 and leaf.end > pinned.get(leaf, leaf.start)
            ),
            key=lambda found: found[1].last_used,
        )
        count = min(leaf.end - pinned.get(leaf, leaf.start), max(wanted, least))
        before = self.tree.size
        self.retain(sequence, leaf.end - count)
        return before - self.tree.size

    # -- ids ---------------------------------------------------------------------------------------------------------

    def claim(self, prefix: RadixNode, reached: int) -> tuple[int, bool] | None:
        """Return an id for a new sequence and whether it owns its prefix already; None if no id is available.

        If all ids are in use, the least recently used retained sequence is released. If it is the only owner of the
        prefix, the new sequence takes it over instead, as it does a sequence that was paused there. A state that cannot
        be cut back is taken over last, because no other sequence could use it any more, and never if it is pinned.
        """
        paused = self.paused_at(prefix, reached)
        if paused is not None and (self._cuts or self._is_releasable(paused, {})):
            return paused, True
        if self._unused:
            return heappop(self._unused), False
        pinned = self.pinned_nodes()
        only_owner = set(self.owners(prefix)) if reached else set()
        retained = sorted(
            self._retained,
            key=lambda each: (not self._cuts and {each} == only_owner, self.tree.ends[each].last_used),
        )
        for sequence in retained:
            if {sequence} == only_owner:
                if self.pinned_length(sequence) <= reached if self._cuts else self._is_releasable(sequence, pinned):
                    self.tree.retreat(sequence, reached)
                    self._cells.cut(sequence, reached)
                    return sequence, True
            elif self._is_releasable(sequence, pinned):
                self.release(sequence)
                return heappop(self._unused), False
        return None

    def _is_releasable(self, sequence: int, pinned: dict[RadixNode, int]) -> bool:
        """Whether every pinned node on a sequence's path has another owner, or a state is not that of a pin."""
        if not self._cuts:
            return all(self.tree.ends[sequence] is not self.find(pin, len(pin))[0] for pin in self.pins.values())
        deepest = next((node for node in self.tree.ends[sequence].upward() if node in pinned), None)
        return deepest is None or any(other != sequence for other in deepest.sequences_through())

    def _is_batch_tail(self, node: RadixNode) -> bool:
        """Whether a node is a leaf that only batch requests retained."""
        if node.children or node.forked:
            return False
        return node.sequences <= self._retained and all(self.uses[each].from_batch for each in node.sequences)


def _continues(prompt: TokenArray, node: RadixNode) -> bool:
    """Whether a prompt begins with all tokens down to a node's end and has at least two more."""
    if len(prompt) <= node.end + 1:  # the last token is computed anyway
        return False
    return all(common(above.tokens, prompt, above.start, above.end) == len(above.tokens) for above in node.upward())
