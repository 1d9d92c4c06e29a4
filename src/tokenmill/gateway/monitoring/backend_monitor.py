"""Polls one backend and keeps its latest state, throughput, cached prefixes and running requests.

The native engine answers some questions only between two steps, so a poll waits briefly and otherwise uses the reply
when it arrives.
"""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tokenmill.engine.engine import EngineStatus
from tokenmill.errors import EngineError, TokenmillError
from tokenmill.gateway.backends.backend import Backend
from tokenmill.gateway.monitoring.throughput import CounterRates

STATUS_TIMEOUT_S = 2.0
STEP_WAIT_S = 0.25  # maximum wait for the native engine to finish a step
PREFIX_INTERVAL_S = 2.0  # between polls of the prefix tree, which cost the engine one line per segment


@dataclass(slots=True)
class BackendMonitor:
    """The latest data of one backend."""

    backend: Backend
    status: EngineStatus | None = None
    rates: CounterRates = field(default_factory=CounterRates)
    prefixes: list[dict[str, Any]] | None = None
    prefixes_s: float | None = None  # time of the last poll of the prefixes
    running: list[dict[str, Any]] | None = None
    last_recorded: tuple[str, str | None] | None = None  # state and detail at the last poll
    exited: "asyncio.Future[EngineError] | None" = None  # of the engine process that is watched
    details_poll: "asyncio.Task[None] | None" = None

    @property
    def state(self) -> str:
        """The backend's state."""
        return self.backend.state

    @property
    def detail(self) -> str | None:
        """What the engine reports about its state, or its last error."""
        if self.state in ("unresponsive", "restarting", "failed"):
            error = self.backend.engine.last_error
            return error.message if error is not None else None
        trouble = self.backend.trouble if self.state != "ready" else None
        reported = self.status.detail if self.status is not None and self.status.state == self.state else None
        return trouble or reported

    async def poll(self, *, details: bool) -> None:
        """Poll the backend; with `details`, also its prefix tree and running requests."""
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                self.status = await self.backend.engine.status()
            self.rates.add(time.monotonic(), self.status.counters)
        except (TimeoutError, TokenmillError, OSError):
            self.status = None
        if details:
            await self._poll_details()

    async def _poll_details(self) -> None:
        if not self.backend.engine.capabilities.lists_contents or self.state != "ready":
            self.prefixes = self.running = self.prefixes_s = None
            return
        if self.details_poll is None or self.details_poll.done():
            self.details_poll = asyncio.create_task(self._read_details())
        await asyncio.wait({self.details_poll}, timeout=STEP_WAIT_S)

    async def _read_details(self) -> None:
        engine = self.backend.engine
        with suppress(TokenmillError):
            self.running = await engine.running_requests()
            if self.prefixes_s is None or time.monotonic() - self.prefixes_s >= PREFIX_INTERVAL_S:
                self.prefixes = await engine.cached_prefixes()
                self.prefixes_s = time.monotonic()
