"""What is known of one backend: its state, how fast it is, what it holds and works on.

What the native engine can only say between two steps is waited for a moment, and otherwise taken when it comes.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tokenmill.engine.engine import Status
from tokenmill.engine.watched import Mortal, Watched
from tokenmill.errors import TokenmillError
from tokenmill.gateway.backend import Backend
from tokenmill.gateway.pace import Pace

PATIENCE_S = 2.0  # for a server to say how it is
STEP_S = 0.25  # for the native engine to come to the end of a step
HEADS_S = 2.0  # between two looks at the forest: every segment is a line that the thread which computes writes


@dataclass(slots=True)
class Eye:
    """What is known of one backend."""

    backend: Backend
    status: Status | None = None
    pace: Pace = field(default_factory=Pace)
    heads: list[dict[str, Any]] | None = None
    heads_s: float | None = None  # when they were told last
    at_work: list[dict[str, Any]] | None = None
    told: tuple[str, str | None] | None = None  # state and detail when it was looked at last
    heard: Mortal | None = None  # the life whose death will wake us
    asking: "asyncio.Task[None] | None" = None

    @property
    def state(self) -> str:
        """How it is: a death counts from the moment it is heard of."""
        engine = self.backend.engine
        living = engine.current if isinstance(engine, Watched) else None
        return "restarting" if living is not None and living.died.done() else self.backend.state

    @property
    def detail(self) -> str | None:
        """What its engine says, or why it died."""
        engine = self.backend.engine
        if self.state in ("restarting", "failed") and isinstance(engine, Watched):
            living = engine.current
            if engine.failed.done():
                return engine.failed.result().message
            if living is not None and living.died.done():
                return living.died.result().message
            return engine.death.message if engine.death is not None else None
        trouble = getattr(self.backend, "trouble", None) if self.state != "ready" else None
        said = self.status.detail if self.status is not None and self.status.state == self.state else None
        return trouble or said

    async def look(self, *, closely: bool) -> None:
        """Ask it how it is; mutates. `closely`: what it holds and works on, too."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                self.status = await self.backend.engine.status()
            self.pace.seen(time.monotonic(), self.status.counters)
        except (TimeoutError, TokenmillError, OSError):
            self.status = None
        if closely:
            await self._closely()

    async def _closely(self) -> None:
        engine = self.backend.engine
        living = engine.current if isinstance(engine, Watched) else engine
        heads, at_work = getattr(living, "heads", None), getattr(living, "at_work", None)
        if not callable(heads) or not callable(at_work) or self.state != "ready":
            self.heads = self.at_work = self.heads_s = None
            return
        if self.asking is None or self.asking.done():
            self.asking = asyncio.create_task(self._ask(heads, at_work))
        await asyncio.wait({self.asking}, timeout=STEP_S)

    async def _ask(self, heads: Callable[[], Any], at_work: Callable[[], Any]) -> None:
        with suppress(TokenmillError):
            self.at_work = await at_work()
            if self.heads_s is None or time.monotonic() - self.heads_s >= HEADS_S:
                self.heads, self.heads_s = await heads(), time.monotonic()
