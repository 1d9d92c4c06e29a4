"""Whether a backend is alive, by asking its health page now and then.

A server that refuses the connection or says that it failed is down after the second time; one that is only slow to
answer after the third, because a long prefill on few cores can keep it from answering. Loading is not failing.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from tokenmill.gateway.upstream import Upstream, UpstreamLost, UpstreamUnreachable

ProbeResult = Literal["up", "loading", "late", "refused"]
Condition = Literal["up", "loading", "down"]


@dataclass(frozen=True, slots=True)
class PollPace:
    """How often, and how long an answer may take."""

    interval_s: float = 2.0
    timeout_s: float = 2.0


_WEIGHT = {"late": 2, "refused": 3}
_DOWN = 6  # three that were late, two that were refused


@dataclass(frozen=True, slots=True)
class Vitals:
    """What the last questions showed; each answer gives new ones."""

    condition: Condition = "up"
    misses: int = 0

    def saw(self, result: ProbeResult) -> "Vitals":
        """The next answer, or none."""
        if result == "up" or result == "loading":  # noqa: PLR1714  narrows
            return Vitals(result)
        misses = min(_DOWN, self.misses + _WEIGHT[result])
        return Vitals("down" if misses >= _DOWN else self.condition, misses)


async def look(upstream: Upstream, timeout_s: float) -> ProbeResult:
    """Ask a server's health page; a server without one has answered, too."""
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
    """Who can be asked how it is."""

    async def check(self, pace: PollPace) -> None:
        """Ask, and remember."""


async def keep_checking(backends: Sequence[HealthChecked], pace: PollPace) -> None:
    """Ask all of them, again and again, until cancelled."""
    while True:
        await asyncio.gather(*(backend.check(pace) for backend in backends))
        await asyncio.sleep(pace.interval_s)
