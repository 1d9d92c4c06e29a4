"""Protocol of a backend (an engine with a name and an admission gate), and the fallback chain of a request.

A request goes to the first available backend of its chain. The next one is tried only before the first token.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tokenmill.engine.engine import Answer, Engine, Piece, Request
from tokenmill.gateway.backends.admission import AdmissionGate
from tokenmill.gateway.backends.health_check import PollPace
from tokenmill.gateway.http.request_context import RequestContext
from tokenmill.gateway.http.response_writer import ResponseWriter

if TYPE_CHECKING:
    from tokenmill.gateway.http.request import ParsedRequest

Events = AsyncGenerator[Piece | Answer, None]


class Backend(Protocol):
    """An engine as the gateway uses it."""

    @property
    def name(self) -> str:
        """The name in the configuration; sent in the X-Tokenmill-Engine header."""

    @property
    def engine(self) -> Engine:
        """The engine without admission control."""

    @property
    def gate(self) -> AdmissionGate:
        """The admission gate of the engine."""

    @property
    def available(self) -> bool:
        """Whether it is up and its circuit breaker is not open."""

    @property
    def state(self) -> str:
        """A value of engine.State, or the circuit breaker's state."""

    @property
    def trouble(self) -> str | None:
        """Error of the last request; None if it succeeded."""

    def stream(self, request: Request) -> Events:
        """Run one request once it is admitted; the last event is the answer. Closing the stream cancels the request."""

    async def relay(
        self, request: "ParsedRequest", writer: ResponseWriter, context: RequestContext, charge: Callable[[int], None]
    ) -> bool:
        """Relay the request to the engine's HTTP API; returns False if it needs `stream` instead.

        After an EngineError that is raised before anything was sent, another backend may answer.
        """

    async def check(self, pace: PollPace) -> None:
        """Poll the engine's health and update `state`."""

    def close(self) -> None:
        """Close its connections; the engine stays open."""


@dataclass(frozen=True, slots=True)
class StartedStream:
    """A stream whose first event has arrived."""

    backend: Backend
    first: Piece | Answer
    rest: Events


async def begin(backend: Backend, request: Request) -> StartedStream:
    """Start a stream and wait for its first event."""
    events = backend.stream(request)
    try:
        return StartedStream(backend, await anext(events), events)
    except BaseException:
        await events.aclose()
        raise


def candidates(chain: Sequence[Backend]) -> Sequence[Backend]:
    """The available backends; all of them if none is, so that the request fails with the real cause."""
    return [backend for backend in chain if backend.available] or chain
