"""Warms a started engine before its first request, and reports the time that this saves. Entry point: `warm`.

The first request after a start waits for pages of the model that are not in memory, for buffers that are allocated at
first use and for each digest, so a measurement of it makes the machine look slow.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Literal

from tokenmill.config import EngineConfig
from tokenmill.engine.engine import Answer, Engine, Request, Sampling
from tokenmill.engine.limits.scheduling import preparation
from tokenmill.engine.loading.process import parse_status
from tokenmill.engine.page_cache import CacheFill, FillProgress, fill
from tokenmill.engine.pinned_prefixes import HeldPrefixes, PinnedPrefix, WarmedHead, hold
from tokenmill.hardware.disk import parse_mountinfo
from tokenmill.hardware.host import Host, LocalHost
from tokenmill.hardware.limits import read_limits
from tokenmill.hardware.memory import parse_meminfo
from tokenmill.launch.binding import HOST_TIERS, mapped_bytes
from tokenmill.planner.plan import Plan
from tokenmill.units import format_bytes, format_seconds

StepName = Literal["page cache", "first decode", "heads"]
TOKENS = 8  # of each of the two first requests
FIRST = "Monday, Tuesday, Wednesday,"
SECOND = "January, February, March,"
"""Two prompts of about the same length without a common prefix, so that the second cannot reuse the first's cache."""
LEAST_LOCKED = 0.95  # minimum share of the wanted bytes that must be locked
WORTH_TELLING = 1.2  # minimum ratio of cold to warm time that is reported


@dataclass(frozen=True, slots=True)
class WarmProgress:
    """Progress of a warm-up."""

    step: StepName
    detail: str
    done: int | None = None  # bytes of the page cache, or number of prefixes
    total: int | None = None
    rate_bytes_s: float | None = None
    eta_s: float | None = None


@dataclass(frozen=True, slots=True)
class WarmRun:
    """One short request."""

    seconds: float
    first_piece_s: float | None
    prefill_s: float | None  # measured by the engine
    decode_s: float | None
    tokens: int

    @property
    def decode_tok_s(self) -> float | None:
        """Decode speed, from the engine's own timings."""
        return self.tokens / self.decode_s if self.decode_s and self.tokens else None


@dataclass(frozen=True, slots=True)
class ColdAgainstWarm:
    """Duration of the first request without warming, and of a request now."""

    cold_s: float | None  # reading the model plus the first request: a lower bound, because page faults read slower
    read_s: float  # the part of `cold_s` that is reading
    warm_s: float | None

    @property
    def times(self) -> float | None:
        """Ratio of cold to warm time."""
        return self.cold_s / self.warm_s if self.cold_s is not None and self.warm_s else None

    def as_words(self) -> str:
        """Return one sentence for the user."""
        if self.cold_s is None or self.warm_s is None or self.times is None:
            return "cold against warm was not measured"
        if self.times < WORTH_TELLING:
            return f"a short request takes {format_seconds(self.warm_s)}, and took no longer at first"
        reading = f", {format_seconds(self.read_s)} of it for reading the model" if self.read_s else ""
        return (
            f"a short request takes {format_seconds(self.warm_s)}; cold it would have taken at least "
            f"{format_seconds(self.cold_s)}{reading}"
        )


@dataclass(frozen=True, slots=True)
class WarmReport:
    """Result of a warm-up."""

    filled: CacheFill | None
    locked_bytes: int | None
    first: WarmRun | None
    second: WarmRun | None
    heads: tuple[WarmedHead, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def cold_against_warm(self) -> ColdAgainstWarm:
        """Compare the first request without warming with a request now."""
        read_s = self.filled.seconds if self.filled and self.filled.read_bytes else 0.0
        cold_s = None if self.first is None else read_s + self.first.seconds
        return ColdAgainstWarm(cold_s, read_s, None if self.second is None else self.second.seconds)


OnWarmProgress = Callable[[WarmProgress], None]


async def warm(
    engine: Engine,
    plan: Plan,
    paths: Sequence[Path],
    *,
    heads: Sequence[PinnedPrefix] = (),
    folder: Path | None = None,
    slots: Path | None = None,
    progress: OnWarmProgress | None = None,
    filled: CacheFill | None = None,
    host: Host | None = None,
) -> WarmReport:
    """Warm a started engine.

    folder, slots: where saved prefixes are, see `pinned_prefixes.hold`.
    filled: result of filling the page cache, if that was done before the start.
    """
    tell: OnWarmProgress = progress or (lambda _: None)
    host = host or LocalHost()
    if filled is None:
        filled = await fill_ahead(plan, paths, loaded=True, progress=tell, host=host)
    tell(WarmProgress("first decode", "a first request"))
    first = await _run(engine, FIRST)
    tell(WarmProgress("first decode", "a second request"))
    second = await _run(engine, SECOND)
    locked, notes = _locked(engine, plan, host)
    held = await hold_with_progress(engine, plan, heads, folder, slots, tell)
    return WarmReport(
        filled, locked, first, second, held.heads, (*(filled.notes if filled else ()), *notes, *held.notes)
    )


async def hold_with_progress(
    engine: Engine,
    plan: Plan,
    heads: Sequence[PinnedPrefix],
    folder: Path | None,
    slots: Path | None,
    tell: OnWarmProgress,
) -> HeldPrefixes:
    """Cache prefixes and report progress, with the forecast time of each if it has to be computed."""
    speed = next(iter(plan.forecast.prefill), None)

    def now(number: int, head: PinnedPrefix) -> None:
        tokens = head.tokens
        size = "" if tokens is None else f", {tokens:,} tokens"
        eta_s = tokens / speed.tok_s if tokens and speed and speed.tok_s > 0 else None
        tell(WarmProgress("heads", head.name + size, number, len(heads), eta_s=eta_s))

    return await hold(engine, heads, folder, now, slots=slots)


async def fill_ahead(
    plan: Plan,
    paths: Sequence[Path],
    *,
    loaded: bool = False,
    progress: OnWarmProgress | None = None,
    host: Host | None = None,
) -> CacheFill | None:
    """Fill the page cache for a plan that maps its files; None if the plan does not.

    Call it before the engine starts, which then maps a cached file. `loaded` means that the engine has started and
    allocated its memory. Cancelling stops the readers before this function returns.
    """
    if not plan.settings.mmap or (loaded and mapped_bytes(plan) == 0):
        return None
    stop = threading.Event()
    loop = asyncio.get_running_loop()

    def tell(state: FillProgress) -> None:
        if progress is not None:
            loop.call_soon_threadsafe(progress, _fill_words(state))

    work = asyncio.ensure_future(
        asyncio.to_thread(
            fill,
            paths,
            available_bytes=room_bytes(plan, host or LocalHost(), loaded=loaded),
            nodes=_spread(plan),
            progress=tell,
            stop=stop,
        )
    )
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([work])
        raise


def room_bytes(plan: Plan, host: Host, *, loaded: bool) -> int | None:
    """Return the memory that a plan's files may fill: available memory minus the engine's own; None if unknown."""
    meminfo = parse_meminfo(host.text("/proc/meminfo") or "")
    available = meminfo.get("MemAvailable")
    if available is None:
        return None
    limits, _ = read_limits(host, parse_mountinfo(host.text("/proc/self/mountinfo") or ""), meminfo.get("MemTotal"))
    if limits.cgroup_memory_bytes is not None:
        available = min(
            available, limits.cgroup_memory_bytes
        )  # pages count for the group of the process that reads them
    rows = plan.ledger.full_context
    own = sum(row.bytes for row in rows if row.tier in HOST_TIERS and row.item not in ("weights", "reserve"))
    return max(0, available - (0 if loaded else own))


def _spread(plan: Plan) -> tuple[int, ...] | None:
    """Return the NUMA nodes over which the engine's memory is spread; pages read ahead must be spread the same way."""
    return preparation(plan, EngineConfig()).nodes


def _fill_words(state: FillProgress) -> WarmProgress:
    return WarmProgress(
        "page cache", "reading the model", state.bytes_done, state.bytes_total, state.rate_bytes_s, state.eta_s
    )


async def _run(engine: Engine, prompt: str) -> WarmRun:
    request = Request(prompt, Sampling(temperature=0.0), max_tokens=TOKENS, priority="interactive")
    began = perf_counter()
    first: float | None = None
    stream = engine.stream(request)
    try:
        async for event in stream:
            if isinstance(event, Answer):
                timings = event.timings
                return WarmRun(
                    perf_counter() - began, first, timings.prefill_s, timings.decode_s, event.usage.completion_tokens
                )
            first = first if first is not None else perf_counter() - began
    finally:
        await stream.aclose()
    raise AssertionError("a stream ended without an answer")


def _locked(engine: Engine, plan: Plan, host: Host) -> tuple[int | None, list[str]]:
    """Return the bytes that the engine locked, and a note if they are fewer than planned."""
    if not plan.settings.mlock or engine.identity.pid is None:
        return None, []
    locked = parse_status(host.text(f"/proc/{engine.identity.pid}/status") or "").locked_bytes
    wanted = mapped_bytes(plan)  # llama.cpp does not lock what it rewrote
    if locked is None or locked >= LEAST_LOCKED * wanted:
        return locked, []
    return locked, [
        f"only {format_bytes(locked)} of {format_bytes(wanted)} are locked in memory: tokenmill doctor "
        "says what the limit is and how to raise it"
    ]
