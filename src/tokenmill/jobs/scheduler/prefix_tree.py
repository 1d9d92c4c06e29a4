"""The part of the prefix forest that is at hand: a radix tree over head keys, jobs taken from it in a useful order.

        root                                              path        shares
        └── the digest                 12 jobs            aabbcc      1536 bytes
            ├── document 1, 5 questions                   aabbccdd    2048 bytes
            │     └── five jobs, one leaf each
            └── document 2, 7 questions                   aabbccee    2048 bytes

A walk goes on where the last one stopped: first what shares most with the job it is given, then the rest of that
group, then of the group around it. Inside a group the longest expected answer comes first; the order of the outermost
groups is chosen, and so is that of groups within a head that is too short to matter: a batch whose prompts all begin
with the same few words has its groups right below those. No lanes, engines or clocks in here.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import Literal

from tokenmill.jobs.identity import KEY_BYTES
from tokenmill.jobs.scheduler.prefix_groups import WORTH_BYTES, Pending, chunk_bytes, common_length

Order = Literal["stream", "longest", "work", "due", "file"]
"""Of the outermost groups: as they came, by longest job, by all their work, by urgency, or no groups and line order."""
Skip = Callable[["PrefixNode"], bool]


def length_of(record: Pending) -> float:
    """For putting the longest first: an answer of unknown length may be the longest."""
    return inf if record.output_tokens is None else record.output_tokens


def due_of(record: Pending) -> tuple[int, float]:
    """For putting the most urgent first."""
    return -record.priority, inf if record.deadline_s is None else record.deadline_s


class PrefixNode:
    """A head that jobs share, or one job's whole prompt."""

    __slots__ = ("children", "count", "due", "jobs", "longest_known", "ordered", "parent", "path", "unknown", "work")

    def __init__(self, parent: "PrefixNode | None", path: bytes) -> None:
        self.parent = parent
        self.path = path
        self.children: dict[bytes, PrefixNode] = {}  # by the first chunk behind the path
        self.jobs: list[Pending] = []  # that end here
        self.count = 0  # jobs here and below
        self.work = 0.0  # output tokens expected of them, where known
        self.unknown = 0  # jobs of which nothing is known
        self.due: tuple[int, float] = (0, inf)  # of the most urgent that was ever below: stays until all have gone
        self.longest_known: float | None = 0.0  # None: to be looked for again
        self.ordered: list[PrefixNode] | None = []  # None: to be sorted again

    @property
    def bytes(self) -> int:
        """Bytes of prompt that all below it share. Mutates nothing."""
        return chunk_bytes(len(self.path))

    @property
    def outer(self) -> bool:
        """Whether it is the root, or a head that is hardly worth the name. Mutates nothing."""
        return self.bytes < WORTH_BYTES

    @property
    def longest(self) -> float:
        """The longest expected answer here or below. Mutates only what it remembers."""
        if self.longest_known is None:
            here = max((length_of(record) for record in self.jobs), default=0.0)
            if self.ordered and not self.outer:  # inner nodes have their longest in front
                self.longest_known = max(here, self.ordered[0].longest)
            else:
                self.longest_known = max(here, max((child.longest for child in self.children.values()), default=0.0))
        return self.longest_known


def touches(head: bytes, node: PrefixNode) -> bool:
    """Whether a head shares more with a node than with what is above it. Mutates nothing."""
    above = len(node.parent.path) if node.parent is not None else 0
    return head.startswith(node.path[: above + KEY_BYTES])


class PrefixTree:
    """Pending jobs by what they share."""

    def __init__(self, order: Order = "stream") -> None:
        self.root = PrefixNode(None, b"")
        self.open: bytes | None = None  # head of the last job of a stream that goes on: its groups are worked last
        self.longest_ever = 0.0  # expected answer, of all jobs that were ever here
        self._order: Order = order
        self._nodes: dict[int, tuple[PrefixNode, Pending]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, job: object) -> bool:
        return job in self._nodes

    @property
    def order(self) -> Order:
        """Of the outermost groups. Mutates nothing."""
        return self._order

    @order.setter
    def order(self, order: Order) -> None:
        if order != self._order:
            self._order = order
            self.root.ordered = None

    def add(self, record: Pending) -> None:
        """Put a job in its place; mutates. In line order, heads do not matter."""
        node = self.root if self._order == "file" else self._node_for(record.head)
        if self._order == "file":
            insort(node.jobs, record, key=lambda other: other.job)
        else:
            insort(node.jobs, record, key=lambda other: -length_of(other))
        self._nodes[record.job] = node, record
        self.longest_ever = max(self.longest_ever, length_of(record))
        self._changed(node, record, 1)

    def remove(self, job: int) -> Pending:
        """Take a job out; mutates: nodes without jobs go."""
        node, record = self._nodes.pop(job)
        node.jobs.remove(record)
        self._changed(node, record, -1)
        while node.count == 0 and node.parent is not None:
            parent = node.parent
            del parent.children[node.path[len(parent.path) : len(parent.path) + KEY_BYTES]]
            if parent.ordered is not None:
                parent.ordered.remove(node)
            node = parent
        return record

    def records(self) -> Iterable[Pending]:
        """All jobs in no particular order. Mutates nothing."""
        return (record for _, record in self._nodes.values())

    def wanted_bytes(self, job: int) -> int:
        """What a job shares with another one that is pending here. Mutates nothing."""
        node, record = self._nodes[job]
        while node.parent is not None and node.count == 1:
            node = node.parent
        return (
            record.prompt_bytes if len(node.jobs) > 1 and record in node.jobs else min(node.bytes, record.prompt_bytes)
        )

    def longest(self) -> Pending | None:
        """The job with the longest expected answer. Mutates nothing but what nodes remember."""
        node = self.root
        while node.count:
            here = max(node.jobs, key=length_of, default=None)
            if here is not None and length_of(here) >= node.longest:
                return here
            node = max(node.children.values(), key=lambda child: child.longest)
        return None

    def path(self, head: bytes) -> list[PrefixNode]:
        """Nodes that share something with a head, from the root down; the last may part from it. Mutates nothing."""
        nodes = [self.root]
        while len(nodes[-1].path) < len(head) and head.startswith(nodes[-1].path):
            at = len(nodes[-1].path)
            child = nodes[-1].children.get(head[at : at + KEY_BYTES])
            if child is None:
                break
            nodes.append(child)
        return nodes

    def walk(self, head: bytes) -> Iterator[Pending]:
        """Jobs, what shares most with a head first. Mutates nothing, and nothing may change meanwhile."""
        done: PrefixNode | None = None
        for node in reversed(self.path(head)):
            yield from self.below(node, but=done)
            done = node

    def below(self, node: PrefixNode, skip: Skip | None = None, *, but: PrefixNode | None = None) -> Iterator[Pending]:
        """Jobs of one group, without those of one group in it; what the stream goes on with comes last."""
        yield from node.jobs
        last: PrefixNode | None = None
        for child in self._children(node):
            if child is but or (skip is not None and skip(child)):
                continue
            if self.open is not None and self.open.startswith(child.path):
                last = child
            else:
                yield from self.below(child, skip)
        if last is not None:
            yield from self.below(last, skip)

    def _children(self, node: PrefixNode) -> list[PrefixNode]:
        if node.ordered is None:
            if not node.outer or self._order == "longest":
                node.ordered = sorted(node.children.values(), key=lambda child: (-child.longest, child.path))
            elif self._order == "work":
                node.ordered = sorted(node.children.values(), key=lambda child: (-child.work, -child.count, child.path))
            elif self._order == "due":
                node.ordered = sorted(node.children.values(), key=lambda child: (child.due, child.path))
            else:
                node.ordered = sorted(node.children.values(), key=lambda child: child.path)
        return node.ordered

    def _node_for(self, head: bytes) -> PrefixNode:
        """The node of a head, made where there is none; mutates."""
        node = self.root
        while len(node.path) < len(head):
            at = len(node.path)
            child = node.children.get(head[at : at + KEY_BYTES])
            if child is None:
                child = node.children[head[at : at + KEY_BYTES]] = PrefixNode(node, head)
                node.ordered = None
            elif not head.startswith(child.path):
                child = self._split(node, child, common_length(head, child.path) // KEY_BYTES * KEY_BYTES)
            node = child
        return node

    @staticmethod
    def _split(parent: PrefixNode, child: PrefixNode, at: int) -> PrefixNode:
        """A new node between two, with the first `at` bytes of the lower one's path; mutates."""
        middle = PrefixNode(parent, child.path[:at])
        middle.children[child.path[at : at + KEY_BYTES]] = child
        middle.count = child.count
        middle.work = child.work
        middle.unknown = child.unknown
        middle.due = child.due
        middle.longest_known = middle.ordered = None
        parent.children[child.path[len(parent.path) : len(parent.path) + KEY_BYTES]] = middle
        parent.ordered = None
        child.parent = middle
        return middle

    def _changed(self, node: PrefixNode | None, record: Pending, by: int) -> None:
        """A job came to a node (1) or went (-1); mutates sums up to the root, and unsorts what may have moved."""
        while node is not None:
            node.count += by
            node.unknown += by * (record.output_tokens is None)
            node.work = node.work + by * (record.output_tokens or 0.0) if node.count else 0.0
            if by > 0:
                node.due = min(node.due, due_of(record)) if node.count > 1 else due_of(record)
            node.longest_known = None
            above = node.parent
            if above is not None and node.count and self._moves(above, by):
                above.ordered = None
            node = above

    def _moves(self, node: PrefixNode, by: int) -> bool:
        """Whether a group's place in its node depends on the jobs in it. Mutates nothing."""
        return not node.outer or self._order in ("longest", "work") or (self._order == "due" and by > 0)
