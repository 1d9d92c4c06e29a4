"""Value types of jobs: batches, jobs and their outcomes.

A *batch* is one submitted file; a *job* is one of its lines; an *answer* belongs to an identity and is shared by all
jobs that have it. Times are Unix seconds. Knows nothing of storage.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple


class JobId:
    """Job numbers in the store: the batch above, its line below, so that they sort by batch, then by line."""

    MAX_LINE = (1 << 32) - 1

    @staticmethod
    def of(batch: int, line: int) -> int:
        """The number of a line of a batch."""
        return batch << 32 | line

    @staticmethod
    def batch(job: int) -> int:
        """The batch of a job."""
        return job >> 32

    @staticmethod
    def line(job: int) -> int:
        """The line of a job in its file, from 1."""
        return job & JobId.MAX_LINE

    @staticmethod
    def span(batch: int) -> dict[str, int]:
        """The lowest and the highest number that a job of a batch can have, as the values of a query."""
        return {"first": JobId.of(batch, 0), "last": JobId.of(batch, JobId.MAX_LINE)}


class State(IntEnum):
    """State of a job; the numbers are stored and never change."""

    PENDING = 0
    RUNNING = 1
    DONE = 2
    FAILED = 3
    CANCELLED = 4
    QUARANTINED = 5  # in flight during too many engine crashes

    @property
    def word(self) -> str:
        """The state as displayed to users."""
        return self.name.lower()

    @property
    def final(self) -> bool:
        """Whether the job has its outcome."""
        return self >= State.DONE


INVALID_LINE = "invalid_line"
"""The code of a line that could not be read; sending it again cannot help."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a job has no answer."""

    code: str  # invalid_line, too_long, refused, timeout, engine_died, deadline, cancelled, ...
    message: str


SortKey = tuple[int, int, bytes, int]
"""Sort key of pending jobs: by priority, then by batch, the oldest first, then by place."""


@dataclass(frozen=True, slots=True)
class Job:
    """One line of a batch."""

    id: int
    custom_id: str | None  # None: a line too malformed to have one
    state: State
    identity: bytes | None  # None, like the following fields: a line that could not be parsed
    place: bytes | None
    priority: int
    prompt_bytes: int | None
    max_tokens: int | None
    deadline_s: float | None
    attempts: int
    crashes: int  # engine crashes while it was in flight
    line: str  # as in the file

    @property
    def batch(self) -> int:
        """The number of its batch."""
        return JobId.batch(self.id)

    @property
    def number(self) -> int:
        """Its line in the file, from 1."""
        return JobId.line(self.id)


class QueuedJob(NamedTuple):
    """The fields that decide the order of a pending job; its line is read when it starts."""

    id: int
    rank: int  # negative priority
    place: bytes
    prompt_bytes: int
    max_tokens: int | None
    deadline_s: float | None
    attempts: int
    crashes: int

    @property
    def key(self) -> "SortKey":
        """Its position in the queue; pass it to read what follows."""
        return self.rank, JobId.batch(self.id), self.place, self.id


@dataclass(frozen=True, slots=True)
class Submission:
    """How a file is to be worked on."""

    model_id: str
    output: str | None = None  # absolute; together with the file's content and the model it identifies the batch
    errors: str | None = None  # a separate file for failed lines
    priority: int | None = None  # default for lines without one; higher first; None: 0, or unchanged
    deadline_s: float | None = None
    reuse: bool = True  # use existing answers
    strict: bool = False  # one bad line rejects the whole file
    defaults: Mapping[str, Any] = field(default_factory=dict)  # body keys for lines that lack them
    name: str | None = None  # of the batch; None: generated


@dataclass(frozen=True, slots=True)
class Counts:
    """Jobs of a batch by state."""

    pending: int = 0
    running: int = 0
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    quarantined: int = field(default=0, metadata={"json": "set_aside"})

    @property
    def total(self) -> int:
        """All of them."""
        return self.pending + self.running + self.final

    @property
    def final(self) -> int:
        """Those that need nothing more."""
        return self.done + self.failed + self.cancelled + self.quarantined


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """Cost of a batch so far: of the answers computed for it, without reused ones.

    `computed` and `reused` add up to the done jobs. The tokens and the time include answers that arrived after their
    job was cancelled.
    """

    computed: int = 0  # answers
    reused: int = 0  # answers that existed, or came from another job
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt tokens; 0 for engines that do not report it
    completion_tokens: int = 0
    engine_s: float = 0.0  # summed over concurrent jobs


@dataclass(frozen=True, slots=True)
class Batch:
    """One submitted file."""

    id: int
    name: str
    source: str
    model_id: str
    output: str | None
    errors: str | None
    reuse: bool
    priority: int
    deadline_s: float | None
    defaults: Mapping[str, Any]
    created_s: float
    sealed_s: float | None  # None: not all lines are stored yet
    cancelled_s: float | None
    lines: int  # number of the last line, including blank ones
    counts: Counts
    totals: BatchTotals

    @property
    def finished(self) -> bool:
        """Whether every line has its outcome."""
        return self.sealed_s is not None and self.counts.pending == 0 and self.counts.running == 0


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """An answer that has come, to be committed."""

    job: int
    body: bytes  # of the response; stored and written unchanged
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    engine_s: float = 0.0


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """A job that changed its state."""

    job: int
    state: State
    reused: bool = False  # done with an answer that was computed for another job


@dataclass(frozen=True, slots=True)
class Started:
    """Result of starting jobs."""

    running: tuple[Job, ...]
    answered: tuple[JobOutcome, ...] = ()  # done immediately: the answer existed
    held: tuple[int, ...] = ()  # an equal job runs: done with it, or freed if it fails


class Result(NamedTuple):
    """A job as the output needs it."""

    number: int
    state: State
    custom_id: str | None
    identity: bytes | None
    body: bytes | None
    code: str | None
    message: str | None
    damaged_answer: int | None = None  # the answer to requeue; 0: the job points to the answer of another request
