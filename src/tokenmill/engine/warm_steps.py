"""What warming an engine will take, step by step, before any of it is done. Pure over a plan.

Weights that a plan maps are read through the page cache for as long as the engine runs; those that it copies to a card
or rewrites are read once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tokenmill.engine.binding import HOST_TIERS
from tokenmill.engine.heads import Head
from tokenmill.plan.plan import Plan
from tokenmill.units import format_bytes

StepName = Literal["page cache", "lock", "first decode", "heads"]
TOKENS = 8  # of each of the two first requests


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a warm-up and what it costs; None: not known beforehand."""

    name: StepName
    what: str
    bytes: int | None = None
    seconds: float | None = None
    skipped: str | None = None  # why it is not taken


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What will be done before an engine counts as ready."""

    steps: tuple[Step, ...]

    @property
    def seconds(self) -> float | None:
        """All steps together; None where one is not known."""
        taken = [step.seconds for step in self.steps if step.skipped is None]
        return None if None in taken else sum(seconds for seconds in taken if seconds is not None)


def warm_up(plan: Plan, *, cold_bytes: int | None, heads: Sequence[Head] = ()) -> WarmUp:
    """Describe the steps for a plan whose files have so many bytes outside memory."""
    steps = (_cache_step(plan, cold_bytes), *_lock_step(plan), _decode_step(plan), *_heads_step(plan, heads))
    return WarmUp(steps)


def mapped_bytes(plan: Plan) -> int:
    """Weights that a mapped plan goes on reading through the page cache; not those that it copies or rewrites."""
    if not plan.settings.mmap:
        return 0
    held = sum(row.bytes for row in plan.ledger.full_context if row.tier in HOST_TIERS and row.item == "weights")
    return held - sum(row.bytes for row in plan.ledger.page_cache if row.tier in HOST_TIERS)


def host_weights_bytes(plan: Plan) -> int:
    """Weights in host memory, rewritten ones too: what an engine may lock at most."""
    return sum(
        row.bytes for row in plan.ledger.after_load if row.tier in HOST_TIERS and row.item in ("weights", "repack")
    )


def _cache_step(plan: Plan, cold_bytes: int | None) -> Step:
    step = Step("page cache", "read what is not in memory", cold_bytes)
    if not plan.settings.mmap:
        return replace(step, skipped="the plan reads the files into memory of its own")
    if mapped_bytes(plan) == 0:
        return replace(step, skipped="no weights are read from the page cache once loaded")
    if cold_bytes == 0:
        return replace(step, skipped="all of it is in memory", seconds=0.0)
    rate = _disk_gb_s(plan)
    return replace(step, seconds=None if cold_bytes is None or rate is None else cold_bytes / rate / 1e9)


def _lock_step(plan: Plan) -> tuple[Step, ...]:
    if not plan.settings.mlock:
        return ()
    wanted, limit = host_weights_bytes(plan), plan.machine.limits.memlock_bytes
    short = None if limit is None or limit >= wanted else f"the limit is {format_bytes(limit)}"
    return (Step("lock", "keep the weights in memory", wanted, 0.0, short),)


def _decode_step(plan: Plan) -> Step:
    speed = next((speed for speed in plan.forecast.decode if speed.sequences == 1), None)
    seconds = None if speed is None or speed.tok_s <= 0 else 2 * TOKENS / speed.tok_s
    return Step("first decode", f"two requests of {TOKENS} tokens", seconds=seconds)


def _heads_step(plan: Plan, heads: Sequence[Head]) -> tuple[Step, ...]:
    if not heads:
        return ()
    speed = next(iter(plan.forecast.prefill), None)
    tokens = [head.tokens for head in heads]
    known = None if None in tokens else sum(count for count in tokens if count is not None)
    seconds = None if known is None or speed is None or speed.tok_s <= 0 else known / speed.tok_s
    what = f"{len(heads)} prompt head{'s' if len(heads) > 1 else ''}" + (f", {known} tokens" if known else "")
    return (Step("heads", what, seconds=seconds),)


def _disk_gb_s(plan: Plan) -> float | None:
    machine = plan.machine
    measured = machine.measured.gb_s("disk") if machine.measured else None
    return measured if measured is not None else machine.disk.nominal_gb_s if machine.disk else None
