"""The engine of a run: opened for the first batch that needs it, with its slots fitted to each batch."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from tokenmill.api.engines.choose import EngineChoice, open_engine, plan_for
from tokenmill.api.engines.slots import fit_slots
from tokenmill.api.options import EngineOptions
from tokenmill.api.planning.plan import EnginePlan, ReadBatch
from tokenmill.api.progress import OnProgress, ignore
from tokenmill.config import Config
from tokenmill.engine.engine import Engine
from tokenmill.jobs.models import Batch
from tokenmill.jobs.scheduler.shape import EngineShape
from tokenmill.jobs.sharding.view import WorkerSpec
from tokenmill.jobs.store.store import Store
from tokenmill.tuner.point import SlotPoint


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """Which engine a run uses, and its plan if it has to be started."""

    choice: EngineChoice
    options: EngineOptions
    config: Config
    planned: EnginePlan | None = None

    def plan(self, batch: ReadBatch | None = None) -> "EngineSetup":
        """This setup with a plan, if an engine has to be started; DoesNotFit if it does not fit.

        `batch` reads the lengths of the jobs, if they are the only ones that the engine is for.
        """
        if self.planned is not None or not self.choice.starts:
            return self
        return replace(self, planned=plan_for(self.choice, self.options, self.config, batch))

    @property
    def measures_slots(self) -> bool:
        """Whether the number of slots is to be measured, because neither the caller nor `tokenmill tune` set it."""
        return self.planned is not None and self.options.sequences is None and not self.planned.tuned


class BatchEngine:
    """One engine for the batches of a run; `async with` stops an engine that was started here.

    `ready` starts the engine for the first batch that needs it. A running engine is attached on entering, because only
    the engine knows its model.
    """

    def __init__(
        self,
        setup: EngineSetup,
        store: Store,
        folder: Path,
        on_progress: OnProgress = ignore,
        *,
        adapt_layout: bool = True,
    ) -> None:
        self.setup = setup
        self.load_s: float | None = None  # None: no engine was started
        self.engine: Engine | None = None
        self.store = store
        self.folder = folder
        self.on_progress = on_progress
        planned = setup.planned
        self._adapt_layout = adapt_layout and planned is not None and planned.plan.settings.total_cells is None
        self._point: SlotPoint | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        if not self.setup.choice.starts:
            await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def announce(self, batch: Batch | None = None) -> None:
        """Announce the model and the batch of this worker to others on the same store, before the engine is loaded."""
        planned = self.setup.planned
        context = planned.plan.settings.context if planned is not None else None
        batches = None if batch is None else (batch.id,)
        await asyncio.to_thread(self.store.announce, WorkerSpec(self.setup.choice.model_id, context, batches))

    async def ready(self, batch: Batch) -> tuple[Engine, EngineShape]:
        """The engine, opened if necessary, and its shape for a batch; may be cancelled."""
        engine = await self._open()
        shape = await fit_slots(
            engine,
            self.store,
            batch,
            measure=self.setup.measures_slots,
            adapt_layout=self._adapt_layout,
            on_progress=self.on_progress,
            known=self._point,
        )
        self._point = shape.point
        return engine, shape

    async def _open(self) -> Engine:
        if self.engine is None:
            began_s = asyncio.get_running_loop().time()
            opened = open_engine(self.setup.choice, self.setup.planned, self.folder, self.on_progress)
            self.engine = await self._stack.enter_async_context(opened)
            if self.setup.planned is not None:
                self.load_s = asyncio.get_running_loop().time() - began_s
        return self.engine
