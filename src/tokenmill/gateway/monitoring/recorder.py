"""Protocol for recording gateway events: metrics, the dashboard, tests.

Methods are called on the event loop and must return immediately.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from tokenmill.engine.engine import Priority, Timings, Usage

PriorityClass = Priority
"""Priority class, as in engine requests."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A finished HTTP request."""

    id: str
    method: str
    route: str  # the path's pattern, never the path: label values must be bounded
    status: int  # 499: the client left before an answer began
    seconds: float
    backend: str | None = None
    lane: PriorityClass | None = None
    key: str | None = None  # its name
    usage: Usage | None = None
    error: str | None = None  # the error's code, if any


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """An answer of an engine."""

    usage: Usage
    timings: Timings
    backend: str
    lane: PriorityClass
    seconds: float  # from reading the request to the last token
    first_token_s: float | None  # None: there was no token
    key: str | None = None
    notes: tuple[str, ...] = ()  # why less was reused than possible


@dataclass(frozen=True, slots=True)
class Missed:
    """A batch prompt of which less was reused than expected."""

    backend: str
    expected_tokens: int
    cached_tokens: int
    words: str  # the cause


class Recorder(Protocol):
    """Records gateway events."""

    def request(self, seen: Seen) -> None:
        """A request was answered, refused or abandoned."""

    def first_token(self, seconds: float, backend: str, lane: PriorityClass) -> None:
        """The first token of an answer arrived."""

    def finished(self, done: FinishedRequest) -> None:
        """An answer is complete."""

    def missed(self, miss: Missed) -> None:
        """A prefix of a batch was recomputed."""

    def refused(self, kind: str) -> None:
        """A request or connection was refused: queue, limits, key, host, size, json, connections, stopping, ..."""


@dataclass(slots=True)
class RequestTally:
    """Plain totals, for /health and for tests."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)  # by route and status
    refusals: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    answers: int = 0

    def request(self, seen: Seen) -> None:
        """Count a request that was answered, refused or abandoned."""
        self.requests[seen.route, seen.status] += 1

    def first_token(self, seconds: float, backend: str, lane: PriorityClass) -> None:
        """Not used: times are not recorded."""

    def finished(self, done: FinishedRequest) -> None:
        """Count a complete answer."""
        self.answers += 1
        self.prompt_tokens += done.usage.prompt_tokens
        self.cached_tokens += done.usage.cached_tokens or 0
        self.completion_tokens += done.usage.completion_tokens

    def missed(self, miss: Missed) -> None:
        """Not used: misses are not recorded."""

    def refused(self, kind: str) -> None:
        """Count a refusal."""
        self.refusals[kind] += 1


@dataclass(slots=True)
class Recorders:
    """Several recorders, called in order."""

    all: list[Recorder] = field(default_factory=list)

    def request(self, seen: Seen) -> None:
        """A request was answered, refused or abandoned."""
        for one in self.all:
            one.request(seen)

    def first_token(self, seconds: float, backend: str, lane: PriorityClass) -> None:
        """The first token of an answer arrived."""
        for one in self.all:
            one.first_token(seconds, backend, lane)

    def finished(self, done: FinishedRequest) -> None:
        """An answer is complete."""
        for one in self.all:
            one.finished(done)

    def missed(self, miss: Missed) -> None:
        """A prefix of a batch was recomputed."""
        for one in self.all:
            one.missed(miss)

    def refused(self, kind: str) -> None:
        """Something was refused."""
        for one in self.all:
            one.refused(kind)
