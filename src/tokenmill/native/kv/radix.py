"""A radix tree over tokens that knows which sequences end where. It decides nothing.

Each node is a segment of tokens at absolute positions [start, end). A sequence ends at exactly one node's end and
holds every cell on the way from the root to there, so the cells of a node are held by the sequences that end in it
or below it, and a node that nobody ends in or below is gone. Two sequences that computed the same tokens apart have
cells apart: siblings may begin with the same token, and the deepest match wins.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import TypeAlias

TokenArray: TypeAlias = "array[int]"
"""Of typecode i: slices of it are copied and compared at memory speed."""


def as_tokens(tokens: Sequence[int]) -> TokenArray:
    """The same tokens as the tree compares them; an array is taken as it is. Mutates nothing."""
    return tokens if isinstance(tokens, array) and tokens.typecode == "i" else array("i", tokens)


def common(left: TokenArray, right: TokenArray, offset: int, limit: int) -> int:
    """How many tokens left[0:] and right[offset:limit] share at their beginning. Mutates nothing."""
    count = min(len(left), limit - offset)
    if count <= 0 or left[0] != right[offset]:
        return 0
    if left[:count] == right[offset : offset + count]:
        return count
    same, differs = 1, count  # left[:same] is equal, left[:differs] is not
    while differs - same > 1:
        middle = (same + differs) // 2
        if left[same:middle] == right[offset + same : offset + middle]:
            same = middle
        else:
            differs = middle
    return same


class Node:
    """A segment of tokens with what hangs off its end."""

    __slots__ = ("children", "forked", "hits", "last_used", "parent", "sequences", "start", "tokens")

    def __init__(self, parent: "Node | None", start: int, tokens: TokenArray) -> None:
        self.parent = parent
        self.start = start
        self.tokens = tokens
        self.children: list[Node] = []
        self.sequences: set[int] = set()  # that end here
        self.forked = False  # two sequences have parted at this end, though one of them may be gone
        self.hits = 0
        self.last_used = 0

    @property
    def end(self) -> int:
        """The position after its last token. Mutates nothing."""
        return self.start + len(self.tokens)

    def upward(self) -> Iterator["Node"]:
        """Itself and what is above it, without the root. Mutates nothing."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def below(self) -> Iterator["Node"]:
        """Itself and everything below. Mutates nothing."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children

    def holders(self) -> Iterator[int]:
        """Sequences that hold this node's cells. Mutates nothing."""
        for node in self.below():
            yield from node.sequences


class Tree:
    """Nodes, and where each sequence ends."""

    def __init__(self) -> None:
        self.root = Node(None, 0, array("i"))
        self.size = 0  # tokens in all nodes
        self.ends: dict[int, Node] = {}  # sequence -> the node it ends in

    def nodes(self) -> Iterator[Node]:
        """All but the root. Mutates nothing."""
        for child in self.root.children:
            yield from child.below()

    def walk(self, tokens: TokenArray, limit: int) -> tuple[Node, int]:
        """The deepest node that tokens[:limit] reach, and the position they reach in it. Mutates nothing."""
        best = self.root
        reached = 0
        waiting = [self.root]
        while waiting:
            for child in waiting.pop().children:
                shared = common(child.tokens, tokens, child.start, limit)
                if child.start + shared > reached:
                    best = child
                    reached = child.start + shared
                if shared == len(child.tokens):
                    waiting.append(child)
        return best, reached

    def attach(self, sequence: int, node: Node, position: int) -> Node:
        """Let a new sequence end at a position inside a node; mutates: the node may be split there."""
        node = self.split(node, position)
        node.sequences.add(sequence)
        self.ends[sequence] = node
        return node

    def split(self, node: Node, position: int) -> Node:
        """The node that ends at this position; mutates where there was none: the lower part keeps its identity."""
        if position == node.end:
            return node
        if node.parent is None or not node.start < position < node.end:
            raise ValueError(f"position {position} is not inside [{node.start},{node.end})")
        cut = position - node.start
        upper = Node(node.parent, node.start, node.tokens[:cut])
        upper.hits = node.hits
        upper.last_used = node.last_used
        upper.children = [node]
        siblings = node.parent.children
        siblings[siblings.index(node)] = upper
        node.parent, node.start, node.tokens = upper, position, node.tokens[cut:]
        return upper

    def extend(self, sequence: int, tokens: TokenArray) -> None:
        """Put more tokens at a sequence's end; mutates."""
        node = self.ends[sequence]
        self.size += len(tokens)
        if node.parent is not None and len(node.sequences) == 1 and not node.children and not node.forked:
            node.tokens += tokens
            return
        leaf = Node(node, node.end, tokens[:])
        leaf.last_used = node.last_used
        leaf.sequences.add(sequence)
        node.sequences.discard(sequence)
        self.ends[sequence] = leaf
        node.children.append(leaf)
        if node.parent is not None and len(node.children) > 1:
            node.forked = True

    def retreat(self, sequence: int, position: int) -> None:
        """Let a sequence end earlier; mutates: what nobody holds any more is gone."""
        node = self.ends[sequence]
        node.sequences.discard(sequence)
        loosened = node  # its border may have no reason any more; one that lost a child is forked, and has
        while node.parent is not None and node.start >= position:
            parent = node.parent
            if not node.children and not node.sequences:
                parent.children.remove(node)
                self.size -= len(node.tokens)
            node = parent
        if position < node.end:
            if node.children or node.sequences:
                node = self.split(node, position)
            else:
                self.size -= node.end - position
                del node.tokens[position - node.start :]
                node.forked = False
        node.sequences.add(sequence)
        self.ends[sequence] = node
        self._join(loosened)

    def detach(self, sequence: int) -> None:
        """Forget a sequence; mutates."""
        self.retreat(sequence, 0)
        self.root.sequences.discard(sequence)
        del self.ends[sequence]

    def _join(self, node: Node) -> None:
        """Make a node one with its only child where nothing marks the border; mutates: the child's identity stays."""
        if node.parent is None or node.sequences or node.forked or len(node.children) != 1:
            return
        child = node.children[0]
        siblings = node.parent.children
        child.tokens = node.tokens + child.tokens
        child.start = node.start
        child.parent = node.parent
        child.hits, child.last_used = max(node.hits, child.hits), max(node.last_used, child.last_used)
        siblings[siblings.index(node)] = child
