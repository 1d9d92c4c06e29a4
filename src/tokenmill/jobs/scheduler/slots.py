"""Which job goes to which lane of an engine whose lanes each keep what their last request left.

        lane 0   digest A, question 7       has A: goes on with A until nothing of A is left
        lane 1   digest B, question 2       has B
        lane 2   nothing                    takes a head that no busy lane is at: C, or nothing of it is computed twice
        lane 3   nothing                    no such head is left: joins A where that pays, else stays idle

A head that a busy lane is at is *claimed*; inside it, what no other lane is at may be worked by a lane that joins, for
the price of computing once more what is claimed. A head of a few words has no price: every lane may join, none is kept
for it, and it decides only between lanes that are as good otherwise.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tokenmill.jobs.scheduler.prefix_groups import (
    WORTH_BYTES,
    Pending,
    chunk_bytes,
    common_length,
    shared_bytes,
    worth_bytes,
)
from tokenmill.jobs.scheduler.prefix_tree import PrefixNode, PrefixTree, touches

Pays = Callable[[PrefixNode, int, int], bool]
"""Whether to compute so many bytes again for one more lane in a group which so many lanes are at."""


@dataclass(slots=True)
class Slot:
    """One lane as far as we know."""

    number: int
    left: Pending | None = None  # what its last request left there
    works: Pending | None = None
    taken: bool = False  # somebody else works there

    @property
    def free(self) -> bool:
        """Whether it can be used. Mutates nothing."""
        return self.works is None and not self.taken


@dataclass(frozen=True, slots=True)
class Pick:
    """A job for a lane."""

    record: Pending
    lane: int | None
    found_bytes: int  # of its prompt, that need not be computed
    like: int | None  # the job they are from


@dataclass(frozen=True, slots=True)
class _Place:
    """A node from which a lane could take a job."""

    node: PrefixNode
    lane: Slot
    found_bytes: int
    again_bytes: int  # claimed, and not on this lane; 0 too where it is not worth a thought


class Slots:
    """All lanes of an engine."""

    def __init__(self, count: int) -> None:
        self._lanes = [Slot(number) for number in range(count)]

    def __getitem__(self, number: int) -> Slot:
        return self._lanes[number]

    @property
    def any_free(self) -> bool:
        """Whether one can be used. Mutates nothing."""
        return any(lane.free for lane in self._lanes)

    def clear(self) -> None:
        """The engine is a new one; mutates."""
        self._lanes = [Slot(lane.number) for lane in self._lanes]

    def pick(self, tree: PrefixTree, trees: list[PrefixTree], pays: Pays) -> Pick | None:
        """The job of a tree that finds most on a free lane; None: none that is worth it. Mutates nothing."""
        claims = [lane.works.head for lane in self._lanes if lane.works is not None]
        values = {lane.number: _value(lane, trees) for lane in self._lanes if lane.free}
        places = [place for lane in self._lanes if lane.free for place in _places(lane, tree, claims)]
        places.sort(
            key=lambda place: (
                place.again_bytes,
                -worth_bytes(place.found_bytes),
                values[place.lane.number],
                -place.found_bytes,
            )
        )
        for place in places:
            record = next(tree.below(place.node, lambda node: any(touches(head, node) for head in claims)), None)
            if record is None:
                continue
            at = sum(head.startswith(place.node.path) for head in claims)
            if place.again_bytes == 0 or pays(place.node, place.again_bytes, max(1, at)):
                left = place.lane.left
                found = shared_bytes(left, record) if left is not None else 0
                return Pick(record, place.lane.number, found, left.job if left is not None and found else None)
        return None


def _places(lane: Slot, tree: PrefixTree, claims: list[bytes]) -> Iterator[_Place]:
    """Nodes that lanes are at or this one was at, and the root. Mutates nothing."""
    own = lane.left.head if lane.left is not None else b""
    nodes = {id(node): node for head in (*claims, own) for node in tree.path(head)}
    for node in nodes.values():
        found = chunk_bytes(common_length(own, node.path))
        claimed = max((chunk_bytes(common_length(head, node.path)) for head in claims), default=0)
        yield _Place(node, lane, found, max(0, worth_bytes(claimed) - worth_bytes(found)))


def _value(lane: Slot, trees: list[PrefixTree]) -> int:
    """Jobs that could still use what a lane has: it is overwritten last. Mutates nothing."""
    if lane.left is None:
        return 0
    head = lane.left.head
    ends = [tree.path(head)[-1] for tree in trees]
    return sum(node.count for node in ends if chunk_bytes(common_length(head, node.path)) >= WORTH_BYTES)
