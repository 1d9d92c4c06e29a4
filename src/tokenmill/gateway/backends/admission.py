"""Admission control: a bounded queue in front of each engine, interactive requests first.

An engine with its own priorities (the native one) gets every request immediately, because it shares prefixes between
queued requests. Other engines get at most one request per slot; the rest is queued here. An `AdmissionGate` belongs to
one event loop.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tokenmill.gateway.http.faults import Busy
from tokenmill.gateway.monitoring.recorder import PriorityClass

MIN_RETRY_S = 1.0
MAX_RETRY_S = 120.0
_FIRST_GUESS_S = 5.0  # assumed duration of a request before the first has ended
_NEW = 0.2  # weight of the newest request in the running mean


@dataclass(slots=True)
class AdmissionGate:
    """The queue in front of one engine."""

    slots: int | None  # slots of the engine; None: unknown
    max_streams: int | None  # maximum concurrent streams; None: unlimited
    queue: int  # maximum queued requests per priority class, here or inside the engine
    inside: dict[PriorityClass, int] = field(default_factory=lambda: {"interactive": 0, "batch": 0})
    mean_s: float | None = None  # running mean of request durations
    _waiting: dict[PriorityClass, deque[asyncio.Future[None]]] = field(
        default_factory=lambda: {"interactive": deque(), "batch": deque()}
    )

    @property
    def running(self) -> int:
        """Number of admitted streams."""
        return sum(self.inside.values())

    def waiting(self, priority: PriorityClass) -> int:
        """Number of requests queued at the gate; those queued inside the engine are not included."""
        return sum(not turn.done() for turn in self._waiting[priority])

    def queued(self, priority: PriorityClass) -> int:
        """Estimated number of admitted or queued requests of a priority class that are not running yet."""
        return self.waiting(priority) + (max(0, self.inside[priority] - self.slots) if self.slots is not None else 0)

    def retry_after_s(self, priority: PriorityClass) -> float:
        """Estimated seconds until a request ends and a retry may succeed."""
        per_slot = (self.mean_s or _FIRST_GUESS_S) / max(1, self.slots or 1)
        return min(MAX_RETRY_S, max(MIN_RETRY_S, per_slot))

    @asynccontextmanager
    async def enter(self, priority: PriorityClass) -> AsyncIterator[None]:
        """Wait for admission, and hold the place during the block; raises Busy if the queue is full."""
        if self.queued(priority) >= self.queue and not self._free():
            raise Busy(
                f"{self.queued(priority)} {priority} requests are already queued",
                retry_after_s=self.retry_after_s(priority),
            )
        loop = asyncio.get_running_loop()
        await self._admitted(priority)
        began_s = loop.time()
        try:
            yield
        finally:
            self.inside[priority] -= 1
            spent_s = loop.time() - began_s
            self.mean_s = spent_s if self.mean_s is None else self.mean_s + _NEW * (spent_s - self.mean_s)
            self._admit_next()

    def _free(self) -> bool:
        limit = self.max_streams if self.max_streams is not None else self.slots
        return limit is None or self.running < limit

    async def _admitted(self, priority: PriorityClass) -> None:
        """Wait until the request is admitted."""
        if self.max_streams is None or self.running < self.max_streams:
            self.inside[priority] += 1  # no request is queued: a finished one passes its place on
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[priority].append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # admitted before it was cancelled
                self.inside[priority] -= 1
                self._admit_next()
            else:
                self._waiting[priority].remove(turn)
            raise

    def _admit_next(self) -> None:
        """Admit queued requests to free places, interactive ones first."""
        while self.max_streams is not None and self.running < self.max_streams:
            priority: PriorityClass = "interactive" if self._waiting["interactive"] else "batch"
            if not self._waiting[priority]:
                return
            turn = self._waiting[priority].popleft()
            if not turn.done():
                self.inside[priority] += 1
                turn.set_result(None)


@dataclass(slots=True)
class AdmissionGates:
    """The gates of all backends."""

    queue: int
    gates: dict[str, AdmissionGate] = field(default_factory=dict)

    def open(self, name: str, *, slots: int | None, interactive_first: bool) -> AdmissionGate:
        """Create the gate of a backend."""
        gate = AdmissionGate(slots, None if interactive_first else slots, self.queue)
        self.gates[name] = gate
        return gate
