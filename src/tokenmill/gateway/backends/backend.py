"""Protocol of a backend (an engine with a name and an admission gate), and the fallback chain of a request.

A request goes to the first backend of its chain that can take it. Another is tried only before the first token.
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
        """The engine itself, without the gate."""

    @property
    def gate(self) -> AdmissionGate:
        """Its admission gate."""

    @property
    def available(self) -> bool:
        """Whether to try it now: it is up, and its breaker is not open."""

    @property
    def state(self) -> str:
        """Its state: a value of engine.State or of the breaker."""

    @property
    def trouble(self) -> str | None:
        """Why the last request to it failed; None if it succeeded."""

    def stream(self, request: Request) -> Events:
        """Run one request when it is admitted; the last event is the answer. Closing cancels."""

    async def relay(
        self, request: "ParsedRequest", sending: ResponseWriter, visit: RequestContext, charge: Callable[[int], None]
    ) -> bool:
        """Answer by relaying bytes to the engine's HTTP API; False if this request needs `stream`.

        An EngineError that is raised before anything was sent leaves the request to another backend.
        """

    async def check(self, pace: PollPace) -> None:
        """Update `state` by asking the engine's health page."""

    def close(self) -> None:
        """Close its connections; the engine belongs to its owner."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model name that clients can use."""

    id: str
    backends: tuple[str, ...]  # backends that serve it, in order of preference
    created_s: int
    context: int | None = None
    aliases: tuple[str, ...] = ()


class Routes(Protocol):
    """Chooses the backends of a request."""

    @property
    def by_length(self) -> bool:
        """Whether routing depends on the prompt's length; only then is it counted."""

    def models(self) -> Sequence[ServedModel]:
        """Every model that is served."""

    def choose(
        self, model: str | None, lane: PriorityClass, prompt_tokens: int | None, key: str | None
    ) -> "Sequence[Backend]":
        """The chain for a request, never empty; UnknownModel where nothing serves that name."""

    def reasoned(
        self, model: str | None, lane: PriorityClass, prompt_tokens: int | None, key: str | None
    ) -> "tuple[Sequence[Backend], str | None]":
        """The chain with the reason for the log; None: the model alone decided."""


@dataclass(slots=True)
class ByModel:
    """Routes by model alone: all backends with the model, in configuration order."""

    served: Sequence[tuple[Backend, tuple[str, ...]]]  # with all names of its model; the first is displayed
    created_s: int

    @property
    def by_length(self) -> bool:
        """Not used: routing depends on the model alone."""
        return False

    def models(self) -> Sequence[ServedModel]:
        """Every model once."""
        found: dict[str, ServedModel] = {}
        for backend, names in self.served:
            there = found.get(names[0])
            backends = (*(there.backends if there else ()), backend.name)
            aliases = tuple(dict.fromkeys((*(there.aliases if there else ()), *names[1:])))
            found[names[0]] = ServedModel(names[0], backends, self.created_s, backend.engine.identity.context, aliases)
        return tuple(found.values())

    def choose(
        self, model: str | None, lane: PriorityClass, prompt_tokens: int | None, key: str | None
    ) -> "Sequence[Backend]":
        """Backends with the model; without a name, the first and all with the same model."""
        wanted = self.served[0][1][0] if model is None else model
        chain = tuple(backend for backend, names in self.served if wanted in names)
        if not chain:
            known = ", ".join(one.id for one in self.models())
            raise UnknownModel(f"the model {wanted[:100]!r} is not served here", hint=f"served: {known}")
        return chain

    def reasoned(
        self, model: str | None, lane: PriorityClass, prompt_tokens: int | None, key: str | None
    ) -> "tuple[Sequence[Backend], str | None]":
        """The chain; there is never another reason."""
        return self.choose(model, lane, prompt_tokens, key), None


@dataclass(frozen=True, slots=True)
class StartedStream:
    """A started answer: its backend, and the events received so far."""

    backend: Backend
    first: Piece | Answer
    rest: Events


async def begin(backend: Backend, request: Request) -> StartedStream:
    """Wait for the first event of an answer; before it, another backend may still be tried."""
    events = backend.stream(request)
    try:
        return StartedStream(backend, await anext(events), events)
    except BaseException:
        await events.aclose()
        raise


def worth_trying(chain: Sequence[Backend]) -> Sequence[Backend]:
    """Backends that are up; all of them if none is, so that the real cause is reported."""
    return [backend for backend in chain if backend.available] or chain
