"""Assigns jobs to the slots of an engine whose slots each keep the prompt of their last request.

        slot 0   digest A, question 7       holds A: continues with A until no job of A is left
        slot 1   digest B, question 2       holds B
        slot 2   empty                      takes a prefix that no busy slot uses: C, so nothing is computed twice
        slot 3   empty                      no such prefix is left: joins A if that pays off, else stays idle

A prefix that a busy slot uses is *claimed*. Another slot may take jobs below it that no other slot uses, at the cost of
recomputing the claimed part. A prefix shorter than WORTH_BYTES costs nothing: any slot may take its jobs, no slot is
reserved for it, and it only breaks ties between slots.
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
"""Whether to recompute this many bytes in one more slot, for a group that this many slots already use."""


@dataclass(slots=True)
class Slot:
    """The known state of one slot."""

    number: int
    cached: Pending | None = None  # the prompt of its last request
    running: Pending | None = None

    @property
    def free(self) -> bool:
        """Whether a job can be sent to it."""
        return self.running is None


@dataclass(frozen=True, slots=True)
class Pick:
    """A job and the slot to run it in."""

    record: Pending
    slot: int | None
    cached_bytes: int  # bytes of its prompt that need not be computed
    source_job: int | None  # the job that computed them


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A node from which a slot could take a job."""

    node: PrefixNode
    slot: Slot
    cached_bytes: int
    recompute_bytes: int  # claimed but not cached in this slot; 0 if too short to matter


class Slots:
    """All slots of an engine."""

    def __init__(self, count: int) -> None:
        self._slots = [Slot(number) for number in range(count)]

    def __getitem__(self, number: int) -> Slot:
        return self._slots[number]

    def clear(self) -> None:
        """Reset all slots after an engine restart."""
        self._slots = [Slot(slot.number) for slot in self._slots]

    def pick(self, tree: PrefixTree, trees: list[PrefixTree], pays: Pays) -> Pick | None:
        """The job of a tree that reuses most of its prompt in a free slot; None if no job is worth starting."""
        claims = [slot.running.prefix_key for slot in self._slots if slot.running is not None]
        reuse_counts = {slot.number: _reuse_count(slot, trees) for slot in self._slots if slot.free}
        candidates = [candidate for slot in self._slots if slot.free for candidate in _candidates(slot, tree, claims)]
        candidates.sort(
            key=lambda candidate: (
                candidate.recompute_bytes,
                -worth_bytes(candidate.cached_bytes),
                reuse_counts[candidate.slot.number],
                -candidate.cached_bytes,
            )
        )
        for candidate in candidates:
            record = next(tree.below(candidate.node, lambda node: any(touches(key, node) for key in claims)), None)
            if record is None:
                continue
            sharing = sum(key.startswith(candidate.node.path) for key in claims)
            if candidate.recompute_bytes == 0 or pays(candidate.node, candidate.recompute_bytes, max(1, sharing)):
                cached = candidate.slot.cached
                shared = shared_bytes(cached, record) if cached is not None else 0
                return Pick(
                    record, candidate.slot.number, shared, cached.job if cached is not None and shared else None
                )
        return None


def _candidates(slot: Slot, tree: PrefixTree, claims: list[bytes]) -> Iterator[_Candidate]:
    """Yield the root and the nodes on the paths of busy slots and of this slot's prompt."""
    own = slot.cached.prefix_key if slot.cached is not None else b""
    nodes = {id(node): node for key in (*claims, own) for node in tree.path(key)}
    for node in nodes.values():
        cached = chunk_bytes(common_length(own, node.path))
        claimed = max((chunk_bytes(common_length(key, node.path)) for key in claims), default=0)
        yield _Candidate(node, slot, cached, max(0, worth_bytes(claimed) - worth_bytes(cached)))


def _reuse_count(slot: Slot, trees: list[PrefixTree]) -> int:
    """Number of pending jobs that could reuse a slot's prompt; the slot with the fewest is overwritten first."""
    if slot.cached is None:
        return 0
    key = slot.cached.prefix_key
    ends = [tree.path(key)[-1] for tree in trees]
    return sum(node.count for node in ends if chunk_bytes(common_length(key, node.path)) >= WORTH_BYTES)
