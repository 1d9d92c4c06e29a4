"""Runs the trials of a tuning: gets settings from the search, measures them, stores and reports the trials.

If the engine fails, the failure is the outcome of the trial, and the loop continues with a restarted engine. If another
process kills the engine, the trial is repeated. The loop ends early only if the model cannot be loaded, or if the
engine is killed repeatedly.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from time import perf_counter
from typing import Protocol

from tokenmill.engine.engine import Engine
from tokenmill.engine.loading.process import local_vram, read_memory
from tokenmill.errors import EngineDied, EngineError, EngineTimeout, TokenmillError
from tokenmill.hardware.host import LocalHost
from tokenmill.planner.plan import Plan
from tokenmill.tuner.bench.rig import pids_of
from tokenmill.tuner.energy import Joules, Meter
from tokenmill.tuner.engine_rig import EngineRig
from tokenmill.tuner.measure import Measured, MeasureOptions, measure, prepare
from tokenmill.tuner.noise_monitor import NoiseMonitor
from tokenmill.tuner.point import Trial, TrialOutcome, TrialSettings
from tokenmill.tuner.search.forecasts import fits
from tokenmill.tuner.work import TuneRequests, WorkFor

MAX_FAILED_LOADS = 3  # in a row
MAX_KILLS = 5  # by other processes, during one trial
MIN_LIMIT_S = 300.0  # minimum time limit of a trial ...
LIMIT_FACTOR = 40  # ... and the limit as a multiple of the time for its waves
_MEMORY = (
    "the oom killer",
    "out of memory",
    "failed to allocate",
    "unable to allocate",
    "bad_alloc",
    "cudamalloc",
    "cannot allocate",
    "alloc_buffer",
    "not enough memory",
)
_DETAIL_CHARS = 300
_log = logging.getLogger("tokenmill")


class TrialChooser(Protocol):
    """Decides which settings to try."""

    @property
    def reason(self) -> str:
        """The current step, or why the search ended."""

    def ask(self) -> TrialSettings | None:
        """The next settings; None: done."""

    def tell(self, trial: Trial) -> None:
        """Record a trial."""

    def best(self) -> Trial | None:
        """The best trial so far."""

    def remaining(self) -> int:
        """Estimated number of remaining trials."""


@dataclass(frozen=True, slots=True)
class TrialStep:
    """A finished trial, for progress output."""

    number: int
    trial: Trial
    best: Trial | None
    remaining: int


@dataclass(slots=True)
class TrialContext:
    """State shared by all trials of a tuning."""

    plan: Plan
    rig: EngineRig
    how: MeasureOptions
    watch: Callable[[], NoiseMonitor] | None = NoiseMonitor  # None: other load is ignored
    meter: Callable[[], Meter] = Meter
    no_energy: str | None = None  # why energy could not be read
    failed_loads: int = 0
    depth: int = 0  # prompt tokens of the last measurement


def outcome_of(error: TokenmillError) -> TrialOutcome:
    """The outcome of a trial that raised an error."""
    text = f"{error.message}\n{error.hint or ''}".lower()
    if any(words in text for words in _MEMORY):
        return "out of memory"
    if isinstance(error, EngineTimeout):
        return "hung"
    if isinstance(error, EngineDied):
        return "hung" if " hung: " in text else "died"
    return "refused"


async def attempt(context: TrialContext, settings: TrialSettings, work: WorkFor, number: int) -> Trial:
    """Try settings. A failed engine is an outcome; if another process killed the engine, the trial is repeated.

    Raises EngineError if the engine cannot be loaded, or was killed `MAX_KILLS` times.
    """
    for _ in range(MAX_KILLS):
        try:
            return await _attempt(context, settings, work, number)
        except EngineDied as error:
            if not error.from_outside:
                raise
            await context.rig.lost()
            _log.warning("another process killed the engine during a trial; repeating the trial: %s", error.message)
            last = error
    raise EngineError(
        f"other processes killed the engine {MAX_KILLS} times during one trial: {last.message}",
        hint="find out what kills it, then run the same command again; it keeps the finished trials",
    )


async def _attempt(context: TrialContext, settings: TrialSettings, work: WorkFor, number: int) -> Trial:
    """One attempt at a trial; raises EngineDied if another process killed the engine."""
    rig = context.rig
    began = perf_counter()
    loads = context.rig.loads
    trial = Trial(settings, "refused")
    try:
        if not fits(context.plan, settings):
            raise EngineError("not tried: out of memory according to the plan's ledger")
        engine = await _loaded(context, settings)
        async with asyncio.timeout(max(MIN_LIMIT_S, LIMIT_FACTOR * context.how.seconds)):
            await rig.turn(settings)
            trial = await _measured(context, engine, settings, await work(engine), number)
    except TimeoutError:
        trial = replace(trial, outcome="hung", detail=f"not finished after {perf_counter() - began:.0f} s")
        await rig.lost()
    except TokenmillError as error:
        if isinstance(error, EngineDied) and error.from_outside:
            raise
        if context.failed_loads and (context.failed_loads >= MAX_FAILED_LOADS or rig.loads == context.failed_loads):
            raise
        trial = replace(trial, outcome=outcome_of(error), detail=_detail(error))
        if isinstance(error, EngineDied | EngineTimeout):
            await rig.lost()
    return replace(trial, seconds=perf_counter() - began, loaded=rig.loads > loads, when=_now())


async def drive(
    context: TrialContext,
    search: TrialChooser,
    work: WorkFor,
    *,
    known: Iterable[Trial] = (),
    keep: Callable[[Trial], None],
    tell: Callable[[TrialStep], None],
) -> tuple[Trial, ...]:
    """Run trials until the search is done; `known` are earlier trials."""
    trials = list(known)
    for trial in trials:
        search.tell(trial)
    while (settings := search.ask()) is not None:
        trial = await attempt(context, settings, work, len(trials))
        keep(trial)  # first, because the run may be interrupted
        search.tell(trial)
        trials.append(trial)
        tell(TrialStep(len(trials), trial, search.best(), search.remaining()))
    return tuple(trials)


async def _loaded(context: TrialContext, settings: TrialSettings) -> Engine:
    before = context.rig.loads
    try:
        engine = await context.rig.ready(settings)
    except EngineError as error:
        if not (isinstance(error, EngineDied) and error.from_outside):
            context.failed_loads += context.rig.loads - before
        raise
    context.failed_loads = 0
    return engine


async def _measured(
    context: TrialContext, engine: Engine, settings: TrialSettings, work: TuneRequests, number: int
) -> Trial:
    pids = pids_of(engine)
    context.depth = work.depth
    prefix_s = await prepare(engine, work, number, settings.sequences)
    watch = context.watch() if context.watch is not None else None
    meter = context.meter()
    if watch is not None:
        watch.start(pids)
    meter.start()
    began = perf_counter()
    found = await measure(
        engine,
        work,
        context.how,
        trial=number,
        slots=settings.sequences,
        ubatch=settings.ubatch,
        context=settings.context,
        prefix_s=prefix_s,
    )
    joules = meter.stop()
    seconds = perf_counter() - began
    context.no_energy = context.no_energy or joules.why_not
    disturbed = watch.stop() if watch is not None else None
    figures = replace(found.figures, joules_per_token=_per_token(joules, seconds, found), **_taken(context.plan, pids))
    return Trial(settings, "measured", figures, disturbed=disturbed)


def _per_token(joules: Joules, seconds: float, found: Measured) -> float | None:
    """Joules per output token of a batch: measured power divided by its throughput."""
    rate = found.figures.jobs_tok_s
    return joules.total / seconds / rate if joules.total is not None and rate and seconds > 0 else None


def _taken(plan: Plan, pids: tuple[int, ...]) -> dict[str, int | None]:
    vram = local_vram()(pids) if plan.placement.gpus and pids else None
    return {
        "host_bytes": read_memory(LocalHost(), pids).rss_bytes if pids else None,
        "gpu_bytes": sum(vram.values()) if vram else None,
    }


def _detail(error: TokenmillError) -> str:
    text = error.message if not error.hint else f"{error.message}; {' '.join(error.hint.split())}"
    return text if len(text) <= _DETAIL_CHARS else f"{text[: _DETAIL_CHARS - 3]}..."


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
