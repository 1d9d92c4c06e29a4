"""The values of the jobs room: batches, jobs, what became of them.

A *batch* is one submitted file; a *job* is one of its lines; an *answer* belongs to an identity and is shared by all
jobs that have it. Times are Unix seconds. Nothing here knows where these are kept.
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
    """Where a job is; the numbers are in every store and stay."""

    PENDING = 0
    RUNNING = 1
    DONE = 2
    FAILED = 3
    CANCELLED = 4
    SET_ASIDE = 5  # it was at work when the engine died, too often

    @property
    def word(self) -> str:
        """As people read it."""
        return self.name.lower().replace("_", " ")

    @property
    def final(self) -> bool:
        """Whether the output can have its line."""
        return self >= State.DONE


INVALID_LINE = "invalid_line"
"""The code of a line that could not be read; sending it again cannot help."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a job has no answer."""

    code: str  # invalid_line, too_long, refused, timeout, engine_died, deadline, cancelled, ...
    message: str


SortKey = tuple[int, int, bytes, int]
"""Of a pending job among all: by priority, then by batch, the oldest first, then by place."""


@dataclass(frozen=True, slots=True)
class Job:
    """One line of a batch."""

    id: int
    custom_id: str | None  # None: a line so bad that it has none
    state: State
    identity: bytes | None  # None, as what follows: a line that could not be read
    place: bytes | None
    priority: int
    prompt_bytes: int | None
    max_tokens: int | None
    deadline_s: float | None
    attempts: int
    deaths: int  # engines that died while it was at work
    line: str  # as it stood in the file

    @property
    def batch(self) -> int:
        """The number of its batch."""
        return JobId.batch(self.id)

    @property
    def number(self) -> int:
        """Its line in the file, from 1."""
        return JobId.line(self.id)


class Waiting(NamedTuple):
    """What the order of pending jobs is decided from; its line is read when it is started."""

    id: int
    rank: int  # the negative of its priority
    place: bytes
    prompt_bytes: int
    max_tokens: int | None
    deadline_s: float | None
    attempts: int
    deaths: int

    @property
    def key(self) -> "SortKey":
        """Its position in the order; give it to ask for what follows."""
        return self.rank, JobId.batch(self.id), self.place, self.id


@dataclass(frozen=True, slots=True)
class Submission:
    """How a file is to be worked on."""

    model_id: str
    output: str | None = None  # absolute; with the file's content and the model it names the batch
    errors: str | None = None  # a file of their own for lines without an answer
    priority: int | None = None  # of lines that have none; higher first; None: 0, or as it was
    deadline_s: float | None = None
    reuse: bool = True  # answers that exist are taken
    strict: bool = False  # one bad line refuses the file
    defaults: Mapping[str, Any] = field(default_factory=dict)  # keys of a body, for lines that lack them
    name: str | None = None  # of the batch; None: one is made up


@dataclass(frozen=True, slots=True)
class Counts:
    """Jobs of a batch by state."""

    pending: int = 0
    running: int = 0
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    set_aside: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.pending + self.running + self.final

    @property
    def final(self) -> int:
        """Those that need nothing more."""
        return self.done + self.failed + self.cancelled + self.set_aside


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """What a batch has cost so far: of the answers computed for it, not of those that were there.

    `computed` and `reused` together are the jobs that are done. What an answer cost that came for a job after it had
    been cancelled is in the tokens and the time.
    """

    computed: int = 0  # answers
    reused: int = 0  # answers that were there, or came for another job
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt tokens; engines that do not say count as none
    completion_tokens: int = 0
    engine_s: float = 0.0  # summed over jobs, many of which ran at once


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
    sealed_s: float | None  # None: not all of its lines are stored yet
    cancelled_s: float | None
    lines: int  # the last line's number, blank ones counted
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
    body: bytes  # of the response; these bytes are kept and written out as they are
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    engine_s: float = 0.0


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """A job that changed its state."""

    job: int
    state: State
    reused: bool = False  # done with an answer that was not computed for it


@dataclass(frozen=True, slots=True)
class Started:
    """What came of an attempt to start jobs."""

    running: tuple[Job, ...]
    answered: tuple[JobOutcome, ...] = ()  # done at once: the answer was there
    held: tuple[int, ...] = ()  # an equal job runs: done with it, or free again when it fails


class Result(NamedTuple):
    """What the output needs of one job."""

    number: int
    state: State
    custom_id: str | None
    identity: bytes | None
    body: bytes | None
    code: str | None
    message: str | None
    damaged_answer: int | None = None  # the job is to be requeued; 0: it points to no answer of its own
