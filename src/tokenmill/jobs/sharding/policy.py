"""Chooses a worker's next shard: consecutive pending jobs of one batch and priority.

The queue is sorted so that jobs with a common prefix are adjacent. A shard is a range of the queue, whose prefixes are
computed by its worker. Each choice uses only the few thousand rows that were read:

    fair, fair_share    maximum size: a share of the remaining jobs, so that workers of unequal speed finish together
    cut                 end: between prefixes, or where adjacent jobs share least
    elsewhere           start: after the jobs that continue a prefix of another worker
    halved              how much of a shard an idle worker takes over, if recomputing the prefix pays off
    gaps                ranges outside of all shards

Prompts and answers are both measured in bytes: with all slots busy, a prompt token takes about as long as an answer
token. Pure, and the same for workers in one process and on several hosts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil

from tokenmill.jobs.ingest.identity import stored_prefix_key
from tokenmill.jobs.models import QueuedJob, SortKey
from tokenmill.jobs.scheduler.prefix_groups import WORTH_BYTES, chunk_bytes, common_length, worth_bytes

MAX_SHARD_JOBS = 16384  # large enough that recomputing a prefix per shard costs almost nothing
MIN_ROWS = 256  # minimum number of rows read to find the end of a prefix
COUNTED_JOBS = 512  # pending jobs are counted up to this number; a shard with more counts as not started
_PARTS = 2  # a fair share is assigned in at least this many parts
_ANSWER_TOKENS = 64  # assumed without max_tokens
_MAX_ANSWER_TOKENS = 256  # assumed at most, because few answers reach max_tokens
_TOKEN_BYTES = 4
_MIN_SPEED = 0.1  # minimum assumed speed of a worker, as a share of the mean
_EPSILON = 1e-9
_MIN_RANK = -(1 << 62)
_MAX_RANK = 1 << 62


@dataclass(frozen=True, slots=True)
class Shard:
    """A range of the queue from one job to another, both included."""

    first: SortKey
    last: SortKey
    jobs: int  # pending jobs when it was created

    def __contains__(self, position: object) -> bool:
        return isinstance(position, tuple) and self.first <= position <= self.last

    @property
    def span(self) -> "Span":
        """The span with exactly the jobs of the shard."""
        rank, batch, place, job = self.last
        return Span(before(self.first), (rank, batch, place, job + 1))


@dataclass(frozen=True, slots=True)
class Span:
    """The part of the queue between two positions of one batch, both excluded."""

    after: SortKey
    until: SortKey


def before(position: SortKey) -> SortKey:
    """The position immediately before another."""
    rank, batch, place, job = position
    return rank, batch, place, job - 1


def gaps(every: Iterable[Shard], batches: Sequence[int], after: SortKey | None) -> list[Span]:
    """The spans of some batches after a position that are in no shard; they may be empty."""
    taken = dict[int, list[Shard]]()
    for shard in sorted(every, key=lambda each: each.first):
        taken.setdefault(shard.first[1], []).append(shard)
    found = list[Span]()
    for batch in batches:
        reached = _entered(batch, after)
        for shard in taken.get(batch, ()):
            if reached < shard.first:
                found.append(Span(reached, shard.first))
            reached = max(reached, shard.last)
        found.append(Span(reached, (_MAX_RANK, batch, b"", 0)))
    return found


def _entered(batch: int, after: SortKey | None) -> SortKey:
    """Map a queue position to a batch: at its priority, older batches precede the position and newer ones follow it."""
    if after is None:
        return _MIN_RANK, batch, b"", -1
    return after if after[1] == batch else (after[0] + (batch < after[1]), batch, b"", -1)


def joined(one: QueuedJob, other: QueuedJob) -> int:
    """Prefix bytes that two adjacent jobs share, in whole chunks."""
    return min(_shared(one.place, other.place), one.prompt_bytes, other.prompt_bytes)


def _shared(one: bytes, other: bytes) -> int:
    """Like `identity.shared_bytes`, but faster for long prefixes, because this runs for every pending job."""
    return chunk_bytes(common_length(stored_prefix_key(one), stored_prefix_key(other)))


def fair(pending: int, workers: int, slots: int, *, speed: float | None = None) -> int:
    """Maximum size of the next shard, with `pending` jobs outside of all shards; at least one job per slot.

    `speed` is the worker's share of the total speed; None: unknown, all workers count as equal.
    """
    return min(MAX_SHARD_JOBS, max(1, slots, _part(pending, workers, speed, _PARTS)))


def fair_share(pending: int, workers: int, *, speed: float | None = None) -> int:
    """Number of jobs for a worker if all jobs were assigned now; longer prefixes are split."""
    return min(MAX_SHARD_JOBS, max(1, _part(pending, workers, speed, 1)))


def speed_share(own: float | None, every: Sequence[float | None]) -> float | None:
    """A speed as a share of the total; None if unknown. Unknown speeds of other workers count as the mean."""
    known = [speed for speed in every if speed is not None]
    if own is None or not known:
        return None
    total = len(every) * sum(known) / len(known)
    minimum = _MIN_SPEED / len(every)
    return min(1 - minimum, max(minimum, own / total)) if len(every) > 1 else 1.0


def _part(pending: int, workers: int, speed: float | None, parts: int) -> int:
    return ceil(pending * (1 / max(1, workers) if speed is None else speed) / parts - _EPSILON)


def cut(rows: Sequence[QueuedJob], most: int, *, more: bool, whole: int | None = None, workers: int = 2) -> int:
    """Number of leading rows that form a shard: the complete prefixes that fit into `most` jobs.

    The first prefix is not split up to `whole` jobs (None: up to `most`). A longer one is split, unless recomputing it
    costs more than several workers gain. Within a prefix the same applies to nested prefixes, such as documents after
    a common system prompt. `more` tells whether further rows follow. There must be more rows than `most` and `whole`,
    so that the end of a prefix is visible.
    """
    if not rows:
        return 0
    most = max(1, most)
    longest = max(most, whole or 0)
    end = next((at for at, row in enumerate(rows) if row.key[:2] != rows[0].key[:2]), None)
    open_end = end is None and more
    rows = rows[:end]
    shared = [worth_bytes(joined(one, other)) for one, other in pairwise(rows)]
    # After the last row, the prefix is assumed to continue.
    shared.append((shared[-1] if shared else 0) if open_end else 0)
    weakest = min(shared[:longest])
    good = [at for at, found in enumerate(shared[:longest], 1) if found < weakest + WORTH_BYTES]
    jobs = max((at for at in good if at <= most), default=good[0])
    return _kept_whole(rows, shared, jobs, workers) or jobs


def _kept_whole(rows: Sequence[QueuedJob], shared: Sequence[int], jobs: int, workers: int) -> int | None:
    """The end of the prefix that a cut after `jobs` rows would split, if splitting does not pay off; otherwise None."""
    again = shared[jobs - 1]
    end = next((at for at in range(jobs, len(rows) + 1) if shared[at - 1] < again), None)
    if not again or end is None:
        return None
    first = next((at for at in range(jobs - 1, 0, -1) if shared[at - 1] < again), 0)
    gained = sum(_cost(row, again) for row in rows[first:end]) * workers
    return end if gained < 2 * again else None  # two, because both parts compute the prefix


def elsewhere(place: bytes, rows: Sequence[QueuedJob]) -> int:
    """Number of leading rows that continue the prefix of the preceding job, at `place`, of another worker.

    0 if the rows continue no prefix, or contain only that prefix.
    """
    if not rows:
        return 0
    begun = _begun(place, rows[0])
    ends = (at for at, (one, other) in enumerate(pairwise(rows), 1) if joined(one, other) + WORTH_BYTES <= begun)
    return next(ends, 0) if begun else 0


def elsewhere_of(places: Iterable[bytes], rows: Sequence[QueuedJob]) -> int:
    """The largest result of `elsewhere` for several places."""
    begun = {_begun(place, rows[0]): place for place in places} if rows else {}
    return max((elsewhere(place, rows) for place in begun.values()), default=0)


def _begun(place: bytes, row: QueuedJob) -> int:
    """Prefix bytes that a job shares with the one at a place."""
    return worth_bytes(min(_shared(place, row.place), row.prompt_bytes))


def halved(rows: Sequence[QueuedJob], *, speed: float = 0.5) -> int | None:
    """Number of a shard's pending jobs to keep when another worker takes over the rest; None: take over nothing.

    `speed` is the other worker's share of the speed of both. Minimises the finishing time. A recomputed prefix counts
    twice: for the time that it takes, and for the work that could be done instead.
    """
    if len(rows) < 2:
        return None
    shared = [joined(one, other) for one, other in pairwise(rows)]
    costs = [_cost(row, found) for row, found in zip(rows, (shared[0], *shared), strict=True)]
    stays = list(accumulate(costs))
    total = stays[-1]
    own = 1 - speed

    def price(stay: int) -> float:
        again = worth_bytes(shared[stay - 1])
        return max(stays[stay - 1] / own, (again + total - stays[stay - 1]) / speed) + again / speed

    best = min(range(1, len(rows)), key=lambda stay: (price(stay), -stay))
    return best if price(best) < total / own else None


def _cost(row: QueuedJob, found: int) -> int:
    """Bytes to compute and to generate for a job of whose prompt `found` bytes are cached."""
    tokens = _ANSWER_TOKENS if row.max_tokens is None else min(_MAX_ANSWER_TOKENS, row.max_tokens)
    return row.prompt_bytes - min(found, row.prompt_bytes) + max(1, tokens) * _TOKEN_BYTES
