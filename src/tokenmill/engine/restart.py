"""An engine whose process is replaced when it dies: one `Engine` to its callers, one process after another.

Streams in flight when a process dies get `EngineDied` from it; requests that come while it restarts wait for the next
process. After too many deaths within an hour it gives up: `ended` is done, and every request raises.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from tokenmill.engine.engine import Capabilities, Counters, Engine, EngineStatus, Identity, Liveness, Runtime
from tokenmill.engine.forward import ForwardingEngine
from tokenmill.errors import EngineDied, EngineError, EngineTimeout

HOUR_S = 3600.0
LONGEST_S = 60.0

Start = Callable[[], Awaitable[Engine]]
"""Starts a new process; EngineError if that fails."""
Delay = Callable[[Sequence[float], float, int], float | None]
"""As `delay_s`."""


def delay_s(deaths: Sequence[float], now_s: float, most: int) -> float | None:
    """Seconds to wait before the next start, from the times of the deaths; None if the last hour had too many."""
    recent = sum(now_s - death < HOUR_S for death in deaths)
    return None if recent > most else min(LONGEST_S, 2.0 ** max(0, recent - 1))


class RestartingEngine(ForwardingEngine):
    """Starts a new process whenever the current one dies. Belongs to the event loop in which it was made."""

    def __init__(self, engine: Engine, start: Start, *, most_restarts: int = 5, delay: Delay | None = None) -> None:
        """Supervise an engine that is ready."""
        self._process = engine  # the current one, or the last
        self._up = True
        self._start = start
        self._most = most_restarts
        self._delay = delay or delay_s
        self._deaths: list[float] = []
        self._generation = 0
        self._restarts = 0
        self._last_error: EngineError | None = None
        self.ended = asyncio.get_running_loop().create_future()
        self._changed = asyncio.Condition()
        self._task = asyncio.create_task(self._supervise())

    @property
    def inner(self) -> Engine | None:
        """The current process; None while it restarts and after it has failed."""
        return self._process if self._up else None

    @property
    def identity(self) -> Identity:
        """Of the current process, or the last."""
        return self._process.identity

    @property
    def capabilities(self) -> Capabilities:
        """Of the current process, or the last."""
        return replace(self._process.capabilities, restarts=True)

    @property
    def runtime(self) -> Runtime | None:
        """Of the current process, or the last."""
        return self._process.runtime

    @property
    def exited(self) -> asyncio.Future[EngineError]:
        """Done when the current process has died."""
        return self._process.ended

    @property
    def generation(self) -> int:
        """The number of processes that have died so far."""
        return self._generation

    @property
    def liveness(self) -> Liveness:
        """Whether a process runs, is being started, or will never run again."""
        if self.ended.done():
            return "failed"
        return "up" if self._up and not self.exited.done() else "restarting"

    @property
    def last_error(self) -> EngineError | None:
        """Why it gave up, why the last process died, or why the last start failed."""
        if self.ended.done():
            return self.ended.result()
        return self.exited.result() if self._up and self.exited.done() else self._last_error

    async def status(self) -> EngineStatus:
        """State and counters of the current process, with the number of restarts."""
        counters = Counters(restarts=self._restarts)
        if self.ended.done():
            return EngineStatus("failed", self.identity, counters, str(self.ended.result()))
        if not self._up:
            return EngineStatus("restarting", self.identity, counters, str(self._last_error))
        status = await self._process.status()
        return replace(status, counters=replace(status.counters, restarts=self._restarts))

    async def close(self) -> None:
        """Close the current process and start no other."""
        await self._stop_supervising()
        if self._up:
            await self._process.close()

    async def stop(self) -> None:
        """Stop the current process and start no other."""
        await self._stop_supervising()
        if self._up:
            await self._process.stop()

    async def _stop_supervising(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    def _running(self) -> Engine:
        if not self._up:
            raise EngineDied(f"the engine died and is being restarted: {self._last_error}")
        return self._process

    async def _ready(self, timeout_s: float | None) -> Engine:
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.liveness != "restarting")
        except TimeoutError as error:
            raise EngineTimeout(f"the engine did not restart within {timeout_s:g} s: {self._last_error}") from error
        if self.ended.done():
            failure = self.ended.result()
            raise EngineError(failure.message, hint=failure.hint)
        return self._process

    async def _supervise(self) -> None:
        while not self.ended.done():
            death = await asyncio.shield(self._process.ended)
            self._up = False
            self._generation += 1
            self._last_error = death
            await self._process.close()
            await self._restart(death)

    async def _restart(self, death: EngineError) -> None:
        """Start processes until one is up or too many have failed."""
        loop = asyncio.get_running_loop()
        while True:
            self._deaths = [*self._deaths[-self._most :], loop.time()]
            wait_s = self._delay(self._deaths, loop.time(), self._most)
            if wait_s is None:
                words = f"the engine died {self._most + 1} times within an hour: {death}"
                self.ended.set_result(EngineError(words, hint=death.hint))
                break
            await asyncio.sleep(wait_s)
            try:
                self._process = await self._start()
            except EngineError as error:
                death = self._last_error = error
                continue
            self._restarts += 1
            self._up = True
            break
        async with self._changed:
            self._changed.notify_all()
