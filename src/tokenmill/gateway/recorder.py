"""What happens at the gateway, told to whoever counts it: metrics, the page, tests.

Calls are made on the event loop and must return at once.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from tokenmill.engine.engine import Priority, Timings, Usage

PriorityClass = Priority
"""interactive or batch, as the engines have it."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One HTTP request, at its end."""

    id: str
    method: str
    route: str  # the path's pattern, never the path: labels must not grow with what clients invent
    status: int  # 499: the client left before an answer began
    seconds: float
    backend: str | None = None
    lane: PriorityClass | None = None
    key: str | None = None  # its name
    usage: Usage | None = None
    error: str | None = None  # the error's code, where there was one


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """One answer that an engine gave for a request."""

    usage: Usage
    timings: Timings
    backend: str
    lane: PriorityClass
    seconds: float  # from when the request was read to the last token
    first_token_s: float | None  # None: there was no token
    key: str | None = None
    notes: tuple[str, ...] = ()  # why less was reused than could have been


@dataclass(frozen=True, slots=True)
class Missed:
    """A prompt of a batch of which less was reused than should have been."""

    backend: str
    expected_tokens: int
    cached_tokens: int
    words: str  # why


class Recorder(Protocol):
    """Who counts."""

    def request(self, seen: Seen) -> None:
        """A request has been answered, refused or left."""

    def first_token(self, seconds: float, backend: str, lane: PriorityClass) -> None:
        """The first token of an answer has come."""

    def finished(self, done: FinishedRequest) -> None:
        """An answer is complete."""

    def missed(self, miss: Missed) -> None:
        """A head of a batch was computed again."""

    def refused(self, kind: str) -> None:
        """A request or connection was refused: queue, limits, key, host, size, json, connections, stopping, ..."""


@dataclass(slots=True)
class RequestTally:
    """Plain sums, for /health and for tests."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)  # by route and status
    refusals: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    answers: int = 0

    def request(self, seen: Seen) -> None:
        """A request has been answered, refused or left."""
        self.requests[seen.route, seen.status] += 1

    def first_token(self, seconds: float, backend: str, lane: PriorityClass) -> None:
        """Times are not kept here."""

    def finished(self, done: FinishedRequest) -> None:
        """An answer is complete."""
        self.answers += 1
        self.prompt_tokens += done.usage.prompt_tokens
        self.cached_tokens += done.usage.cached_tokens or 0
        self.completion_tokens += done.usage.completion_tokens

    def missed(self, miss: Missed) -> None:
        """Misses are not kept here."""

    def refused(self, kind: str) -> None:
        """Something was refused."""
        self.refusals[kind] += 1


@dataclass(slots=True)
class Recorders:
    """Several who count, told one after the other."""

    all: list[Recorder] = field(default_factory=list)

    def request(self, seen: Seen) -> None:
        """A request has been answered, refused or left."""
        for one in self.all:
            one.request(seen)

    def first_token(self, seconds: float, backend: str, lane: PriorityClass) -> None:
        """The first token of an answer has come."""
        for one in self.all:
            one.first_token(seconds, backend, lane)

    def finished(self, done: FinishedRequest) -> None:
        """An answer is complete."""
        for one in self.all:
            one.finished(done)

    def missed(self, miss: Missed) -> None:
        """A head of a batch was computed again."""
        for one in self.all:
            one.missed(miss)

    def refused(self, kind: str) -> None:
        """Something was refused."""
        for one in self.all:
            one.refused(kind)
