"""An engine set up for measuring: fresh text, points that are repeated, runs that were disturbed thrown away.

Knows nothing of tables or of what is worth measuring. Anything that answers requests can be on it.
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
"""Told in a few words what is being measured."""


class Quiet(Protocol):
    """Sees what else used the machine between two moments."""

    def start(self, pids: Collection[int]) -> None:
        """Watch from here on; these processes are no disturbance."""

    def stop(self) -> str | None:
        """What disturbed, in words; None: nothing did."""


def pids_of(engine: Engine) -> tuple[int, ...]:
    """Its processes, where they are on this machine, known, and not this one."""
    pid = engine.identity.pid
    return () if pid is None or pid == os.getpid() else (pid, *descendants(pid))


@dataclass(slots=True)
class Rig:
    """What every measurement needs."""

    engine: Engine
    prose: Prose
    repeat: int = 3
    quiet: Callable[[], Quiet] | None = None  # None: nothing is known of other load
    tell: Tell = lambda _: None

    @property
    def room(self) -> int | None:
        """Tokens that a sequence can have, prompt and answer together; None: the engine does not say."""
        context = self.engine.identity.context
        return None if context is None else context - self.prose.head_tokens

    def need(self, tokens: int, what: str) -> None:
        """UsageError where no sequence is that long."""
        if self.room is not None and tokens > self.room:
            raise UsageError(
                f"{what} needs {tokens:,} tokens of context and the engine has {self.engine.identity.context:,}",
                hint=f"--context {tokens + self.prose.head_tokens}, or less --depth",
                code="context_length_exceeded",
            )

    async def ask(self, units: Units, tokens: int, lane: int | None = 0) -> Served:
        """One request for so many tokens, on lane 0 where lanes can be chosen: there its head is."""
        served, _ = await serve(self.engine, self.request(units, tokens, lane))
        self.prose.was(units, served.prompt_tokens)
        return served

    def request(self, units: Units, tokens: int, lane: int | None) -> Request:
        """A request as this engine can take it: not every server can be told to go on after the end of a text."""
        chosen = lane if self.engine.capabilities.chooses_lanes else None
        return request_for(self.prose.prompt(units), tokens, lane=chosen, ends=self.engine.identity.kind == "url")

    async def together(self, texts: Sequence[Units], tokens: int) -> list[tuple[Served, Arrivals]]:
        """A request for each text at the same time, each on a lane of its own where lanes can be chosen."""
        tasks = [
            asyncio.ensure_future(serve(self.engine, self.request(text, tokens, lane)))
            for lane, text in enumerate(texts)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def repeated(self, once: Callable[[], Awaitable[T]]) -> tuple[tuple[T, ...], str | None, int]:
        """Runs of one point: as many as asked for that nothing disturbed; the words of what did where all were.

        A disturbed run is made again, twice as many in all at most.
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
        """The same for requests."""
        return Runs(*await self.repeated(once))
