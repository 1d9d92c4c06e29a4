"""Fills a context step by step while watching memory, and stops before it runs out.

A prompt grows with each step, in one slot or in every slot. A step in which free memory falls below the reserve is
aborted. An engine that dies anyway is also a result.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tokenmill.errors import EngineError, UsageError
from tokenmill.tuner.bench.rig import Rig, pids_of
from tokenmill.tuner.bench.served import Units
from tokenmill.tuner.bench.sweep import joined
from tokenmill.tuner.soak.judge import Ended, Limit, MemoryReading, SoakStep, SoakVerdict, judge

WATCH_INTERVAL_S = 0.2
STEPS = 16  # number of steps to the goal, if no step is given
TOKENS = 16  # generated at each depth
ReadMemory = Callable[[int], tuple[MemoryReading, ...]]
"""Reads all memories; the argument is the depth for the ledger."""


@dataclass(frozen=True, slots=True)
class Filled:
    """The result of filling a context."""

    steps: tuple[SoakStep, ...]
    verdict: SoakVerdict
    ended: Ended
    last_words: str | None = None


def default_step(goal: int, ubatch: int) -> int:
    """A sixteenth of the goal, in whole micro-batches."""
    return max(1, min(goal, max(ubatch, goal // STEPS // ubatch * ubatch)))


async def fill(
    rig: Rig,
    limit: Limit,
    read: ReadMemory,
    *,
    sequences: int = 1,
    tokens: int = TOKENS,
    tell: Callable[[SoakStep], None] = lambda _: None,
) -> Filled:
    """Fill one sequence, or several concurrently, up to the goal or until memory runs short."""
    if min(limit.goal, limit.step) <= tokens or sequences < 1:
        raise UsageError(
            f"the goal and the step of a soak must be larger than the {tokens} tokens generated at each step",
            code="step_too_small",
        )
    await rig.prose.learn()
    rig.need(limit.goal, "the goal")
    prompts: list[Units] = [()] * sequences
    steps: list[SoakStep] = []
    depth = 0
    verdict = judge(steps, limit)
    try:
        await rig.ask(
            await rig.prose.take(tokens), 2
        )  # so that buffers of the first request are not attributed to a depth
        while verdict.should_continue:
            ahead = min(depth + limit.step, limit.goal)
            new = ahead - depth if steps else ahead - tokens  # the answer is part of the depth and is overwritten
            prompts = [joined(prompt, await rig.prose.take(new)) for prompt in prompts]
            steps.append(await _step(rig, prompts, ahead, tokens, read, limit))
            tell(steps[-1])
            depth = ahead
            verdict = judge(steps, limit)
    except EngineError as error:
        return Filled(tuple(steps), _died(verdict, steps, limit), "died", _words(error))
    goal = verdict.usable_context >= limit.goal and all(step.whole for step in steps)
    return Filled(tuple(steps), verdict, "goal" if goal else "memory")


def _died(verdict: SoakVerdict, steps: Sequence[SoakStep], limit: Limit) -> SoakVerdict:
    reached = f"{steps[-1].depth:,} tokens were reached" if steps else "no step was completed"
    ahead = min((steps[-1].depth if steps else 0) + limit.step, limit.goal)
    return replace(verdict, should_continue=False, reason=f"the engine failed before {ahead:,} tokens; {reached}")


def _words(error: EngineError) -> str:
    return error.message + (f"\n{error.hint}" if error.hint else "")


async def _step(
    rig: Rig, prompts: Sequence[Units], depth: int, tokens: int, read: ReadMemory, limit: Limit
) -> SoakStep:
    """Make one step; its memory is the tightest reading during it."""
    quiet = rig.quiet() if rig.quiet is not None else None
    if quiet is not None:
        quiet.start(pids_of(rig.engine))
    seen = [read(depth)]
    asking = asyncio.ensure_future(rig.together(prompts, tokens))
    watching = asyncio.ensure_future(_watch(read, depth, limit, seen))
    try:
        await asyncio.wait({asking, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            return SoakStep(depth, len(prompts), tightest(seen), whole=False)
        served = [each for each, _ in asking.result()]
        seen.append(read(depth))
    finally:
        for task in (asking, watching):
            task.cancel()
        await asyncio.gather(asking, watching, return_exceptions=True)
    computed = sum(each.computed_tokens for each in served)
    first_s = max(each.first_s for each in served)
    speeds = [each.decode_tok_s for each in served if each.decode_tok_s is not None]
    return SoakStep(
        depth,
        len(prompts),
        tightest(seen),
        computed / first_s,
        sum(speeds) if speeds else None,
        computed // len(served),
        quiet.stop() if quiet is not None else None,
    )


async def _watch(read: ReadMemory, depth: int, limit: Limit, seen: list[tuple[MemoryReading, ...]]) -> None:
    """Read memory repeatedly; returns when a memory has less free than its reserve."""
    while True:
        await asyncio.sleep(WATCH_INTERVAL_S)
        now = await asyncio.to_thread(read, depth)
        seen.append(now)
        if any(each.free_bytes is not None and each.free_bytes < limit.reserve(each.tier) for each in now):
            return


def tightest(readings: Sequence[tuple[MemoryReading, ...]]) -> tuple[MemoryReading, ...]:
    """Combine readings: maximum used and minimum free bytes per memory."""
    by_tier: dict[str, list[MemoryReading]] = {}
    for each in readings:
        for reading in each:
            by_tier.setdefault(reading.tier, []).append(reading)
    return tuple(
        replace(
            found[-1],
            measured_bytes=max((r.measured_bytes for r in found if r.measured_bytes is not None), default=None),
            free_bytes=min((r.free_bytes for r in found if r.free_bytes is not None), default=None),
        )
        for found in by_tier.values()
    )
