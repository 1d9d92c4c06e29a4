"""What answers behind the gateway: an engine with a name and a gate before it, and the chain that a request tries.

A request goes to the first of its chain that can take it. Another is only tried while not one token has come.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tokenmill.engine.engine import Answer, Engine, Piece, Request
from tokenmill.errors import UnknownModel
from tokenmill.gateway.admission import AdmissionGate
from tokenmill.gateway.recorder import PriorityClass
from tokenmill.gateway.request_context import RequestContext
from tokenmill.gateway.response_writer import ResponseWriter
from tokenmill.gateway.vitals import PollPace

if TYPE_CHECKING:
    from tokenmill.gateway.request import ParsedRequest

Events = AsyncGenerator[Piece | Answer, None]


class Backend(Protocol):
    """An engine as the gateway uses it."""

    @property
    def name(self) -> str:
        """What the configuration calls it; it goes into X-Tokenmill-Engine."""

    @property
    def engine(self) -> Engine:
        """The engine itself, past the gate."""

    @property
    def gate(self) -> AdmissionGate:
        """Who may go to it."""

    @property
    def available(self) -> bool:
        """Whether it is worth trying now: it is up, and no breaker is open."""

    @property
    def state(self) -> str:
        """How it is, in a word of engine.State or of a breaker."""

    @property
    def trouble(self) -> str | None:
        """Why the last request to it failed; None if it succeeded."""

    def stream(self, request: Request) -> Events:
        """Work on one request, when it is its turn; the last value is the answer. Closing cancels."""

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
    backends: tuple[str, ...]  # who answers for it, the first first
    created_s: int
    context: int | None = None
    aliases: tuple[str, ...] = ()


class Routes(Protocol):
    """Which backends a request may go to."""

    @property
    def by_length(self) -> bool:
        """Whether the length of a prompt matters: only then is it counted."""

    def models(self) -> Sequence[ServedModel]:
        """Every model that is served."""

    def choose(
        self, model: str | None, lane: PriorityClass, prompt_tokens: int | None, key: str | None
    ) -> "Sequence[Backend]":
        """The chain for a request, never empty; UnknownModel where nothing serves that name."""

    def reasoned(
        self, model: str | None, lane: PriorityClass, prompt_tokens: int | None, key: str | None
    ) -> "tuple[Sequence[Backend], str | None]":
        """The same with the reason for the log; None: the model alone decided."""


@dataclass(slots=True)
class ByModel:
    """Routes by model alone: whoever has it, in the order of the configuration."""

    served: Sequence[tuple[Backend, tuple[str, ...]]]  # with every name of its model; the first is shown
    created_s: int

    @property
    def by_length(self) -> bool:
        """It does not matter."""
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
        """Those who have the model; without a name, the first and whoever has the same."""
        wanted = self.served[0][1][0] if model is None else model
        chain = tuple(backend for backend, names in self.served if wanted in names)
        if not chain:
            known = ", ".join(one.id for one in self.models())
            raise UnknownModel(f"the model {wanted[:100]!r} is not served here", hint=f"served: {known}")
        return chain

    def reasoned(
        self, model: str | None, lane: PriorityClass, prompt_tokens: int | None, key: str | None
    ) -> "tuple[Sequence[Backend], str | None]":
        """The same; there is never another reason."""
        return self.choose(model, lane, prompt_tokens, key), None


@dataclass(frozen=True, slots=True)
class StartedStream:
    """An answer that has begun: who gives it, and what has come."""

    backend: Backend
    first: Piece | Answer
    rest: Events


async def begin(backend: Backend, request: Request) -> StartedStream:
    """Wait for the first sign of an answer; until then another backend may still be tried."""
    events = backend.stream(request)
    try:
        return StartedStream(backend, await anext(events), events)
    except BaseException:
        await events.aclose()
        raise


def worth_trying(chain: Sequence[Backend]) -> Sequence[Backend]:
    """Those that are up; all of them where none is, so that the true reason is found."""
    return [backend for backend in chain if backend.available] or chain
