"""A server that could not be reached when the gateway started: others answer, and it joins them when it is there.

To its callers an engine that has died, until somebody's `look` finds it; from then on that server.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable

from tokenmill.engine.engine import (
    Answer,
    Capabilities,
    Counters,
    Identity,
    Piece,
    Prompt,
    Request,
    Status,
)
from tokenmill.engine.server import ServerEngine
from tokenmill.engine.server_bodies import Speech, capabilities_of
from tokenmill.errors import EngineDied, TokenmillError

Attach = Callable[[], Awaitable[ServerEngine]]


class Away:
    """One that is not there yet."""

    def __init__(self, attach: Attach, *, model: str, address: str, error: TokenmillError) -> None:
        """`model`: what to call it until it says so itself."""
        self._attach = attach
        self.error = error  # why it was not reached the last time
        self._speech = Speech("url", model)
        self._identity = Identity("url", model, f"away:{address}:{model}", "not reached yet", None, None, address)
        self.current: ServerEngine | None = None

    async def look(self) -> bool:
        """Try to reach it; whether it is there."""
        if self.current is None:
            try:
                self.current = await self._attach()
            except TokenmillError as error:
                self.error = error
        return self.current is not None

    @property
    def identity(self) -> Identity:
        """What answers, or will."""
        return self.current.identity if self.current is not None else self._identity

    @property
    def capabilities(self) -> Capabilities:
        """What it can do; until it is there, what any server can."""
        if self.current is not None:
            return self.current.capabilities
        return capabilities_of(self._speech, reports_cached=False)

    async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        """Work on one request; EngineDied while it is not there."""
        events = (await self._there()).stream(request)
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """The tokens a prompt becomes."""
        return await (await self._there()).tokenize(prompt)

    async def status(self) -> Status:
        """State and counters, as of now."""
        if self.current is not None:
            return await self.current.status()
        return Status("failed", self._identity, Counters(), self.error.message)

    async def close(self) -> None:
        """Let go of it."""
        if self.current is not None:
            await self.current.close()

    async def _there(self) -> ServerEngine:
        if self.current is None and not await self.look():
            raise EngineDied(self.error.message, hint=self.error.hint, from_outside=True)
        assert self.current is not None  # noqa: S101  found just now
        return self.current
