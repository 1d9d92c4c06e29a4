"""Pending jobs in memory as a radix tree over prefix keys.

        root                                              path        shares
        └── the digest                 12 jobs            aabbcc      1536 bytes
            ├── document 1, 5 questions                   aabbccdd    2048 bytes
            │     └── five jobs, one leaf each
            └── document 2, 7 questions                   aabbccee    2048 bytes

A walk yields first the jobs that share most with the given key, then the rest of their group, then the rest of the
enclosing group. Within a group the longest expected answer comes first. The order of the outermost groups is
configurable. Groups directly below a prefix that is too short to matter count as outermost: if all prompts of a batch
begin with the same few words, the groups that matter are right below those.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from math import inf
from typing import Literal

from tokenmill.jobs.ingest.identity import KEY_BYTES
from tokenmill.jobs.scheduler.prefix_groups import WORTH_BYTES, Pending, chunk_bytes, common_length

Order = Literal["stream", "longest", "work", "due", "file"]
"""Order of the outermost groups: as read, by longest job, by total work, by deadline; "file": line order, no groups."""
Skip = Callable[["PrefixNode"], bool]


def length_of(record: Pending) -> float:
    """Expected output tokens, for sorting; infinite if unknown."""
    return inf if record.output_tokens is None else record.output_tokens


def due_of(record: Pending) -> tuple[int, float]:
    """Sort key that puts the most urgent job first."""
    return -record.priority, inf if record.deadline_s is None else record.deadline_s


class PrefixNode:
    """A prefix shared by several jobs, or the whole prompt of a job."""

    __slots__ = ("children", "count", "due", "jobs", "longest_known", "ordered", "parent", "path", "unknown", "work")

    def __init__(self, parent: "PrefixNode | None", path: bytes) -> None:
        self.parent = parent
        self.path = path
        self.children: dict[bytes, PrefixNode] = {}  # by the first chunk after the path
        self.jobs: list[Pending] = []  # jobs whose key ends here
        self.count = 0  # jobs here and below
        self.work = 0.0  # sum of the known expected output tokens
        self.unknown = 0  # jobs of unknown length
        self.due: tuple[int, float] = (0, inf)  # the most urgent job ever added here or below; reset when empty
        self.longest_known: float | None = 0.0  # None: must be recomputed
        self.ordered: list[PrefixNode] | None = []  # None: must be sorted again

    @property
    def bytes(self) -> int:
        """Prompt bytes that all jobs below share."""
        return chunk_bytes(len(self.path))

    @property
    def outer(self) -> bool:
        """Whether this is the root or a prefix that is too short to matter."""
        return self.bytes < WORTH_BYTES

    @property
    def longest(self) -> float:
        """The longest expected answer here or below, cached."""
        if self.longest_known is None:
            here = max((length_of(record) for record in self.jobs), default=0.0)
            if self.ordered and not self.outer:  # inner nodes are sorted by longest
                self.longest_known = max(here, self.ordered[0].longest)
            else:
                self.longest_known = max(here, max((child.longest for child in self.children.values()), default=0.0))
        return self.longest_known


def touches(key: bytes, node: PrefixNode) -> bool:
    """Whether a key shares more with a node than with the node's parent."""
    above = len(node.parent.path) if node.parent is not None else 0
    return key.startswith(node.path[: above + KEY_BYTES])


class PrefixTree:
    """Pending jobs, grouped by prefix."""

    def __init__(self, order: Order = "stream") -> None:
        self.root = PrefixNode(None, b"")
        self.open: bytes | None = None  # key of the last job read from an unfinished stream; its groups go last
        self.longest_ever = 0.0  # longest expected answer of all jobs ever added
        self._order: Order = order
        self._nodes: dict[int, tuple[PrefixNode, Pending]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, job: object) -> bool:
        return job in self._nodes

    @property
    def order(self) -> Order:
        """Order of the outermost groups."""
        return self._order

    @order.setter
    def order(self, order: Order) -> None:
        if order != self._order:
            self._order = order
            self.root.ordered = None

    def add(self, record: Pending) -> None:
        """Add a job; with order "file", its prefix is ignored."""
        node = self.root if self._order == "file" else self._node_for(record.prefix_key)
        if self._order == "file":
            insort(node.jobs, record, key=lambda other: other.job)
        else:
            insort(node.jobs, record, key=lambda other: -length_of(other))
        self._nodes[record.job] = node, record
        self.longest_ever = max(self.longest_ever, length_of(record))
        self._changed(node, record, 1)

    def remove(self, job: int) -> Pending:
        """Remove and return a job, and remove nodes without jobs."""
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
        """All jobs in no particular order."""
        return (record for _, record in self._nodes.values())

    def wanted_bytes(self, job: int) -> int:
        """Maximum number of prompt bytes that a job shares with another pending job of this tree."""
        node, record = self._nodes[job]
        while node.parent is not None and node.count == 1:
            node = node.parent
        return (
            record.prompt_bytes if len(node.jobs) > 1 and record in node.jobs else min(node.bytes, record.prompt_bytes)
        )

    def longest(self) -> Pending | None:
        """The job with the longest expected answer; None if the tree is empty."""
        node = self.root
        while node.count:
            here = max(node.jobs, key=length_of, default=None)
            if here is not None and length_of(here) >= node.longest:
                return here
            node = max(node.children.values(), key=lambda child: child.longest)
        return None

    def path(self, key: bytes) -> list[PrefixNode]:
        """Nodes that share something with a key, from the root down; the last may diverge from it."""
        nodes = [self.root]
        while len(nodes[-1].path) < len(key) and key.startswith(nodes[-1].path):
            at = len(nodes[-1].path)
            child = nodes[-1].children.get(key[at : at + KEY_BYTES])
            if child is None:
                break
            nodes.append(child)
        return nodes

    def walk(self, key: bytes) -> Iterator[Pending]:
        """Yield all jobs, those that share most with a key first. The tree must not change meanwhile."""
        done: PrefixNode | None = None
        for node in reversed(self.path(key)):
            yield from self.below(node, excluding=done)
            done = node

    def diverging(self, job: int, each: int) -> Iterator[Pending]:
        """Yield jobs that share a part of a job's prompt: up to `each` for every shared prefix, the longest first."""
        node: PrefixNode | None
        node, record = self._nodes[job]
        done = None
        while node is not None:
            yield from islice((other for other in self.below(node, excluding=done) if other is not record), each)
            done, node = node, node.parent

    def below(
        self, node: PrefixNode, skip: Skip | None = None, *, excluding: PrefixNode | None = None
    ) -> Iterator[Pending]:
        """Yield the jobs of a group, except subgroups matching `skip` or `excluding`; an unfinished one comes last."""
        yield from node.jobs
        last: PrefixNode | None = None
        for child in self._children(node):
            if child is excluding or (skip is not None and skip(child)):
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

    def _node_for(self, key: bytes) -> PrefixNode:
        """Return the node of a key, creating it if necessary."""
        node = self.root
        while len(node.path) < len(key):
            at = len(node.path)
            child = node.children.get(key[at : at + KEY_BYTES])
            if child is None:
                child = node.children[key[at : at + KEY_BYTES]] = PrefixNode(node, key)
                node.ordered = None
            elif not key.startswith(child.path):
                child = self._split(node, child, common_length(key, child.path) // KEY_BYTES * KEY_BYTES)
            node = child
        return node

    @staticmethod
    def _split(parent: PrefixNode, child: PrefixNode, at: int) -> PrefixNode:
        """Insert a node between a parent and its child, with the first `at` bytes of the child's path."""
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
        """Update counts and sums up to the root after a job was added (1) or removed (-1), and invalidate orders."""
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
        """Whether adding (1) or removing (-1) a job can change the order of a node's groups."""
        return not node.outer or self._order in ("longest", "work") or (self._order == "due" and by > 0)
