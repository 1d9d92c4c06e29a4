"""Radix tree over tokens that records where each sequence ends. It holds no policy.

Each node is a segment of tokens at absolute positions [start, end). A sequence ends at exactly one node's end and
owns every cell on the path from the root to there, so the cells of a node belong to the sequences that end in it or
below it; a node without such a sequence is removed. Two sequences that computed the same tokens separately have
separate cells: siblings may begin with the same token, and the deepest match wins.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import TypeAlias

TokenArray: TypeAlias = "array[int]"
"""An array of typecode `i`, whose slices are copied and compared at memory speed."""


def as_tokens(tokens: Sequence[int]) -> TokenArray:
    """Convert tokens to the array that the tree compares; an array of typecode `i` is returned unchanged."""
    return tokens if isinstance(tokens, array) and tokens.typecode == "i" else array("i", tokens)


def common(left: TokenArray, right: TokenArray, offset: int, limit: int) -> int:
    """Return the length of the common prefix of left[0:] and right[offset:limit]."""
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


class Children:
    """The children of a node, indexed by their first token: a prefix may have thousands of them."""

    __slots__ = ("_by_token", "_nodes")

    def __init__(self) -> None:
        self._nodes: dict[RadixNode, None] = {}  # in order of insertion
        self._by_token: dict[int, list[RadixNode]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> "Iterator[RadixNode]":
        return iter(self._nodes)

    def add(self, node: "RadixNode") -> None:
        """Add a child; its first token must not change while it is here."""
        self._nodes[node] = None
        self._by_token.setdefault(node.tokens[0], []).append(node)

    def remove(self, node: "RadixNode") -> None:
        """Remove a child."""
        del self._nodes[node]
        same = self._by_token[node.tokens[0]]
        same.remove(node)
        if not same:
            del self._by_token[node.tokens[0]]

    def starting_with(self, token: int) -> "Sequence[RadixNode]":
        """Return the children whose first token is this one."""
        return self._by_token.get(token, ())


class RadixNode:
    """A segment of tokens and its children."""

    __slots__ = ("children", "forked", "hits", "last_used", "locks", "parent", "sequences", "start", "tokens")

    def __init__(self, parent: "RadixNode | None", start: int, tokens: TokenArray) -> None:
        self.parent = parent
        self.start = start
        self.tokens = tokens
        self.children = Children()
        self.sequences: set[int] = set()  # sequences that end here
        self.locks = 0  # locked sequences that end here or below
        self.forked = False  # two sequences diverged at this end; one of them may have been removed since
        self.hits = 0
        self.last_used = 0

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + len(self.tokens)

    def upward(self) -> Iterator["RadixNode"]:
        """Yield this node and its ancestors, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def below(self) -> Iterator["RadixNode"]:
        """Yield this node and its descendants."""
        yield self
        stack = [iter(self.children)]
        while stack:
            node = next(stack[-1], None)
            if node is None:
                stack.pop()
            else:
                yield node
                stack.append(iter(node.children))

    def sequences_through(self) -> Iterator[int]:
        """Yield the sequences that own this node's cells: those that end here or below."""
        for node in self.below():
            yield from node.sequences


class RadixTree:
    """The root, and the node in which each sequence ends.

    A locked sequence is one whose cells are needed; the lock counts of nodes and `locked_tokens` follow every change.
    """

    def __init__(self) -> None:
        self.root = RadixNode(None, 0, array("i"))
        self.size = 0  # tokens in all nodes
        self.locked_tokens = 0  # tokens in nodes of locked sequences
        self.ends: dict[int, RadixNode] = {}  # by sequence: the node in which it ends
        self._locked: set[int] = set()

    def nodes(self) -> Iterator[RadixNode]:
        """Yield every node except the root."""
        for child in self.root.children:
            yield from child.below()

    def walk(self, tokens: TokenArray, limit: int, *, to_end: bool = False) -> tuple[RadixNode, int]:
        """Return the deepest node that matches tokens[:limit], and the position up to which it matches.

        to_end: only nodes that match entirely and in which a sequence ends.
        """
        best = self.root
        reached = 0
        stack = [self.root]
        while stack:
            node = stack.pop()
            if node.end >= limit:
                continue
            for child in node.children.starting_with(tokens[node.end]):
                shared = common(child.tokens, tokens, child.start, limit)
                if child.start + shared > reached and (not to_end or (child.sequences and shared == len(child.tokens))):
                    best = child
                    reached = child.start + shared
                if shared == len(child.tokens):
                    stack.append(child)
        return best, reached

    def attach(self, sequence: int, node: RadixNode, position: int) -> RadixNode:
        """Add a sequence that ends at `position` of a node, which is split there if necessary."""
        node = self.split(node, position)
        node.sequences.add(sequence)
        self.ends[sequence] = node
        return node

    def split(self, node: RadixNode, position: int) -> RadixNode:
        """Return the node that ends at `position`, splitting `node` if necessary.

        The lower part keeps the identity of `node`. Raises ValueError if the position is outside the node.
        """
        if position == node.end:
            return node
        if node.parent is None or not node.start < position < node.end:
            raise ValueError(f"position {position} is not inside [{node.start},{node.end})")
        cut = position - node.start
        upper = RadixNode(node.parent, node.start, node.tokens[:cut])
        upper.hits = node.hits
        upper.last_used = node.last_used
        upper.locks = node.locks
        node.parent.children.remove(node)
        node.parent.children.add(upper)
        node.parent, node.start, node.tokens = upper, position, node.tokens[cut:]
        upper.children.add(node)
        return upper

    def lock(self, sequence: int) -> None:
        """Mark the cells of a sequence as needed. It must not be locked already."""
        self._locked.add(sequence)
        for node in self.ends[sequence].upward():
            self.locked_tokens += 0 if node.locks else len(node.tokens)
            node.locks += 1

    def unlock(self, sequence: int) -> None:
        """Undo `lock`. Only unlocked sequences can be shortened."""
        self._locked.remove(sequence)
        for node in self.ends[sequence].upward():
            node.locks -= 1
            self.locked_tokens -= 0 if node.locks else len(node.tokens)

    def extend(self, sequence: int, tokens: TokenArray) -> None:
        """Append tokens to a sequence."""
        if not tokens:
            return
        node = self.ends[sequence]
        locked = sequence in self._locked
        self.size += len(tokens)
        self.locked_tokens += len(tokens) if locked else 0
        if node.parent is not None and len(node.sequences) == 1 and not node.children and not node.forked:
            node.tokens += tokens
            return
        leaf = RadixNode(node, node.end, tokens[:])
        leaf.last_used = node.last_used
        leaf.locks = int(locked)
        leaf.sequences.add(sequence)
        node.sequences.discard(sequence)
        self.ends[sequence] = leaf
        node.children.add(leaf)
        if node.parent is not None and len(node.children) > 1:
            node.forked = True

    def retreat(self, sequence: int, position: int) -> None:
        """Shorten a sequence to `position`; nodes without a sequence are removed."""
        node = self.ends[sequence]
        node.sequences.discard(sequence)
        former_end = node  # it may be joined with its child now; a node that lost a child is forked and is not
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
        self._join(former_end)

    def detach(self, sequence: int) -> None:
        """Remove a sequence."""
        self.retreat(sequence, 0)
        self.root.sequences.discard(sequence)
        del self.ends[sequence]

    def _join(self, node: RadixNode) -> None:
        """Merge a node into its only child unless a sequence ends or forked there; the child keeps its identity."""
        if node.parent is None or node.sequences or node.forked or len(node.children) != 1:
            return
        (child,) = node.children
        node.parent.children.remove(node)
        child.tokens = node.tokens + child.tokens
        child.start = node.start
        child.parent = node.parent
        child.hits, child.last_used = max(node.hits, child.hits), max(node.last_used, child.last_used)
        node.parent.children.add(child)
