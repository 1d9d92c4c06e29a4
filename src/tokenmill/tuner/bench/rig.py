"""An engine set up for measuring: sends text that is not cached, repeats points and discards disturbed runs.

Does not decide what to measure. Works with any engine.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tokenmill.engine.engine import Engine, Request
from tokenmill.engine.process.identity import descendants
from tokenmill.errors import UsageError
from tokenmill.tuner.bench.rows import Runs
from tokenmill.tuner.bench.served import Arrivals, Prose, Served, Units, request_for, serve

T = TypeVar("T")
Tell = Callable[[str], None]
"""Called with a short description of what is being measured."""


class NoiseWatch(Protocol):
    """Detects other load on the machine between `start` and `stop`."""

    def start(self, pids: Collection[int]) -> None:
        """Start watching; `pids` are ignored."""

    def stop(self) -> str | None:
        """Describes the load that disturbed the measurement; None if nothing did."""


def pids_of(engine: Engine) -> tuple[int, ...]:
    """Processes of an engine on this machine, without this process; empty if unknown."""
    pid = engine.identity.pid
    return () if pid is None or pid == os.getpid() else (pid, *descendants(pid))


@dataclass(slots=True)
class Rig:
    """An engine with a source of text, and options for repeating points."""

    engine: Engine
    prose: Prose
    repeat: int = 3
    quiet: Callable[[], NoiseWatch] | None = None  # None: other load is not detected
    tell: Tell = lambda _: None

    @property
    def room(self) -> int | None:
        """Maximum tokens of a sequence, prompt and answer together; None: the engine does not report it."""
        context = self.engine.identity.context
        return None if context is None else context - self.prose.prefix_tokens

    def need(self, tokens: int, what: str) -> None:
        """Raise UsageError if a sequence cannot have `tokens`."""
        if self.room is not None and tokens > self.room:
            raise UsageError(
                f"{what} needs {tokens:,} tokens of context, and the engine has {self.engine.identity.context:,}",
                hint=f"--context {tokens + self.prose.prefix_tokens}, or a smaller --depth",
                code="context_length_exceeded",
            )

    async def ask(self, units: Units, tokens: int, slot: int | None = 0) -> Served:
        """Send one request that generates `tokens`; if slots can be chosen, to slot 0, which has the prefix cached."""
        served, _ = await serve(self.engine, self.request(units, tokens, slot))
        self.prose.calibrate(units, served.prompt_tokens)
        return served

    def request(self, units: Units, tokens: int, slot: int | None) -> Request:
        """A request for this engine, which may end early if the engine cannot ignore an end-of-text token."""
        chosen = slot if self.engine.capabilities.chooses_slots else None
        return request_for(self.prose.prompt(units), tokens, slot=chosen, ends=self.engine.identity.kind == "url")

    async def together(self, texts: Sequence[Units], tokens: int) -> list[tuple[Served, Arrivals]]:
        """Send a request for each text concurrently, each to its own slot if slots can be chosen."""
        tasks = [
            asyncio.ensure_future(serve(self.engine, self.request(text, tokens, slot)))
            for slot, text in enumerate(texts)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def repeated(self, once: Callable[[], Awaitable[T]]) -> tuple[tuple[T, ...], str | None, int]:
        """Undisturbed runs of one point, up to `repeat`; if all were disturbed, these with the last reason.

        Disturbed runs are repeated, up to twice `repeat` runs in total. The last value is the number of repeated runs.
        """
        good: list[T] = []
        bad: list[tuple[T, str]] = []
        while len(good) < self.repeat and len(good) + len(bad) < 2 * self.repeat:
            watch = self.quiet() if self.quiet is not None else None
            if watch is not None:
                watch.start(pids_of(self.engine))
            found = await once()
            words = watch.stop() if watch is not None else None
            if words is None:
                good.append(found)
            else:
                bad.append((found, words))
        if good:
            return tuple(good), None, len(bad)
        return tuple(found for found, _ in bad), bad[-1][1], 0

    async def runs(self, once: Callable[[], Awaitable[Served]]) -> Runs:
        """`repeated` for a function that sends one request."""
        return Runs(*await self.repeated(once))
