"""Shared prefixes of pending jobs: common length of two prompts, groups of jobs, minimum to compute.

Works on small records sorted by prefix key, so that jobs with a common prefix are adjacent, and holds only a few of
them in memory. A prefix key (`jobs.ingest.identity`) measures sharing in whole chunks: it never overestimates, except
for checksum collisions, and underestimates by less than a chunk (up to 127 bytes within the first 512, then 511 and
more). If the prompts themselves are available, they are compared instead.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from tokenmill.jobs.ingest.identity import CHUNK_BYTES, ENDS, KEY_BYTES, MAX_CHUNKS

WORTH_BYTES = CHUNK_BYTES
"""Shorter prefixes are cheap to recompute: they still group jobs, but no job waits and no slot is reserved for them."""
_HELD_UNITS = 1 << 23  # bytes or tokens of prompts kept for comparison


class Pending(NamedTuple):
    """A pending job before its line is read."""

    job: int
    prefix_key: bytes  # of its prompt, see `identity.prefix_key_of`
    prompt_bytes: int
    output_tokens: float | None = None  # expected; None if unknown
    priority: int = 0  # higher first
    deadline_s: float | None = None
    max_tokens: int | None = None


def common_length(one: bytes | str | tuple[int, ...], other: bytes | str | tuple[int, ...]) -> int:
    """Length of the common prefix of two texts in bytes, characters or tokens."""
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
    """Prompt bytes that a prefix key of this length covers, excluding an open-ended last chunk."""
    return ENDS[min(key_bytes // KEY_BYTES, MAX_CHUNKS - 1)]


def worth_bytes(shared: int) -> int:
    """`shared`, or 0 if it is less than WORTH_BYTES."""
    return shared if shared >= WORTH_BYTES else 0


def shared_bytes(one: Pending, other: Pending, texts: tuple[bytes, bytes] | None = None) -> int:
    """Bytes of the common prefix of two prompts: exact if both texts are given, otherwise in whole chunks."""
    if texts is not None:
        return common_length(*texts)
    if one.prefix_key == other.prefix_key:
        return min(one.prompt_bytes, other.prompt_bytes)
    return min(chunk_bytes(common_length(one.prefix_key, other.prefix_key)), one.prompt_bytes, other.prompt_bytes)


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Consecutive jobs, sorted by prefix key, that share a prefix."""

    shared_bytes: int
    jobs: int
    first: int  # one of its jobs


def groups(records: Iterable[Pending]) -> Iterator[PrefixGroup]:
    """Yield every group of two or more jobs that share more with each other than with other jobs, inner groups first.

    `records` must be sorted by prefix key. Memory grows with the nesting depth only.
    """
    nested: list[PrefixGroup] = []  # open groups, the outermost first; they count all jobs seen except the last
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
    """Minimum to compute for a sequence of prompts if every prefix is computed once, in bytes or tokens.

    Prompts can come in any order. The result is exact while prompts that share a prefix are at most `held` units apart;
    beyond that it is an upper bound. The last unit of a prompt always counts as computed, because engines need it for
    the first token of the answer.
    """

    def __init__(self, *, held: int = _HELD_UNITS) -> None:
        self.units = 0  # of all prompts
        self.computed = 0  # units, each shared prefix counted once
        self._max_held_units = held
        self._sorted: list[bytes | tuple[int, ...]] = []
        self._arrived: deque[bytes | tuple[int, ...]] = deque()
        self._held_units = 0

    def add(self, prompt: bytes | tuple[int, ...]) -> int:
        """Count a prompt; return how many of its units it shares with an earlier prompt."""
        at = bisect_left(self._sorted, prompt)
        near = self._sorted[max(0, at - 1) : at + 1]
        shared = min(max((common_length(other, prompt) for other in near), default=0), max(0, len(prompt) - 1))
        self.units += len(prompt)
        self.computed += len(prompt) - shared
        self._sorted.insert(at, prompt)
        self._arrived.append(prompt)
        self._held_units += len(prompt)
        while self._held_units > self._max_held_units and len(self._arrived) > 1:
            oldest = self._arrived.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]
            self._held_units -= len(oldest)
        return shared


def minimum(prompts: Iterable[bytes | tuple[int, ...]], *, held: int = _HELD_UNITS) -> int:
    """Minimum bytes or tokens to compute for all prompts: the size of their trie."""
    total = Minimum(held=held)
    for prompt in prompts:
        total.add(prompt)
    return total.computed


def minimum_bytes(records: Iterable[Pending]) -> int:
    """Minimum bytes to compute, from records sorted by prefix key; too high by less than one chunk per job."""
    total = 0
    last = None
    for record in records:
        total += record.prompt_bytes - (shared_bytes(last, record) if last is not None else 0)
        last = record
    return total
