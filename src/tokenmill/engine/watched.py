"""An engine that is started again when it dies: to its callers one engine, to the machine one process after another.

Streams that run when it dies get `EngineDied` from the engine itself; those that come while it restarts wait for it.
It gives up when an hour has seen too many deaths.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from tokenmill.engine.engine import Answer, Capabilities, Counters, Engine, Identity, Piece, Prompt, Request, Status
from tokenmill.errors import EngineDied, EngineError, EngineTimeout

HOUR_S = 3600.0
LONGEST_S = 60.0


class Mortal(Engine, Protocol):
    """An engine that tells when it has died."""

    @property
    def died(self) -> "asyncio.Future[EngineDied]":
        """Done once it has; not when it was closed."""


class Started(Mortal, Protocol):
    """One that was started here, and may have been to outlive us."""

    async def stop(self) -> None:
        """End it, whoever started it."""


Start = Callable[[], Awaitable[Mortal]]
"""Starts the engine anew; EngineError if that fails."""
Delay = Callable[[Sequence[float], float, int], float | None]
"""As `delay_s`."""


def delay_s(deaths: Sequence[float], now_s: float, most: int) -> float | None:
    """How long to wait before starting again, by the times it died; None: it has died too often within the hour."""
    recent = sum(now_s - death < HOUR_S for death in deaths)
    return None if recent > most else min(LONGEST_S, 2.0 ** max(0, recent - 1))


class Watched:
    """One engine through all its lives. Belongs to the event loop in which it was made."""

    def __init__(self, engine: Mortal, start: Start, *, most_restarts: int = 5, delay: Delay | None = None) -> None:
        """Watch an engine that is ready."""
        self._delay = delay or delay_s
        self._engine: Mortal | None = engine
        self._identity, self._capabilities = engine.identity, engine.capabilities
        self._start, self._most = start, most_restarts
        self._deaths: list[float] = []
        self._restarts = 0
        self.death: EngineError | None = None  # the last, or why starting it again failed
        self.failed: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()
        self._changed = asyncio.Condition()
        self._task = asyncio.create_task(self._watch())

    @property
    def current(self) -> Mortal | None:
        """The engine that lives now, for what only its kind can; None while it restarts."""
        return self._engine

    @property
    def identity(self) -> Identity:
        """What answers, or answered last."""
        return self._engine.identity if self._engine is not None else self._identity

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        return self._engine.capabilities if self._engine is not None else self._capabilities

    async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        """Work on one request once the engine lives; the last value is the answer. Closing the generator cancels."""
        stream = (await self._living(request.timeout_s)).stream(request)
        try:
            async for event in stream:
                yield event
        finally:
            await stream.aclose()

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """The tokens a prompt becomes, its template applied."""
        return await (await self._living(None)).tokenize(prompt)

    async def status(self) -> Status:
        """State and counters, as of now."""
        if self.failed.done():
            return Status("failed", self._identity, Counters(restarts=self._restarts), str(self.failed.result()))
        engine = self._engine
        if engine is None:
            return Status("restarting", self._identity, Counters(restarts=self._restarts), str(self.death))
        status = await engine.status()
        return replace(status, counters=replace(status.counters, restarts=self._restarts))

    async def close(self) -> None:
        """Stop the engine and do not start it again."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        if self._engine is not None:
            await self._engine.close()

    @property
    def _lives(self) -> bool:
        return self._engine is not None and not self._engine.died.done()

    async def _living(self, timeout_s: float | None) -> Mortal:
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._lives or self.failed.done())
        except TimeoutError as error:
            raise EngineTimeout(f"the engine did not come back within {timeout_s:g} s: {self.death}") from error
        if self._engine is None:
            failure = self.failed.result()
            raise EngineError(failure.message, hint=failure.hint)
        return self._engine

    async def _watch(self) -> None:
        while self._engine is not None:
            death = await asyncio.shield(self._engine.died)
            gone = self._engine
            self._identity, self._capabilities = gone.identity, gone.capabilities
            self._engine, self.death = None, death
            await gone.close()
            await self._restart(death)

    async def _restart(self, death: EngineError) -> None:
        """Start again until it lives or has failed too often."""
        loop = asyncio.get_running_loop()
        while True:
            self._deaths = [*self._deaths[-self._most :], loop.time()]
            wait_s = self._delay(self._deaths, loop.time(), self._most)
            if wait_s is None:
                self.failed.set_result(
                    EngineError(f"the engine died {self._most + 1} times within an hour: {death}", hint=death.hint)
                )
                break
            await asyncio.sleep(wait_s)
            try:
                engine = await self._start()
            except EngineError as error:
                death = self.death = error
                continue
            self._restarts += 1
            self._engine = engine
            break
        async with self._changed:
            self._changed.notify_all()
