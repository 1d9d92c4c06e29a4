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

from tokenmill.gateway.faults import Busy
from tokenmill.gateway.recorder import PriorityClass

LEAST_RETRY_S = 1.0
MOST_RETRY_S = 120.0
_FIRST_GUESS_S = 5.0  # of a request, while none has ended
_NEW = 0.2  # weight of the newest request in the running mean


@dataclass(slots=True)
class AdmissionGate:
    """The way into one engine."""

    lanes: int | None  # what it works on at once; None: it does not say
    at_once: int | None  # streams let in at once; None: all
    queue: int  # requests of one lane that may wait, here or inside
    inside: dict[PriorityClass, int] = field(default_factory=lambda: {"interactive": 0, "batch": 0})
    mean_s: float | None = None  # of a request
    _waiting: dict[PriorityClass, deque[asyncio.Future[None]]] = field(
        default_factory=lambda: {"interactive": deque(), "batch": deque()}
    )

    @property
    def running(self) -> int:
        """Streams that were let in."""
        return sum(self.inside.values())

    def waiting(self, lane: PriorityClass) -> int:
        """Requests that wait here; those that wait inside an engine are its own to count."""
        return sum(not turn.done() for turn in self._waiting[lane])

    def queued(self, lane: PriorityClass) -> int:
        """Requests of a lane that are not being worked on, as far as can be said from here."""
        return self.waiting(lane) + (max(0, self.inside[lane] - self.lanes) if self.lanes is not None else 0)

    def retry_after_s(self, lane: PriorityClass) -> float:
        """When it may be worth trying again: when the first of those before has probably ended."""
        per_lane = (self.mean_s or _FIRST_GUESS_S) / max(1, self.lanes or 1)
        return min(MOST_RETRY_S, max(LEAST_RETRY_S, per_lane))

    @asynccontextmanager
    async def enter(self, lane: PriorityClass) -> AsyncIterator[None]:
        """Wait for one's turn and hold it; Busy at once where too many wait already."""
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
        """Returns with the place taken."""
        if self.at_once is None or self.running < self.at_once:
            self.inside[lane] += 1  # nobody waits while a place is free: whoever leaves hands it on
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[lane].append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the place was ours already
                self.inside[lane] -= 1
                self._next()
            else:
                self._waiting[lane].remove(turn)
            raise

    def _next(self) -> None:
        """Hand a free place to who waits, interactive ones first."""
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
    """The gates of all engines, by backend."""

    queue: int
    gates: dict[str, AdmissionGate] = field(default_factory=dict)

    def open(self, name: str, *, lanes: int | None, interactive_first: bool) -> AdmissionGate:
        """Make the gate of a backend."""
        gate = AdmissionGate(lanes, None if interactive_first else lanes, self.queue)
        self.gates[name] = gate
        return gate
