"""Starts engines for trials and applies the settings of each trial.

The native engine is loaded once and changes its settings while it runs. A server gets its settings at the start, so it
is restarted as rarely as possible: fewer slots are measured by sending fewer requests, and fewer values of the other
settings are tried.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from tokenmill.config import EngineConfig
from tokenmill.engine import load_history
from tokenmill.engine.engine import Engine
from tokenmill.engine.process.registry import log_path
from tokenmill.engine.warm import fill_ahead
from tokenmill.errors import EngineDied, EngineError
from tokenmill.native.launching import Tell, hold, start
from tokenmill.native.worker_config import INTERACTIVE_SLOTS, goal_for, sequences_for
from tokenmill.planner.make import make
from tokenmill.planner.plan import Plan
from tokenmill.planner.speed.offload import choose_min_batch
from tokenmill.tuner.point import TrialSettings
from tokenmill.tuner.search.forecasts import fits
from tokenmill.tuner.search.space import Space, start_for

LOAD_CONTEXT = 256  # context of a load; small, so that bad settings are not mistaken for a failed load
STEP_LIMIT_S = 180.0  # a longer step counts as hung
_RELOAD = ("mmap", "repack", "offload_min_batch", "placement")


class EngineRig(Protocol):
    """An engine for trials."""

    @property
    def loads(self) -> int:
        """Number of loads so far."""

    async def ready(self, settings: TrialSettings) -> Engine:
        """An engine to which `turn` can apply these settings; loads one if necessary."""

    async def turn(self, settings: TrialSettings) -> None:
        """Apply the settings; raises EngineError if the engine cannot."""

    async def lost(self) -> None:
        """Clean up after a dead or hung engine."""

    async def close(self) -> None:
        """Stop the engine."""


def plan_at(plan: Plan, settings: TrialSettings, *, native: bool) -> Plan:
    """The plan with other settings and the same placement."""
    asked = plan.goal.offload_min_batch if settings.offload_min_batch is None else settings.offload_min_batch
    planned = replace(plan.settings, sequences=settings.sequences, mmap=settings.mmap)
    rows = choose_min_batch(plan.machine, plan.profile, planned, plan.placement, asked)
    goal = replace(
        plan.goal,
        threads=settings.threads,
        threads_batch=settings.threads_batch,
        sequences=settings.sequences,
        ubatch=settings.ubatch,
        context=settings.context,
        cache_type_k=settings.cache_type_k,
        cache_type_v=settings.cache_type_v,
        flash_attention=settings.flash_attention,
        mmap=settings.mmap,
        repack=settings.repack,
        offload_min_batch=rows,
    )
    return make(plan.machine, plan.profile, goal_for(goal) if native else goal, placement=plan.placement)


def needs_load(before: TrialSettings, after: TrialSettings) -> bool:
    """Whether a native engine must reload its weights."""
    return any(getattr(before, name) != getattr(after, name) for name in _RELOAD)


@dataclass(slots=True)
class Starter:
    """Starts engines for one model, one at a time, and counts the loads."""

    model_path: Path
    config: EngineConfig
    state: Path
    name: str
    shown: Callable[[], AbstractContextManager[Tell]] = lambda: nullcontext(
        lambda _: None
    )  # shows the progress of each load
    loads: int = 0

    async def started(self, plan: Plan) -> Engine:
        """Load the engine and record the load in the machine's history."""
        paths = [Path(file.path) for file in plan.profile.files] or [self.model_path]
        with self.shown() as tell:
            if self.config.warm and self.config.kind != "vllm" and not self.loads:
                await fill_ahead(plan, paths, progress=tell)
            self.loads += 1
            began_s = asyncio.get_running_loop().time()
            engine = await start(
                plan, model_path=self.model_path, config=self.config, state=self.state, name=self.name, progress=tell
            )
            load_s = asyncio.get_running_loop().time() - began_s
        try:
            held = await asyncio.to_thread(hold, plan, engine, log_path(self.state, self.name))
            kept = load_history.record(plan, held, model_id=engine.identity.model_id, load_s=load_s)
            await asyncio.to_thread(load_history.append, self.state, kept)
        except BaseException:
            await engine.close()
            raise
        return engine


class NativeRig:
    """The native engine: one load serves all settings that do not move weights."""

    def __init__(self, plan: Plan, starter: Starter, *, max_sequences: int) -> None:
        """`max_sequences`: maximum of all trials; some engine settings depend on it."""
        limit = min(starter.config.step_limit_s or STEP_LIMIT_S, STEP_LIMIT_S)
        starter.config = replace(starter.config, step_limit_s=limit)
        self._plan = plan
        self._starter = starter
        self._max_sequences = max_sequences
        self._engine: Engine | None = None
        self._loaded: TrialSettings | None = None

    @property
    def loads(self) -> int:
        """Number of loads so far."""
        return self._starter.loads

    @property
    def engine(self) -> Engine | None:
        """The loaded engine, if any."""
        return self._engine

    async def ready(self, settings: TrialSettings) -> Engine:
        """The running engine if its weights need no reload, else a new one."""
        if self._engine is not None and self._loaded is not None and not needs_load(self._loaded, settings):
            return self._engine
        await self.close()
        now = self._plan.settings
        small = TrialSettings(
            now.threads,
            now.threads_batch,
            self._max_sequences,
            min(now.ubatch, LOAD_CONTEXT),
            LOAD_CONTEXT,
            now.cache_type_k,
            now.cache_type_v,
            now.flash_attention,
            settings.mmap,
            settings.repack,
            settings.offload_min_batch,
            settings.placement,
        )
        engine = await self._starter.started(plan_at(self._plan, small, native=True))
        if not engine.capabilities.changes_context:
            await engine.close()
            raise EngineError(f"engine {engine.identity.kind} cannot change its context while it runs")
        self._engine = engine
        self._loaded = settings
        return engine

    async def turn(self, settings: TrialSettings) -> None:
        """Create a new context on the same weights, so that trials do not depend on each other."""
        if self._engine is None:
            raise EngineError("no engine is loaded")
        running = settings.sequences + INTERACTIVE_SLOTS
        shares = self._engine.capabilities.shares_prefixes
        ids = sequences_for(settings.sequences, INTERACTIVE_SLOTS) if shares else running
        await self._engine.set_context(
            cells=settings.context * settings.sequences,
            context=settings.context,
            sequences=ids,
            ubatch=settings.ubatch,
            batch=max(settings.ubatch, ids),
            cache_type_k=settings.cache_type_k,
            cache_type_v=settings.cache_type_v,
            flash_attention=settings.flash_attention,
            threads=settings.threads,
            threads_batch=settings.threads_batch,
            lanes=settings.sequences,
        )

    async def lost(self) -> None:
        """Stop the engine."""
        await self.close()

    async def close(self) -> None:
        """Stop the worker."""
        engine = self._engine
        self._engine = None
        if engine is not None:
            await engine.close()


_THREADS = (1.0, 0.85, 0.7, 0.5)  # thread counts to try, as shares of the maximum
_UBATCHES = (512, 2048)


class ServerRig:
    """A server of llama.cpp, ik_llama.cpp or vLLM."""

    def __init__(self, plan: Plan, starter: Starter, *, max_sequences: int) -> None:
        """`max_sequences`: maximum of all trials."""
        self._plan = plan
        self._starter = starter
        self._max_sequences = max_sequences
        self._engine: Engine | None = None
        self._started: TrialSettings | None = None

    @property
    def loads(self) -> int:
        """Number of starts so far."""
        return self._starter.loads

    async def ready(self, settings: TrialSettings) -> Engine:
        """The running server if only the sequences differ, else a new one with the most slots that fit in memory."""
        if self._engine is not None and self._started is not None and serves(self._started, settings):
            return self._engine
        await self.close()
        wide = replace(settings, sequences=max(self._max_sequences, settings.sequences))
        self._started = wide if fits(self._plan, wide) else settings
        try:
            self._engine = await self._starter.started(plan_at(self._plan, self._started, native=False))
        except EngineError as error:
            if self._started == settings or (isinstance(error, EngineDied) and error.from_outside):
                raise
            self._started = settings  # fewer slots may work
            self._engine = await self._starter.started(plan_at(self._plan, settings, native=False))
        return self._engine

    async def turn(self, settings: TrialSettings) -> None:
        """Nothing to change: the number of concurrent requests is the number of sequences."""
        if self._engine is None:
            raise EngineError("no server is running")

    async def lost(self) -> None:
        """Stop the engine."""
        await self.close()

    async def close(self) -> None:
        """Stop the server."""
        engine = self._engine
        self._engine = None
        if engine is not None:
            await engine.close()


def serves(started: TrialSettings, settings: TrialSettings) -> bool:
    """Whether a server started with `started` can be measured at these settings."""
    return settings.sequences <= started.sequences and replace(settings, sequences=started.sequences) == started


def thinned(plan: Plan, space: Space) -> Space:
    """A space with few values of every setting except sequences."""
    now = start_for(plan, space)
    most = max(space.threads)
    threads = {max(1, round(most * share)) for share in _THREADS} & set(space.threads)
    return replace(
        space,
        threads=tuple(sorted(threads | {now.threads})),
        threads_batch=(now.threads_batch,) if space.threads_batch else (),
        ubatch=tuple(sorted({now.ubatch, *(set(_UBATCHES) & set(space.ubatch))})),
        cache_types=((now.cache_type_k, now.cache_type_v),),
        flash_attention=(now.flash_attention,),
    )


def max_starts(space: Space) -> int:
    """Number of starts needed for all combinations."""
    widths = len(space.sequences)
    return -(-space.all() // widths)
