"""A backend as an engine for batches: counts tokens, and uses the gate if the engine has no priorities of its own."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from tokenmill.engine.engine import (
    Answer,
    Capabilities,
    Engine,
    EngineStatus,
    Identity,
    Liveness,
    Piece,
    Request,
    Usage,
)
from tokenmill.engine.forward import ForwardingEngine
from tokenmill.errors import EngineError, TokenmillError
from tokenmill.gateway.backends.backend import Backend
from tokenmill.gateway.http.faults import Busy


class BackendEngine(ForwardingEngine):
    """The engine of a backend, as batches use it. `close` does nothing: the backend's owner closes the engine."""

    def __init__(self, backend: Backend, on_usage: Callable[[Usage], None] = lambda _: None) -> None:
        """`on_usage` receives the tokens of each complete answer."""
        self._backend = backend
        self._on_usage = on_usage

    @property
    def inner(self) -> Engine:
        """The wrapped engine."""
        return self._backend.engine

    @property
    def identity(self) -> Identity:
        """Identity of the engine."""
        return self.inner.identity

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the engine."""
        return self.inner.capabilities

    @property
    def ended(self) -> asyncio.Future[EngineError]:
        """Done when the engine has failed and will not be restarted."""
        return self.inner.ended

    @property
    def exited(self) -> asyncio.Future[EngineError]:
        """Done when the engine's current process has died."""
        return self.inner.exited

    @property
    def generation(self) -> int:
        """The number of the engine's processes that have died."""
        return self.inner.generation

    @property
    def liveness(self) -> Liveness:
        """Whether the engine can be used."""
        return self.inner.liveness

    @property
    def last_error(self) -> TokenmillError | None:
        """Why the engine failed or died last."""
        return self.inner.last_error

    async def reconnect(self) -> bool:
        """Try again to reach the engine."""
        return await self.inner.reconnect()

    async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        """Run one request; if it needs the gate, waits without a limit until it is admitted."""
        while True:
            gated = not self.capabilities.interactive_first
            events = self._backend.stream(request) if gated else self.inner.stream(request)
            begun = False
            try:
                async for event in events:
                    begun = True
                    if isinstance(event, Answer):
                        self._on_usage(event.usage)
                    yield event
            except Busy as busy:
                if begun:
                    raise
                wait_s = busy.retry_after_s or 1.0
            else:
                return
            finally:
                await events.aclose()
            await asyncio.sleep(wait_s)

    async def embed(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Compute embeddings once admitted; waits without a limit."""
        while True:
            try:
                async with self._backend.gate.enter("batch"):
                    response = await self.inner.embed(body)
            except Busy as busy:
                await asyncio.sleep(busy.retry_after_s or 1.0)
                continue
            tokens = int((response.get("usage") or {}).get("prompt_tokens") or 0)
            self._on_usage(Usage(tokens, 0, None))
            return response

    async def status(self) -> EngineStatus:
        """State and counters."""
        return await self.inner.status()

    async def close(self) -> None:
        """Does nothing: the backend's owner closes the engine."""
