"""Admission control: interactive requests before batch requests, and a bounded queue.

An engine that runs interactive requests first by itself (the native one) gets every request immediately, because it
shares prefixes between queued requests. Other engines get as many requests as they have slots; the rest waits here.
`AdmissionGate` belongs to one event loop; only `enter` waits.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tokenmill.gateway.http.faults import Busy
from tokenmill.gateway.monitoring.recorder import PriorityClass

LEAST_RETRY_S = 1.0
MOST_RETRY_S = 120.0
_FIRST_GUESS_S = 5.0  # assumed duration of a request before the first has ended
_NEW = 0.2  # weight of the newest request in the running mean


@dataclass(slots=True)
class AdmissionGate:
    """The queue in front of one engine."""

    lanes: int | None  # requests that it runs concurrently; None: unknown
    at_once: int | None  # maximum streams admitted concurrently; None: all
    queue: int  # maximum queued requests per priority class, here or inside the engine
    inside: dict[PriorityClass, int] = field(default_factory=lambda: {"interactive": 0, "batch": 0})
    mean_s: float | None = None  # of a request
    _waiting: dict[PriorityClass, deque[asyncio.Future[None]]] = field(
        default_factory=lambda: {"interactive": deque(), "batch": deque()}
    )

    @property
    def running(self) -> int:
        """Number of admitted streams."""
        return sum(self.inside.values())

    def waiting(self, lane: PriorityClass) -> int:
        """Requests queued here; the engine counts those queued inside it."""
        return sum(not turn.done() for turn in self._waiting[lane])

    def queued(self, lane: PriorityClass) -> int:
        """Estimated number of admitted or queued requests of a priority class that are not running yet."""
        return self.waiting(lane) + (max(0, self.inside[lane] - self.lanes) if self.lanes is not None else 0)

    def retry_after_s(self, lane: PriorityClass) -> float:
        """Seconds until a retry may succeed: when the first of the requests before it has probably ended."""
        per_lane = (self.mean_s or _FIRST_GUESS_S) / max(1, self.lanes or 1)
        return min(MOST_RETRY_S, max(LEAST_RETRY_S, per_lane))

    @asynccontextmanager
    async def enter(self, lane: PriorityClass) -> AsyncIterator[None]:
        """Wait for a place and hold it; raises Busy immediately if the queue is full."""
        if self.queued(lane) >= self.queue and not self._free():
            raise Busy(f"{self.queued(lane)} requests are waiting already", retry_after_s=self.retry_after_s(lane))
        loop = asyncio.get_running_loop()
        await self._turn(lane)
        began_s = loop.time()
        try:
            yield
        finally:
            self.inside[lane] -= 1
            spent_s = loop.time() - began_s
            self.mean_s = spent_s if self.mean_s is None else self.mean_s + _NEW * (spent_s - self.mean_s)
            self._next()

    def _free(self) -> bool:
        limit = self.at_once if self.at_once is not None else self.lanes
        return limit is None or self.running < limit

    async def _turn(self, lane: PriorityClass) -> None:
        """Returns once the place is acquired."""
        if self.at_once is None or self.running < self.at_once:
            self.inside[lane] += 1  # a free place never has waiters: a leaving request passes it on
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[lane].append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the place was already acquired
                self.inside[lane] -= 1
                self._next()
            else:
                self._waiting[lane].remove(turn)
            raise

    def _next(self) -> None:
        """Pass a free place to the next waiter, interactive requests first."""
        while self.at_once is not None and self.running < self.at_once:
            lane: PriorityClass = "interactive" if self._waiting["interactive"] else "batch"
            if not self._waiting[lane]:
                return
            turn = self._waiting[lane].popleft()
            if not turn.done():
                self.inside[lane] += 1
                turn.set_result(None)


@dataclass(slots=True)
class AdmissionGates:
    """The gates of all backends."""

    queue: int
    gates: dict[str, AdmissionGate] = field(default_factory=dict)

    def open(self, name: str, *, lanes: int | None, interactive_first: bool) -> AdmissionGate:
        """Create the gate of a backend."""
        gate = AdmissionGate(lanes, None if interactive_first else lanes, self.queue)
        self.gates[name] = gate
        return gate
