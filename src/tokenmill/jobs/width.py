"""How many jobs at once: measured on the engine that will run them, because no forecast knows its kernels that well.

A few short answers are written at each width in turn, and the narrowest that is nearly as fast as the fastest wins:
narrower takes fewer cells, ends with fewer idle lanes, and is quicker for who waits. Only engines that change their
width without loading anew can be measured so, and only batches that are long against the measurement are worth it.
Prompts of the batch itself are used: experts that its texts wake are the ones that count, and their heads are needed
anyway. It ends after a small part of what the batch will take, and after a minute at the latest: on a slow engine fewer
tokens are written, then fewer widths tried. Nothing is stored: who breaks it off loses nothing.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from tokenmill.engine.engine import Answer, Engine, Request, Sampling, answer
from tokenmill.errors import RequestRefused
from tokenmill.jobs import life
from tokenmill.jobs.job import Batch
from tokenmill.jobs.line import call_of
from tokenmill.jobs.reader import Reader
from tokenmill.units import format_seconds

WIDTHS = (1, 2, 4, 8, 16)
TOKENS = 24  # of each answer; the first, which comes with its prompt, is not counted
FEWEST_TOKENS = 6  # of each on a slow engine
LIMIT_S = 60.0
SHARE = 0.05  # of the time that a batch is expected to take, at most
ROUNDS = 2  # the better one counts: what disturbs a measurement only makes it slower
MORE_ROUNDS = 4  # at most, while the figures look disturbed
DISTURBED = 0.85  # of a narrower one's speed: kernels do not lose so much by a wider batch
NEARLY = 0.98  # of the fastest
WORTH = 40  # times the tokens of a measurement that a batch must be expected to write
LEAST_ANSWER = 32  # tokens that an answer without a ceiling counts as


Tell = Callable[[str], None]
"""Takes a few words on what is being measured."""


@runtime_checkable
class Widens(Engine, Protocol):
    """An engine whose number of lanes can be changed while it runs."""

    @property
    def most_lanes(self) -> int:
        """As many as it has room for."""

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


async def measured_for(
    engine: Engine, store: Reader, batch: Batch, *, limit_s: float = LIMIT_S, tell: Tell | None = None
) -> Width | None:
    """The width for a batch, measured where that can be done and pays; None: the engine's own."""
    now = life.of(engine)
    if not engine.capabilities.shares_prefixes or not isinstance(now, Widens):
        return None
    most = min(now.most_lanes, max(WIDTHS[-1], engine.identity.lanes or 1))
    first = store.waiting([batch.id], limit=2 * most)  # more than are needed: some may be refused
    ceilings = [LEAST_ANSWER if row.max_tokens is None else row.max_tokens for row in first]
    expected = batch.counts.pending * sum(ceilings) / len(ceilings) if ceilings else 0.0
    if not pays(expected, most):
        return None
    requests = [*_requests(store, batch, [row.id for row in first])]
    return await measure(now, requests, most, expected_tokens=expected, limit_s=limit_s, tell=tell)


def _requests(store: Reader, batch: Batch, jobs: Sequence[int]) -> Iterator[Request]:
    for job in jobs:
        found = store.job(job)
        try:
            if found is not None:
                yield call_of(found.line, batch.defaults).request("batch")
        except (RequestRefused, ValueError):  # an older version took the line: the work will say so
            continue


async def measure(
    engine: Widens,
    requests: Sequence[Request],
    most: int,
    *,
    expected_tokens: float | None = None,
    limit_s: float = LIMIT_S,
    tell: Tell | None = None,
) -> Width:
    """Measure an engine with requests like those to come, and leave it at the width that is best.

    The requests must differ: equal ones would wake the same experts. Fewer than `most` are a narrower measurement, and
    those that the engine refuses do not count. `expected_tokens`: of the batch, for a share of whose time it lasts.
    """
    own = engine.identity.lanes or most
    trial = _Trial(engine, requests, most, limit_s, tell or (lambda _: None))
    try:
        await trial.run(expected_tokens)
    except TimeoutError:
        trial.cut_short = True
    chosen = trial.choose(own)
    await engine.set_lanes(chosen.value)
    return chosen


class _Trial:
    """One measurement. `run` mutates and may be broken off by a TimeoutError: what was measured until then counts."""

    def __init__(self, engine: Widens, requests: Sequence[Request], most: int, limit_s: float, tell: Tell) -> None:
        self._engine, self._most, self._tell = engine, most, tell
        self._waiting = [
            replace(each, sampling=Sampling(temperature=0.0), max_tokens=TOKENS, stop=(), ignore_eos=True, lane=None)
            for each in requests
        ]
        self._ready: list[Request] = []  # their heads are computed
        self._clock = asyncio.get_running_loop().time
        self._ends_s = self._clock() + limit_s
        self._limit_s = limit_s
        self._best: dict[int, float] = {}
        self.cut_short = False

    async def run(self, expected_tokens: float | None) -> None:
        widths = widths_up_to(min(self._most, len(self._waiting)))
        if not widths or not await self._prepare(1):
            return
        rate = await self._write(1, FEWEST_TOKENS)  # every page has been touched now, and how long all takes is known
        if rate > 0 and expected_tokens is not None:
            share_s = SHARE * expected_tokens / rate
            self._ends_s -= max(0.0, self._limit_s - share_s)
            self._limit_s = min(self._limit_s, share_s)
        tokens = max(FEWEST_TOKENS, min(TOKENS, int(rate * self._limit_s / sum(widths)))) if rate > 0 else TOKENS
        for number in range(ROUNDS + MORE_ROUNDS):
            if number >= ROUNDS and not disturbed(list(self._best.values())):
                break
            began_s = self._clock()
            widths = await self._round(widths, tokens)
            if self._clock() + (self._clock() - began_s) > self._ends_s:
                break

    async def _round(self, widths: Sequence[int], tokens: int) -> tuple[int, ...]:
        """Each width once, as far as there is time; those that were measured."""
        done: list[int] = []
        for width in widths:
            fastest = max(self._best.values(), default=0.0)
            if fastest > 0 and self._clock() + width * tokens / fastest > self._ends_s:
                self.cut_short = True
                break
            self._tell(f"measuring how many at once: {width}")
            if not await self._prepare(width):
                break
            self._best[width] = max(self._best.get(width, 0.0), await self._write(width, tokens))
            done.append(width)
        return tuple(done)

    async def _prepare(self, width: int) -> bool:
        """Compute the prompts of so many requests; whether there are as many that the engine takes."""
        await self._engine.set_lanes(width)
        while len(self._ready) < width and self._waiting:
            new = self._waiting[: width - len(self._ready)]
            del self._waiting[: len(new)]
            self._ready += [each for each, taken in zip(new, await self._taken(new), strict=True) if taken]
        return len(self._ready) >= width

    async def _taken(self, requests: Sequence[Request]) -> list[bool]:
        async def taken(request: Request) -> bool:
            try:
                await answer(self._engine, replace(request, max_tokens=1))
            except RequestRefused:
                return False
            return True

        async with asyncio.timeout_at(self._ends_s):
            return list(await asyncio.gather(*map(taken, requests)))

    async def _write(self, width: int, tokens: int) -> float:
        """Tokens a second at a width."""
        short = [replace(each, max_tokens=tokens) for each in self._ready[:width]]
        async with asyncio.timeout_at(self._ends_s):
            return _rate(await asyncio.gather(*(answer(self._engine, each) for each in short)))

    def choose(self, own: int) -> Width:
        """The best of what was measured; the engine's own width where that does not tell."""
        points = [Point(width, self._best[width]) for width in sorted(self._best)]
        if not points:
            return Width(own, f"it could not be measured within {format_seconds(self._limit_s)}")
        chosen = choose(points)
        if not self.cut_short:
            return chosen
        words = f"{chosen.reason}; the time for it was up after {format_seconds(self._limit_s)}"
        if chosen.value == points[-1].width and own > chosen.value:
            return Width(own, f"{words}, and more was still faster", chosen.points)
        return replace(chosen, reason=words)


def _rate(answers: Sequence[Answer]) -> float:
    """Tokens a second of answers that were written together, by the engine's own clock.

    The one that was begun last counts for all: in the times of the others are prompts that were computed beside them.
    """
    times = [(each.timings.decode_s or 0.0, each.usage.completion_tokens - 1) for each in answers]
    seconds, written = min(times, default=(0.0, 0))
    return len(answers) * written / seconds if seconds > 0 else 0.0
