"""Shared prefixes of pending jobs: what two prompts share, which jobs form a group, and the minimum to compute.

Works on light records sorted by prefix key, in which jobs with a common prefix are neighbours, and keeps only a few of
them in memory. A prefix key (`identity`) measures sharing in whole chunks: never too much, except for checksum
collisions, and up to a chunk too little (63 or 127 bytes within the first 512, then 511 and more). Where the prompts
themselves are available, they are compared. Does not decide which job runs when.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from tokenmill.jobs.ingest.identity import CHUNK_BYTES, ENDS, KEY_BYTES, MOST_CHUNKS

WORTH_BYTES = CHUNK_BYTES
"""A shorter prefix still groups jobs, but no job waits and no slot is reserved for it: it is computed in a moment."""
_HELD_UNITS = 1 << 23  # bytes or tokens of prompts kept for comparison


class Pending(NamedTuple):
    """A pending job before its line is read."""

    job: int
    prefix_key: bytes  # identity.head_key of its prompt
    prompt_bytes: int
    output_tokens: float | None = None  # expected; None if unknown
    priority: int = 0  # higher first
    deadline_s: float | None = None
    max_tokens: int | None = None


def common_length(one: bytes | str | tuple[int, ...], other: bytes | str | tuple[int, ...]) -> int:
    """Length of the common prefix of two texts in bytes, characters or tokens; a binary search over slices."""
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
    """Prompt bytes that a prefix key of this length stands for; the last chunk may stand for any number."""
    return ENDS[min(key_bytes // KEY_BYTES, MOST_CHUNKS - 1)]


def worth_bytes(shared: int) -> int:
    """The shared bytes if they are enough to wait for, else 0."""
    return shared if shared >= WORTH_BYTES else 0


def shared_bytes(one: Pending, other: Pending, texts: tuple[bytes, bytes] | None = None) -> int:
    """Bytes of the common prefix of two prompts: exact if both texts are given, else in whole chunks."""
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

    Keeps as many groups in memory as are nested.
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
    """Minimum to compute for some prompts if no prefix is computed twice, in bytes or tokens.

    Exact for prompts in any order, as long as no more than `held` units lie between two prompts that share a prefix
    which no other prompt has; beyond that too high, never too low. The last unit of a prompt always counts as computed,
    because engines need it for the first token of the answer.
    """

    def __init__(self, *, held: int = _HELD_UNITS) -> None:
        self.units = 0  # of all prompts
        self.least = 0  # units that had to be computed
        self._held = held
        self._sorted: list[bytes | tuple[int, ...]] = []
        self._arrived: deque[bytes | tuple[int, ...]] = deque()
        self._holds = 0

    def add(self, prompt: bytes | tuple[int, ...]) -> int:
        """Count a prompt; return how much of it an earlier prompt had."""
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
    """Minimum bytes or tokens to compute for all prompts: every edge of their trie once."""
    total = Minimum(held=held)
    for prompt in prompts:
        total.add(prompt)
    return total.least


def minimum_bytes(records: Iterable[Pending]) -> int:
    """Minimum bytes from records sorted by prefix key; less than one chunk per job too high."""
    least = 0
    last = None
    for record in records:
        least += record.prompt_bytes - (shared_bytes(last, record) if last is not None else 0)
        last = record
    return least
