"""A backend as the batch room works with engines: jobs go through the backend's gate, so that interactive requests go
first where an engine does not see to that itself."""

import asyncio
from collections.abc import AsyncGenerator

from tokenmill.engine.engine import Answer, Capabilities, Engine, Identity, Piece, Prompt, Request, Status
from tokenmill.engine.watched import Watched
from tokenmill.errors import EngineError
from tokenmill.gateway.backend import Backend
from tokenmill.gateway.faults import Busy


def engine_behind(backend: Backend) -> Engine:
    """What batches are to be worked with."""
    return backend.engine if backend.engine.capabilities.interactive_first else Gated(backend)


class Gated:
    """The engine of a backend, entered through its gate."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        engine = backend.engine
        # where the batch room looks for the end of an engine that is not started again
        self.died: asyncio.Future[EngineError] | None = (
            engine.failed if isinstance(engine, Watched) else getattr(engine, "died", None)
        )

    @property
    def identity(self) -> Identity:
        """What answers."""
        return self._backend.engine.identity

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        return self._backend.engine.capabilities

    async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        """Work on one request when it is its turn; a batch waits as long as it takes."""
        while True:
            events = self._backend.stream(request)
            begun = False
            try:
                async for event in events:
                    begun = True
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

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """The tokens a prompt becomes."""
        return await self._backend.engine.tokenize(prompt)

    async def status(self) -> Status:
        """State and counters."""
        return await self._backend.engine.status()

    async def close(self) -> None:
        """It is not ours to close."""
