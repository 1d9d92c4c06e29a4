"""Timing of a request on the caller's clock, which counts tokens and not pieces; and text that is new every time."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.prefix_engine import HEAD, PrefixEngine
from tokenmill.engine.engine import Answer, Timings, Usage
from tokenmill.tuner.bench.rows import Runs, row_of, stat
from tokenmill.tuner.bench.served import Prose, Served, request_for, serve, timed, words


def answered(tokens: int, *, prompt: int = 100, cached: int | None = 0, decode_s: float | None = None) -> Answer:
    return Answer("", "length", Usage(prompt, tokens, cached), Timings(0.0, 0.5, decode_s))


def test_the_engine_says_how_much_of_the_time_was_writing() -> None:
    # pieces came late and together, because the caller was busy
    found = timed(10.0, [(12.9, 1), (12.9001, 2)], answered(3, decode_s=1.0), 13.0)
    assert (found.first_s, found.write_s, found.decode_tok_s) == (2.0, 1.0, 2.0)
    odd = timed(10.0, [(12.0, 1), (13.0, 2)], answered(3, decode_s=99.0), 13.0)  # longer than all of it: not believed
    assert (odd.first_s, odd.write_s) == (2.0, 1.0)


def test_a_token_a_piece() -> None:
    found = timed(10.0, [(11.0, 1), (11.5, 1), (12.0, 1)], answered(3), 12.1)
    assert (found.first_s, found.write_s, found.timed_tokens) == (1.0, 1.0, 2)
    assert found.prefill_tok_s == 100.0
    assert found.decode_tok_s == 2.0
    assert found.total_s == pytest.approx(2.1)
    assert found.engine_prefill_s == 0.5


def test_tokens_held_back_do_not_count_as_faster_and_a_late_first_piece_not_as_slower_prefill() -> None:
    # the first token came at 11, the piece with it and two more at 12
    found = timed(10.0, [(12.0, 3), (14.0, 4)], answered(7), 14.0)
    assert found.decode_tok_s == 2.0
    assert found.first_s == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("arrivals", "decode_s", "write_s", "rate"),
    [
        ([(12.0, 5)], 0.8, 0.8, 5.0),  # all in one piece: the engine's own clock
        ([(12.0, 5)], None, None, None),  # and without one nothing is known
        ([], 0.8, 0.8, 5.0),
        ([(12.0, 0), (12.5, 1), (13.0, 4)], None, 0.5, 8.0),  # a piece without a token says nothing
    ],
)
def test_what_came_at_once(
    arrivals: list[tuple[float, int]], decode_s: float | None, write_s: float | None, rate: float | None
) -> None:
    found = timed(10.0, arrivals, answered(5, decode_s=decode_s), 13.0)
    assert (found.write_s, found.decode_tok_s) == (write_s, pytest.approx(rate) if rate else None)


@pytest.mark.parametrize(
    ("cached", "computed", "rate"), [(0, 100, 50.0), (40, 60, 30.0), (99, 1, None), (None, 100, 50.0)]
)
def test_only_what_was_computed_counts_and_a_handful_says_nothing(
    cached: int | None, computed: int, rate: float | None
) -> None:
    found = timed(0.0, [(2.0, 1), (3.0, 1)], answered(2, cached=cached), 3.0)
    assert (found.computed_tokens, found.prefill_tok_s) == (computed, rate)


@given(st.lists(st.tuples(st.floats(0.001, 1.0), st.integers(1, 5)), min_size=2, max_size=20), st.floats(0.001, 5.0))
def test_speeds_and_times_are_positive_and_fit_together(gaps: list[tuple[float, int]], first: float) -> None:
    at, arrivals = first, []
    for gap, count in gaps:
        at += gap
        arrivals.append((at, count))
    total = sum(count for _, count in gaps)
    found = timed(0.0, arrivals, answered(total), at)
    assert found.write_s is not None
    assert found.decode_tok_s is not None
    assert 0 < found.first_s <= arrivals[0][0]
    assert found.decode_tok_s * found.write_s == pytest.approx(found.timed_tokens)


def test_text_is_new_each_time_and_begins_differently() -> None:
    async def scene() -> None:
        engine = PrefixEngine()
        prose = Prose(engine, 7)
        texts = [await prose.take(50) for _ in range(20)]
        assert [len(text) for text in texts] == [50] * 20
        assert len({text[0] for text in texts}) == 20
        assert len(set(texts)) == 20
        prompt = prose.prompt(texts[0])
        assert prompt == (*HEAD, *texts[0])
        served, arrivals = await serve(engine, request_for(prompt, 4))
        assert (served.prompt_tokens, served.cached_tokens, served.written_tokens) == (51, 0, 4)
        assert [count for _, count in arrivals] == [1, 1, 1, 1]

    asyncio.run(scene())


def test_a_server_that_tells_no_tokens_is_given_words() -> None:
    async def scene() -> None:
        engine = PrefixEngine(kind="url")
        prose = Prose(engine, 7)
        text = await prose.take(30)
        prompt = prose.prompt(text)
        assert isinstance(prompt, str)
        assert len(prompt.split()) == 30
        prose.calibrate(text, 60)  # the server counted two tokens per word
        assert len(await prose.take(30)) == 15

    asyncio.run(scene())


def test_words_depend_on_the_seed_alone() -> None:
    assert words(1, 50) == words(1, 50) != words(2, 50)


def test_medians_and_how_far_runs_lie_apart() -> None:
    assert stat([None, None]) is None
    found = stat([2.0, None, 4.0, 10.0])
    assert found is not None
    assert (found.median, found.low, found.high, found.runs, found.spread) == (4.0, 2.0, 10.0, 3, 1.5)
    runs = Runs((Served(100, 20, 5, 1.0, 2.0, 3.0, 4), Served(100, 20, 5, 2.0, 4.0, 6.0, 4)), "something", 1)
    row = row_of("sweep", runs)
    assert (row.pp, row.tg, row.n_kv, row.depth, row.disturbed, row.repeated) == (80, 5, 20, 100, "something", 1)
    assert row.t_pp_s is not None
    assert row.t_pp_s.median == 1.5
    assert row_of("cold", Runs((Served(100, None, 5, 1.0, None, 3.0),))).n_kv is None
