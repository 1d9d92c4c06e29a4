"""Measures one trial on a prepared engine.

    warm-up   a few tokens on every slot, not counted
    prefix    the jobs' shared prefix alone: prefill speed
    waves     one job per slot, concurrently, repeated: time until the last one has started, and total decode speed
              from then on
    latency   optionally another wave while interactive requests arrive

Tokens are counted when they arrive, as a client sees them. The caller applies the trial settings before.
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

SHARING = 64  # jobs among which the time of a shared prefix is divided
MIN_STEPS = 12  # minimum steps in which all slots decode together
MIN_WAVES = 2
MAX_WAVES = 12
WARM_TOKENS = 4


class TokenMark(NamedTuple):
    """Number of tokens that a slot had received at a moment."""

    at_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class MeasureOptions:
    """Duration and precision of a measurement."""

    seconds: float = 5.0  # total time for the waves of one trial
    noise: float = 0.03  # relative: stop early once the waves agree within it
    latency: bool = False  # also measure an interactive request's first token


@dataclass(frozen=True, slots=True)
class Wave:
    """Result of one wave."""

    begun_s: float  # from sending until every slot has its first token
    tok_s: float | None  # total of all slots while all decode


@dataclass(frozen=True, slots=True)
class Measured:
    """Result of a trial."""

    figures: Figures  # only speeds
    spread: float | None  # relative spread of the waves
    waves: int


def rate(slots: Sequence[Sequence[TokenMark]]) -> float | None:
    """Total tok/s while all slots decode: after the last one started and before the first one ended.

    Before that, prefill runs concurrently; after, fewer slots are active. Every mark is exact for its own slot, even if
    several tokens arrive together; None if no slot has two marks in that time.
    """
    if not slots or not all(slots):
        return None
    began = max(slot[0].at_s for slot in slots)
    ended = min(slot[-1].at_s for slot in slots)
    tokens = 0
    seconds = 0.0
    for slot in slots:
        inside = [mark for mark in slot if began <= mark.at_s <= ended]
        if len(inside) > 1:
            tokens += inside[-1].tokens - inside[0].tokens
            seconds += inside[-1].at_s - inside[0].at_s
    return len(slots) * tokens / seconds if tokens > 0 and seconds > 0 else None


def rough_rate(slots: Sequence[Sequence[TokenMark]]) -> float | None:
    """A low estimate from the slot with the most tokens, over its whole time, which includes the prefill of others."""
    if not slots or not all(slots):
        return None
    furthest = max(slots, key=lambda slot: slot[-1].tokens)
    tokens = furthest[-1].tokens - furthest[0].tokens
    seconds = furthest[-1].at_s - furthest[0].at_s
    return len(slots) * tokens / seconds if tokens > 0 and seconds > 0 else None


def batch_rate(*, slots: int, output_tokens: int, prefix_s: float, begun_s: float, decode_tok_s: float) -> float:
    """Output tok/s of a batch with prompt time included: the prefix once per `SHARING` jobs, each job's tail once."""
    wave_s = begun_s + slots * output_tokens / decode_tok_s
    return SHARING * output_tokens / (prefix_s + SHARING / slots * wave_s)


def relative_spread(values: Sequence[float]) -> float | None:
    """Standard deviation divided by the median; None for fewer than two values."""
    return stdev(values) / median(values) if len(values) > 1 else None


def settled(values: Sequence[float], noise: float) -> bool:
    """Whether the values agree well enough that their median is reliable."""
    spread = relative_spread(values)
    return len(values) > MIN_WAVES and spread is not None and spread / len(values) ** 0.5 <= noise / 2


async def prepare(engine: Engine, work: TuneRequests, trial: int, slots: int) -> float | None:
    """Warm up, then compute the shared prefix; return its seconds, None if there is none."""
    short = [replace(work.job(trial, -1 - at), max_tokens=WARM_TOKENS) for at in range(slots)]
    prefix = work.prefix(trial)
    if prefix is not None:  # the warm-up must not compute it
        short = [replace(each, prompt=each.prompt[-8:]) if isinstance(each.prompt, tuple) else each for each in short]
    await asyncio.gather(*(answer(engine, each) for each in short))
    if prefix is None:
        return None
    began = perf_counter()
    found = await answer(engine, replace(prefix, max_tokens=1))
    seconds = found.timings.prefill_s or perf_counter() - began
    if engine.capabilities.keeps_prefixes and not engine.capabilities.shares_prefixes:
        # copy it to every slot, as in the steady state of a batch
        again = [replace(work.job(trial, -1 - at), max_tokens=1) for at in range(slots)]
        await asyncio.gather(*(answer(engine, each) for each in again))
    return seconds


async def measure(
    engine: Engine,
    work: TuneRequests,
    how: MeasureOptions,
    *,
    trial: int,
    slots: int,
    ubatch: int,
    context: int,
    prefix_s: float | None,
) -> Measured:
    """Run the waves of a trial on a prepared engine and combine their figures."""
    free_tokens = max(1, context - work.depth - 1)
    max_tokens = min(free_tokens, work.wave_tokens(slots, ubatch))
    until = perf_counter() + how.seconds
    jobs = (work.job(trial, number) for number in count())
    waves: list[Wave] = []
    rates: list[float] = []
    while not waves or (
        perf_counter() < (until if len(waves) >= MIN_WAVES else until + how.seconds)
        and len(waves) < MAX_WAVES
        and not settled(rates, how.noise)
    ):
        running = _Running(engine, _some(jobs, slots, max_tokens), how.seconds / MIN_WAVES)
        wave = await running.measured()
        if wave.tok_s is None and max_tokens < free_tokens:
            max_tokens = min(free_tokens, 2 * max_tokens)  # the wave was too short: several tokens arrived together
            continue
        waves.append(wave)
        found = wave.tok_s or rough_rate(running.slots)
        if found is not None:
            rates.append(found)
    first_s = None
    if how.latency:
        first_s = await _Running(engine, _some(jobs, slots, max_tokens), how.seconds).disturbed_by(
            _some(jobs, 2, max_tokens)
        )
    if not rates:
        raise EngineError(
            f"{slots} slots never decoded at the same time",
            hint="the engine may have fewer slots, or its answers end immediately",
            code="no_overlap",
        )
    return Measured(_figures(work, waves, median(rates), slots, prefix_s, first_s), relative_spread(rates), len(waves))


def _some(jobs: Iterator[Request], number: int, max_tokens: int) -> list[Request]:
    return [replace(job, max_tokens=max_tokens) for job in islice(jobs, number)]


def _figures(
    work: TuneRequests,
    waves: Sequence[Wave],
    decode_tok_s: float,
    slots: int,
    prefix_s: float | None,
    first_s: float | None,
) -> Figures:
    begun_s = median(wave.begun_s for wave in waves)
    jobs = batch_rate(
        slots=slots,
        output_tokens=work.output_tokens,
        prefix_s=prefix_s or 0.0,
        begun_s=begun_s,
        decode_tok_s=decode_tok_s,
    )
    prefix = work.prefix(0)
    prefill = (
        len(prefix.prompt) / prefix_s if prefix_s and prefix is not None and isinstance(prefix.prompt, tuple) else None
    )
    return Figures(decode_tok_s=decode_tok_s, prefill_tok_s=prefill, jobs_tok_s=jobs, first_token_s=first_s)


@dataclass(slots=True)
class _Running:
    """A running wave; it ends when all slots have decoded together long enough, or one has finished."""

    engine: Engine
    jobs: Sequence[Request]
    seconds: float
    slots: list[list[TokenMark]] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    enough: asyncio.Event = field(default_factory=asyncio.Event)

    async def measured(self) -> Wave:
        """Run the wave to its end."""
        began = perf_counter()
        await self._run(self.enough.wait())
        firsts = [slot[0].at_s for slot in self.slots if slot]
        return Wave(max(firsts, default=began) - began, rate(self.slots))

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
        """Run all slots concurrently until `until` is done; an engine failure ends it immediately."""
        self.slots = [[] for _ in self.jobs]
        running = {asyncio.create_task(self._slot(job, slot)) for job, slot in zip(self.jobs, self.slots, strict=True)}
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

    async def _slot(self, job: Request, marks: list[TokenMark]) -> None:
        stream = self.engine.stream(job)
        tokens = 0
        try:
            async for event in stream:
                tokens = tokens + event.tokens if isinstance(event, Piece) else event.usage.completion_tokens
                marks.append(TokenMark(perf_counter(), tokens))
                self._check(ended=isinstance(event, Answer))
        finally:
            await stream.aclose()

    def _check(self, *, ended: bool) -> None:
        """Check whether all slots have started and have decoded long enough."""
        if not self.begun.is_set():
            if not all(self.slots):
                return
            self.begun.set()
        began = max(slot[0].at_s for slot in self.slots)
        last = min(self.slots, key=lambda slot: slot[-1].tokens)
        if ended or (last[-1].at_s - began >= self.seconds and last[-1].tokens > MIN_STEPS):
            self.enough.set()


async def _first_token_s(engine: Engine, request: Request) -> float:
    began = perf_counter()
    stream = engine.stream(replace(request, priority="interactive", max_tokens=1))
    try:
        async for _ in stream:
            return perf_counter() - began
    finally:
        await stream.aclose()
    raise EngineError("an interactive request got an empty answer")
