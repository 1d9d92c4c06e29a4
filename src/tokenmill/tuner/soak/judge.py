"""Derives the usable context from the memory at each depth. Pure.

A context is filled step by step. After each step, `judge` decides whether the next one is safe, from the free memory
and the growth of the engine's own memory. Memory of other programs reduces the free memory, not the growth.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from tokenmill.units import format_bytes

ROUND = 256  # tokens; engines pad a context to a multiple of it
Ended = Literal["goal", "memory", "died"]


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """One memory after a step; None: unknown."""

    tier: str  # dram, pmem, gpu0, ...
    predicted_bytes: int | None = None  # by the plan's ledger, at this depth
    measured_bytes: int | None = None  # used by the engine: its own memory, and the model pages that it needs
    free_bytes: int | None = None  # available to it, before reserves
    page_cache_bytes: int | None = None  # of the model's file


@dataclass(frozen=True, slots=True)
class SoakStep:
    """A depth that was reached, or at which memory ran out."""

    depth: int  # tokens of each sequence
    sequences: int
    memory: tuple[MemoryReading, ...]
    prefill_tok_s: float | None = None
    decode_tok_s: float | None = None
    computed_tokens: int | None = None  # of each prompt
    disturbed: str | None = None  # other load, which makes the speeds invalid
    whole: bool = True  # False: aborted because memory ran out


@dataclass(frozen=True, slots=True)
class Limit:
    """The depth to reach, and the memory that must stay free."""

    goal: int  # tokens of each sequence
    step: int
    reserve_bytes: tuple[tuple[str, int], ...] = ()  # by tier; 0 for others

    def reserve(self, tier: str) -> int:
        """Bytes that must stay free in a tier."""
        return dict(self.reserve_bytes).get(tier, 0)


@dataclass(frozen=True, slots=True)
class SoakVerdict:
    """Whether to continue, and the usable context if not."""

    should_continue: bool
    usable_context: int  # tokens of each sequence that are known to be safe
    reason: str
    tier: str | None = None  # the memory that limits the context
    left_bytes: int | None = None  # free in that memory at the usable context


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
    usable_with_lanes: int | None = None  # tokens of each sequence with all slots full; None: not tried
    limit_bytes: int | None = None  # of host memory, if one was given
    reserve_bytes: tuple[tuple[str, int], ...] = ()
    last_words: str | None = None  # error of an engine that died


def judge(steps: Sequence[SoakStep], limit: Limit) -> SoakVerdict:
    """Judge the steps so far, which have the same number of sequences and ascending depths."""
    safe = _safe(steps, limit)
    if not steps:
        return SoakVerdict(True, 0, "no step was made")
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
        return SoakVerdict(True, last.depth, "the next step fits in memory")
    return _before(last, limit, *nearest)


def growth(steps: Sequence[SoakStep], tier: str) -> float | None:
    """Growth in bytes per token, the larger of recent and overall growth; None if unknown."""
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
    """Bytes used by the engine; if unknown, the negative of the free bytes, which grows in the same way."""
    for reading in step.memory:
        if reading.tier == tier:
            if reading.measured_bytes is not None:
                return reading.measured_bytes
            return None if reading.free_bytes is None else -reading.free_bytes
    return None


def _safe(steps: Sequence[SoakStep], limit: Limit) -> Sequence[SoakStep]:
    """The steps before the first in which a memory ran out."""
    for at, step in enumerate(steps):
        if not step.whole or _tightest(step, limit)[1] < 0:
            return steps[:at]
    return steps


def _tightest(step: SoakStep, limit: Limit) -> tuple[MemoryReading | None, float]:
    """The memory with the fewest free bytes above its reserve, and that number."""
    margins = [(r, r.free_bytes - limit.reserve(r.tier)) for r in step.memory if r.free_bytes is not None]
    return min(margins, key=lambda margin: margin[1], default=(None, inf))


def _reached(last: SoakStep, limit: Limit) -> SoakVerdict:
    reading, _ = _tightest(last, limit)
    if reading is None or reading.free_bytes is None:
        return SoakVerdict(False, limit.goal, "the whole context was filled; memory could not be read")
    left = f"{named(reading.tier)} has {size(reading.free_bytes)} left"
    reason = f"the whole context was filled; {left}, {_reserved(limit, reading.tier)}"
    return SoakVerdict(False, limit.goal, reason, reading.tier, reading.free_bytes)


def _short(safe: Sequence[SoakStep], step: SoakStep, limit: Limit) -> SoakVerdict:
    """Memory ran out: the last safe depth is usable."""
    reading, _ = _tightest(step, limit)
    usable = min(safe[-1].depth, limit.goal) if safe else 0
    if reading is None or reading.free_bytes is None:
        return SoakVerdict(False, usable, f"memory ran out before {step.depth:,} tokens")
    words = f"at {step.depth:,} tokens {named(reading.tier)} had {size(reading.free_bytes)} left"
    left = next((r.free_bytes for r in safe[-1].memory if r.tier == reading.tier), None) if safe else None
    return SoakVerdict(False, usable, f"{words}, {_reserved(limit, reading.tier)}", reading.tier, left)


def _before(last: SoakStep, limit: Limit, end: float, reading: MemoryReading, slope: float) -> SoakVerdict:
    """Memory would run out in the next step: the usable context follows from the growth so far."""
    usable = min(limit.goal, max(last.depth, int(end) // ROUND * ROUND))
    free = reading.free_bytes or 0
    left = round(free - slope * (usable - last.depth))
    beyond = round(free - slope * (limit.goal - last.depth))
    reason = (
        f"at that depth {named(reading.tier)} would have {size(left)} left, {_reserved(limit, reading.tier)}; "
        f"it grows by {size(round(slope * 1000))} per 1,000 tokens, and at {limit.goal:,} "
        + (f"only {size(beyond)} would be left" if beyond >= 0 else f"{size(-beyond)} would be missing")
    )
    return SoakVerdict(False, usable, reason, reading.tier, left)


def _reserved(limit: Limit, tier: str) -> str:
    return f"the reserve is {size(limit.reserve(tier))}"


def size(count: int) -> str:
    """Bytes as text; may be negative."""
    return format_bytes(count) if count >= 0 else f"-{format_bytes(-count)}"


def named(tier: str) -> str:
    """The display name of a memory."""
    return {"dram": "host memory", "pmem": "host memory (PMem)"}.get(tier, tier)
