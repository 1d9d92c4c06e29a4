"""The prefix forest of pending jobs: what two prompts share, which jobs share a head, what must be computed at least.

Works on light records in the order of their head keys, in which jobs that begin alike are neighbours, and holds a few
of them at a time, however many come. A head key tells what is shared in whole chunks (`identity`), never too much but
for colliding checksums, and up to a chunk too little: 63 or 127 bytes in the first 512, then 511 and more. Where the
prompts themselves are at hand, they are compared. Which job runs when is not decided here.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from tokenmill.jobs.identity import CHUNK_BYTES, ENDS, KEY_BYTES, MOST_CHUNKS

WORTH_BYTES = CHUNK_BYTES
"""A shorter head makes neighbours, but nobody waits for it, no lane is kept for it: it is computed in a moment."""
_HELD_UNITS = 1 << 23  # bytes or tokens of prompts that are held for comparison


class Pending(NamedTuple):
    """What is known of a job before its line is read."""

    job: int
    head: bytes  # identity.head_key of its prompt
    prompt_bytes: int
    output_tokens: float | None = None  # expected; None: nothing is known
    priority: int = 0  # higher first
    deadline_s: float | None = None
    max_tokens: int | None = None


def common_length(one: bytes | str | tuple[int, ...], other: bytes | str | tuple[int, ...]) -> int:
    """How many bytes, characters or tokens two texts begin with alike: halving steps over slices, compared in C."""
    differs = min(len(one), len(other))
    if one[:differs] == other[:differs]:
        return differs
    same = 0  # one[:same] is equal, one[:differs] is not
    while differs - same > 1:
        middle = (same + differs) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            differs = middle
    return same


def chunk_bytes(key_bytes: int) -> int:
    """Bytes of prompt that so many bytes of a head key stand for; the last chunk may stand for any number."""
    return ENDS[min(key_bytes // KEY_BYTES, MOST_CHUNKS - 1)]


def worth_bytes(shared: int) -> int:
    """Of a head that is shared, what is worth waiting for: all or nothing."""
    return shared if shared >= WORTH_BYTES else 0


def shared_bytes(one: Pending, other: Pending, texts: tuple[bytes, bytes] | None = None) -> int:
    """Bytes that two prompts share at their beginning: exactly where both texts are given, else in whole chunks."""
    if texts is not None:
        return common_length(*texts)
    if one.head == other.head:
        return min(one.prompt_bytes, other.prompt_bytes)
    return min(chunk_bytes(common_length(one.head, other.head)), one.prompt_bytes, other.prompt_bytes)


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Neighbours in head order that share a head."""

    shared_bytes: int
    jobs: int
    first: int  # one of its jobs


def groups(records: Iterable[Pending]) -> Iterator[PrefixGroup]:
    """Every group of two or more jobs that share more than with anyone else, inner groups before those around them.

    Holds as many groups as lie in each other.
    """
    nested: list[
        PrefixGroup
    ] = []  # open ones, the outermost first; all jobs seen are counted in them, but not the last
    last: Pending | None = None
    for record in records:
        shared = shared_bytes(last, record) if last is not None else 0
        seen = 1
        first = last.job if last is not None else record.job
        while nested and nested[-1].shared_bytes > shared:
            ended = nested.pop()
            seen += ended.jobs
            yield replace(ended, jobs=seen)
            first = ended.first
        if nested and nested[-1].shared_bytes == shared:
            nested[-1] = replace(nested[-1], jobs=nested[-1].jobs + seen)
        elif shared:
            nested.append(PrefixGroup(shared, seen, first))
        last = record
    seen = 1
    while nested:
        ended = nested.pop()
        seen += ended.jobs
        yield replace(ended, jobs=seen)


class Minimum:
    """What computing some prompts costs at least when no head is computed twice, in bytes or in tokens.

    Exact for prompts that come in any order, as long as no more than `held` units of them lie between two that share
    what no other shares; beyond that too high, never too low. The last unit of a prompt always counts as computed:
    engines need it for the first token of the answer.
    """

    def __init__(self, *, held: int = _HELD_UNITS) -> None:
        self.units = 0  # of all prompts
        self.least = 0  # that had to be computed
        self._held = held
        self._sorted: list[bytes | tuple[int, ...]] = []
        self._arrived: deque[bytes | tuple[int, ...]] = deque()
        self._holds = 0

    def add(self, prompt: bytes | tuple[int, ...]) -> int:
        """Count a prompt; how much of it some prompt before it had. Mutates."""
        at = bisect_left(self._sorted, prompt)
        near = self._sorted[max(0, at - 1) : at + 1]
        shared = min(max((common_length(other, prompt) for other in near), default=0), max(0, len(prompt) - 1))
        self.units += len(prompt)
        self.least += len(prompt) - shared
        self._sorted.insert(at, prompt)
        self._arrived.append(prompt)
        self._holds += len(prompt)
        while self._holds > self._held and len(self._arrived) > 1:
            oldest = self._arrived.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]
            self._holds -= len(oldest)
        return shared


def minimum(prompts: Iterable[bytes | tuple[int, ...]], *, held: int = _HELD_UNITS) -> int:
    """Bytes or tokens to compute at least for all prompts together: every edge of their trie once."""
    total = Minimum(held=held)
    for prompt in prompts:
        total.add(prompt)
    return total.least


def minimum_bytes(records: Iterable[Pending]) -> int:
    """The same from records in head order alone: too high by less than a chunk for each job."""
    least = 0
    last = None
    for record in records:
        least += record.prompt_bytes - (shared_bytes(last, record) if last is not None else 0)
        last = record
    return least
