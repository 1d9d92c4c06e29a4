"""What answers behind the gateway: an engine with a name and a gate before it, and the chain that a request tries.

A request goes to the first of its chain that can take it. Another is only tried while not one token has come.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenmill.engine.engine import Answer, Engine, Piece, Request
from tokenmill.engine.watched import Watched
from tokenmill.errors import UnknownModel
from tokenmill.gateway.lanes import Gate
from tokenmill.gateway.recorder import Lane

Events = AsyncGenerator[Piece | Answer, None]


class Backend(Protocol):
    """One that answers.

    It may also have `relay(work, sending, visit, charge) -> bool`, which answers a request by passing bytes on as they
    are; False, or an EngineError before anything was sent: it was not that one's to answer.
    """

    @property
    def name(self) -> str:
        """What the configuration calls it; it goes into X-Tokenmill-Engine."""

    @property
    def engine(self) -> Engine:
        """The engine itself, past the gate."""

    @property
    def gate(self) -> Gate:
        """Who may go to it."""

    @property
    def available(self) -> bool:
        """Whether it is worth trying now: it is up, and no breaker is open."""

    @property
    def state(self) -> str:
        """How it is, in a word of engine.State or of a breaker."""

    def stream(self, request: Request) -> Events:
        """Work on one request, when it is its turn; the last value is the answer. Closing cancels."""


@dataclass(frozen=True, slots=True)
class Model:
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

    def models(self) -> Sequence[Model]:
        """Every model that is served."""

    def choose(
        self, model: str | None, lane: Lane, prompt_tokens: int | None, key: str | None
    ) -> "Sequence[Backend]":  # fmt: skip
        """The chain for a request, never empty; UnknownModel where nothing serves that name."""

    def reasoned(
        self, model: str | None, lane: Lane, prompt_tokens: int | None, key: str | None
    ) -> "tuple[Sequence[Backend], str | None]":  # fmt: skip
        """The same with the reason for the log; None: the model alone decided."""


@dataclass(slots=True)
class EngineBackend:
    """An engine of our own behind a gate."""

    name: str
    engine: Engine
    gate: Gate

    @property
    def available(self) -> bool:
        """Whether it lives; one that restarts is only asked where no other can be."""
        return self.state == "ready"

    @property
    def state(self) -> str:
        """How it is, as far as is known without asking."""
        engine = self.engine
        if not isinstance(engine, Watched):
            return "ready"
        return "failed" if engine.failed.done() else "restarting" if engine.current is None else "ready"

    async def stream(self, request: Request) -> Events:
        """Work on one request, when it is its turn; the last value is the answer. Closing cancels."""
        async with self.gate.enter(request.priority):
            events = self.engine.stream(request)
            try:
                async for event in events:
                    yield event
            finally:
                await events.aclose()


@dataclass(slots=True)
class ByModel:
    """Routes by model alone: whoever has it, in the order of the configuration."""

    served: Sequence[tuple[Backend, tuple[str, ...]]]  # with every name of its model; the first is shown
    created_s: int

    @property
    def by_length(self) -> bool:
        """It does not matter."""
        return False

    def models(self) -> Sequence[Model]:
        """Every model once."""
        found: dict[str, Model] = {}
        for backend, names in self.served:
            there = found.get(names[0])
            backends = (*(there.backends if there else ()), backend.name)
            aliases = tuple(dict.fromkeys((*(there.aliases if there else ()), *names[1:])))
            found[names[0]] = Model(names[0], backends, self.created_s, backend.engine.identity.context, aliases)
        return tuple(found.values())

    def choose(
        self, model: str | None, lane: Lane, prompt_tokens: int | None, key: str | None
    ) -> "Sequence[Backend]":  # fmt: skip
        """Those who have the model; without a name, the first and whoever has the same."""
        wanted = self.served[0][1][0] if model is None else model
        chain = tuple(backend for backend, names in self.served if wanted in names)
        if not chain:
            known = ", ".join(one.id for one in self.models())
            raise UnknownModel(f"the model {wanted[:100]!r} is not served here", hint=f"served: {known}")
        return chain

    def reasoned(
        self, model: str | None, lane: Lane, prompt_tokens: int | None, key: str | None
    ) -> "tuple[Sequence[Backend], str | None]":  # fmt: skip
        """The same; there is never another reason."""
        return self.choose(model, lane, prompt_tokens, key), None


@dataclass(frozen=True, slots=True)
class Begun:
    """An answer that has begun: who gives it, and what has come."""

    backend: Backend
    first: Piece | Answer
    rest: Events


async def begin(backend: Backend, request: Request) -> Begun:
    """Wait for the first sign of an answer; until then another backend may still be tried."""
    events = backend.stream(request)
    try:
        return Begun(backend, await anext(events), events)
    except BaseException:
        await events.aclose()
        raise


def worth_trying(chain: Sequence[Backend]) -> Sequence[Backend]:
    """Those that are up; all of them where none is, so that the true reason is found."""
    return [backend for backend in chain if backend.available] or chain
