"""Polls the engines while the dashboard is open, and keeps recent events for the dashboard and metrics.

While no client watches, engines are not polled, but exits of engine processes are still recorded.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress

from tokenmill.api.stores import BATCHES
from tokenmill.gateway.http.faults import Busy
from tokenmill.gateway.monitoring.backend_monitor import BackendMonitor
from tokenmill.gateway.monitoring.memory_view import MemorySize, measure_memories
from tokenmill.gateway.monitoring.recorder import FinishedRequest, PrefixMiss, PriorityClass, RequestRecord
from tokenmill.gateway.schemas import CacheMiss, ErrorRecord, Notice
from tokenmill.gateway.state import GatewayState
from tokenmill.jobs.store.http_batches import batches_by_status

POLL_S = 1.0
UNSETTLED_POLL_S = 0.2  # interval while an engine is loading or restarting
MEMORY_INTERVAL_S = 5.0  # between measurements of the machine's memory
MAX_CLIENTS = 32
MAX_EVENTS = 50
MAX_HISTORY = 180
MAX_LATENCIES = 200  # requests included in quantiles


class Monitor:
    """Monitors of all backends, watching clients and recent events. A `Recorder`; belongs to one event loop."""

    def __init__(self, state: GatewayState) -> None:
        self.state = state
        self.backends = [BackendMonitor(backend) for backend in state.backends]
        self.memories: Mapping[str, MemorySize] = {}
        self.batches: Mapping[str, int] | None = None
        self.notices: deque[Notice] = deque(maxlen=MAX_EVENTS)
        self.misses: deque[CacheMiss] = deque(maxlen=MAX_EVENTS)
        self.errors: deque[ErrorRecord] = deque(maxlen=MAX_EVENTS)
        self.first_token_s: deque[float] = deque(maxlen=MAX_LATENCIES)
        self.token_s: deque[float] = deque(maxlen=MAX_LATENCIES)
        self.history: deque[dict[str, float | None]] = deque(maxlen=MAX_HISTORY)
        self.clients = 0
        self.version = 0  # incremented by every poll
        self.polled_s: float | None = None
        self._memories_s: float | None = None
        self._wake = asyncio.Event()
        self._changed = asyncio.Condition()
        self._polling = asyncio.Lock()

    # ---- recorded requests

    def request(self, record: RequestRecord) -> None:
        """Record a failed request."""
        if record.error is not None and record.status >= 400:
            self.errors.append(
                ErrorRecord(
                    when_s=time.time(), id=record.id, route=record.route, status=record.status, code=record.error
                )
            )

    def first_token(self, seconds: float, backend: str, priority: PriorityClass) -> None:
        """Record the time to the first token of an interactive request."""
        if priority == "interactive":
            self.first_token_s.append(seconds)

    def finished(self, done: FinishedRequest) -> None:
        """Record the token latency and cache misses of a complete answer."""
        each_s = token_s(done)
        if each_s is not None and done.priority == "interactive":
            self.token_s.append(each_s)
        for words in done.notes:
            self.misses.append(
                CacheMiss(
                    when_s=time.time(),
                    backend=done.backend,
                    lane=done.priority,
                    prompt_tokens=done.usage.prompt_tokens,
                    cached_tokens=done.usage.cached_tokens,
                    words=words,
                )
            )

    def missed(self, miss: PrefixMiss) -> None:
        """Record a prefix of a batch that was recomputed."""
        self.misses.append(
            CacheMiss(
                when_s=time.time(),
                backend=miss.backend,
                lane="batch",
                prompt_tokens=miss.expected_tokens,  # tokens expected to be reused
                cached_tokens=miss.cached_tokens,
                words=miss.words,
            )
        )

    def refused(self, kind: str) -> None:
        """Not recorded; metrics count refusals."""

    # ---- polling

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Poll and record while the block runs."""
        tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._notify_shutdown())]
        tasks[0].add_done_callback(self._log_failure)
        try:
            yield
        finally:
            details_polls = [
                monitored.details_poll for monitored in self.backends if monitored.details_poll is not None
            ]
            for task in (*tasks, *details_polls):
                task.cancel()
            await asyncio.gather(*tasks, *details_polls, return_exceptions=True)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Register a client for the duration of the block; raises Busy if there are too many."""
        if self.clients >= MAX_CLIENTS:
            raise Busy(
                f"the dashboard is already open in {self.clients} pages",
                retry_after_s=10.0,
                code="too_many_pages",
                kind="pages",
            )
        self.clients += 1
        self._wake.set()
        try:
            yield
        finally:
            self.clients -= 1

    async def wait_for_poll(self, version: int, timeout_s: float) -> bool:
        """Wait for a poll that is newer than `version`; returns False after the timeout."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.version > version or self.state.shutting_down.is_set())
        except TimeoutError:
            return False
        return True

    async def poll(self, *, details: bool = True, max_age_s: float = 0.0) -> None:
        """Poll all backends and the machine, unless the last poll is more recent than `max_age_s`."""
        async with self._polling:
            if self.polled_s is not None and time.monotonic() - self.polled_s < max_age_s:
                return
            await asyncio.gather(
                *(monitored.poll(details=details) for monitored in self.backends), self._poll_machine()
            )
            self.polled_s = time.monotonic()
            self._record_state_changes()
            self._record_rates()
        async with self._changed:
            self.version += 1
            self._changed.notify_all()

    async def _poll_machine(self) -> None:
        self.batches = await asyncio.to_thread(batches_by_status, self.state.state_path / BATCHES)
        now_s = time.monotonic()
        if self._memories_s is None or now_s - self._memories_s >= MEMORY_INTERVAL_S:
            tiers = {row.tier for ready in self.state.ready_engines.values() for row in ready.held.rows}
            self.memories = await asyncio.to_thread(measure_memories, tiers)
            self._memories_s = now_s

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            self._watch_exits()
            self._record_state_changes()
            unsettled = any(
                monitored.state in ("unresponsive", "restarting", "loading", "starting", "warming")
                for monitored in self.backends
            )
            if self.clients:
                await self.poll()
            with suppress(TimeoutError):
                async with asyncio.timeout(UNSETTLED_POLL_S if unsettled else POLL_S if self.clients else None):
                    await self._wake.wait()

    def _log_failure(self, run: "asyncio.Task[None]") -> None:
        if not run.cancelled() and (bug := run.exception()) is not None:
            self.state.log({"event": "page_stopped", "why": f"internal error: {bug!r}"})

    async def _notify_shutdown(self) -> None:
        await self.state.shutting_down.wait()
        async with self._changed:
            self._changed.notify_all()

    def _watch_exits(self) -> None:
        for monitored in self.backends:
            exited = monitored.backend.engine.exited
            if exited is not monitored.exited:
                monitored.exited = exited
                exited.add_done_callback(lambda _: self._wake.set())

    def _record_state_changes(self) -> None:
        """Append a notice for every backend whose state changed."""
        for monitored in self.backends:
            state = monitored.state
            before = monitored.last_recorded[0] if monitored.last_recorded is not None else "ready"
            if state != before:
                self.notices.append(
                    Notice(when_s=time.time(), backend=monitored.backend.name, state=state, words=monitored.detail)
                )
            monitored.last_recorded = (state, monitored.detail)

    def _record_rates(self) -> None:
        def summed(name: str) -> float | None:
            known = [rate for rate in (monitored.rates.per_s(name) for monitored in self.backends) if rate is not None]
            return round(sum(known), 2) if known else None

        now_s = time.time()
        last_s = self.history[-1]["when_s"] if self.history else None
        if last_s is not None and now_s - last_s > 5 * POLL_S:
            self.history.clear()  # a gap without polls
        self.history.append(
            {
                "when_s": round(now_s, 2),
                "generated_tok_s": summed("generated_tokens"),
                "prompt_tok_s": summed("prompt_tokens_computed"),
                "reused_tok_s": summed("prompt_tokens_reused"),
            }
        )


def token_s(done: FinishedRequest) -> float | None:
    """Mean seconds between tokens, as the client sees it; None with fewer than two tokens."""
    tokens = done.usage.completion_tokens
    return None if done.first_token_s is None or tokens < 2 else (done.seconds - done.first_token_s) / (tokens - 1)
