"""Assigns batches to backends: one job worker per backend and owner, each batch on its best available backend.

All batches of an owner on a backend run in one worker, because they may share prefixes and answers; a new batch joins
the running worker. Each worker keeps as many jobs in flight as the backend has slots, and the backend runs batch
requests in order of arrival: owners get equal shares of its slots, however many batches or jobs they have queued.

A worker stops when its backend fails, when a better backend for one of its batches is available again, or when its
owner has used the tokens of the day; its jobs in flight return to the queue, and its batches run later or elsewhere.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tokenmill.engine.engine import Usage
from tokenmill.errors import TokenmillError, UnknownModel
from tokenmill.gateway.backends.backend import Backend
from tokenmill.gateway.backends.backend_engine import BackendEngine
from tokenmill.gateway.monitoring.recorder import PrefixMiss
from tokenmill.gateway.state import GatewayState
from tokenmill.jobs.models import Batch
from tokenmill.jobs.scheduler.shape import shape_of
from tokenmill.jobs.store.http_batches import HttpBatch
from tokenmill.jobs.store.store import Store
from tokenmill.jobs.worker.loop import WorkOptions, WorkTask, work
from tokenmill.jobs.worker.reuse import Miss

_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 2.0, 60.0


@dataclass(slots=True)
class _Worker:
    backend: Backend
    owner: str | None
    batches: set[int]  # unfinished job batches
    joining: "asyncio.Queue[Batch]" = field(default_factory=asyncio.Queue)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    task: "asyncio.Task[None] | None" = None


@dataclass(slots=True)
class _Backoff:
    """Backoff of a backend after a worker failed on it."""

    until_s: float = 0.0
    failures: int = 0


class BackendWorkers:
    """The job workers of the gateway, by backend."""

    def __init__(
        self, state: GatewayState, *, tick_s: float, wake: Callable[[], None], clock: Callable[[], float] = time.time
    ) -> None:
        """`wake`: called when a worker ends."""
        self._state = state
        self._tick_s = tick_s
        self._wake = wake
        self._clock = clock
        self._workers: dict[tuple[str, str | None], _Worker] = {}  # by backend and owner
        self._over_budget: set[str] = set()
        self._backoffs: dict[str, _Backoff] = {}

    @property
    def busy(self) -> bool:
        """Whether a worker is running."""
        return bool(self._workers)

    def has(self, batch: int) -> bool:
        """Whether a worker runs a job batch."""
        return any(batch in worker.batches for worker in self._workers.values())

    def done(self, batch: int) -> None:
        """Mark a job batch as finished."""
        for worker in self._workers.values():
            worker.batches.discard(batch)

    async def run(self, store: Store, jobs: Batch, batch: HttpBatch) -> None:
        """Run a batch on its best backend, if one is available."""
        best = self._best(jobs, batch)
        current = next((worker for worker in self._workers.values() if jobs.id in worker.batches), None)
        if self._is_over_budget(batch.owner):
            if current is not None:
                current.stop.set()
            return
        if best is None:
            return  # if a worker has the batch, it waits for its engine
        if current is not None:
            if current.backend.name != best.name:
                current.stop.set()
            return
        worker = self._workers.get((best.name, batch.owner))
        if worker is None:
            worker = self._workers[best.name, batch.owner] = _Worker(best, batch.owner, {jobs.id})
            worker.task = asyncio.create_task(self._work(store, worker, jobs))
        else:
            worker.batches.add(jobs.id)
            worker.joining.put_nowait(jobs)

    async def stop(self) -> None:
        """Stop all workers; jobs in flight return to the queue."""
        tasks = [worker.task for worker in self._workers.values() if worker.task is not None]
        for worker in self._workers.values():
            worker.stop.set()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _is_over_budget(self, owner: str | None) -> bool:
        """Whether an owner has used the tokens of the day; logged when that begins."""
        if owner is None:
            return False
        limiter = self._state.limiter
        key = self._state.keys.owned_by(owner)
        wait_s = limiter.daily_wait_s(owner, limiter.limits(key.limits if key is not None else None))
        if not wait_s:
            self._over_budget.discard(owner)
        elif owner not in self._over_budget:
            self._over_budget.add(owner)
            self._state.log({"event": "batches_wait", "owner": owner, "why": "the tokens of the day are used up"})
        return wait_s > 0

    def _best(self, jobs: Batch, batch: HttpBatch) -> Backend | None:
        """The first available backend of the model that is not in backoff."""
        try:
            chain = self._state.routes.choose(batch.model, "batch", None, self._state.key_name(batch.owner))
        except UnknownModel:  # the configuration has changed
            return None
        now_s = asyncio.get_running_loop().time()
        return next(
            (
                backend
                for backend in chain
                if backend.engine.identity.model_id == jobs.model_id
                and backend.available
                and self._backoffs.get(backend.name, _Backoff()).until_s <= now_s
            ),
            None,
        )

    async def _work(self, store: Store, worker: _Worker, first: Batch) -> None:
        """Run until all joined batches are done or the backend fails."""
        name = worker.backend.name
        try:
            engine = BackendEngine(worker.backend, lambda usage: self._charge(worker.owner, usage))
            status = await engine.status()
            shape = shape_of(engine.capabilities, engine.identity, cells_total=status.counters.cells_total)
            await work(
                WorkTask(
                    store,
                    [first],
                    engine,
                    shape,
                    options=WorkOptions(tick_s=self._tick_s, names_as_requested=True),
                    stop=worker.stop,
                    clock=self._clock,
                    joining=worker.joining,
                    on_miss=lambda miss: self._record_miss(name, miss),
                )
            )
            self._backoffs.pop(name, None)
        except TokenmillError as error:
            self._back_off(name, error)
        finally:
            del self._workers[name, worker.owner]
            self._wake()

    def _charge(self, owner: str | None, usage: Usage) -> None:
        if owner is not None:
            self._state.limiter.charge_day(owner, usage.total_tokens)

    def _record_miss(self, name: str, miss: Miss) -> None:
        self._state.recorder.missed(PrefixMiss(name, miss.expected_tokens, miss.cached_tokens, miss.message))

    def _back_off(self, name: str, error: TokenmillError) -> None:
        backoff = self._backoffs.setdefault(name, _Backoff())
        wait_s = min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2.0**backoff.failures)
        backoff.failures += 1
        backoff.until_s = asyncio.get_running_loop().time() + wait_s
        self._state.log({"event": "batches_wait", "backend": name, "why": " ".join(error.message.split())})
