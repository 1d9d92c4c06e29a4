"""Protocol of a backend (an engine with a name and an admission gate), and the fallback chain of a request.

A request goes to the first available backend of its chain. The next one is tried only before the first token.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tokenmill.engine.engine import Answer, Engine, Piece, Request
from tokenmill.errors import UnknownModel
from tokenmill.gateway.backends.admission import AdmissionGate
from tokenmill.gateway.backends.health_check import PollPace
from tokenmill.gateway.http.request_context import RequestContext
from tokenmill.gateway.http.response_writer import ResponseWriter
from tokenmill.gateway.monitoring.recorder import PriorityClass

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
class ServedModel:
    """A model and its names."""

    id: str
    backends: tuple[str, ...]  # backends that serve it, in order of preference
    created_s: int
    context: int | None = None
    aliases: tuple[str, ...] = ()


class Routes(Protocol):
    """Chooses the backends of a request."""

    @property
    def by_length(self) -> bool:
        """Whether routing depends on the prompt's length, which is counted only then."""

    def models(self) -> Sequence[ServedModel]:
        """The served models."""

    def choose(
        self, model: str | None, priority: PriorityClass, prompt_tokens: int | None, key: str | None
    ) -> "Sequence[Backend]":
        """The fallback chain of a request, never empty; raises UnknownModel if no backend serves the model."""

    def choose_with_reason(
        self, model: str | None, priority: PriorityClass, prompt_tokens: int | None, key: str | None
    ) -> "tuple[Sequence[Backend], str | None]":
        """The fallback chain, and the matching route for the log; None: chosen by model alone."""


@dataclass(slots=True)
class ModelRoutes:
    """Routes by model alone: all backends with the model, in configuration order."""

    served: Sequence[tuple[Backend, tuple[str, ...]]]  # with the names of its model; the first is displayed
    created_s: int

    @property
    def by_length(self) -> bool:
        """False: routing depends on the model alone."""
        return False

    def models(self) -> Sequence[ServedModel]:
        """The served models, each once."""
        found: dict[str, ServedModel] = {}
        for backend, names in self.served:
            there = found.get(names[0])
            backends = (*(there.backends if there else ()), backend.name)
            aliases = tuple(dict.fromkeys((*(there.aliases if there else ()), *names[1:])))
            found[names[0]] = ServedModel(names[0], backends, self.created_s, backend.engine.identity.context, aliases)
        return tuple(found.values())

    def choose(
        self, model: str | None, priority: PriorityClass, prompt_tokens: int | None, key: str | None
    ) -> "Sequence[Backend]":
        """The backends with this model; for None, the backends with the first model."""
        wanted = self.served[0][1][0] if model is None else model
        chain = tuple(backend for backend, names in self.served if wanted in names)
        if not chain:
            known = ", ".join(one.id for one in self.models())
            raise UnknownModel(f"the model {wanted[:100]!r} is not served", hint=f"served models: {known}")
        return chain

    def choose_with_reason(
        self, model: str | None, priority: PriorityClass, prompt_tokens: int | None, key: str | None
    ) -> "tuple[Sequence[Backend], str | None]":
        """The fallback chain, without a reason."""
        return self.choose(model, priority, prompt_tokens, key), None


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


def worth_trying(chain: Sequence[Backend]) -> Sequence[Backend]:
    """The available backends; all of them if none is, so that the request fails with the real cause."""
    return [backend for backend in chain if backend.available] or chain
