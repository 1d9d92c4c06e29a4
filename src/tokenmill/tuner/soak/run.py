"""Fills a context step by step, watches memory meanwhile, and stops before it runs out.

One prompt grows, as the sweep of a benchmark does, or one in every slot. A step in which memory falls below what must
stay free is aborted. An engine that dies in spite of it is a result as well.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tokenmill.errors import EngineError, UsageError
from tokenmill.tuner.bench.rig import Rig, pids_of
from tokenmill.tuner.bench.served import Units
from tokenmill.tuner.bench.sweep import joined
from tokenmill.tuner.soak.judge import Ended, Limit, MemoryReading, SoakStep, SoakVerdict, judge

LOOK_S = 0.2
STEPS = 16  # of a goal, if no step is given
TOKENS = 16  # generated at each depth
NoiseSample = Callable[[int], tuple[MemoryReading, ...]]
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
    look: NoiseSample,
    *,
    sequences: int = 1,
    tokens: int = TOKENS,
    tell: Callable[[SoakStep], None] = lambda _: None,
) -> Filled:
    """Fill one sequence, or several concurrently, up to the goal or until memory runs short."""
    if min(limit.goal, limit.step) <= tokens or sequences < 1:
        raise UsageError(
            f"the goal and the steps of a soak must exceed the {tokens} tokens that it generates at each step",
            code="step_too_small",
        )
    await rig.prose.learn()
    rig.need(limit.goal, "the goal")
    heads: list[Units] = [()] * sequences
    steps: list[SoakStep] = []
    depth = 0
    verdict = judge(steps, limit)
    try:
        await rig.ask(await rig.prose.take(tokens), 2)  # buffers of the first request belong to no depth
        while verdict.go_on:
            ahead = min(depth + limit.step, limit.goal)
            new = ahead - depth if steps else ahead - tokens  # the answer is part of the depth, and is overwritten
            heads = [joined(head, await rig.prose.take(new)) for head in heads]
            steps.append(await _step(rig, heads, ahead, tokens, look, limit))
            tell(steps[-1])
            depth = ahead
            verdict = judge(steps, limit)
    except EngineError as error:
        return Filled(tuple(steps), _died(verdict, steps, limit), "died", _words(error))
    goal = verdict.usable_context >= limit.goal and all(step.whole for step in steps)
    return Filled(tuple(steps), verdict, "goal" if goal else "memory")


def _died(verdict: SoakVerdict, steps: Sequence[SoakStep], limit: Limit) -> SoakVerdict:
    reached = f"{steps[-1].depth:,} tokens were reached before" if steps else "nothing was reached before"
    ahead = min((steps[-1].depth if steps else 0) + limit.step, limit.goal)
    return replace(verdict, go_on=False, reason=f"the engine failed on the way to {ahead:,} tokens; {reached}")


def _words(error: EngineError) -> str:
    return error.message + (f"\n{error.hint}" if error.hint else "")


async def _step(rig: Rig, heads: Sequence[Units], depth: int, tokens: int, look: NoiseSample, limit: Limit) -> SoakStep:
    """One step; the least free memory in it counts."""
    quiet = rig.quiet() if rig.quiet is not None else None
    if quiet is not None:
        quiet.start(pids_of(rig.engine))
    seen = [look(depth)]
    asking = asyncio.ensure_future(rig.together(heads, tokens))
    watching = asyncio.ensure_future(_watch(look, depth, limit, seen))
    try:
        await asyncio.wait({asking, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            return SoakStep(depth, len(heads), tightest(seen), whole=False)
        served = [each for each, _ in asking.result()]
        seen.append(look(depth))
    finally:
        for task in (asking, watching):
            task.cancel()
        await asyncio.gather(asking, watching, return_exceptions=True)
    computed = sum(each.computed_tokens for each in served)
    first_s = max(each.first_s for each in served)
    speeds = [each.decode_tok_s for each in served if each.decode_tok_s is not None]
    return SoakStep(
        depth,
        len(heads),
        tightest(seen),
        computed / first_s,
        sum(speeds) if speeds else None,
        computed // len(served),
        quiet.stop() if quiet is not None else None,
    )


async def _watch(look: NoiseSample, depth: int, limit: Limit, seen: list[tuple[MemoryReading, ...]]) -> None:
    """Read memory repeatedly; returns when a memory has less left than its reserve."""
    while True:
        await asyncio.sleep(LOOK_S)
        now = await asyncio.to_thread(look, depth)
        seen.append(now)
        if any(each.free_bytes is not None and each.free_bytes < limit.reserve(each.tier) for each in now):
            return


def tightest(looks: Sequence[tuple[MemoryReading, ...]]) -> tuple[MemoryReading, ...]:
    """Of several readings: the most that was held and the least that was free, per memory."""
    by_tier: dict[str, list[MemoryReading]] = {}
    for each in looks:
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
