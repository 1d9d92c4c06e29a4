"""Figures from waves, on an engine with a fake clock."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.fake_engine import CAPABILITIES
from support.ticking_engine import Ticking
from tokenmill.engine.engine import Answer, Piece, Request, Timings, Usage
from tokenmill.errors import EngineDied, EngineError
from tokenmill.tuner.measure import (
    SHARING,
    Measured,
    MeasureOptions,
    TokenMark,
    batch_rate,
    measure,
    prepare,
    rate,
    relative_spread,
    rough_rate,
    settled,
)
from tokenmill.tuner.point import Aim
from tokenmill.tuner.work import GeneratedJobs

AIM = Aim(prompt_tokens=20, tail_tokens=4, output_tokens=16)
WORK = GeneratedJobs(AIM, tuple(range(100, 400)))


def marks(*pairs: tuple[float, int]) -> list[TokenMark]:
    return [TokenMark(*pair) for pair in pairs]


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        ([marks((1, 1), (2, 11))], 10.0),
        ([marks((1, 1), (2, 11)), marks((1, 1), (2, 11))], 20.0),
        # the first wrote fast before the second's prompt was there, and alone after the second ended
        ([marks((0, 1), (4, 90), (5, 91), (7, 93), (9, 200)), marks((5, 1), (7, 3))], 2.0),
        # pieces of several tokens: a slot without two marks inside does not count, and all write at one pace
        ([marks((0, 1), (5, 30)), marks((1, 1), (3, 21), (5, 41))], 20.0),
        ([marks((0, 1), (1, 5)), marks((2, 1), (3, 5))], None),  # never together
        ([marks((0, 1)), []], None),
        ([], None),
    ],
)
def test_the_rate_is_that_of_all_slots_together(slots: Sequence[Sequence[TokenMark]], expected: float | None) -> None:
    assert rate(slots) == (None if expected is None else pytest.approx(expected))


def test_a_slot_with_marks_only_at_its_ends_gives_a_rough_rate() -> None:
    slots = [marks((0.0, 1), (4.0, 41)), marks((1.0, 1), (5.0, 41))]
    assert rate(slots) is None
    assert rough_rate(slots) == pytest.approx(20.0)
    assert rough_rate([marks((0.0, 1), (4.0, 41)), marks((1.0, 1))]) == pytest.approx(20.0), "the others were cancelled"
    assert rough_rate([marks((0.0, 1))]) is None
    assert rough_rate([marks((0.0, 1), (1.0, 5)), []]) is None
    assert rough_rate([]) is None


@given(
    step_s=st.floats(0.001, 2.0),
    starts=st.lists(st.integers(0, 12), min_size=1, max_size=8),
    held=st.integers(1, 5),
    steps=st.integers(30, 60),
)
def test_the_rate_is_exact_however_pieces_are_held(step_s: float, starts: list[int], held: int, steps: int) -> None:
    slots = [
        [
            TokenMark((start + token) * step_s, token + 1)
            for token in range(steps)
            if token == 0 or (token + 1) % held == 0
        ]
        for start in starts
    ]
    assert rate(slots) == pytest.approx(len(starts) / step_s)


def test_a_batch_pays_for_its_prompts() -> None:
    alone = batch_rate(slots=1, output_tokens=10, prefix_s=0.0, begun_s=0.0, decode_tok_s=5.0)
    assert alone == pytest.approx(5.0)
    with_tail = batch_rate(slots=1, output_tokens=10, prefix_s=0.0, begun_s=2.0, decode_tok_s=5.0)
    assert with_tail == pytest.approx(2.5)
    with_head = batch_rate(slots=1, output_tokens=10, prefix_s=2.0 * SHARING, begun_s=0.0, decode_tok_s=5.0)
    assert with_head == pytest.approx(2.5)


@given(st.integers(1, 64), st.integers(1, 500), st.floats(0, 100), st.floats(0, 100), st.floats(0.1, 1e4))
def test_a_batch_is_never_faster_than_decoding(
    slots: int, output: int, prefix_s: float, begun_s: float, decode: float
) -> None:
    found = batch_rate(slots=slots, output_tokens=output, prefix_s=prefix_s, begun_s=begun_s, decode_tok_s=decode)
    assert 0 < found <= decode * (1 + 1e-9)


def test_waves_that_agree_are_enough() -> None:
    assert relative_spread([3.0]) is None
    assert relative_spread([1.0, 1.0]) == 0.0
    assert not settled([10.0, 10.0], 0.03), "two may agree by chance"
    assert settled([10.0, 10.1, 10.0], 0.03)
    assert not settled([10.0, 14.0, 7.0], 0.03)


def run(engine: Ticking, how: MeasureOptions, slots: int = 3, context: int = 4096) -> tuple[float | None, Measured]:
    async def work() -> tuple[float | None, Measured]:
        async with asyncio.timeout(20):
            prefix_s = await prepare(engine, WORK, 7, slots)
            return prefix_s, await measure(
                engine, WORK, how, trial=7, slots=slots, ubatch=512, context=context, prefix_s=prefix_s
            )

    return asyncio.run(work())


def test_a_trial_warms_up_computes_the_prefix_alone_and_keeps_all_slots_busy() -> None:
    engine = Ticking()
    prefix_s, found = run(engine, MeasureOptions(seconds=0.05))
    assert prefix_s == 0.5
    warm, head, first = engine.seen[:3], engine.seen[3], engine.seen[4]
    assert all(isinstance(each.prompt, tuple) and len(each.prompt) == 8 for each in warm)
    assert isinstance(head.prompt, tuple)
    assert isinstance(first.prompt, tuple)
    assert len(head.prompt) == AIM.prompt_tokens
    assert first.prompt[: AIM.prompt_tokens] == head.prompt
    assert engine.most_running == 3
    assert engine.running == 0, "what was not needed any more has been cancelled"
    jobs = [each.prompt for each in engine.seen[4:]]
    assert len(set(jobs)) == len(jobs), "no job comes twice"
    figures = found.figures
    assert figures.prefill_tok_s == AIM.prompt_tokens / 0.5
    assert figures.first_token_s is None
    assert figures.jobs_tok_s is not None
    assert figures.decode_tok_s is not None
    assert 0 < figures.jobs_tok_s <= figures.decode_tok_s


def test_interactive_requests_are_sent_only_where_they_are_asked_for() -> None:
    engine = Ticking()
    _, found = run(engine, MeasureOptions(seconds=0.05, latency=True))
    assert [each.priority for each in engine.seen].count("interactive") == 2
    assert found.figures.first_token_s is not None
    assert found.figures.first_token_s > 0
    assert engine.running == 0


def test_slots_that_share_nothing_get_the_prefix_first() -> None:
    alone = replace(CAPABILITIES, shares_prefixes=False)
    engine = Ticking(capabilities=alone)
    run(engine, MeasureOptions(seconds=0.05))
    again = engine.seen[4:7]
    assert [each.max_tokens for each in again] == [1, 1, 1]


def test_a_death_in_a_wave_is_raised_immediately_and_leaves_nothing_running() -> None:
    engine = Ticking(dies_after=5)
    with pytest.raises(EngineDied):
        run(engine, MeasureOptions(seconds=5.0))
    assert engine.running == 0


class Held(Ticking):
    """Reports the first token immediately and all others at the end, as long as there are few."""

    async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        self.seen.append(request)
        most = request.max_tokens or 1
        await asyncio.sleep(0.001 * len(self.seen))  # one after the other
        yield Piece("x", 1)
        for told in range(100, most, 100):
            await asyncio.sleep(0.01)
            yield Piece("x", 100 if told > 100 else 99)
        await asyncio.sleep(0.01)
        yield Answer("", "length", Usage(1, most, 0), Timings(prefill_s=0.5))


@pytest.mark.parametrize(("context", "grows"), [(4096, True), (80, False)])
def test_answers_that_come_whole_are_made_longer_as_far_as_the_context_goes(context: int, grows: bool) -> None:
    engine = Held()
    _, found = run(engine, MeasureOptions(seconds=0.05), context=context)
    longest = max(each.max_tokens or 0 for each in engine.seen)
    assert (longest > 100) is grows
    assert longest < context - WORK.depth
    assert found.figures.decode_tok_s


class Silent(Ticking):
    """Sends answers without tokens."""

    async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        await asyncio.sleep(0)
        yield Answer("", "stop", Usage(1, 0, 0))


def test_an_engine_that_writes_nothing_is_no_figure() -> None:
    with pytest.raises(EngineError) as caught:
        run(Silent(), MeasureOptions(seconds=0.05))
    assert caught.value.code == "no_overlap"


def test_drawn_work_is_the_same_for_the_same_numbers_and_new_for_each_trial() -> None:
    assert WORK.job(1, 2) == WORK.job(1, 2)
    heads = [WORK.prefix(trial) for trial in range(20)]
    assert all(first != second for first, second in pairwise(heads))
    assert GeneratedJobs(replace(AIM, prompt_tokens=0), WORK.vocabulary).prefix(0) is None
    assert WORK.depth == 24


@given(st.integers(1, 64), st.sampled_from((64, 128, 512, 2048)))
def test_slots_decode_long_enough_to_overlap(slots: int, ubatch: int) -> None:
    prompts = slots * AIM.tail_tokens / ubatch
    assert WORK.wave_tokens(slots, ubatch) >= prompts + AIM.output_tokens
