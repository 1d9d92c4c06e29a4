"""How much context can really be used, from the memory at each depth so far.

Pure. A context is filled step by step; after each step `judge` says whether the next one is safe, from what is free now
and how fast the engine's own memory grows. Other programs' memory shows in what is free, not in the growth.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from tokenmill.units import format_bytes

ROUND = 256  # tokens: engines pad a context to as many
Ended = Literal["goal", "memory", "died"]


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """One memory after a step; None: unknown."""

    tier: str  # dram, pmem, gpu0, ...
    predicted_bytes: int | None = None  # by the plan's ledger, at this depth
    measured_bytes: int | None = None  # held by the engine: its own memory, and the model pages that it needs
    free_bytes: int | None = None  # available to it, before reserves
    page_cache_bytes: int | None = None  # of the model's file


@dataclass(frozen=True, slots=True)
class SoakStep:
    """A depth that was reached, or at which memory ran short."""

    depth: int  # tokens of each sequence
    sequences: int
    memory: tuple[MemoryReading, ...]
    prefill_tok_s: float | None = None
    decode_tok_s: float | None = None
    computed_tokens: int | None = None  # of each prompt
    disturbed: str | None = None  # what else used the machine; such speeds do not count
    whole: bool = True  # False: aborted because memory ran short


@dataclass(frozen=True, slots=True)
class Limit:
    """The depth to reach, and the memory that must stay free."""

    goal: int  # tokens of each sequence
    step: int
    reserve_bytes: tuple[tuple[str, int], ...] = ()  # by tier; nothing for one that is not listed

    def reserve(self, tier: str) -> int:
        """Bytes that must stay free in a memory."""
        return dict(self.reserve_bytes).get(tier, 0)


@dataclass(frozen=True, slots=True)
class SoakVerdict:
    """Whether to continue, and the usable context if not."""

    go_on: bool
    usable_context: int  # tokens of each sequence that are known to be safe
    reason: str
    tier: str | None = None  # the memory that decides
    left_bytes: int | None = None  # free in it at the usable context


@dataclass(frozen=True, slots=True)
class SoakResult:
    """The result of a soak; the last one of each machine and model is stored."""

    machine: str
    machine_id: str
    model: str
    model_id: str
    engine: str
    build: str
    when: str  # ISO 8601, UTC
    goal: int
    steps: tuple[SoakStep, ...]
    usable_context: int
    reason: str
    ended: Ended
    lanes: int = 1  # concurrent sequences in the last steps
    usable_with_lanes: int | None = None  # of each sequence with all lanes full; None: not tried
    limit_bytes: int | None = None  # of host memory, if one was given
    reserve_bytes: tuple[tuple[str, int], ...] = ()
    last_words: str | None = None  # of an engine that died


def judge(steps: Sequence[SoakStep], limit: Limit) -> SoakVerdict:
    """Judge the steps so far, all with the same number of sequences, by ascending depth."""
    safe = _safe(steps, limit)
    if not steps:
        return SoakVerdict(True, 0, "nothing has been tried")
    if len(safe) < len(steps):
        return _short(safe, steps[len(safe)], limit)
    last = safe[-1]
    if last.depth >= limit.goal:
        return _reached(last, limit)
    ahead = min(last.depth + limit.step, limit.goal)
    nearest: tuple[float, MemoryReading, float] | None = None
    for reading in last.memory:
        slope = growth(safe, reading.tier)
        if reading.free_bytes is None or slope is None or slope <= 0:
            continue
        end = last.depth + (reading.free_bytes - limit.reserve(reading.tier)) / slope
        if nearest is None or end < nearest[0]:
            nearest = end, reading, slope
    if nearest is None or nearest[0] >= ahead:
        return SoakVerdict(True, last.depth, "there is room for the next step")
    return _before(last, limit, *nearest)


def growth(steps: Sequence[SoakStep], tier: str) -> float | None:
    """Bytes per further token, the larger of recent and overall growth; None if unknown."""
    known = [(step.depth, used) for step in steps if (used := _used(step, tier)) is not None]
    if len(known) < 2:
        return None
    first = known[0]
    before = known[-2]
    last = known[-1]
    return max(_slope(first, last), _slope(before, last), 0.0)


def _slope(one: tuple[int, int], two: tuple[int, int]) -> float:
    return (two[1] - one[1]) / (two[0] - one[0]) if two[0] > one[0] else 0.0


def _used(step: SoakStep, tier: str) -> int | None:
    """Bytes that the engine holds; if unknown, the negative of the free bytes, which grows in the same way."""
    for reading in step.memory:
        if reading.tier == tier:
            if reading.measured_bytes is not None:
                return reading.measured_bytes
            return None if reading.free_bytes is None else -reading.free_bytes
    return None


def _safe(steps: Sequence[SoakStep], limit: Limit) -> Sequence[SoakStep]:
    """Steps before the first in which a memory ran short."""
    for at, step in enumerate(steps):
        if not step.whole or _tightest(step, limit)[1] < 0:
            return steps[:at]
    return steps


def _tightest(step: SoakStep, limit: Limit) -> tuple[MemoryReading | None, float]:
    """The memory with the least left above its reserve, and the bytes left."""
    rooms = [(r, r.free_bytes - limit.reserve(r.tier)) for r in step.memory if r.free_bytes is not None]
    return min(rooms, key=lambda room: room[1], default=(None, inf))


def _reached(last: SoakStep, limit: Limit) -> SoakVerdict:
    reading, _ = _tightest(last, limit)
    if reading is None or reading.free_bytes is None:
        return SoakVerdict(False, limit.goal, "all of it was filled; memory could not be watched")
    left = f"{named(reading.tier)} has {size(reading.free_bytes)} left there"
    reason = f"all of it was filled; {left}, {_reserved(limit, reading.tier)}"
    return SoakVerdict(False, limit.goal, reason, reading.tier, reading.free_bytes)


def _short(safe: Sequence[SoakStep], step: SoakStep, limit: Limit) -> SoakVerdict:
    """Memory ran short: the last safe depth is usable."""
    reading, _ = _tightest(step, limit)
    usable = min(safe[-1].depth, limit.goal) if safe else 0
    if reading is None or reading.free_bytes is None:
        return SoakVerdict(False, usable, f"memory ran short on the way to {step.depth:,} tokens")
    words = f"at {step.depth:,} tokens {named(reading.tier)} had {size(reading.free_bytes)} left"
    left = next((r.free_bytes for r in safe[-1].memory if r.tier == reading.tier), None) if safe else None
    return SoakVerdict(False, usable, f"{words}, {_reserved(limit, reading.tier)}", reading.tier, left)


def _before(last: SoakStep, limit: Limit, end: float, reading: MemoryReading, slope: float) -> SoakVerdict:
    """Memory would run short in the next step: the usable context follows from the growth so far."""
    usable = min(limit.goal, max(last.depth, int(end) // ROUND * ROUND))
    free = reading.free_bytes or 0
    left = round(free - slope * (usable - last.depth))
    beyond = round(free - slope * (limit.goal - last.depth))
    reason = (
        f"at that depth {named(reading.tier)} would have {size(left)} left, {_reserved(limit, reading.tier)}; "
        f"it grows by {size(round(slope * 1000))} for 1,000 tokens, and at {limit.goal:,} "
        + (f"only {size(beyond)} would be left" if beyond >= 0 else f"{size(-beyond)} would be missing")
    )
    return SoakVerdict(False, usable, reason, reading.tier, left)


def _reserved(limit: Limit, tier: str) -> str:
    return f"the reserve is {size(limit.reserve(tier))}"


def size(count: int) -> str:
    """Bytes as text, also negative ones."""
    return format_bytes(count) if count >= 0 else f"-{format_bytes(-count)}"


def named(tier: str) -> str:
    """The name of a memory in messages."""
    return {"dram": "host memory", "pmem": "host memory (PMem)"}.get(tier, tier)
