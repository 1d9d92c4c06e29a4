"""Periodic health checks of backends.

A server is down after two refused connections or reported failures in a row, or after three timeouts: a long prefill
on few cores can delay the response. Loading is not a failure.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from tokenmill.gateway.backends.http_client import Upstream, UpstreamLost, UpstreamUnreachable

ProbeResult = Literal["up", "loading", "late", "refused"]
Condition = Literal["up", "loading", "down"]


@dataclass(frozen=True, slots=True)
class PollPace:
    """Interval and timeout of health checks."""

    interval_s: float = 2.0
    timeout_s: float = 2.0


_WEIGHT = {"late": 2, "refused": 3}
_DOWN = 6  # three timeouts, or two failures


@dataclass(frozen=True, slots=True)
class HealthHistory:
    """Outcome of the latest health checks; immutable."""

    condition: Condition = "up"
    misses: int = 0

    def add(self, result: ProbeResult) -> "HealthHistory":
        """Add the next result."""
        if result == "up" or result == "loading":  # noqa: PLR1714  narrows
            return HealthHistory(result)
        misses = min(_DOWN, self.misses + _WEIGHT[result])
        return HealthHistory("down" if misses >= _DOWN else self.condition, misses)


async def probe(upstream: Upstream, timeout_s: float) -> ProbeResult:
    """Request /health of a server; a server without this page counts as healthy."""
    try:
        async with asyncio.timeout(timeout_s):
            response = await upstream.send("GET", "/health")
            try:
                await response.all(64 * 1024)
            finally:
                response.close()
    except TimeoutError:
        return "late"
    except (UpstreamUnreachable, UpstreamLost):
        return "refused"
    if response.status == 503:
        return "loading"
    return "refused" if response.status >= 500 else "up"


class HealthChecked(Protocol):
    """A backend whose health can be checked."""

    async def check(self, pace: PollPace) -> None:
        """Check and store the result."""


async def keep_checking(backends: Sequence[HealthChecked], pace: PollPace) -> None:
    """Check all backends periodically, until cancelled."""
    while True:
        await asyncio.gather(*(backend.check(pace) for backend in backends))
        await asyncio.sleep(pace.interval_s)
