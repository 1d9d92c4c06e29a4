"""The jobs of a load in the order of a store, and the works that an engine gets.

A job is a position in that order. Its row is the one that the store would return: places share the same chunks of
`jobs.ingest.identity` as their prefixes, so that jobs are assigned by the same few bytes as in the product. Prompts
have four bytes per token, which a scheduler assumes until it knows better.
"""

import random
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, count
from zlib import crc32

from bench.simulation.engine import Path, Work
from bench.simulation.loads import SIZE, SPREAD, Kind, Piece

from tokenmill.jobs.ingest.identity import ENDS, KEY_BYTES, stored_prefix_key
from tokenmill.jobs.models import JobId, QueuedJob
from tokenmill.jobs.scheduler.prefix_groups import Pending

_BYTES = 4  # bytes of a prompt per token
_BATCH = 1


class Table:
    """Jobs in their order, each with its kind and the length of its answer."""

    def __init__(self, kinds: Sequence[Kind], pieces: Sequence[Piece] | None = None, *, seed: str | None) -> None:
        """`pieces` change the order of the store. Without a seed, all answers have the same length."""
        self._kinds = kinds
        self._keys = [_key(kind.path) for kind in kinds]
        if pieces is None:
            pieces = [(at, kinds[at].jobs) for at in sorted(range(len(kinds)), key=lambda at: (self._keys[at], at))]
        self._kind = array("L")
        self._starts = array("L")
        for at, jobs in pieces:
            self._starts.append(len(self._kind))
            self._kind.extend(array("L", [at]) * jobs)
        self.jobs = len(self._kind)
        self._prompts = array("d", accumulate((kinds[at].prompt_tokens for at in self._kind), initial=0.0))
        mean = float(SIZE.output_tokens)
        draw = random.Random(f"answers {seed}")
        answers = draw.choices(SPREAD, k=self.jobs) if seed is not None else [1.0] * self.jobs
        self._answers = array("d", accumulate((mean * each for each in answers), initial=0.0))
        self._bytes = [int(_BYTES * (_tokens(kind.path) + kind.prompt_tokens)) for kind in kinds]
        self._rows: list[QueuedJob | None] = [None] * self.jobs
        self._numbers = count()

    def row(self, position: int) -> QueuedJob:
        """A row as the store returns it; the part after a job's prefixes is unique."""
        if (row := self._rows[position]) is None:
            kind = self._kind[position]
            place = self._keys[kind] + position.to_bytes(KEY_BYTES, "big") + b"own"
            row = QueuedJob(JobId.of(_BATCH, position + 1), 0, place, self._bytes[kind], None, None, 0, 0)
            self._rows[position] = row
        return row

    def work(self, first: int, end: int) -> Work:
        """The jobs in a range of positions as one work; mutates the numbering.

        For several kinds: the common beginning of their paths, and each other prefix once.
        """
        number = next(self._numbers)
        jobs = end - first
        prompts, answers = (values[end] - values[first] for values in (self._prompts, self._answers))
        path = self._kinds[self._kind[first]].path
        if self._kind[first] != self._kind[end - 1]:
            paths = [self._kinds[at].path for at in dict.fromkeys(self._kind[first:end])]
            shared = 0
            while all(len(each) > shared and each[shared] == path[shared] for each in paths):
                shared += 1
            prompts += sum({head: tokens for each in paths for head, tokens in each[shared:]}.values())
            path = path[:shared]
        return Work(number, path, prompts, answers, jobs, first)

    def works(self, first: int, end: int, most: int, *, finer: int | None = None) -> Iterator[Work]:
        """Works with a maximum number of jobs; whole prefixes may exceed it if they are together in one.

        `finer`: ever smaller works, down to single jobs, so that all slots end at about the same time.
        """
        at = first
        while at < end:
            size = most if finer is None else max(1, min(most, (end - at) // finer))
            stop = self._end(at, end)
            if stop - at < size and at in (first, self._starts[bisect_right(self._starts, at) - 1]):
                while stop < end and stop - at < size and self._end(stop, end) - stop <= size:
                    stop = self._end(stop, end)
            stop = min(stop, at + size) if self._kind[at] == self._kind[stop - 1] else stop
            yield self.work(at, stop)
            at = stop

    def record(self, work: Work, *, lengths: bool) -> Pending:
        """A work as a job for a scheduler; `lengths`: its answer's length is known, as for works of several jobs."""
        row = self.row(work.first)
        tokens = work.output_tokens if lengths else None
        return Pending(work.number, stored_prefix_key(row.place), row.prompt_bytes, tokens, 0, None, None)

    def tokens(self, work: Work) -> int:
        """Prompt tokens of a single job."""
        return int(_tokens(work.path) + work.prompt_tokens)

    def _end(self, position: int, end: int) -> int:
        """Number of equal jobs from here on."""
        at = bisect_right(self._starts, position)
        return min(end, self._starts[at] if at < len(self._starts) else self.jobs)


def position_of(row: QueuedJob) -> int:
    """Position in the table."""
    return JobId.line(row.id) - 1


def _tokens(path: Path) -> float:
    return sum(tokens for _, tokens in path)


def _key(path: Path) -> bytes:
    """Checksums of the whole chunks of a path, one per chunk."""
    ends = list(accumulate((_BYTES * tokens for _, tokens in path), initial=0.0))
    chunks = bisect_right(ENDS, ends[-1]) - 1
    made = []
    for chunk in range(chunks):
        heads = [
            head
            for (head, _), start, end in zip(path, ends, ends[1:], strict=False)
            if start < ENDS[chunk + 1] and end > ENDS[chunk]
        ]
        made.append(crc32(repr((chunk, heads)).encode()).to_bytes(KEY_BYTES, "big"))
    return b"".join(made)
