"""Measures one trial on a prepared engine.

    warm-up   a few tokens on every slot, not counted
    prefix    the jobs' shared prefix alone: prefill speed
    waves     one job per slot, concurrently, repeated: time until the last one has started, and total decode speed
              from then on
    latency   optionally the same while interactive requests arrive

Tokens are counted when they arrive, as a client sees them. Applying trial settings is up to the caller.
"""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from statistics import median, stdev
from time import perf_counter
from typing import NamedTuple

from tokenmill.engine.engine import Answer, Engine, Piece, Request, answer
from tokenmill.errors import EngineError
from tokenmill.tuner.point import Figures
from tokenmill.tuner.work import TuneRequests

SHARING = 64  # jobs over which the time of a shared prefix is distributed
LEAST_STEPS = 12  # minimum steps in which all slots decode together
LEAST_WAVES = 2
MOST_WAVES = 12
WARM_TOKENS = 4


class TokenMark(NamedTuple):
    """Number of tokens that a slot had received at a moment."""

    at_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class MeasureOptions:
    """Duration and precision of a measurement."""

    seconds: float = 5.0  # total time for the waves of one trial
    noise: float = 0.03  # relative: waves end early once they agree this well
    latency: bool = False  # also measure an interactive request's first token


@dataclass(frozen=True, slots=True)
class Wave:
    """Result of one wave."""

    begun_s: float  # from sending until every slot had its first token
    tok_s: float | None  # total of all slots while all of them decode


@dataclass(frozen=True, slots=True)
class Measured:
    """Result of a trial."""

    figures: Figures  # only speeds
    spread: float | None  # relative spread of the waves
    waves: int


def rate(lanes: Sequence[Sequence[TokenMark]]) -> float | None:
    """Total tok/s while all slots decode: after the last one started and before the first one ended.

    Before that, prefill runs concurrently; after, fewer slots are active. Every mark is exact for its own slot, even if
    several tokens arrive together; None if no slot has two marks in that time.
    """
    if not lanes or not all(lanes):
        return None
    began = max(lane[0].at_s for lane in lanes)
    ended = min(lane[-1].at_s for lane in lanes)
    tokens = 0
    seconds = 0.0
    for lane in lanes:
        inside = [mark for mark in lane if began <= mark.at_s <= ended]
        if len(inside) > 1:
            tokens += inside[-1].tokens - inside[0].tokens
            seconds += inside[-1].at_s - inside[0].at_s
    return len(lanes) * tokens / seconds if tokens > 0 and seconds > 0 else None


def rough_rate(lanes: Sequence[Sequence[TokenMark]]) -> float | None:
    """A lower estimate from the slot that got furthest over its whole time, which includes the prefill of others."""
    if not lanes or not all(lanes):
        return None
    furthest = max(lanes, key=lambda lane: lane[-1].tokens)
    tokens = furthest[-1].tokens - furthest[0].tokens
    seconds = furthest[-1].at_s - furthest[0].at_s
    return len(lanes) * tokens / seconds if tokens > 0 and seconds > 0 else None


def batch_rate(*, lanes: int, output_tokens: int, head_s: float, begun_s: float, decode_tok_s: float) -> float:
    """Output tok/s of a batch with prompt time included: the prefix once per `SHARING` jobs, each job's tail once."""
    wave_s = begun_s + lanes * output_tokens / decode_tok_s
    return SHARING * output_tokens / (head_s + SHARING / lanes * wave_s)


def relative_spread(values: Sequence[float]) -> float | None:
    """Standard deviation divided by the median; None for fewer than two values."""
    return stdev(values) / median(values) if len(values) > 1 else None


def settled(values: Sequence[float], noise: float) -> bool:
    """Whether the values agree well enough that their median is reliable."""
    spread = relative_spread(values)
    return len(values) > LEAST_WAVES and spread is not None and spread / len(values) ** 0.5 <= noise / 2


async def prepare(engine: Engine, work: TuneRequests, trial: int, lanes: int) -> float | None:
    """Warm up, then compute the shared prefix; return its seconds, None if there is none."""
    short = [replace(work.job(trial, -1 - at), max_tokens=WARM_TOKENS) for at in range(lanes)]
    prefix = work.head(trial)
    if prefix is not None:  # the warm-up must not compute it
        short = [replace(each, prompt=each.prompt[-8:]) if isinstance(each.prompt, tuple) else each for each in short]
    await asyncio.gather(*(answer(engine, each) for each in short))
    if prefix is None:
        return None
    began = perf_counter()
    found = await answer(engine, replace(prefix, max_tokens=1))
    seconds = found.timings.prefill_s or perf_counter() - began
    if engine.capabilities.keeps_prefixes and not engine.capabilities.shares_prefixes:
        # copy it to every slot, the steady state of a batch
        again = [replace(work.job(trial, -1 - at), max_tokens=1) for at in range(lanes)]
        await asyncio.gather(*(answer(engine, each) for each in again))
    return seconds


async def measure(
    engine: Engine,
    work: TuneRequests,
    how: MeasureOptions,
    *,
    trial: int,
    lanes: int,
    ubatch: int,
    context: int,
    head_s: float | None,
) -> Measured:
    """Run the waves of a trial on a prepared engine and combine their figures."""
    room = max(1, context - work.depth - 1)
    most = min(room, work.most_tokens(lanes, ubatch))
    until = perf_counter() + how.seconds
    jobs = (work.job(trial, number) for number in count())
    waves: list[Wave] = []
    rates: list[float] = []
    while not waves or (
        perf_counter() < (until if len(waves) >= LEAST_WAVES else until + how.seconds)
        and len(waves) < MOST_WAVES
        and not settled(rates, how.noise)
    ):
        running = _Running(engine, _some(jobs, lanes, most), how.seconds / LEAST_WAVES)
        wave = await running.measured()
        if wave.tok_s is None and most < room:
            most = min(room, 2 * most)  # the wave ended before any progress arrived: pieces of a batch arrive together
            continue
        waves.append(wave)
        found = wave.tok_s or rough_rate(running.lanes)
        if found is not None:
            rates.append(found)
    first_s = None
    if how.latency:
        first_s = await _Running(engine, _some(jobs, lanes, most), how.seconds).disturbed_by(_some(jobs, 2, most))
    if not rates:
        raise EngineError(
            f"{lanes} slots never decoded at the same time",
            hint="the engine has fewer slots, or its answers end immediately",
            code="no_overlap",
        )
    return Measured(_figures(work, waves, median(rates), lanes, head_s, first_s), relative_spread(rates), len(waves))


def _some(jobs: Iterator[Request], number: int, most: int) -> list[Request]:
    return [replace(job, max_tokens=most) for job in islice(jobs, number)]


def _figures(
    work: TuneRequests,
    waves: Sequence[Wave],
    decode_tok_s: float,
    lanes: int,
    head_s: float | None,
    first_s: float | None,
) -> Figures:
    begun_s = median(wave.begun_s for wave in waves)
    jobs = batch_rate(
        lanes=lanes, output_tokens=work.output_tokens, head_s=head_s or 0.0, begun_s=begun_s, decode_tok_s=decode_tok_s
    )
    prefix = work.head(0)
    prefill = (
        len(prefix.prompt) / head_s if head_s and prefix is not None and isinstance(prefix.prompt, tuple) else None
    )
    return Figures(decode_tok_s=decode_tok_s, prefill_tok_s=prefill, jobs_tok_s=jobs, first_token_s=first_s)


@dataclass(slots=True)
class _Running:
    """A running wave; it ends when all slots have decoded together long enough, or one has finished."""

    engine: Engine
    jobs: Sequence[Request]
    seconds: float
    lanes: list[list[TokenMark]] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    enough: asyncio.Event = field(default_factory=asyncio.Event)

    async def measured(self) -> Wave:
        """Run the wave to its end."""
        began = perf_counter()
        await self._run(self.enough.wait())
        firsts = [lane[0].at_s for lane in self.lanes if lane]
        return Wave(max(firsts, default=began) - began, rate(self.lanes))

    async def disturbed_by(self, others: Sequence[Request]) -> float:
        """The longest time to first token of interactive requests, during prefill and later."""
        seconds: list[float] = []

        async def asked() -> None:
            seconds.append(await _first_token_s(self.engine, others[0]))
            await self.begun.wait()
            seconds.append(await _first_token_s(self.engine, others[1]))

        await self._run(asked())
        return max(seconds)

    async def _run(self, until: Coroutine[None, None, object]) -> None:
        """Run all slots concurrently until a condition; an engine failure ends it immediately."""
        self.lanes = [[] for _ in self.jobs]
        running = {asyncio.create_task(self._lane(job, lane)) for job, lane in zip(self.jobs, self.lanes, strict=True)}
        tasks = (asyncio.create_task(self._until(until)), *running)
        try:
            while not tasks[0].done():
                done, _ = await asyncio.wait({tasks[0], *running}, return_when=asyncio.FIRST_COMPLETED)
                running -= done
                for task in done:
                    task.result()
                if not running:
                    self.begun.set()
                    self.enough.set()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @staticmethod
    async def _until(over: Coroutine[None, None, object]) -> None:
        await over

    async def _lane(self, job: Request, marks: list[TokenMark]) -> None:
        stream = self.engine.stream(job)
        tokens = 0
        try:
            async for event in stream:
                tokens = tokens + event.tokens if isinstance(event, Piece) else event.usage.completion_tokens
                marks.append(TokenMark(perf_counter(), tokens))
                self._look(ended=isinstance(event, Answer))
        finally:
            await stream.aclose()

    def _look(self, *, ended: bool) -> None:
        """Check whether all slots have started and have decoded long enough."""
        if not self.begun.is_set():
            if not all(self.lanes):
                return
            self.begun.set()
        began = max(lane[0].at_s for lane in self.lanes)
        last = min(self.lanes, key=lambda lane: lane[-1].tokens)
        if ended or (last[-1].at_s - began >= self.seconds and last[-1].tokens > LEAST_STEPS):
            self.enough.set()


async def _first_token_s(engine: Engine, request: Request) -> float:
    began = perf_counter()
    stream = engine.stream(replace(request, priority="interactive", max_tokens=1))
    try:
        async for _ in stream:
            return perf_counter() - began
    finally:
        await stream.aclose()
    raise EngineError("an interactive request was answered with nothing")
