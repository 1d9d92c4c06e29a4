"""Polls one backend and keeps its latest state, throughput, prefix tree and slot usage.

The native engine answers some questions only between two steps; these are awaited briefly, and otherwise used later.
"""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tokenmill.engine.engine import EngineStatus
from tokenmill.errors import EngineError, TokenmillError
from tokenmill.gateway.backends.backend import Backend
from tokenmill.gateway.monitoring.throughput import CounterPace

PATIENCE_S = 2.0  # timeout of a server's status
STEP_S = 0.25  # wait for the native engine to finish a step
HEADS_S = 2.0  # between polls of the prefix tree: the computing thread writes one line per segment


@dataclass(slots=True)
class BackendMonitor:
    """The latest data of one backend."""

    backend: Backend
    status: EngineStatus | None = None
    pace: CounterPace = field(default_factory=CounterPace)
    heads: list[dict[str, Any]] | None = None
    heads_s: float | None = None  # when they were reported last
    at_work: list[dict[str, Any]] | None = None
    told: tuple[str, str | None] | None = None  # state and detail at the last poll
    exited: "asyncio.Future[EngineError] | None" = None  # of the process whose end is awaited
    asking: "asyncio.Task[None] | None" = None

    @property
    def state(self) -> str:
        """The backend's state."""
        return self.backend.state

    @property
    def detail(self) -> str | None:
        """What the engine reports, or why it died."""
        if self.state in ("restarting", "failed"):
            error = self.backend.engine.last_error
            return error.message if error is not None else None
        trouble = self.backend.trouble if self.state != "ready" else None
        said = self.status.detail if self.status is not None and self.status.state == self.state else None
        return trouble or said

    async def look(self, *, closely: bool) -> None:
        """Poll the backend. With `closely`, also its prefix tree and slots."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                self.status = await self.backend.engine.status()
            self.pace.seen(time.monotonic(), self.status.counters)
        except (TimeoutError, TokenmillError, OSError):
            self.status = None
        if closely:
            await self._closely()

    async def _closely(self) -> None:
        if not self.backend.engine.capabilities.lists_contents or self.state != "ready":
            self.heads = self.at_work = self.heads_s = None
            return
        if self.asking is None or self.asking.done():
            self.asking = asyncio.create_task(self._ask())
        await asyncio.wait({self.asking}, timeout=STEP_S)

    async def _ask(self) -> None:
        engine = self.backend.engine
        with suppress(TokenmillError):
            self.at_work = await engine.running_requests()
            if self.heads_s is None or time.monotonic() - self.heads_s >= HEADS_S:
                self.heads = await engine.cached_prefixes()
                self.heads_s = time.monotonic()
