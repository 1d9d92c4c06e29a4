"""Value types: batches, jobs and their outcomes.

A *batch* is a submitted file, a *job* one of its lines. An *answer* belongs to the identity of a request and is shared
by all jobs with that identity. Times are Unix seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple


class JobId:
    """Job numbers in the store: the batch in the upper bits and the line in the lower 32, so that they sort by both."""

    MAX_LINE = (1 << 32) - 1

    @staticmethod
    def of(batch: int, line: int) -> int:
        """The job number of a line of a batch."""
        return batch << 32 | line

    @staticmethod
    def batch(job: int) -> int:
        """The batch number of a job."""
        return job >> 32

    @staticmethod
    def line(job: int) -> int:
        """The line number of a job in its file, from 1."""
        return job & JobId.MAX_LINE

    @staticmethod
    def span(batch: int) -> dict[str, int]:
        """The lowest and highest job numbers of a batch, as query values."""
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
        """Whether the job has an outcome."""
        return self >= State.DONE


INVALID_LINE = "invalid_line"
"""The failure code of a line that could not be parsed; retrying it cannot help."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a job has no answer."""

    code: str  # invalid_line, too_long, refused, timeout, engine_died, deadline, cancelled, ...
    message: str


SortKey = tuple[int, int, bytes, int]
"""Sort key of pending jobs: negative priority, batch (oldest first), place, job."""


@dataclass(frozen=True, slots=True)
class Job:
    """One line of a batch."""

    id: int
    custom_id: str | None  # None: the line could not be parsed
    state: State
    identity: bytes | None  # None if the line could not be parsed, like the following fields
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
        """The batch number."""
        return JobId.batch(self.id)

    @property
    def number(self) -> int:
        """The line number in the file, from 1."""
        return JobId.line(self.id)


class QueuedJob(NamedTuple):
    """A pending job with the fields that determine its order; its line is read when it starts."""

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
        """The job's position in the queue, from which reading can continue."""
        return self.rank, JobId.batch(self.id), self.place, self.id


@dataclass(frozen=True, slots=True)
class Submission:
    """How to run a job file."""

    model_id: str
    output: str | None = None  # absolute path; identifies the batch together with the file's content and the model
    errors: str | None = None  # a separate file for failed lines
    priority: int | None = None  # default for lines without one; higher first; None: 0, or unchanged
    deadline_s: float | None = None
    reuse: bool = True  # use existing answers
    strict: bool = False  # a bad line rejects the whole file
    defaults: Mapping[str, Any] = field(default_factory=dict)  # body keys for lines without them
    name: str | None = None  # of the batch; None: generated
    owner: str | None = None  # existing answers are reused only within one owner; None: those without an owner


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
        """All jobs."""
        return self.pending + self.running + self.final

    @property
    def final(self) -> int:
        """Jobs with an outcome."""
        return self.done + self.failed + self.cancelled + self.quarantined


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """Answers of a batch so far, and the cost of the computed ones.

    `computed` and `reused` add up to the number of done jobs. Tokens and time include answers that arrived after their
    job was cancelled.
    """

    computed: int = 0  # answers
    reused: int = 0  # answers that existed or were computed for another job
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt tokens; 0 if the engine does not report them
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
        """Whether every line has an outcome."""
        return self.sealed_s is not None and self.counts.pending == 0 and self.counts.running == 0


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """A computed answer, to be committed."""

    job: int
    body: bytes  # response body, stored and written unchanged
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    engine_s: float = 0.0


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The new state of a job."""

    job: int
    state: State
    reused: bool = False  # the answer was computed for another job


@dataclass(frozen=True, slots=True)
class Started:
    """Result of starting jobs."""

    running: tuple[Job, ...]
    answered: tuple[JobOutcome, ...] = ()  # done immediately, because the answer existed
    held: tuple[int, ...] = ()  # a job with the same identity runs: they are done with it, or released if it fails


class Result(NamedTuple):
    """A job as written to the output."""

    number: int
    state: State
    custom_id: str | None
    identity: bytes | None
    body: bytes | None
    code: str | None
    message: str | None
    damaged_answer: int | None = None  # the damaged answer; 0: the job refers to the answer of another request
