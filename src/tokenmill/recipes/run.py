"""Runs a recipe on an engine of this machine: `run_recipe`.

The engine is opened for the first stage that has jobs to compute. If all answers are in the store, nothing is loaded.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from tokenmill.api.batch_run import counts_text
from tokenmill.api.engines.batch import BatchEngine, EngineSetup
from tokenmill.api.engines.choose import EngineChoice
from tokenmill.api.engines.speeds import EngineOrigin, installed_build, record_speed
from tokenmill.api.planning.plan import EnginePlan
from tokenmill.api.progress import OnProgress, log
from tokenmill.api.stopping import Stop
from tokenmill.api.stores import work_folder
from tokenmill.hardware.catalog import find
from tokenmill.jobs.models import Batch
from tokenmill.jobs.store.address import Address
from tokenmill.jobs.store.store import Store
from tokenmill.jobs.worker.progress import RunReport
from tokenmill.jobs.worker.stats import OnSnapshot
from tokenmill.recipes.local_runner import LocalRunner, RunnerOptions, origin_of
from tokenmill.recipes.runner import AnswerOrigin, BatchRunner, Budget, RecipeCost, RecipeEnd

UNKNOWN_BUILD = "not started"


class RecipeEngine(BatchEngine):
    """The engine of one recipe run, opened for the first stage that has jobs to compute."""

    _planned: AnswerOrigin | None = None

    @property
    def origin(self) -> AnswerOrigin:
        """Model, engine and build; taken from the plan until the engine is open."""
        choice = self.setup.choice
        if self.engine is not None:
            return origin_of(self.engine.identity, called=name_of(choice, self.engine.identity.model))
        if self._planned is None:
            self._planned = planned_origin(choice, self.setup.planned)
        return self._planned


def planned_origin(choice: EngineChoice, wanted: EnginePlan | None) -> AnswerOrigin:
    """The origin that answers will have, without starting an engine."""
    if choice.record is not None:
        record = choice.record
        return AnswerOrigin(name_of(choice, record.model), record.model_id, record.kind, record.build)
    if wanted is None:
        return AnswerOrigin(choice.model, choice.model_id, "url", UNKNOWN_BUILD)
    context = wanted.plan.settings.context
    name = name_of(choice, wanted.plan.profile.name)
    return AnswerOrigin(name, choice.model_id, choice.config.kind, installed_build(wanted) or UNKNOWN_BUILD, context)


def name_of(choice: EngineChoice, own: str) -> str:
    """The model's display name: the name in the file if the model was given as a file or URL."""
    return own if choice.url is not None or "/" in choice.model or choice.model.endswith(".gguf") else choice.model


T = TypeVar("T")
Recipe = Callable[[BatchRunner, Callable[[str], None]], Awaitable[T]]
"""A recipe: runs stages on the runner and returns its result; the second argument logs messages."""


@dataclass(frozen=True, slots=True)
class RecipeRequest:
    """Where a recipe runs, and its limits."""

    name: str  # name of its batches
    store: Address
    setup: EngineSetup
    budget: Budget
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class RecipeRun(Generic[T]):
    """A finished recipe run."""

    value: T  # return value of the recipe
    end: RecipeEnd  # finished, or the reason for the end
    spent: RecipeCost
    origin: AnswerOrigin
    load_s: float | None  # None: no engine was started
    seconds: float  # loading included


def run_recipe(recipe: Recipe[T], request: RecipeRequest, stop: Stop, on_progress: OnProgress) -> RecipeRun[T]:
    """Run a recipe; blocks, and runs its own event loop.

    After a stop, or when the budget is used up, the recipe writes the rows it has.
    """
    with ExitStack() as stack:
        store = stack.enter_context(Store(request.store, shutdown=stop.shutdown))
        folder = stack.enter_context(work_folder(request.store, request.setup.config))
        return asyncio.run(_run(recipe, request, RecipeEngine(request.setup, store, folder, on_progress), stop))


async def _run(recipe: Recipe[T], request: RecipeRequest, opening: RecipeEngine, stop: Stop) -> RecipeRun[T]:
    began_s = asyncio.get_running_loop().time()
    stop.begin()
    stop.loaded()  # the runner itself cancels a load, so that the recipe can write its rows
    setup = request.setup
    async with opening as engine:
        runner = LocalRunner(
            engine.store,
            engine.folder,
            engine,
            RunnerOptions(
                budget=request.budget,
                stop=stop.event,
                priority=request.priority,
                name=request.name,
                watch=partial(_watched, engine.on_progress),
                began_s=began_s,
                exclusive=setup.planned is not None,
                on_stage_end=_speed_recorder(engine),
            ),
        )
        value = await recipe(runner, log.info)
        seconds = asyncio.get_running_loop().time() - began_s
        return RecipeRun(value, runner.end, runner.spent, runner.origin, engine.load_s, seconds)


def _speed_recorder(engine: RecipeEngine) -> Callable[[RunReport], None]:
    """Store the measured speed of each stage; a server behind a URL runs on an unknown machine."""
    setup = engine.setup
    if setup.planned is not None:
        machine = setup.planned.plan.machine
    elif setup.choice.record is not None:
        machine = find(setup.config.machine)
    else:
        return lambda _report: None

    def record(report: RunReport) -> None:
        origin = engine.origin
        engine_origin = EngineOrigin(origin.model_id, origin.engine, origin.build)
        record_speed(setup.choice.state, machine, report, engine_origin)

    return record


@contextmanager
def _watched(on_progress: OnProgress, stage: str, batch: Batch) -> Iterator[OnSnapshot]:
    log.info("%s: %s (%s)", stage, counts_text(batch.counts), batch.name)
    yield on_progress
