"""Cells of their own for every lane: how many, which models, and the order of a step's work."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.kv_cells import KvCells, Mill
from tokenmill.engine.native.context_settings import ContextSettings
from tokenmill.engine.native.forest import Forest
from tokenmill.engine.native.model import Facts
from tokenmill.engine.native.streams import PAD, apart, check, padded
from tokenmill.errors import EngineError, UsageError

TOGETHER = ContextSettings(cells=8192, context=1000, sequences=60)
FACTS = Facts("a model", "llama", 1, 1, 4096, None, shares=True, why_not=None)


@given(st.integers(1, 300), st.integers(1, 5000), st.integers(1, 100_000))
def test_no_lane_has_less_and_all_have_no_more(lanes: int, context: int, cells: int) -> None:
    together = replace(TOGETHER, cells=cells, context=context)
    try:
        made = apart(together, lanes)
    except UsageError as error:
        assert error.hint is not None
        possible = padded(cells) // padded(context)
        assert possible < lanes
        assert error.hint.startswith(f"{possible} lanes")
        return
    assert made.streams
    assert made.sequences == lanes
    assert made.cells // lanes >= context
    assert made.cells % (lanes * PAD) == 0  # llama.cpp has nothing to round
    assert made.cells <= padded(cells)
    assert replace(made, streams=False, sequences=60, cells=cells) == together


def test_none_is_no_number_of_lanes() -> None:
    with pytest.raises(UsageError, match="0 lanes"):
        apart(TOGETHER, 0)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (replace(FACTS, window=512), "some of its layers see 512 tokens only"),
        (replace(FACTS, shares=False, why_not="a recurrent state cannot be cut"), "a recurrent state cannot be cut"),
    ],
)
def test_models_with_another_memory_are_refused_and_told_why(facts: Facts, why: str) -> None:
    check(FACTS)
    with pytest.raises(EngineError, match=why):
        check(facts)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=12), st.integers(1, 5))
def test_work_is_in_the_order_of_sequences_and_answers_do_not_change(jobs: list[tuple[int, int]], lanes: int) -> None:
    answers = []
    for streams in (False, True):
        mill = Mill(lanes * 64, lanes=lanes, interactive_lanes=0, budget=16, context=64, sequences=lanes, shares=False)
        mill.schedule.streams = streams
        asked = [(number, [number + 1] * prompt, most) for number, (prompt, most) in enumerate(jobs)]
        for number, prompt, most in asked:
            mill.submit(number, prompt, most)
        while mill.jobs:
            step = mill.step()
            sequences = [work.sequence for work in step.work]
            if streams:
                assert sequences == sorted(sequences)
        answers.append([mill.done[number].answer for number, _, _ in asked])
    assert answers[0] == answers[1]


PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=20)


@given(PROMPTS, st.integers(1, 3), st.randoms(use_true_random=False))
def test_a_lane_goes_on_with_what_its_last_prompt_began_with(
    prompts: list[list[int]], lanes: int, chance: Random
) -> None:
    """Whenever sequences end, and however far they came: what a new one begins with are its own tokens."""
    cells = KvCells(lanes * 20, lanes)
    forest = Forest(cells, total_cells=lanes * 20, sequences=lanes, shares=False, streams=True)
    running: dict[int, list[int]] = {}
    for prompt in prompts:
        while len(running) == lanes or (running and chance.random() < 0.5):
            sequence = chance.choice(list(running))
            running.pop(sequence)
            if chance.random() < 0.5:
                forest.close(sequence, "prompt")
            else:
                forest.pause(sequence)
        last = {lane: cells.content(lane) for lane in range(lanes)}
        opened = forest.open(prompt)
        assert opened is not None
        lane, reused = opened.sequence, opened.reused
        assert lane == min(set(range(lanes)) - running.keys())
        assert reused < len(prompt)
        same = [one == other for one, other in zip(last[lane], prompt[:-1], strict=False)]
        assert reused == [*same, False].index(False)
        rest = prompt[reused : reused + chance.randint(0, 12)]
        if rest:
            cells.decode(lane, reused, rest)
            forest.filled(lane, len(rest))
        running[lane] = prompt
        assert cells.content(lane) == prompt[: forest.length(lane)]
        assert forest.used == sum(forest.length(each) for each in running)
    assert not cells.copies


def test_what_lanes_left_is_gone_with_the_context() -> None:
    cells = KvCells(40, 2)
    forest = Forest(cells, total_cells=40, sequences=2, shares=False, streams=True)
    for _ in range(2):
        opened = forest.open([1, 2, 3])
        assert opened is not None
        assert opened.reused == 0
        cells.decode(opened.sequence, 0, [1, 2, 3])
        forest.filled(opened.sequence, 3)
        forest.close(opened.sequence, "prompt")
        cells.cells.clear()
        forest.clear()
