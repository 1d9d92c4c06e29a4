"""Polls the engines while a client watches, and keeps recent history for the dashboard and metrics.

Without watchers no engine is polled, but the end of an engine process is still noticed immediately.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress

from tokenmill.gateway.batches.routes import FOLDER as BATCHES
from tokenmill.gateway.http.faults import Busy
from tokenmill.gateway.monitoring.backend_monitor import BackendMonitor
from tokenmill.gateway.monitoring.memory_view import Room, rooms
from tokenmill.gateway.monitoring.recorder import FinishedRequest, Missed, PriorityClass, Seen
from tokenmill.gateway.schemas import CacheMiss, ErrorRecord, Notice
from tokenmill.gateway.state import GatewayState
from tokenmill.jobs.store.http_batches import batches_by_status

LOOK_S = 1.0
SETTLE_S = 0.2  # polling interval while an engine is not ready
ROOMS_S = 5.0  # interval between measurements of the machine's memory
MOST_CLIENTS = 32
KEPT = 50
HISTORY = 180
TIMES = 200  # requests included in medians


class Monitor:
    """All backends, watchers and recent events. Belongs to one event loop; a `Recorder`."""

    def __init__(self, state: GatewayState) -> None:
        self.state = state
        self.eyes = [BackendMonitor(backend) for backend in state.backends]
        self.rooms: Mapping[str, Room] = {}
        self.batches: Mapping[str, int] | None = None
        self.notices: deque[Notice] = deque(maxlen=KEPT)
        self.misses: deque[CacheMiss] = deque(maxlen=KEPT)
        self.errors: deque[ErrorRecord] = deque(maxlen=KEPT)
        self.first_token_s: deque[float] = deque(maxlen=TIMES)
        self.token_s: deque[float] = deque(maxlen=TIMES)
        self.history: deque[dict[str, float | None]] = deque(maxlen=HISTORY)
        self.clients = 0
        self.version = 0  # version of the data; grows with every poll
        self.looked_s: float | None = None
        self._rooms_s: float | None = None
        self._wake = asyncio.Event()
        self._changed = asyncio.Condition()
        self._looking = asyncio.Lock()

    # ---- recorded requests

    def request(self, seen: Seen) -> None:
        """Record a request that was answered, refused or abandoned."""
        if seen.error is not None and seen.status >= 400:
            self.errors.append(
                ErrorRecord(when_s=time.time(), id=seen.id, route=seen.route, status=seen.status, code=seen.error)
            )

    def first_token(self, seconds: float, backend: str, lane: PriorityClass) -> None:
        """Not used: medians are taken from complete answers."""
        if lane == "interactive":
            self.first_token_s.append(seconds)

    def finished(self, done: FinishedRequest) -> None:
        """Record a complete answer."""
        each_s = token_s(done)
        if each_s is not None and done.lane == "interactive":
            self.token_s.append(each_s)
        for words in done.notes:
            self.misses.append(
                CacheMiss(
                    when_s=time.time(),
                    backend=done.backend,
                    lane=done.lane,
                    prompt_tokens=done.usage.prompt_tokens,
                    cached_tokens=done.usage.cached_tokens,
                    words=words,
                )
            )

    def missed(self, miss: Missed) -> None:
        """Record a batch prompt whose prefix was recomputed."""
        self.misses.append(
            CacheMiss(
                when_s=time.time(),
                backend=miss.backend,
                lane="batch",
                prompt_tokens=miss.expected_tokens,  # tokens that should have been reused
                cached_tokens=miss.cached_tokens,
                words=miss.words,
            )
        )

    def refused(self, kind: str) -> None:
        """Refusals are counted elsewhere."""

    # ---- polling

    @asynccontextmanager
    async def alongside(self) -> AsyncIterator[None]:
        """Watch while the block runs."""
        tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._stopping())]
        tasks[0].add_done_callback(self._ended)
        try:
            yield
        finally:
            asked = [eye.asking for eye in self.eyes if eye.asking is not None]
            for task in (*tasks, *asked):
                task.cancel()
            await asyncio.gather(*tasks, *asked, return_exceptions=True)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Register a watcher; raises Busy if there are too many."""
        if self.clients >= MOST_CLIENTS:
            raise Busy(
                f"{self.clients} pages are looking already", retry_after_s=10.0, code="too_many_pages", kind="pages"
            )
        self.clients += 1
        self._wake.set()
        try:
            yield
        finally:
            self.clients -= 1

    async def newer(self, version: int, timeout_s: float) -> bool:
        """Wait for a poll after this version; False if there was none in that time."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.version > version or self.state.shutting_down.is_set())
        except TimeoutError:
            return False
        return True

    async def look(self, *, closely: bool = True, younger_s: float = 0.0) -> None:
        """Poll everything now, unless that was done less than `younger_s` ago."""
        async with self._looking:
            if self.looked_s is not None and time.monotonic() - self.looked_s < younger_s:
                return
            await asyncio.gather(*(eye.look(closely=closely) for eye in self.eyes), self._look_around())
            self.looked_s = time.monotonic()
            self._notice()
            self._remember()
        async with self._changed:
            self.version += 1
            self._changed.notify_all()

    async def _look_around(self) -> None:
        self.batches = await asyncio.to_thread(batches_by_status, self.state.state_path / BATCHES)
        now_s = time.monotonic()
        if self._rooms_s is None or now_s - self._rooms_s >= ROOMS_S:
            tiers = {row.tier for up in self.state.ups.values() for row in up.held.rows}
            self.rooms = await asyncio.to_thread(rooms, tiers)
            self._rooms_s = now_s

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            self._listen_for_deaths()
            self._notice()
            unsettled = any(eye.state in ("restarting", "loading", "starting", "warming") for eye in self.eyes)
            if self.clients:
                await self.look()
            with suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_S if unsettled else LOOK_S if self.clients else None):
                    await self._wake.wait()

    def _ended(self, run: "asyncio.Task[None]") -> None:
        if not run.cancelled() and (bug := run.exception()) is not None:
            self.state.log({"event": "page_stopped", "why": f"tokenmill itself failed: {bug!r}"})

    async def _stopping(self) -> None:
        await self.state.shutting_down.wait()
        async with self._changed:
            self._changed.notify_all()

    def _listen_for_deaths(self) -> None:
        for eye in self.eyes:
            exited = eye.backend.engine.exited
            if exited is not eye.exited:
                eye.exited = exited
                exited.add_done_callback(lambda _: self._wake.set())

    def _notice(self) -> None:
        """Record what has changed."""
        for eye in self.eyes:
            state = eye.state
            before = eye.told[0] if eye.told is not None else "ready"
            if state != before:
                self.notices.append(Notice(when_s=time.time(), backend=eye.backend.name, state=state, words=eye.detail))
            eye.told = (state, eye.detail)

    def _remember(self) -> None:
        def summed(name: str) -> float | None:
            known = [rate for rate in (eye.pace.per_s(name) for eye in self.eyes) if rate is not None]
            return round(sum(known), 2) if known else None

        now_s = time.time()
        last_s = self.history[-1]["when_s"] if self.history else None
        if last_s is not None and now_s - last_s > 5 * LOOK_S:
            self.history.clear()  # nothing was polled meanwhile
        self.history.append(
            {
                "when_s": round(now_s, 2),
                "generated_tok_s": summed("generated_tokens"),
                "prompt_tok_s": summed("prompt_tokens_computed"),
                "reused_tok_s": summed("prompt_tokens_reused"),
            }
        )


def token_s(done: FinishedRequest) -> float | None:
    """Seconds between tokens, as seen by the client; None with fewer than two."""
    tokens = done.usage.completion_tokens
    return None if done.first_token_s is None or tokens < 2 else (done.seconds - done.first_token_s) / (tokens - 1)
