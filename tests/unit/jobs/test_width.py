"""How many jobs at once: the decision over measured points, and measuring an engine whose speed is known."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from support.fake_engine import CAPABILITIES
from support.jobs_store import submitted
from tokenmill.engine.engine import (
    Answer,
    Capabilities,
    Counters,
    Identity,
    Piece,
    Prompt,
    Request,
    Status,
    Timings,
    Usage,
)
from tokenmill.errors import TooLong
from tokenmill.jobs.store import Store
from tokenmill.jobs.width import (
    FEWEST_TOKENS,
    LIMIT_S,
    MORE_ROUNDS,
    ROUNDS,
    TOKENS,
    WORTH,
    Point,
    Width,
    choose,
    measure,
    measured_for,
    measured_tokens,
    pays,
    widths_up_to,
)


@dataclass
class Speedy:
    """Writes as many tokens a second as its table says for so many at once."""

    tok_s: dict[int, float]
    lanes: int = 16
    asked: list[int] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    now: int = 0
    hangs_at: int | None = None  # a width at which nothing comes
    closed: int = 0  # streams that were left

    @property
    def identity(self) -> Identity:
        return Identity("native", "speedy", "m", "speedy 1", 4096, self.lanes, "nowhere")

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    @property
    def most_lanes(self) -> int:
        return self.lanes

    async def set_lanes(self, lanes: int) -> None:
        self.now = lanes
        self.asked.append(lanes)

    async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        self.requests.append(request)
        if "long" in str(request.prompt):
            raise TooLong("5 too many", needed_tokens=105, context_tokens=100)
        tokens = request.max_tokens or 0
        if self.now == self.hangs_at and tokens > 1:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self.closed += 1
        seconds = self.now * (tokens - 1) / self.tok_s[self.now]
        yield Answer("", "length", Usage(8, tokens, 0), Timings(0.0, 0.1, seconds))

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        return (1,)

    async def status(self) -> Status:
        return Status("ready", self.identity, Counters())

    async def close(self) -> None:
        return None


def points(*rates: float) -> list[Point]:
    return [Point(width, rate) for width, rate in zip((1, 2, 4, 8, 16), rates, strict=False)]


@pytest.mark.parametrize(
    ("rates", "width"),
    [
        ((100, 120, 140, 160, 180), 16),
        ((100, 120, 140, 160, 161), 8),  # twice the lanes for nothing
        ((100, 99, 98, 90, 80), 1),
        ((100, 101, 102), 1),  # nearly as fast, and narrower
        ((100, 90, 140, 130, 120), 4),
        ((0.0, 0.0), 1),  # an engine that tells no times
    ],
)
def test_the_narrowest_of_the_fastest_wins(rates: tuple[float, ...], width: int) -> None:
    assert choose(points(*rates)).value == width


def test_the_reason_has_the_figures() -> None:
    assert choose(points(41.3, 60.5)).reason == "measured in tok/s by width: 1: 41.3, 2: 60.5"


@pytest.mark.parametrize(("most", "widths"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (24, (1, 2, 4, 8, 16, 24))])
def test_widths_end_with_all_lanes(most: int, widths: tuple[int, ...]) -> None:
    assert widths_up_to(most) == widths


def test_only_long_batches_are_worth_it() -> None:
    worth = WORTH * measured_tokens(8)
    assert pays(worth, 8)
    assert not pays(worth - 1, 8)
    assert not pays(1e9, 1)


def measured(engine: Speedy, requests: Sequence[Request], most: int) -> int:
    return asyncio.run(asyncio.wait_for(measure(engine, requests, most), 10)).value


def test_an_engine_is_measured_and_left_at_its_best() -> None:
    engine = Speedy({1: 50.0, 2: 70.0, 4: 90.0, 8: 80.0})
    requests = [replace(Request(f"job {number}"), max_tokens=900, lane=3, stop=("x",)) for number in range(8)]
    assert measured(engine, requests, 8) == 4
    assert engine.asked == [1, 1, 2, 4, 8, 1, 2, 4, 8, 4]
    assert {request.max_tokens for request in engine.requests} == {1, FEWEST_TOKENS, TOKENS}
    assert all(request.ignore_eos and request.lane is None and not request.stop for request in engine.requests)


def test_figures_that_fall_are_measured_again() -> None:
    engine = Speedy({1: 50.0, 2: 30.0})
    assert measured(engine, [Request("one"), Request("two")], 2) == 1
    assert engine.asked.count(2) == ROUNDS + MORE_ROUNDS


def test_few_requests_measure_narrower() -> None:
    engine = Speedy({1: 50.0, 2: 70.0, 3: 90.0})
    assert measured(engine, [Request(f"job {number}") for number in range(3)], 16) == 3


def prompts(count: int) -> list[Request]:
    return [Request(f"job {number}") for number in range(count)]


def test_a_slow_engine_writes_less_and_what_would_take_too_long_is_not_tried() -> None:
    engine = Speedy({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0, 16: 1.0})
    width = asyncio.run(measure(engine, prompts(16), 16))
    assert max(request.max_tokens or 0 for request in engine.requests) == FEWEST_TOKENS
    assert 16 * FEWEST_TOKENS > LIMIT_S
    assert [point.width for point in width.points] == [1, 2, 4, 8]
    assert width.value == 1
    assert "the time for it was up after 60 s" in width.reason


def test_a_short_batch_gets_less_time() -> None:
    engine = Speedy({1: 50.0, 2: 50.0, 4: 50.0})
    width = asyncio.run(measure(engine, prompts(4), 4, expected_tokens=500.0))  # ten seconds of work: half a second
    assert max(request.max_tokens or 0 for request in engine.requests) == FEWEST_TOKENS
    assert "after 0.5 s" in asyncio.run(measure(engine, prompts(16), 16, expected_tokens=500.0)).reason
    assert width.value == 1


def test_a_width_at_which_it_hangs_ends_the_measurement_and_its_streams() -> None:
    engine = Speedy({1: 50.0, 2: 90.0, 4: 90.0}, lanes=4, hangs_at=4)
    width = asyncio.run(asyncio.wait_for(measure(engine, prompts(4), 4, limit_s=0.3), 10))
    assert [point.width for point in width.points] == [1, 2]
    assert engine.closed == 4
    assert width.value == engine.now == 4  # two were faster than one, and the engine has four
    assert "more was still faster" in width.reason


def test_an_engine_that_writes_nothing_in_time_keeps_its_own_width() -> None:
    engine = Speedy({1: 50.0}, lanes=6, hangs_at=1)
    width = asyncio.run(asyncio.wait_for(measure(engine, prompts(6), 6, limit_s=0.05), 10))
    assert width == Width(6, "it could not be measured within 0.1 s")


def test_prompts_that_are_refused_do_not_count() -> None:
    engine = Speedy({1: 50.0, 2: 70.0})
    requests = [Request("a long one"), Request("one"), Request("another long one"), Request("two")]
    assert measured(engine, requests, 2) == 2
    assert measured(Speedy({1: 50.0}, lanes=2), requests[:2], 2) == 1
    assert measured(Speedy({}, lanes=2), requests[:1], 2) == 2


def test_what_is_measured_is_told() -> None:
    told: list[str] = []
    asyncio.run(measure(Speedy({1: 50.0, 2: 70.0}), prompts(2), 2, tell=told.append))
    assert told == ["measuring how many at once: 1", "measuring how many at once: 2"] * ROUNDS


def batch_width(engine: Speedy, folder: Path, jobs: int, max_tokens: int) -> int | None:
    with Store(folder / "store") as store:
        prompts = [f"prompt {number}" for number in range(jobs)]
        batch = submitted(store, folder / "jobs.jsonl", prompts, max_tokens=max_tokens)
        width = asyncio.run(asyncio.wait_for(measured_for(engine, store, batch), 10))
    return None if width is None else width.value


def test_a_long_batch_is_measured_with_its_own_prompts(tmp_path: Path) -> None:
    engine = Speedy({1: 50.0, 2: 70.0}, lanes=2)
    assert batch_width(engine, tmp_path, 50, 1000) == 2
    own = {request.prompt for request in engine.requests}
    assert len(own) == 2
    assert own <= {f"prompt {number}" for number in range(50)}


def test_a_short_batch_is_not(tmp_path: Path) -> None:
    engine = Speedy({1: 50.0, 2: 70.0}, lanes=2)
    assert batch_width(engine, tmp_path, 10, 16) is None
    assert engine.asked == []
