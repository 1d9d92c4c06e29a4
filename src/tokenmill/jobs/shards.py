"""Stretches: consecutive pending jobs of one batch and priority, which one of several workers is to take.

The store's order has jobs with a common head side by side, so a stretch is a range of it, and who has the stretch
computes its heads. Four choices, each from the few thousand rows that are looked at:

    fair, fair_share    how long the next stretch may be: a part of what is left, so that unlike workers end together
    cut                 where it ends: between heads, or where neighbours share least
    elsewhere           where to begin, so that another worker keeps the head that it is at
    halved              what a worker without work takes of another's, if computing its head again is worth that

`gaps` says where to look for jobs that lie in no stretch.

Costs are reckoned in bytes, of prompts and of answers alike: computing a token of a prompt takes about as long as
writing one with all lanes at work. Pure: knows no stores, clocks or workers, and is the same for all that share out.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil

from tokenmill.jobs.forest import WORTH_BYTES, chunk_bytes, common_length, worth_bytes
from tokenmill.jobs.identity import head_of
from tokenmill.jobs.models import SortKey, Waiting

MOST_JOBS = 16384  # a head that is computed again after so many jobs costs next to nothing
_PARTS = 2  # that a fair share is handed out in, at least
_ANSWER_TOKENS = 64  # of an answer without a ceiling
_MOST_ANSWER_TOKENS = 256  # a ceiling is not what is written
_TOKEN_BYTES = 4
_EPSILON = 1e-9
_LEAST_RANK = -(1 << 62)
_MOST_RANK = 1 << 62


@dataclass(frozen=True, slots=True)
class Shard:
    """From one job to another, both included."""

    first: SortKey
    last: SortKey
    jobs: int  # that were pending when it was made

    def __contains__(self, position: object) -> bool:
        return isinstance(position, tuple) and self.first <= position <= self.last

    @property
    def between(self) -> "Between":
        """As the positions that it lies between."""
        rank, batch, place, job = self.last
        return Between(before(self.first), (rank, batch, place, job + 1))


@dataclass(frozen=True, slots=True)
class Between:
    """A part of one batch's order between two positions of that batch, neither included."""

    after: SortKey
    until: SortKey


def before(position: SortKey) -> SortKey:
    """For reading from a position on: right before it."""
    rank, batch, place, job = position
    return rank, batch, place, job - 1


def gaps(every: Iterable[Shard], batches: Sequence[int], after: SortKey | None) -> list[Between]:
    """What of some batches lies behind a position and in none of these stretches; there may be no jobs in it."""
    taken = dict[int, list[Shard]]()
    for stretch in sorted(every, key=lambda each: each.first):
        taken.setdefault(stretch.first[1], []).append(stretch)
    found = list[Between]()
    for batch in batches:
        reached = _entered(batch, after)
        for stretch in taken.get(batch, ()):
            if reached < stretch.first:
                found.append(Between(reached, stretch.first))
            reached = max(reached, stretch.last)
        found.append(Between(reached, (_MOST_RANK, batch, b"", 0)))
    return found


def _entered(batch: int, after: SortKey | None) -> SortKey:
    """A position as one of a batch: older ones have had their turn at its priority, newer ones have not."""
    if after is None:
        return _LEAST_RANK, batch, b"", -1
    return after if after[1] == batch else (after[0] + (batch < after[1]), batch, b"", -1)


def joined(one: Waiting, other: Waiting) -> int:
    """Bytes of head that two neighbours share, in whole chunks."""
    return min(_shared(one.place, other.place), one.prompt_bytes, other.prompt_bytes)


def _shared(one: bytes, other: bytes) -> int:
    """As `identity.shared_bytes`, and quicker for long heads: this runs for every pending job."""
    return chunk_bytes(common_length(head_of(one), head_of(other)))


def fair(pending: int, workers: int, lanes: int, *, speed: float | None = None) -> int:
    """Most jobs of the next stretch when so many are in none: never fewer than the worker has lanes.

    `speed`: its part of the speed of all workers together; None: unknown, they count as alike.
    """
    return min(MOST_JOBS, max(1, lanes, _part(pending, workers, speed, _PARTS)))


def fair_share(pending: int, workers: int, *, speed: float | None = None) -> int:
    """Jobs that a worker would get if all were shared out at once; a head with more is cut."""
    return min(MOST_JOBS, max(1, _part(pending, workers, speed, 1)))


def _part(pending: int, workers: int, speed: float | None, parts: int) -> int:
    return ceil(pending * (1 / max(1, workers) if speed is None else speed) / parts - _EPSILON)


def cut(rows: Sequence[Waiting], most: int, *, more: bool, whole: int | None = None, workers: int = 2) -> int:
    """How many of the leading rows make a stretch: as many whole heads as there are in `most` jobs.

    The first head is kept whole up to `whole` jobs (None: up to `most`), and cut where it is longer, unless computing
    it once more costs more than several of so many workers gain. Inside one head the same is done with those that lie
    in it: documents behind one system prompt. `more`: rows go on behind these; give more than `most` and `whole`, so
    that it can be seen where a head ends.
    """
    if not rows:
        return 0
    most = max(1, most)
    longest = max(most, whole or 0)
    end = next((at for at, row in enumerate(rows) if row.key[:2] != rows[0].key[:2]), None)
    open_end = end is None and more
    rows = rows[:end]
    shared = [worth_bytes(joined(one, other)) for one, other in pairwise(rows)]
    # Where rows are not seen any more, a head is taken to go on as it did.
    shared.append((shared[-1] if shared else 0) if open_end else 0)
    weakest = min(shared[:longest])
    good = [at for at, found in enumerate(shared[:longest], 1) if found < weakest + WORTH_BYTES]
    jobs = max((at for at in good if at <= most), default=good[0])
    return _kept_whole(rows, shared, jobs, workers) or jobs


def _kept_whole(rows: Sequence[Waiting], shared: Sequence[int], jobs: int, workers: int) -> int | None:
    """Where the head ends that would be cut behind so many rows, if cutting it does not pay; None: it does."""
    again = shared[jobs - 1]
    end = next((at for at in range(jobs, len(rows) + 1) if shared[at - 1] < again), None)
    if not again or end is None:
        return None
    first = next((at for at in range(jobs - 1, 0, -1) if shared[at - 1] < again), 0)
    gained = sum(_cost(row, again) for row in rows[first:end]) * workers
    return end if gained < 2 * again else None  # for two parts


def elsewhere(place: bytes, rows: Sequence[Waiting]) -> int:
    """How many leading rows to leave to the worker who had the job before them, at this place: what is left of a head.

    0: it had whole heads, or there is nothing else among these rows.
    """
    if not rows:
        return 0
    begun = _begun(place, rows[0])
    ends = (at for at, (one, other) in enumerate(pairwise(rows), 1) if joined(one, other) + WORTH_BYTES <= begun)
    return next(ends, 0) if begun else 0


def elsewhere_of(places: Iterable[bytes], rows: Sequence[Waiting]) -> int:
    """The most that `elsewhere` says for some places; each length of a begun head is looked at once."""
    begun = {_begun(place, rows[0]): place for place in places} if rows else {}
    return max((elsewhere(place, rows) for place in begun.values()), default=0)


def _begun(place: bytes, row: Waiting) -> int:
    """Bytes of a job's head that lie before it at a place."""
    return worth_bytes(min(_shared(place, row.place), row.prompt_bytes))


def halved(rows: Sequence[Waiting], *, speed: float = 0.5) -> int | None:
    """How many of the pending jobs of a stretch stay when another worker takes the rest; None: it should take none.

    `speed`: the part of both workers' speed that is the other's. Chosen is what ends soonest, a head that is computed
    again counted twice: once for the time it takes, and once for what could have been done in it.
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


def _cost(row: Waiting, found: int) -> int:
    """Bytes to compute for a job whose head is there, and to write."""
    tokens = _ANSWER_TOKENS if row.max_tokens is None else min(_MOST_ANSWER_TOKENS, row.max_tokens)
    return row.prompt_bytes - min(found, row.prompt_bytes) + max(1, tokens) * _TOKEN_BYTES
