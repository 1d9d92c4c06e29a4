"""An engine that restarts its process when it dies.

Streams in flight when the process dies raise `EngineDied`; requests that arrive during a restart wait for the next
process. After too many deaths within an hour the engine fails permanently: `ended` completes, and every request raises.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from tokenmill.engine.engine import Capabilities, Counters, Engine, EngineStatus, Identity, Liveness, Runtime
from tokenmill.engine.forward import ForwardingEngine
from tokenmill.errors import EngineDied, EngineError, EngineTimeout, TokenmillError

HOUR_S = 3600.0
MAX_DELAY_S = 60.0

Start = Callable[[], Awaitable[Engine]]
"""Starts a new process; raises EngineError if that fails."""
Delay = Callable[[Sequence[float], float, int], float | None]
"""A function with the signature of `delay_s`."""


def delay_s(deaths: Sequence[float], now_s: float, max_restarts: int) -> float | None:
    """Return the backoff before the next start; None if there were more than `max_restarts` deaths in the last hour."""
    recent = sum(now_s - death < HOUR_S for death in deaths)
    return None if recent > max_restarts else min(MAX_DELAY_S, 2.0 ** max(0, recent - 1))


class RestartingEngine(ForwardingEngine):
    """Restarts its process when it dies. Must be used in the event loop in which it was created."""

    def __init__(self, engine: Engine, start: Start, *, most_restarts: int = 5, delay: Delay | None = None) -> None:
        """Supervise an engine that is ready."""
        self._process = engine  # the current one, or the last
        self._up = True
        self._start = start
        self._max_restarts = most_restarts
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
        """As reported by the current process, or by the last one."""
        return self._process.identity

    @property
    def capabilities(self) -> Capabilities:
        """As reported by the current process, or by the last one."""
        return replace(self._process.capabilities, restarts=True)

    @property
    def runtime(self) -> Runtime | None:
        """As reported by the current process, or by the last one."""
        return self._process.runtime

    @property
    def exited(self) -> asyncio.Future[EngineError]:
        """Completes when the current process has died."""
        return self._process.ended

    @property
    def generation(self) -> int:
        """Number of processes that have died so far."""
        return self._generation

    @property
    def liveness(self) -> Liveness:
        """Whether a process is running, restarting, or has failed permanently."""
        if self.ended.done():
            return "failed"
        return self._process.liveness if self._up and not self.exited.done() else "restarting"

    @property
    def last_error(self) -> TokenmillError | None:
        """Why the engine failed or is unresponsive, why the last process died, or why the last start failed."""
        if self.ended.done():
            return self.ended.result()
        return (self._process.last_error if self._up else None) or self._last_error

    async def status(self) -> EngineStatus:
        """State and counters of the current process, including the number of restarts."""
        counters = Counters(restarts=self._restarts)
        if self.ended.done():
            return EngineStatus("failed", self.identity, counters, str(self.ended.result()))
        if not self._up:
            return EngineStatus("restarting", self.identity, counters, str(self._last_error))
        status = await self._process.status()
        return replace(status, counters=replace(status.counters, restarts=self._restarts))

    async def close(self) -> None:
        """Close the current process and stop restarting."""
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
        """Start processes until one is ready or too many have failed."""
        loop = asyncio.get_running_loop()
        while True:
            self._deaths = [*self._deaths[-self._max_restarts :], loop.time()]
            wait_s = self._delay(self._deaths, loop.time(), self._max_restarts)
            if wait_s is None:
                message = f"the engine died {self._max_restarts + 1} times within an hour: {death}"
                self.ended.set_result(EngineError(message, hint=death.hint))
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
