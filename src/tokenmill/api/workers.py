"""`work`: run the batches that are in a store, next to other workers on the same PostgreSQL database."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from tokenmill.api.display import display
from tokenmill.api.engines.batch import BatchEngine, EngineSetup
from tokenmill.api.engines.choose import choose_engine
from tokenmill.api.options import engine_options
from tokenmill.api.planning.plan import configuration
from tokenmill.api.progress import OnProgress, log
from tokenmill.api.run_options import RunOptions, WorkArguments, check_arguments, run_options
from tokenmill.api.stopping import Stop, in_thread
from tokenmill.api.stores import store_address, work_folder
from tokenmill.api.summary import WorkSummary
from tokenmill.config import Config
from tokenmill.engine.engine import Engine
from tokenmill.errors import UsageError
from tokenmill.jobs.models import Batch
from tokenmill.jobs.output import Output
from tokenmill.jobs.scheduler.shape import EngineShape
from tokenmill.jobs.store.address import Address
from tokenmill.jobs.store.store import Store
from tokenmill.jobs.worker.loop import WorkOptions, WorkTask
from tokenmill.jobs.worker.loop import work as work_on
from tokenmill.jobs.worker.progress import RunReport
from tokenmill.units import number_of

POLL_S = 2.0  # polling interval for new batches


def work(
    *,
    model: str | Path | None = None,
    store: str | Path | None = None,
    stay: bool = False,
    config: Config | str | Path | None = None,
    on_progress: OnProgress | None = None,
    **arguments: Unpack[WorkArguments],
) -> WorkSummary:
    """Work on the batches of a store that ask for this model until all are done; `stay` waits for more.

    Batches come from `submit`, or from `run` on another machine. In a store on PostgreSQL several workers share the
    jobs, and the output is written by the process that runs the batch; in a folder this worker writes it. The other
    arguments are `attempts`, `job_timeout_s` and the engine options of `tokenmill.plan`.
    """
    check_arguments(arguments, WorkArguments)
    settings = configuration(config)
    given: dict[str, Any] = dict(arguments)
    options = run_options(None, given)
    request = WorkRequest(store_address(store, settings), options, stay)
    stop = Stop()
    engine = engine_options(given)
    name = None if model is None else str(model)

    def choose_and_work(report: OnProgress) -> WorkSummary:
        setup = EngineSetup(choose_engine(name, engine, settings, report), engine, settings)
        return work_batches(request, setup, stop, report)

    with display() if on_progress is None else nullcontext(on_progress) as show:
        return in_thread(choose_and_work, stop, show)


@dataclass(frozen=True, slots=True)
class WorkRequest:
    """The store to work on, and the options."""

    store: Address
    options: RunOptions
    stay: bool = False


def work_batches(request: WorkRequest, setup: EngineSetup, stop: Stop, on_progress: OnProgress) -> WorkSummary:
    """Work until all batches are done, or until `stop` is requested; blocks, and runs an event loop of its own."""
    began_s = time.monotonic()
    if isinstance(request.store, Path) and not request.store.exists():
        raise UsageError(f"no store in {request.store}", hint="check the path; tokenmill.submit creates a store")
    setup = setup.plan()
    with ExitStack() as stack:
        store = stack.enter_context(Store(request.store, shutdown=stop.shutdown))
        folder = stack.enter_context(work_folder(request.store, setup.config))
        worker = BatchWorker(store, setup, request.options.worker_options(), folder, stop, stay=request.stay)
        asyncio.run(worker.run(on_progress))
    return WorkSummary(tuple(sorted(worker.names.values())), tuple(worker.reports), time.monotonic() - began_s)


class BatchWorker:
    """Works on the batches of a store in this process."""

    def __init__(
        self, store: Store, setup: EngineSetup, options: WorkOptions, folder: Path, stop: Stop, *, stay: bool
    ) -> None:
        self.reports: list[RunReport] = []
        self.names: dict[int, str] = {}  # of the batches that were worked on
        self._store = store
        self._setup = setup
        self._options = options
        self._folder = folder
        self._stop = stop
        self._stay = stay

    async def run(self, on_progress: OnProgress) -> None:
        """Work until there is nothing left to do, or a stop is requested."""
        self._stop.begin()
        engine = BatchEngine(self._setup, self._store, self._folder, on_progress, adapt_layout=False)
        await engine.announce()
        try:
            batches = await self._next_batches()
            if not batches:
                return
            async with engine:
                opened, shape = await engine.ready(batches[0])
                self._stop.loaded()
                while batches and not self._stop.requested:
                    await self._round(batches, opened, shape, on_progress)
                    batches = await self._next_batches()
        except asyncio.CancelledError:
            if not self._stop.requested:
                raise

    async def _round(
        self, batches: Sequence[Batch], engine: Engine, shape: EngineShape, on_progress: OnProgress
    ) -> None:
        """Work on batches, including new ones that arrive meanwhile, until all are done."""
        self.names |= {batch.id: batch.name for batch in batches}
        joining: asyncio.Queue[Batch] = asyncio.Queue()
        watch = asyncio.create_task(self.watch(joining, {batch.id for batch in batches}))
        with ExitStack() as stack:
            outputs = {batch.id: stack.enter_context(Output(self._store, batch)) for batch in self._written(batches)}
            try:
                report = await work_on(
                    WorkTask(
                        self._store,
                        batches,
                        engine,
                        shape,
                        outputs=outputs,
                        options=self._options,
                        stop=self._stop.event,
                        on_snapshot=on_progress,
                        joining=joining,
                    )
                )
                self.reports.append(report)
                for number, output in outputs.items():
                    if self._store.batch(number).finished:
                        output.finish()
            finally:
                watch.cancel()
                with suppress(asyncio.CancelledError):
                    await watch

    def _written(self, batches: Sequence[Batch]) -> list[Batch]:
        """The batches whose output this process writes; in PostgreSQL, the submitting process writes it."""
        if self._store.shared:
            return []
        return [batch for batch in batches if batch.output is not None and self._store.claim_output(batch.id)]

    async def watch(self, joining: "asyncio.Queue[Batch]", joined: set[int]) -> None:
        """Queue new batches for the worker."""
        while True:
            await asyncio.sleep(POLL_S)
            for batch in await asyncio.to_thread(self._open_batches):
                if batch.id not in joined:
                    joined.add(batch.id)
                    self.names[batch.id] = batch.name
                    log.info("%s joins: %s", batch.name, number_of(batch.counts.pending, "job"))
                    joining.put_nowait(batch)

    async def _next_batches(self) -> list[Batch]:
        """Batches with pending jobs; empty if all are done and `stay` is off, or a stop is requested.

        Waits while all remaining jobs are leased to other workers; the engine is loaded only if one of them is lost.
        """
        logged = False
        while not self._stop.requested:
            if found := await asyncio.to_thread(self._open_batches):
                return found
            if not self._stay and not await asyncio.to_thread(self._leased_to_others):
                break
            if not logged:
                waiting = "no batch has jobs for this model; waiting for batches"
                log.info(waiting if self._stay else "all remaining jobs are leased to other workers; waiting")
                logged = True
            await asyncio.to_thread(self._store.renew_lease)
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._stop.event.wait()
        return []

    def _open_batches(self) -> list[Batch]:
        return self._store.open_batches(self._setup.choice.model_id)

    def _leased_to_others(self) -> bool:
        """Whether other workers hold jobs that this one would take over if they were lost."""
        ours = [batch for batch in self._store.batches() if batch.model_id == self._setup.choice.model_id]
        return any(batch.sealed_s is not None and not batch.finished for batch in ours)
