"""Runs a tuning: asks the search for settings, tries them, stores the trial, tells the search.

An engine failure is the trial's outcome; the engine is restarted and the loop continues. A trial whose engine is
killed by another process is repeated. The loop ends early only if the model cannot be loaded, or if the engine is
killed repeatedly.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from time import perf_counter
from typing import Protocol

from tokenmill.engine.engine import Engine
from tokenmill.engine.loading.process import read_memory, this_driver
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

MOST_FAILED_LOADS = 3  # consecutive
MOST_KILLS = 5  # of the engine by other processes, during one trial
LEAST_LIMIT_S, LIMIT_TIMES = 300.0, 40  # time limit of a trial: seconds, or a multiple of the time for its waves
_MEMORY = (
    "for memory",
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
    """Decides which settings are tried."""

    @property
    def reason(self) -> str:
        """The next step, or why the search ended."""

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
    stand: EngineRig
    how: MeasureOptions
    watch: Callable[[], NoiseMonitor] | None = NoiseMonitor  # None: other use of the machine is ignored
    meter: Callable[[], Meter] = Meter
    no_energy: str | None = None  # why energy could not be read
    failed_loads: int = 0
    depth: int = 0  # prompt tokens of the last measurement


def outcome_of(error: TokenmillError) -> TrialOutcome:
    """The outcome of a trial that raised an error."""
    text = f"{error.message}\n{error.hint or ''}".lower()
    if any(words in text for words in _MEMORY) and "not for memory" not in text:
        return "out of memory"
    if isinstance(error, EngineTimeout):
        return "hung"
    if isinstance(error, EngineDied):
        return "hung" if " hung: " in text else "died"
    return "refused"


async def attempt(context: TrialContext, dials: TrialSettings, work: WorkFor, number: int) -> Trial:
    """Try settings. An engine that dies is an outcome, unless another process killed it: then the trial is repeated.

    Raises EngineError if the engine cannot be loaded at all, or was killed more than `MOST_KILLS` times.
    """
    for _ in range(MOST_KILLS):
        try:
            return await _attempt(context, dials, work, number)
        except EngineDied as error:
            if not error.from_outside:
                raise
            await context.stand.lost()
            _log.warning("another process killed the engine during a trial; repeating the trial: %s", error.message)
            last = error
    raise EngineError(
        f"other processes killed the engine {MOST_KILLS} times during one trial: {last.message}",
        hint="find out what kills it; the same command keeps the trials so far and repeats this one",
    )


async def _attempt(context: TrialContext, dials: TrialSettings, work: WorkFor, number: int) -> Trial:
    """One attempt at a trial; raises EngineDied if another process killed the engine, else as `attempt`."""
    stand = context.stand
    began = perf_counter()
    loads = context.stand.loads
    trial = Trial(dials, "refused")
    try:
        if not fits(context.plan, dials):
            raise EngineError("not tried: out of memory by the plan's ledger")
        engine = await _loaded(context, dials)
        async with asyncio.timeout(max(LEAST_LIMIT_S, LIMIT_TIMES * context.how.seconds)):
            await stand.turn(dials)
            trial = await _measured(context, engine, dials, await work(engine), number)
    except TimeoutError:
        trial = replace(trial, outcome="hung", detail=f"no end after {perf_counter() - began:.0f} s")
        await stand.lost()
    except TokenmillError as error:
        if isinstance(error, EngineDied) and error.from_outside:
            raise
        if context.failed_loads and (context.failed_loads >= MOST_FAILED_LOADS or stand.loads == context.failed_loads):
            raise
        trial = replace(trial, outcome=outcome_of(error), detail=_detail(error))
        if isinstance(error, EngineDied | EngineTimeout):
            await stand.lost()
    return replace(trial, seconds=perf_counter() - began, loaded=stand.loads > loads, when=_now())


async def drive(
    context: TrialContext,
    search: TrialChooser,
    work: WorkFor,
    *,
    known: Iterable[Trial] = (),
    keep: Callable[[Trial], None],
    tell: Callable[[TrialStep], None],
) -> tuple[Trial, ...]:
    """Run trials until the search is done; earlier trials in `known` count as well."""
    trials = list(known)
    for trial in trials:
        search.tell(trial)
    while (dials := search.ask()) is not None:
        trial = await attempt(context, dials, work, len(trials))
        keep(trial)  # stored before the search sees it, because the run may be interrupted
        search.tell(trial)
        trials.append(trial)
        tell(TrialStep(len(trials), trial, search.best(), search.remaining()))
    return tuple(trials)


async def _loaded(context: TrialContext, dials: TrialSettings) -> Engine:
    before = context.stand.loads
    try:
        engine = await context.stand.ready(dials)
    except EngineError as error:
        if not (isinstance(error, EngineDied) and error.from_outside):
            context.failed_loads += context.stand.loads - before
        raise
    context.failed_loads = 0
    return engine


async def _measured(
    context: TrialContext, engine: Engine, dials: TrialSettings, work: TuneRequests, number: int
) -> Trial:
    pids = pids_of(engine)
    context.depth = work.depth
    head_s = await prepare(engine, work, number, dials.sequences)
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
        lanes=dials.sequences,
        ubatch=dials.ubatch,
        context=dials.context,
        head_s=head_s,
    )
    joules = meter.stop()
    seconds = perf_counter() - began
    context.no_energy = context.no_energy or joules.why_not
    disturbed = watch.stop() if watch is not None else None
    figures = replace(found.figures, joules_per_token=_per_token(joules, seconds, found), **_taken(context.plan, pids))
    return Trial(dials, "measured", figures, disturbed=disturbed)


def _per_token(joules: Joules, seconds: float, found: Measured) -> float | None:
    """Joules per output token of a batch: measured power divided by its throughput."""
    rate = found.figures.jobs_tok_s
    return joules.total / seconds / rate if joules.total is not None and rate and seconds > 0 else None


def _taken(plan: Plan, pids: tuple[int, ...]) -> dict[str, int | None]:
    vram = this_driver()(pids) if plan.placement.gpus and pids else None
    return {
        "host_bytes": read_memory(LocalHost(), pids).rss_bytes if pids else None,
        "gpu_bytes": sum(vram.values()) if vram else None,
    }


def _detail(error: TokenmillError) -> str:
    text = error.message if not error.hint else f"{error.message}; {' '.join(error.hint.split())}"
    return text if len(text) <= _DETAIL_CHARS else f"{text[: _DETAIL_CHARS - 3]}..."


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
