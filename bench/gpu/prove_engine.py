"""Loads one plan, compares it with its ledger, and measures its speeds; each row is stored as it is measured.

Both stages share one load, which takes longer than most measurements. The native engine is changed to each point's
context, threads and slots and measured with waves, as in a tuning.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from prove_card import limited
from prove_plans import (
    OUT,
    TAIL,
    Case,
    Point,
    calibrated,
    forecast,
    ledger_at,
    points,
    seconds_for,
)
from prove_rows import Clock, Row, Rows

from tokenmill.config import EngineConfig
from tokenmill.engine.engine import Engine, Request, Sampling, answer
from tokenmill.engine.loading.process import local_vram
from tokenmill.engine.process.registry import log_path
from tokenmill.errors import TokenmillError
from tokenmill.hardware.identity import machine_id
from tokenmill.native.launching import ReadyEngine, hold, launch_engine
from tokenmill.native.worker_config import INTERACTIVE_SLOTS, sequences_for
from tokenmill.planner.plan import Plan
from tokenmill.planner.speed.calibration import Calibration
from tokenmill.tuner.bench.rig import pids_of
from tokenmill.tuner.measure import MeasureOptions, measure, prepare
from tokenmill.tuner.point import Aim, Figures, TrialSettings
from tokenmill.tuner.work import GeneratedJobs, vocabulary
from tokenmill.units import format_bytes

NAME = "prove"
LOAD_S, TINY_LOAD_S = 45.0, 8.0  # assumed until the first load
POINT_LIMIT_S = 150.0


@dataclass(slots=True)
class Bench:
    """Shared by all loads."""

    model: Path
    config: EngineConfig
    state: Path
    logs: Path
    rows: Rows
    tiny: bool
    how: MeasureOptions
    load_s: float = LOAD_S


def say(text: str) -> None:
    """Print a line immediately."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def missing(bench: Bench, case: Case, stages: set[str], cores: int) -> list[Point]:
    """Points that were not measured yet."""
    if "speed" not in stages:
        return []
    return [point for point in points(case, cores, tiny=bench.tiny) if not bench.rows.has("speed", key(case, point))]


def key(case: Case, point: Point) -> str:
    """Key of a speed's row."""
    return f"{case.name} / {point.name}"


async def prove(bench: Bench, case: Case, stages: set[str], clock: Clock, cores: int) -> None:
    """Both stages of one plan within the time; errors are stored as rows."""
    left = missing(bench, case, stages, cores)
    wants_ledger = "ledger" in stages and not bench.rows.has("ledger", case.name)
    if not left and not wants_ledger:
        return
    if not clock.allows(bench.load_s):
        say(f"{case.name}: left out, {clock.left_s:.0f} s are too few to load it")
        return
    if not case.plan.fits:
        bench.rows.add(
            "ledger",
            case.name,
            case=case.name,
            error="does not fit by its own ledger",
            shortfalls=[asdict(one) for one in case.plan.shortfalls],
        )
        return
    try:
        async with limited(case.card_bytes) as free, up(bench, case.plan, case.slug) as one:
            say(f"{case.name}: loaded in {one.load_s:.1f} s")
            for note in one.engine.capabilities.notes:
                say(f"  {note}")
            bench.load_s = one.load_s + 5
            if wants_ledger:
                await held(bench, case, one, free)
            await sped(bench, case, one.engine, left, clock, cores)
    except TokenmillError as error:
        say(f"{case.name}: {error.message}")
        bench.rows.add(
            "ledger" if wants_ledger else "speed",
            f"{case.name} / failed",
            case=case.name,
            error=error.message,
            hint=error.hint,
        )


@asynccontextmanager
async def up(bench: Bench, plan: Plan, slug: str) -> AsyncIterator[ReadyEngine]:
    """An engine for a plan; its log is kept."""
    name = f"{NAME}-{slug}"
    try:
        one = await launch_engine(
            plan, model_path=bench.model, config=replace(bench.config, warm=False), state=bench.state, name=name
        )
        try:
            yield one
        finally:
            await one.engine.close()
    finally:
        keep_log(bench, name)


def keep_log(bench: Bench, name: str) -> None:
    """Copy an engine's log to the rows."""
    log = log_path(bench.state, name)
    if log.is_file():
        bench.logs.mkdir(parents=True, exist_ok=True)
        (bench.logs / f"{name}.log").write_bytes(log.read_bytes())


async def held(bench: Bench, case: Case, one: ReadyEngine, free: int | None) -> Row:
    """Store the ledger, after a prompt of two micro-batches has created all buffers and kernels."""
    plan = case.plan
    tokens = min(2 * plan.settings.ubatch, plan.settings.context - 16)
    words = tuple(100 + at * 7919 % 3000 for at in range(tokens))
    await answer(one.engine, Request(words, Sampling(temperature=0.0), max_tokens=8, ignore_eos=True))
    return await held_as(bench, case, one.engine, f"{NAME}-{case.slug}", free=free, load_s=one.load_s)


async def held_as(bench: Bench, case: Case, engine: Engine, name: str, **more: Any) -> Row:
    """Store the ledger of an engine as it is now."""
    plan = case.plan
    found = await asyncio.to_thread(hold, plan, engine, log_path(bench.state, name))
    rows = [asdict(row) for row in found.rows if row.measured_bytes is not None]
    for row in rows:
        ours = format_bytes(row["predicted_bytes"])
        theirs = format_bytes(row["measured_bytes"])
        say(f"  {row['tier']:5} {row['item']:8} predicted {ours:>10}, measured {theirs:>10}")
    settings = {
        name: getattr(plan.settings, name)
        for name in ("context", "sequences", "ubatch", "threads", "mmap", "repack", "cache_type_k")
    }
    return bench.rows.add(
        "ledger",
        case.name,
        case=case.name,
        rows=rows,
        settings=settings,
        build=found.build,
        notes=list(engine.capabilities.notes),
        card_bytes=case.card_bytes,
        **more,
        load_warm_s=plan.forecast.load_warm_s,
        load_cold_s=plan.forecast.load_cold_s,
        placement=[d.value for d in plan.decisions if d.name == "placement"],
    )


async def sped(bench: Bench, case: Case, engine: Engine, left: list[Point], clock: Clock, cores: int) -> None:
    """Measure the speeds at every remaining point within the time."""
    if not left:
        return
    words = await vocabulary(engine)
    first = points(case, cores, tiny=bench.tiny)[0]
    for number, point in enumerate(left):
        said = forecast(case.plan, point)
        if not clock.allows(seconds_for(point, said)):
            bench.rows.add(
                "speed",
                key(case, point),
                case=case.name,
                point=point.name,
                axis=point.axis,
                skipped=f"{clock.left_s:.0f} s were left",
            )
            continue
        try:
            async with asyncio.timeout(min(POINT_LIMIT_S, max(20.0, clock.left_s))):
                row = await measured(bench, case, engine, point, words, number)
        except TimeoutError:
            bench.rows.add(
                "speed",
                key(case, point),
                case=case.name,
                point=point.name,
                axis=point.axis,
                skipped="it did not end in time",
            )
            return  # requests that are still running would disturb the next point
        known = correction(bench, case, first, engine)
        told = _told(forecast(case.plan, point, known)) if known is not None else None
        kept = bench.rows.add("speed", key(case, point), **row, before=_told(said), after=told)
        say(f"  {point.name:22} {_words(kept)}")


async def measured(
    bench: Bench, case: Case, engine: Engine, point: Point, words: tuple[int, ...], number: int
) -> dict[str, Any]:
    """Measure one point: its context, a prefix, and waves of jobs."""
    dials = point.dials(case.plan)
    lanes = point.sequences
    began = time.monotonic()
    await turn(engine, dials)
    work = GeneratedJobs(Aim(prompt_tokens=point.head, tail_tokens=TAIL, output_tokens=OUT), words, seed=number)
    prefix_s = await prepare(engine, work, number, lanes)
    found = await measure(
        engine,
        work,
        bench.how,
        trial=number,
        slots=lanes,
        ubatch=dials.ubatch,
        context=dials.context,
        prefix_s=prefix_s,
    )
    pids = pids_of(engine)
    vram = local_vram()(pids) if case.plan.placement.gpus else None
    ledger = ledger_at(case.plan, point)
    taken = {
        tier: sum(row.bytes for row in ledger.after_load if row.tier == tier and row.item != "reserve")
        for tier in case.plan.placement.gpus
    }
    return {
        "case": case.name,
        "point": point.name,
        "axis": point.axis,
        "dials": asdict(dials),
        "head": point.head,
        "measured": _told(found.figures),
        "spread": found.spread,
        "waves": found.waves,
        "vram": {f"gpu{index}": size for index, size in (vram or {}).items()},
        "vram_predicted": taken,
        "seconds": round(time.monotonic() - began, 1),
    }


async def turn(engine: Engine, dials: TrialSettings, *, cells: int | None = None) -> None:
    """Create another context on the same weights."""
    ids = sequences_for(dials.sequences, INTERACTIVE_SLOTS)
    await engine.set_context(
        cells=cells or dials.context * dials.sequences,
        context=dials.context,
        sequences=ids,
        ubatch=dials.ubatch,
        batch=max(dials.ubatch, ids),
        cache_type_k=dials.cache_type_k,
        cache_type_v=dials.cache_type_v,
        flash_attention=dials.flash_attention,
        threads=dials.threads,
        threads_batch=dials.threads_batch,
        lanes=dials.sequences,
    )


def correction(bench: Bench, case: Case, first: Point, engine: Engine) -> Calibration | None:
    """The calibration by the row of the first point, if it exists."""
    row = bench.rows.get("speed", key(case, first))
    if row is None or "measured" not in row:
        return None
    found = row["measured"]
    return calibrated(
        case,
        first,
        Figures(found["decode"], found["prefill"]),
        machine_id=machine_id(case.plan.machine),
        model_id=engine.identity.model_id,
        when=row["when"],
    )


def _told(figures: Figures) -> dict[str, float | None]:
    return {"decode": figures.decode_tok_s, "prefill": figures.prefill_tok_s}


def _words(row: Row) -> str:
    parts = []
    for kind in ("decode", "prefill"):
        measured_, before, after = (((row.get(when) or {}).get(kind)) for when in ("measured", "before", "after"))
        if measured_:
            shown = [f"{value:.1f} ({value / measured_ - 1:+.0%})" if value else "-" for value in (before, after)]
            parts.append(f"{kind} {measured_:.1f}, predicted {shown[0]}, calibrated {shown[1]}")
    return "; ".join(parts)
