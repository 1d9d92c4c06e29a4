"""Assigns jobs to the slots of an engine whose slots each keep the prompt of their last request.

        slot 0   digest A, question 7       holds A: continues with A until no job of A is left
        slot 1   digest B, question 2       holds B
        slot 2   empty                      takes a prefix that no busy slot works on: C, so nothing is computed twice
        slot 3   empty                      no such prefix is left: joins A if that pays, else stays idle

A prefix that a busy slot works on is *claimed*. Another slot may join inside it, on jobs that no other slot works on,
at the price of recomputing the claimed part. A prefix shorter than WORTH_BYTES has no price: any slot may join, none
is reserved for it, and it only breaks ties between slots.
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
"""Whether to compute this many bytes again for one more slot in a group on which this many slots work."""


@dataclass(slots=True)
class Slot:
    """The known state of one slot."""

    number: int
    left: Pending | None = None  # the prompt that its last request left
    works: Pending | None = None
    taken: bool = False  # used by a request that is not ours

    @property
    def free(self) -> bool:
        """Whether a job can be sent to it."""
        return self.works is None and not self.taken


@dataclass(frozen=True, slots=True)
class Pick:
    """A job and the slot to run it in."""

    record: Pending
    slot: int | None
    found_bytes: int  # bytes of its prompt that need not be computed
    like: int | None  # the job that left them there


@dataclass(frozen=True, slots=True)
class _Place:
    """A node from which a slot could take a job."""

    node: PrefixNode
    slot: Slot
    found_bytes: int
    again_bytes: int  # claimed, and not in this slot; 0 if it is too short to matter


class Slots:
    """All slots of an engine."""

    def __init__(self, count: int) -> None:
        self._slots = [Slot(number) for number in range(count)]

    def __getitem__(self, number: int) -> Slot:
        return self._slots[number]

    @property
    def any_free(self) -> bool:
        """Whether any slot is free."""
        return any(slot.free for slot in self._slots)

    def clear(self) -> None:
        """Reset all slots after an engine restart."""
        self._slots = [Slot(slot.number) for slot in self._slots]

    def pick(self, tree: PrefixTree, trees: list[PrefixTree], pays: Pays) -> Pick | None:
        """The job of a tree that reuses most of its prompt in a free slot; None if no job is worth starting."""
        claims = [slot.works.prefix_key for slot in self._slots if slot.works is not None]
        values = {slot.number: _value(slot, trees) for slot in self._slots if slot.free}
        places = [place for slot in self._slots if slot.free for place in _places(slot, tree, claims)]
        places.sort(
            key=lambda place: (
                place.again_bytes,
                -worth_bytes(place.found_bytes),
                values[place.slot.number],
                -place.found_bytes,
            )
        )
        for place in places:
            record = next(tree.below(place.node, lambda node: any(touches(key, node) for key in claims)), None)
            if record is None:
                continue
            at = sum(key.startswith(place.node.path) for key in claims)
            if place.again_bytes == 0 or pays(place.node, place.again_bytes, max(1, at)):
                left = place.slot.left
                found = shared_bytes(left, record) if left is not None else 0
                return Pick(record, place.slot.number, found, left.job if left is not None and found else None)
        return None


def _places(slot: Slot, tree: PrefixTree, claims: list[bytes]) -> Iterator[_Place]:
    """Yield the root and the nodes on the paths of busy slots and of this slot's prompt."""
    own = slot.left.prefix_key if slot.left is not None else b""
    nodes = {id(node): node for key in (*claims, own) for node in tree.path(key)}
    for node in nodes.values():
        found = chunk_bytes(common_length(own, node.path))
        claimed = max((chunk_bytes(common_length(key, node.path)) for key in claims), default=0)
        yield _Place(node, slot, found, max(0, worth_bytes(claimed) - worth_bytes(found)))


def _value(slot: Slot, trees: list[PrefixTree]) -> int:
    """Number of pending jobs that could reuse a slot's prompt; the slot with the fewest is overwritten first."""
    if slot.left is None:
        return 0
    key = slot.left.prefix_key
    ends = [tree.path(key)[-1] for tree in trees]
    return sum(node.count for node in ends if chunk_bytes(common_length(key, node.path)) >= WORTH_BYTES)
