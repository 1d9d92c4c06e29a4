"""Health checks of a backend: polls its health page periodically.

A server that refuses the connection or reports a failure is down after the second time; one that is only slow to
respond after the third, because a long prefill on few cores can delay the response. Loading does not count as failure.
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
class Vitals:
    """Results of the latest health checks; immutable."""

    condition: Condition = "up"
    misses: int = 0

    def saw(self, result: ProbeResult) -> "Vitals":
        """Add the next result."""
        if result == "up" or result == "loading":  # noqa: PLR1714  narrows
            return Vitals(result)
        misses = min(_DOWN, self.misses + _WEIGHT[result])
        return Vitals("down" if misses >= _DOWN else self.condition, misses)


async def look(upstream: Upstream, timeout_s: float) -> ProbeResult:
    """Request a server's health page; a response without such a page counts as healthy."""
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
        """Check, and store the result."""


async def keep_checking(backends: Sequence[HealthChecked], pace: PollPace) -> None:
    """Check all of them repeatedly, until cancelled."""
    while True:
        await asyncio.gather(*(backend.check(pace) for backend in backends))
        await asyncio.sleep(pace.interval_s)
