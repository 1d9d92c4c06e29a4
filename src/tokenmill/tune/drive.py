"""The loop of a tuning: ask the search for dials, try them, keep what came of it, tell the search.

Whatever a trial does to the engine is that trial's outcome; the engine is brought back and the loop goes on. Only a
model that cannot be loaded at all ends it.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from time import perf_counter
from typing import Protocol

from tokenmill.engine.engine import Engine
from tokenmill.engine.loading_process import read_memory
from tokenmill.engine.loading_vram import this_driver
from tokenmill.errors import EngineDied, EngineError, EngineTimeout, TokenmillError
from tokenmill.hardware.host import LocalHost
from tokenmill.plan.plan import Plan
from tokenmill.tune.bench_rig import pids_of
from tokenmill.tune.energy import Joules, Meter
from tokenmill.tune.measure import How, Measured, measure, prepare
from tokenmill.tune.point import Dials, Outcome, Trial
from tokenmill.tune.predicted import fits
from tokenmill.tune.quiet import Watch
from tokenmill.tune.stand import Stand
from tokenmill.tune.work import Work, WorkFor

MOST_FAILED_LOADS = 3  # in a row
LEAST_LIMIT_S, LIMIT_TIMES = 300.0, 40  # of a trial, or so many times what its waves are given
_MEMORY = ("for memory", "out of memory", "failed to allocate", "unable to allocate", "bad_alloc", "cudamalloc",
           "cannot allocate", "alloc_buffer", "not enough memory")  # fmt: skip
_DETAIL_CHARS = 300


class Search(Protocol):
    """What decides which dials are tried."""

    @property
    def reason(self) -> str:
        """Why it stopped, or what it does next."""

    def ask(self) -> Dials | None:
        """Dials to try; None: it is done."""

    def tell(self, trial: Trial) -> None:
        """What came of some."""

    def best(self) -> Trial | None:
        """The best so far."""

    def remaining(self) -> int:
        """About how many are still to come."""


@dataclass(frozen=True, slots=True)
class Step:
    """A trial that has ended, for whoever watches."""

    number: int
    trial: Trial
    best: Trial | None
    remaining: int


@dataclass(slots=True)
class Bed:
    """What every trial of a tuning shares."""

    plan: Plan
    stand: Stand
    how: How
    watch: Callable[[], Watch] | None = Watch  # None: trials count although something else uses the machine
    meter: Callable[[], Meter] = Meter
    no_energy: str | None = None  # why energy could not be read, once it was tried
    failed_loads: int = 0
    depth: int = 0  # tokens of the prompts that were measured with last


def outcome_of(error: TokenmillError) -> Outcome:
    """What an error says became of a trial."""
    text = f"{error.message}\n{error.hint or ''}".lower()
    if any(words in text for words in _MEMORY) and "not for memory" not in text:
        return "out of memory"
    if isinstance(error, EngineTimeout):
        return "hung"
    if isinstance(error, EngineDied):
        return "hung" if " hung: " in text else "died"
    return "refused"


async def attempt(bed: Bed, dials: Dials, work: WorkFor, number: int) -> Trial:
    """Try dials; the engine dying is an outcome. EngineError where it cannot be loaded at all."""
    stand, began, loads = bed.stand, perf_counter(), bed.stand.loads
    trial = Trial(dials, "refused")
    try:
        if not fits(bed.plan, dials):
            raise EngineError("not tried: out of memory by the plan's ledger")
        engine = await _loaded(bed, dials)
        async with asyncio.timeout(max(LEAST_LIMIT_S, LIMIT_TIMES * bed.how.seconds)):
            await stand.turn(dials)
            trial = await _measured(bed, engine, dials, await work(engine), number)
    except TimeoutError:
        trial = replace(trial, outcome="hung", detail=f"no end after {perf_counter() - began:.0f} s")
        await stand.lost()
    except TokenmillError as error:
        if bed.failed_loads and (bed.failed_loads >= MOST_FAILED_LOADS or stand.loads == bed.failed_loads):
            raise
        trial = replace(trial, outcome=outcome_of(error), detail=_detail(error))
        if isinstance(error, EngineDied | EngineTimeout):
            await stand.lost()
    return replace(trial, seconds=perf_counter() - began, loaded=stand.loads > loads, when=_now())


async def drive(
    bed: Bed,
    search: Search,
    work: WorkFor,
    *,
    known: Iterable[Trial] = (),
    keep: Callable[[Trial], None],
    tell: Callable[[Step], None],
) -> tuple[Trial, ...]:
    """Try what the search asks for until it is done; `known` are trials from before, which count as well."""
    trials = list(known)
    for trial in trials:
        search.tell(trial)
    while (dials := search.ask()) is not None:
        trial = await attempt(bed, dials, work, len(trials))
        keep(trial)  # before it counts: what is told next may be interrupted
        search.tell(trial)
        trials.append(trial)
        tell(Step(len(trials), trial, search.best(), search.remaining()))
    return tuple(trials)


async def _loaded(bed: Bed, dials: Dials) -> Engine:
    before = bed.stand.loads
    try:
        engine = await bed.stand.ready(dials)
    except EngineError:
        bed.failed_loads += bed.stand.loads - before
        raise
    bed.failed_loads = 0
    return engine


async def _measured(bed: Bed, engine: Engine, dials: Dials, work: Work, number: int) -> Trial:
    pids, bed.depth = pids_of(engine), work.depth
    head_s = await prepare(engine, work, number, dials.sequences)
    watch, meter = bed.watch() if bed.watch is not None else None, bed.meter()
    if watch is not None:
        watch.start(pids)
    meter.start()
    began = perf_counter()
    found = await measure(
        engine, work, bed.how, trial=number, lanes=dials.sequences, ubatch=dials.ubatch, context=dials.context,
        head_s=head_s,
    )  # fmt: skip
    joules, seconds = meter.stop(), perf_counter() - began
    bed.no_energy = bed.no_energy or joules.why_not
    disturbed = watch.stop() if watch is not None else None
    figures = replace(found.figures, joules_per_token=_per_token(joules, seconds, found), **_taken(bed.plan, pids))
    return Trial(dials, "measured", figures, disturbed=disturbed)


def _per_token(joules: Joules, seconds: float, found: Measured) -> float | None:
    """The power while it was measured, over what a batch writes: waves are longer or shorter than jobs."""
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
