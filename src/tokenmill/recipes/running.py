"""Run a recipe on an engine of this machine: `run_recipe`."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from tokenmill.api.batch_engine import EngineSetup
from tokenmill.api.batches import counts_text
from tokenmill.api.progress import OnProgress, log
from tokenmill.api.stopping import Stop
from tokenmill.api.stores import work_folder
from tokenmill.hardware.catalog import find
from tokenmill.jobs.address import Address
from tokenmill.jobs.models import Batch
from tokenmill.jobs.progress import Report
from tokenmill.jobs.run_stats import Tell
from tokenmill.jobs.store import Store
from tokenmill.recipes.engine import RecipeEngine
from tokenmill.recipes.local_runner import LocalRunner
from tokenmill.recipes.runner import BatchRunner, Budget, End, Origin, Spent
from tokenmill.recipes.stage_speeds import keeper

T = TypeVar("T")
Recipe = Callable[[BatchRunner, Callable[[str], None]], Awaitable[T]]
"""Runs stages through a mill and returns what came of them; the second argument takes messages."""


@dataclass(frozen=True, slots=True)
class RecipeRequest:
    """Where a recipe runs, and how far it may go."""

    name: str  # what its batches are called
    store: Address
    setup: EngineSetup
    budget: Budget
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class RecipeRun(Generic[T]):
    """A recipe that has run."""

    value: T  # what it returned
    end: End  # finished, or why not
    spent: Spent
    origin: Origin
    load_s: float | None  # None: no engine had to be started
    seconds: float  # loading included


def run_recipe(recipe: Recipe[T], request: RecipeRequest, stop: Stop, on_progress: OnProgress) -> RecipeRun[T]:
    """Run a recipe; blocks, and runs an event loop of its own.

    The engine is started with the first stage that has work. After a stop or a used-up budget the recipe still ends in
    its own way, with what there is.
    """
    with ExitStack() as stack:
        store = stack.enter_context(Store(request.store, shutdown=stop.shutdown))
        folder = stack.enter_context(work_folder(request.store, request.setup.config))
        return asyncio.run(_run(recipe, request, RecipeEngine(request.setup, store, folder, on_progress), stop))


async def _run(recipe: Recipe[T], request: RecipeRequest, opening: RecipeEngine, stop: Stop) -> RecipeRun[T]:
    began_s = asyncio.get_running_loop().time()
    stop.begin()
    stop.loaded()  # the mill cancels a load by itself, so that the recipe can write what there is
    setup = request.setup
    async with opening as engine:
        mill = LocalRunner(
            engine.store,
            engine.folder,
            engine,
            budget=request.budget,
            stop=stop.event,
            priority=request.priority,
            called=request.name,
            watch=partial(_watched, engine.on_progress),
            began_s=began_s,
            alone=setup.planned is not None,
            booked=_keeper(engine),
        )
        value = await recipe(mill, log.info)
        seconds = asyncio.get_running_loop().time() - began_s
        return RecipeRun(value, mill.end, mill.spent, mill.origin, engine.load_s, seconds)


def _keeper(engine: RecipeEngine) -> Callable[[Report], None]:
    """Keeps the measured speed of each stage, if it is known which machine the engine runs on."""
    setup = engine.setup
    if setup.planned is not None:
        machine = setup.planned.plan.machine
    elif setup.choice.record is not None:
        machine = find(setup.config.machine)
    else:  # a server behind a URL
        return lambda _report: None
    return keeper(setup.choice.state, machine, lambda: engine.origin)


@contextmanager
def _watched(on_progress: OnProgress, stage: str, batch: Batch) -> Iterator[Tell]:
    log.info("%s: %s (%s)", stage, counts_text(batch.counts), batch.name)
    yield on_progress
