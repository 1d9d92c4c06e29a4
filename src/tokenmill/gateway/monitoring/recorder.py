"""Protocol for recording gateway events, implemented by metrics and the dashboard.

Methods are called on the event loop and must not block.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from tokenmill.engine.engine import Priority, Timings, Usage

PriorityClass = Priority
"""`interactive` or `batch`, as in engine requests."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A finished HTTP request."""

    id: str
    method: str
    route: str  # the path's pattern, because label values must be bounded
    status: int  # 499: the client disconnected before the response
    seconds: float
    backend: str | None = None
    priority: PriorityClass | None = None
    key: str | None = None  # name of the API key
    usage: Usage | None = None
    error: str | None = None  # the error's code, if any


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A complete answer of an engine."""

    usage: Usage
    timings: Timings
    backend: str
    priority: PriorityClass
    seconds: float  # from reading the request to the last token
    first_token_s: float | None  # None: no token was generated
    key: str | None = None
    notes: tuple[str, ...] = ()  # reasons for prompt tokens that were not reused


@dataclass(frozen=True, slots=True)
class PrefixMiss:
    """A batch prompt of which fewer tokens were reused than expected."""

    backend: str
    expected_tokens: int
    cached_tokens: int
    words: str  # the cause


class Recorder(Protocol):
    """Receives gateway events."""

    def request(self, record: RequestRecord) -> None:
        """A request ended: it was answered, refused or abandoned."""

    def first_token(self, seconds: float, backend: str, priority: PriorityClass) -> None:
        """The first token of an answer arrived."""

    def finished(self, done: FinishedRequest) -> None:
        """An answer is complete."""

    def missed(self, miss: PrefixMiss) -> None:
        """A prefix of a batch was recomputed."""

    def refused(self, kind: str) -> None:
        """A request or connection was refused; `kind` is queue, limits, key, host, size, json, stopping, ..."""


@dataclass(slots=True)
class RequestTally:
    """Plain totals of a gateway."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)  # by route and status
    refusals: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    answers: int = 0

    def request(self, record: RequestRecord) -> None:
        """Count a finished request."""
        self.requests[record.route, record.status] += 1

    def first_token(self, seconds: float, backend: str, priority: PriorityClass) -> None:
        """Not counted."""

    def finished(self, done: FinishedRequest) -> None:
        """Count a complete answer."""
        self.answers += 1
        self.prompt_tokens += done.usage.prompt_tokens
        self.cached_tokens += done.usage.cached_tokens or 0
        self.completion_tokens += done.usage.completion_tokens

    def missed(self, miss: PrefixMiss) -> None:
        """Not counted."""

    def refused(self, kind: str) -> None:
        """Count a refusal."""
        self.refusals[kind] += 1


@dataclass(slots=True)
class Recorders:
    """Passes events to several recorders."""

    all: list[Recorder] = field(default_factory=list)

    def request(self, record: RequestRecord) -> None:
        """A request ended: it was answered, refused or abandoned."""
        for one in self.all:
            one.request(record)

    def first_token(self, seconds: float, backend: str, priority: PriorityClass) -> None:
        """The first token of an answer arrived."""
        for one in self.all:
            one.first_token(seconds, backend, priority)

    def finished(self, done: FinishedRequest) -> None:
        """An answer is complete."""
        for one in self.all:
            one.finished(done)

    def missed(self, miss: PrefixMiss) -> None:
        """A prefix of a batch was recomputed."""
        for one in self.all:
            one.missed(miss)

    def refused(self, kind: str) -> None:
        """A request or connection was refused."""
        for one in self.all:
            one.refused(kind)
