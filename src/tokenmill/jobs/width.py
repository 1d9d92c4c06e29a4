"""How many jobs at once: measured on the engine that will run them, because no forecast knows its kernels that well.

A few short answers are written at each width in turn, and the narrowest that is nearly as fast as the fastest wins:
narrower takes fewer cells, ends with fewer idle lanes, and is quicker for who waits. Only engines that change their
width without loading anew can be measured so, and only batches that are long against the measurement are worth it.
Prompts of the batch itself are used: experts that its texts wake are the ones that count, and their heads are needed
anyway.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from tokenmill.engine.engine import Answer, Engine, Request, Sampling, answer
from tokenmill.jobs import life
from tokenmill.jobs.job import Batch
from tokenmill.jobs.line import call_of
from tokenmill.jobs.reader import Reader

WIDTHS = (1, 2, 4, 8, 16)
TOKENS = 16  # of each answer; the first, which comes with its prompt, is not counted
ROUNDS = 2  # the better one counts: what disturbs a measurement only makes it slower
MORE_ROUNDS = 4  # at most, while the figures look disturbed
DISTURBED = 0.85  # of a narrower one's speed: kernels do not lose so much by a wider batch
NEARLY = 0.97  # of the fastest
WORTH = 40  # times the tokens of a measurement that a batch must be expected to write
LEAST_ANSWER = 32  # tokens that an answer without a ceiling counts as


@runtime_checkable
class Widens(Engine, Protocol):
    """An engine whose number of lanes can be changed while it runs."""

    async def set_lanes(self, lanes: int) -> None:
        """Change how many batch sequences run at once."""


@dataclass(frozen=True, slots=True)
class Point:
    """What an engine writes at a width."""

    width: int
    tok_s: float  # all lanes together


@dataclass(frozen=True, slots=True)
class Width:
    """A width with its reason."""

    value: int
    reason: str
    points: tuple[Point, ...] = ()

    @property
    def rates(self) -> tuple[tuple[int, float], ...]:
        """As `expected.Rates` has them."""
        return tuple((point.width, point.tok_s) for point in self.points)


def widths_up_to(most: int) -> tuple[int, ...]:
    """Widths to measure on an engine with so many lanes."""
    return tuple(sorted({*(width for width in WIDTHS if width < most), most}))


def measured_tokens(most: int) -> int:
    """Tokens that a measurement writes."""
    return ROUNDS * TOKENS * sum(widths_up_to(most))


def pays(expected_tokens: float, most: int) -> bool:
    """Whether a batch that is expected to write so much is long against a measurement."""
    return most > 1 and expected_tokens >= WORTH * measured_tokens(most)


def disturbed(rates: Sequence[float]) -> bool:
    """Whether rates by width, narrow first, fall so much that something else must have used the processors."""
    return any(rate < DISTURBED * max(rates[:at]) for at, rate in enumerate(rates) if at)


def choose(points: Sequence[Point]) -> Width:
    """The narrowest width that is nearly as fast as the fastest."""
    best = max(points, key=lambda point: point.tok_s)
    chosen = min((point for point in points if point.tok_s >= NEARLY * best.tok_s), key=lambda point: point.width)
    shown = ", ".join(f"{point.width}: {point.tok_s:.3g}" for point in points)
    return Width(chosen.width, f"measured in tok/s by width: {shown}", tuple(points))


async def measured_for(engine: Engine, store: Reader, batch: Batch) -> Width | None:
    """The width for a batch, measured where that can be done and pays; None: the engine's own."""
    now, most = life.of(engine), engine.identity.lanes
    if most is None or not engine.capabilities.shares_prefixes or not isinstance(now, Widens):
        return None
    first = store.waiting([batch.id], limit=most)
    ceilings = [LEAST_ANSWER if row.max_tokens is None else row.max_tokens for row in first]
    if not ceilings or not pays(batch.counts.pending * sum(ceilings) / len(ceilings), most):
        return None
    jobs = [job for job in (store.job(row.id) for row in first) if job is not None]
    return await measure(now, [call_of(job.line, batch.defaults).request("batch") for job in jobs], most)


async def measure(engine: Widens, requests: Sequence[Request], most: int) -> Width:
    """Measure an engine with requests like those to come, and leave it at the width that is best.

    The requests must differ: equal ones would wake the same experts. Fewer than `most` are a narrower measurement.
    """
    widths = widths_up_to(min(most, len(requests)))
    short = [
        replace(each, sampling=Sampling(temperature=0.0), max_tokens=TOKENS, stop=(), ignore_eos=True, lane=None)
        for each in requests[: widths[-1]]
    ]
    await engine.set_lanes(widths[-1])
    await _together(engine, short, tokens=1)  # heads are computed, and every page has been touched
    best: dict[int, float] = {}
    for number in range(ROUNDS + MORE_ROUNDS):
        if number >= ROUNDS and not disturbed(list(best.values())):
            break
        for width in widths:
            await engine.set_lanes(width)
            best[width] = max(best.get(width, 0.0), _rate(await _together(engine, short[:width])))
    chosen = choose([Point(width, best[width]) for width in widths])
    await engine.set_lanes(chosen.value)
    return chosen


async def _together(engine: Engine, requests: Sequence[Request], tokens: int = TOKENS) -> list[Answer]:
    return list(await asyncio.gather(*(answer(engine, replace(each, max_tokens=tokens)) for each in requests)))


def _rate(answers: Sequence[Answer]) -> float:
    """Tokens a second of answers that were written together, by the engine's own clock."""
    seconds = max((each.timings.decode_s or 0.0 for each in answers), default=0.0)
    written = sum(each.usage.completion_tokens - 1 for each in answers)
    return written / seconds if seconds > 0 else 0.0
