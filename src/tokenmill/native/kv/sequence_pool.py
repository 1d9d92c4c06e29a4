"""Who holds the cells of the forest: running sequences, keepers and pins, and which keeper has to yield first.

Every change of the tree that frees cells or ids is made here, together with the same change of the cache.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

from tokenmill.native.kv.radix import Node, TokenArray, Tree, common

_NOTHING: TokenArray = array("i")


class CellOps(Protocol):
    """What can be done to the cells of a cache without computing."""

    def copy(self, source: int, target: int, end: int) -> None:
        """Let `target` hold what `source` has before position `end`, and nothing else; mutates the cache.

        It is empty, unless each sequence has cells of its own.
        """

    def cut(self, sequence: int, start: int) -> object:
        """Let go of a sequence's cells from position `start` on; mutates the cache."""


@dataclass(slots=True)
class SequenceUse:
    """What a sequence id in use is used for."""

    prompt: TokenArray  # of a running sequence: what it has promised to compute
    running: bool
    from_batch: bool = False  # of a keeper: nobody comes back for its tail
    paused: bool = False  # of a keeper: whoever was stopped here comes back for all of it


class SequencePool:
    """The tree with the sequences that hold it."""

    def __init__(self, cells: CellOps, sequences: int, *, leaves: bool = False, least_copied: int = 1) -> None:
        """`leaves`: an id that is put back keeps its cells, of which others may have a copy, until it begins anew.

        `least_copied`: tokens that it must gain by beginning with a copy of what another id has instead.
        """
        self.tree = Tree()
        self._leaves = leaves
        self._left = dict[int, TokenArray]()
        self._least_copied = least_copied
        self.held: dict[int, SequenceUse] = {}
        self.pins: dict[bytes, TokenArray] = {}
        self._cells = cells
        self._unused = list(range(sequences))
        self._ordinal = 0

    # -- reading -----------------------------------------------------------------------------------------------------

    def locked(self) -> set[Node]:
        """Nodes that a running sequence needs. Mutates nothing."""
        nodes: set[Node] = set()
        for sequence, held in self.held.items():
            if held.running:
                for node in self.tree.ends[sequence].upward():
                    if node in nodes:
                        break
                    nodes.add(node)
        return nodes

    def guarded(self) -> dict[Node, int]:
        """Nodes that a pin protects, with the position up to which it does. Mutates nothing."""
        nodes: dict[Node, int] = {}
        for pin in self.pins.values():
            node, reached = self.tree.walk(pin, len(pin))
            for above in node.upward():
                nodes[above] = max(nodes.get(above, 0), min(above.end, reached))
        return nodes

    def guarded_length(self, sequence: int) -> int:
        """Tokens of a sequence that a pin protects. Mutates nothing."""
        if not self.pins:
            return 0
        guarded = self.guarded()
        return max((guarded.get(node, 0) for node in self.tree.ends[sequence].upward()), default=0)

    def last_fork(self, sequence: int, end: int) -> Node:
        """The deepest node on a sequence's path, ending at `end` or before, where sequences parted. Mutates nothing.

        All part at the root.
        """
        path = self.tree.ends[sequence].upward()
        return next((node for node in path if node.forked and node.end <= end), self.tree.root)

    def paused_at(self, node: Node, position: int) -> int | None:
        """The keeper that was paused at this very position, if there is one. Mutates nothing."""
        if position != node.end:
            return None
        return next((sequence for sequence in node.sequences if self.held[sequence].paused), None)

    # -- holding -----------------------------------------------------------------------------------------------------

    def touch(self, node: Node, *, hits: int = 0) -> None:
        """Note a use of a whole path; mutates ordinals only. No node is ever older than one below it."""
        self._ordinal += 1
        for above in node.upward():
            above.last_used = self._ordinal
            above.hits += hits

    def begin(self, sequence: int, node: Node, position: int, held: SequenceUse) -> Node:
        """Let an empty sequence hold a path up to a position; mutates tree and cache."""
        head = self.tree.attach(sequence, node, position)
        self.held[sequence] = held
        if position:
            self._cells.copy(next(other for other in head.holders() if other != sequence), sequence, position)
        return head

    def take_up(self, sequence: int) -> int:
        """Let a sequence that holds nothing yet begin with what is there of its prompt, see `head_for`.

        Mutates tree and cache. Returns how many tokens that are.
        """
        prompt = self.held[sequence].prompt
        source, count = self.head_for(prompt, sequence)
        left = self._left.pop(sequence, None)
        if source is not None:
            self._cells.copy(source, sequence, count)
        elif left is not None:
            self._cells.cut(sequence, count)
        if count:
            self.tree.extend(sequence, prompt[:count])
        return count

    def head_for(self, prompt: TokenArray, sequence: int | None = None) -> tuple[int | None, int]:
        """What an id, the next if none is named, would begin a prompt with: whose cells, and how many. Mutates nothing.

        Its own (None), or a copy of another's where that is worth it. The last token never counts: its logits are
        wanted.
        """
        if sequence is None and self._unused:
            sequence = self._unused[0]
        left = self._left.get(sequence, _NOTHING) if sequence is not None else _NOTHING
        limit = len(prompt) - 1
        source = None
        most = common(left, prompt, 0, limit)
        worth = most + self._least_copied
        running = ((other, self.tree.ends[other].tokens) for other in self.held) if self._leaves else ()
        for other, tokens in (*self._left.items(), *running):
            # Without the token after the most so far it cannot have more: a cheap test that mostly fails.
            if other != sequence and most < min(limit, len(tokens)) and tokens[most] == prompt[most]:
                same = common(tokens, prompt, 0, limit)
                if same > most and same >= worth:
                    source = other
                    most = same
        return source, most

    def release(self, sequence: int) -> None:
        """Let an id go with all it holds; mutates tree and cache."""
        self.tree.detach(sequence)
        del self.held[sequence]
        self.put_back(sequence)

    def put_back(self, sequence: int) -> None:
        """Empty an id that is not in the tree, for others to use; mutates the cache."""
        if sequence not in self._left:
            self._cells.cut(sequence, 0)
        heappush(self._unused, sequence)

    def settle(self, sequence: int, position: int) -> None:
        """Let an idle sequence keep its path up to a position; mutates tree and cache.

        It is the path's only keeper then, or goes where there is one below. A running sequence below is no reason to
        go: it may end and keep nothing.
        """
        if self._leaves:
            self._left[sequence] = self.tree.ends[sequence].tokens[:]  # all it has: such a path is one node
        is_shorter = position < self.tree.ends[sequence].end
        if is_shorter:
            self.tree.retreat(sequence, position)
        node = self.tree.ends[sequence]
        if node is self.tree.root or any(self._is_keeper(other) for other in node.holders() if other != sequence):
            self.release(sequence)
            return
        if is_shorter:
            self._cells.cut(sequence, position)
        others = [other for above in node.upward() for other in above.sequences if other != sequence]
        for other in filter(self._is_keeper, others):
            self.release(other)

    def drop_tails(self, fork: Node, wanted: Iterable[TokenArray]) -> None:
        """Drop what batch work has left beyond a fork, but for the newest tail and those that prompts go on in.

        Mutates tree and cache.
        """
        tails = [child for child in fork.children if self._is_batch_tail(child)]
        if len(tails) < 2:
            return
        prompts = [prompt for prompt in wanted if _passes(prompt, fork)]
        newest = max(tails, key=lambda child: child.last_used)
        for child in tails:
            if child is not newest and not any(prompt[fork.end] == child.tokens[0] for prompt in prompts):
                (sequence,) = child.sequences
                self.settle(sequence, max(fork.end, self.guarded_length(sequence)))

    def evict(self, wanted: int, least: int) -> int:
        """Cut the end of the least recently used idle leaf, `least` tokens if it has them; mutates tree and cache.

        Returns how many went: as many as wanted, or all that this leaf could give.
        """
        guarded = self.guarded()
        leaves = ((sequence, self.tree.ends[sequence]) for sequence, held in self.held.items() if not held.running)
        sequence, leaf = min(
            (
                (sequence, leaf)
                for sequence, leaf in leaves
                if not leaf.children and len(leaf.sequences) == 1 and leaf.end > guarded.get(leaf, leaf.start)
            ),
            key=lambda found: found[1].last_used,
        )
        count = min(leaf.end - guarded.get(leaf, leaf.start), max(wanted, least))
        self.settle(sequence, leaf.end - count)
        return count

    # -- ids ---------------------------------------------------------------------------------------------------------

    def claim(self, head: Node, reached: int) -> tuple[int, bool] | None:
        """An id for a sequence that begins with a head, and whether it holds that head already; None if there is none.

        Mutates tree and cache where all ids are in use: the least recently used keeper goes, unless it is the only
        holder of the head; then the new sequence takes its place, as it does that of one that was paused there.
        """
        paused = self.paused_at(head, reached)
        if paused is not None:
            return paused, True
        if self._unused:
            return heappop(self._unused), False
        guarded = self.guarded()
        keepers = sorted(filter(self._is_keeper, self.held), key=lambda keeper: self.tree.ends[keeper].last_used)
        for keeper in keepers:
            if reached and all(other == keeper for other in head.holders()):
                if self.guarded_length(keeper) <= reached:
                    self.tree.retreat(keeper, reached)
                    self._cells.cut(keeper, reached)
                    return keeper, True
            elif self._can_go(keeper, guarded):
                self.release(keeper)
                return heappop(self._unused), False
        return None

    def _can_go(self, keeper: int, guarded: dict[Node, int]) -> bool:
        """Whether everything pinned on a keeper's path has another holder. Mutates nothing."""
        pinned = next((node for node in self.tree.ends[keeper].upward() if node in guarded), None)
        return pinned is None or any(other != keeper for other in pinned.holders())

    def _is_keeper(self, sequence: int) -> bool:
        """Whether an id in use is idle. Mutates nothing."""
        return not self.held[sequence].running

    def _is_batch_tail(self, node: Node) -> bool:
        """Whether a node is an end that batch work has left and nobody has branched off. Mutates nothing."""
        if node.children or node.forked:
            return False
        return all(not self.held[sequence].running and self.held[sequence].from_batch for sequence in node.sequences)


def _passes(prompt: TokenArray, node: Node) -> bool:
    """Whether a prompt begins with all that a node's end stands for, and goes on. Mutates nothing."""
    if len(prompt) <= node.end + 1:  # the last token is computed anyway
        return False
    return all(common(above.tokens, prompt, above.start, above.end) == len(above.tokens) for above in node.upward())
