"""Runs recipes on this machine: each stage is a batch of the store, run until it is done or a limit is reached.

The engine is opened for the first stage that has jobs to compute. Lines that were submitted before are the same batch,
so finished answers are reused and the rest is resumed. Stopping loses only answers in flight.
"""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tokenmill.engine.engine import Engine, Identity
from tokenmill.jobs.ingest.submit import submit
from tokenmill.jobs.models import Batch, Result, Submission
from tokenmill.jobs.scheduler.shape import EngineShape, shape_of
from tokenmill.jobs.sharding.view import WorkerSpec
from tokenmill.jobs.store.store import Store
from tokenmill.jobs.worker.loop import WorkOptions, WorkTask, work
from tokenmill.jobs.worker.progress import RunReport, Snapshot
from tokenmill.jobs.worker.stats import OnSnapshot
from tokenmill.recipes.runner import Answered, AnswerOrigin, Budget, Line, RecipeCost, RecipeEnd, line_bytes

_PAGE = 32  # results per read: with logprobs, one may have megabytes

T = TypeVar("T")
Watch = Callable[[str, Batch], AbstractContextManager[OnSnapshot]]
"""Shows the progress of a stage."""


class EngineProvider(Protocol):
    """Opens the engine of a runner when the first stage needs it."""

    @property
    def origin(self) -> AnswerOrigin:
        """The model and engine that answer; available before the engine is open."""

    async def ready(self, batch: Batch) -> tuple[Engine, EngineShape]:
        """The engine, opened if necessary, and its settings for a batch; may be cancelled."""


class OpenEngine:
    """Provides an engine that is already open."""

    def __init__(self, engine: Engine, shape: EngineShape | None = None) -> None:
        self._engine = engine
        self._shape = shape or shape_of(engine.capabilities, engine.identity)

    @property
    def origin(self) -> AnswerOrigin:
        """The model and engine that answer."""
        return origin_of(self._engine.identity)

    async def ready(self, _batch: Batch) -> tuple[Engine, EngineShape]:
        """Return the engine and its settings."""
        return self._engine, self._shape


def origin_of(identity: Identity, *, called: str | None = None) -> AnswerOrigin:
    """The origin of an engine's answers; `called`: the model's display name."""
    return AnswerOrigin(called or identity.model, identity.model_id, identity.kind, identity.build, identity.context)


@dataclass(frozen=True, slots=True)
class Stage:
    """A finished stage; the store must stay open while its answers are read."""

    end: RecipeEnd
    total: int
    store: Store
    batch: int | None  # None: the stage has no lines

    def answers(self) -> Iterator[Answered]:
        """Every line with an outcome, in line order."""
        after = 0
        while self.batch is not None and (page := self.store.results(self.batch, after, _PAGE)):
            yield from (_answered(result) for result in page if result.state.final)
            after = page[-1].number


def _answered(result: Result) -> Answered:
    custom_id = result.custom_id or f"line-{result.number}"
    if result.body is not None:
        return Answered(custom_id, json.loads(result.body))
    return Answered(custom_id, None, result.code or result.state.word, result.message)


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """Limits and reporting of a `LocalRunner`."""

    budget: Budget = field(default_factory=Budget)
    stop: asyncio.Event | None = None  # set by the caller to stop
    worker: WorkOptions = field(default_factory=WorkOptions)
    priority: int | None = None
    name: str = "recipe"  # name of its batches
    watch: Watch = lambda _stage, _batch: nullcontext(lambda _now: None)
    began_s: float | None = None  # start of the time budget on the loop's clock; None: now
    exclusive: bool = (
        True  # no other client uses the engine, so its own counters, which include running prompts, are valid
    )
    on_stage_end: Callable[[RunReport], None] = lambda _report: None


class LocalRunner:
    """Runs stages on a store that this process works on, one at a time."""

    def __init__(
        self, store: Store, folder: Path, engines: EngineProvider, options: RunnerOptions = RunnerOptions()
    ) -> None:
        self._store = store
        self._folder = folder
        self._engines = engines
        self._options = options
        self._stop = options.stop or asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time() if options.began_s is None else options.began_s
        self._spent = RecipeCost()
        self._time_up = False
        self._ended: RecipeEnd = "finished"

    @property
    def origin(self) -> AnswerOrigin:
        """The model and engine that answer."""
        return self._engines.origin

    @property
    def spent(self) -> RecipeCost:
        """Cost of this run up to the last finished stage, including aborted answers."""
        return self._spent

    @property
    def end(self) -> RecipeEnd:
        """Why the run ended; "finished" while every stage did."""
        return self._ended

    async def run(self, stage: str, lines: Iterable[Line]) -> Stage:
        """Store the lines as a batch and run it; raises errors of the engine and the store."""
        batch = await self._submitted(stage, lines)
        if batch is None:
            return Stage("finished", 0, self._store, None)
        if batch.counts.done and await asyncio.to_thread(self._store.requeue_damaged, batch.id):
            batch = self._store.batch(batch.id)
        end: RecipeEnd
        if batch.cancelled_s is not None:
            end = "cancelled"
        elif batch.finished:
            end = "finished"
        else:
            end = self._over(0) or await self._worked(stage, batch)
        after = self._store.batch(batch.id)
        counts = after.counts
        computed = after.totals.computed - batch.totals.computed
        self._spent += RecipeCost(reused=counts.done - computed, failed=counts.final - counts.done)
        if end != "finished":
            self._ended = end
        return Stage(end, counts.total, self._store, batch.id)

    async def _submitted(self, stage: str, lines: Iterable[Line]) -> Batch | None:
        """The batch of these lines; None: no lines. Their file is anonymous, so that a kill leaves nothing behind."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._folder, buffering=1 << 20) as file:
            for line in lines:
                file.write(line_bytes(line))
            file.flush()
            if file.tell() == 0:
                return None
            how = Submission(self._engines.origin.model_id, priority=self._options.priority)
            where = f"/dev/fd/{file.fileno()}"
            called = f"{self._options.name}: {stage}"
            return (await asyncio.to_thread(submit, self._store, where, how, source_name=called)).batch

    async def _worked(self, stage: str, batch: Batch) -> RecipeEnd:
        """Run the batch until it is done or a limit is reached."""
        # Announced before the load, so that other workers leave jobs that are too long for them to this one.
        await asyncio.to_thread(self._store.announce, WorkerSpec(batch.model_id, None, (batch.id,)))
        found = await self._unless_stopped(self._engines.ready(batch))
        if found is None:
            return self._over(0) or "stopped"
        engine, shape = found
        halt = asyncio.Event()
        live_prompts = 0
        with self._options.watch(stage, batch) as shown:

            def on_snapshot(now: Snapshot) -> None:
                nonlocal live_prompts
                live_prompts = now.prompt_tokens_live if self._options.exclusive else now.tokens.computed
                if self._over(live_prompts + now.tokens.generated) is not None:
                    halt.set()
                shown(now)

            async with self._halting(halt):
                report = await work(
                    WorkTask(
                        self._store,
                        [batch],
                        engine,
                        shape,
                        options=self._options.worker,
                        stop=halt,
                        on_snapshot=on_snapshot,
                    )
                )
        self._book(report, live_prompts)
        self._options.on_stage_end(report)
        return self._over(0) or "stopped" if report.end == "stopped" else report.end

    def _book(self, report: RunReport, live_prompts: int) -> None:
        tokens = report.tokens
        lost = max(0, live_prompts - tokens.computed)  # tokens of aborted answers
        self._spent += RecipeCost(
            answers=report.answers,
            prompt_tokens=tokens.prompt + lost,
            cached_tokens=tokens.cached,
            completion_tokens=tokens.generated,
            seconds=report.seconds,
        )

    def _over(self, live: int) -> RecipeEnd | None:
        """The limit reached, with `live` tokens used in the current stage; None: none reached."""
        if self._stop.is_set():
            return "stopped"
        if self._options.budget.tokens is not None and self._spent.tokens + live >= self._options.budget.tokens:
            return "tokens"
        self._time_up |= self._ends_s is not None and self._loop.time() >= self._ends_s
        return "hours" if self._time_up else None

    @property
    def _ends_s(self) -> float | None:
        return None if self._options.budget.seconds is None else self._began_s + self._options.budget.seconds

    @asynccontextmanager
    async def _halting(self, halt: asyncio.Event) -> AsyncIterator[None]:
        """Set the event when a stop is requested or time is up."""

        def time_up() -> None:  # sets a flag, because a timer may fire slightly early
            self._time_up = True
            halt.set()

        async def wait_for_stop() -> None:
            await self._stop.wait()
            halt.set()

        task = asyncio.create_task(wait_for_stop())
        timer = None if self._ends_s is None else self._loop.call_at(self._ends_s, time_up)
        try:
            yield
        finally:
            task.cancel()
            if timer is not None:
                timer.cancel()

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`; None if it was cancelled by a stop or the time limit."""
        halt = asyncio.Event()
        task = asyncio.ensure_future(work)
        async with self._halting(halt):
            halted = asyncio.create_task(halt.wait())
            try:
                await asyncio.wait({task, halted}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                halted.cancel()
                if not task.done():
                    task.cancel()
                    await asyncio.wait({task})
        return None if task.cancelled() else task.result()
