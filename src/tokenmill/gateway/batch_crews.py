"""Which engine works on which batches: one crew for each backend, each batch with the best of its backends that is up.

Batches of one backend are worked together, because they may share heads of prompts and whole answers, and new ones join
while others run. A crew with a batch whose backend falls away, or has a better one that is back, is ended, and its
batches go where they belong: what it had in hand is put back, and nothing that was answered is lost.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tokenmill.errors import TokenmillError, UnknownModel
from tokenmill.gateway.admission_engine import engine_behind
from tokenmill.gateway.backend import Backend
from tokenmill.gateway.batch_records import BatchRecord
from tokenmill.gateway.recorder import Missed
from tokenmill.gateway.state import GatewayState
from tokenmill.jobs.misses import Miss
from tokenmill.jobs.models import Batch
from tokenmill.jobs.shape import shape_of
from tokenmill.jobs.store import Store
from tokenmill.jobs.worker import Options, work

_FIRST_REST_S, _LONGEST_REST_S = 2.0, 60.0  # for a backend that a crew gave up on


@dataclass(slots=True)
class _Crew:
    backend: Backend
    batches: set[int]  # not finished, as far as is known
    joining: "asyncio.Queue[Batch]" = field(default_factory=asyncio.Queue)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    task: "asyncio.Task[None] | None" = None


@dataclass(slots=True)
class _Rest:
    until_s: float = 0.0
    failures: int = 0


class Crews:
    """The crews at work."""

    def __init__(
        self, state: GatewayState, *, tick_s: float, wake: Callable[[], None], clock: Callable[[], float] = time.time
    ) -> None:
        self._state = state
        self._tick_s = tick_s
        self._wake = wake
        self._clock = clock
        self._crews: dict[str, _Crew] = {}  # by backend
        self._rests: dict[str, _Rest] = {}  # by backend
        self.store: Store | None = None  # while it is held

    @property
    def busy(self) -> bool:
        """Whether any is at work."""
        return bool(self._crews)

    def has(self, batch: int) -> bool:
        """Whether a crew works on a batch."""
        return any(batch in crew.batches for crew in self._crews.values())

    def done(self, batch: int) -> None:
        """A batch needs no crew any more."""
        for crew in self._crews.values():
            crew.batches.discard(batch)

    async def work_on(self, batch: Batch, ticket: BatchRecord) -> None:
        """See to it that a batch is worked on, where an engine can."""
        best = self._best(batch, ticket)
        has = next((crew for crew in self._crews.values() if batch.id in crew.batches), None)
        if best is None or self.store is None:
            return  # a crew that has it waits for its engine
        if has is not None:
            if has.backend.name != best.name:
                has.stop.set()
            return
        crew = self._crews.get(best.name)
        if crew is None:
            crew = self._crews[best.name] = _Crew(best, {batch.id})
            crew.task = asyncio.create_task(self._work(self.store, crew, batch))
        else:
            crew.batches.add(batch.id)
            crew.joining.put_nowait(batch)

    async def stop(self) -> None:
        """End all; what they had in hand is put back."""
        tasks = [crew.task for crew in self._crews.values() if crew.task is not None]
        for crew in self._crews.values():
            crew.stop.set()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _best(self, batch: Batch, ticket: BatchRecord) -> Backend | None:
        """The first backend of the model that is up and has not just failed; None: none is."""
        try:
            chain = self._state.routes.choose(ticket.model, "batch", None, ticket.owner)
        except UnknownModel:  # the configuration has changed since
            return None
        now_s = asyncio.get_running_loop().time()
        return next(
            (
                backend
                for backend in chain
                if backend.engine.identity.model_id == batch.model_id
                and backend.available
                and self._rests.get(backend.name, _Rest()).until_s <= now_s
            ),
            None,
        )

    async def _work(self, store: Store, crew: _Crew, first: Batch) -> None:
        """Until all that joined is done, or the backend is given up."""
        name = crew.backend.name
        try:
            engine = engine_behind(crew.backend)
            status = await engine.status()
            shape = shape_of(engine.capabilities, engine.identity, cells_total=status.counters.cells_total)
            await work(
                store,
                [first],
                engine,
                shape,
                options=Options(tick_s=self._tick_s),
                stop=crew.stop,
                clock=self._clock,
                joining=crew.joining,
                missed=lambda miss: self._missed(name, miss),
            )
            self._rests.pop(name, None)
        except TokenmillError as error:
            self._rest(name, error)
        finally:
            del self._crews[name]
            self._wake()

    def _missed(self, name: str, miss: Miss) -> None:
        self._state.recorder.missed(Missed(name, miss.expected_tokens, miss.cached_tokens, miss.words))

    def _rest(self, name: str, error: TokenmillError) -> None:
        rest = self._rests.setdefault(name, _Rest())
        wait_s = min(_LONGEST_REST_S, _FIRST_REST_S * 2.0**rest.failures)
        rest.failures = rest.failures + 1
        rest.until_s = asyncio.get_running_loop().time() + wait_s
        self._state.log({"event": "batches_wait", "backend": name, "why": " ".join(error.message.split())})
