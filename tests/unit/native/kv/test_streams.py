"""A KV cache per slot: the number of slots, supported models, and the order of a step's work."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.kv_cells import KvCells, SchedulerHarness
from tokenmill.errors import EngineError, UsageError
from tokenmill.jobs.scheduler.prefix_groups import common_length
from tokenmill.native.batching import Id
from tokenmill.native.kv.prefix_cache import Match, PrefixCache
from tokenmill.native.kv.streams import PAD, apart, least_copied, mixes, padded
from tokenmill.native.llama.context import check_streams
from tokenmill.native.llama.model import ModelMetadata
from tokenmill.native.llama.settings import ContextSettings, ModelSettings

TOGETHER = ContextSettings(cells=8192, context=1000, sequences=60)
FACTS = ModelMetadata("a model", "llama", 1, 1, 4096, None, shares=True, why_not=None)


@given(st.integers(1, 300), st.integers(1, 5000), st.integers(1, 100_000))
def test_cells_are_divided_between_slots(slots: int, context: int, cells: int) -> None:
    together = replace(TOGETHER, cells=cells, context=context)
    try:
        made = apart(together, slots)
    except UsageError as error:
        assert error.hint is not None
        possible = padded(cells) // padded(context)
        assert possible < slots
        assert f" {possible} slots" in error.hint
        return
    assert made.streams
    assert made.sequences == slots
    assert made.cells // slots >= context
    assert made.cells % (slots * PAD) == 0  # llama.cpp has nothing to round
    assert made.cells <= padded(cells)
    assert replace(made, streams=False, sequences=60, cells=cells) == together


def test_zero_slots_are_refused() -> None:
    with pytest.raises(UsageError, match="got 0"):
        apart(TOGETHER, 0)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (replace(FACTS, window=512), "some of its layers see 512 tokens only"),
        (replace(FACTS, shares=False, why_not="a recurrent state cannot be cut"), "a recurrent state cannot be cut"),
    ],
)
def test_models_with_another_memory_are_refused_with_the_reason(facts: ModelMetadata, why: str) -> None:
    check_streams(FACTS)
    with pytest.raises(EngineError, match=why):
        check_streams(facts)


HOST, CARD = ModelSettings(), ModelSettings(gpus=(0,), gpu_layers=20)


@pytest.mark.parametrize(
    ("settings", "model", "expected"),
    [
        (TOGETHER, HOST, False),
        (TOGETHER, CARD, True),
        (TOGETHER, replace(CARD, gpu_layers=0), False),
        (replace(TOGETHER, streams=True), CARD, False),
        (replace(TOGETHER, cache_type_k="q8_0", cache_type_v="q8_0"), HOST, True),
        (replace(TOGETHER, cache_type_k="f32"), HOST, True),
        (replace(TOGETHER, flash_attention=False), HOST, True),
    ],
)
def test_where_prompts_and_answers_mix(settings: ContextSettings, model: ModelSettings, expected: bool) -> None:
    assert mixes(settings, model) is expected


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=12), st.integers(1, 5))
def test_work_is_in_the_order_of_sequences_and_answers_do_not_change(jobs: list[tuple[int, int]], slots: int) -> None:
    answers = []
    for streams in (False, True):
        harness = SchedulerHarness(
            slots * 64,
            slots=slots,
            interactive_slots=0,
            budget=16,
            context=64,
            sequences=slots,
            shares=False,
            streams=streams,
        )
        asked = [(number, [number + 1] * prompt, most) for number, (prompt, most) in enumerate(jobs)]
        prompts: dict[Id, int] = {number: len(prompt) for number, prompt, _ in asked}
        for number, prompt, most in asked:
            harness.submit(number, prompt, most)
        while harness.jobs:
            step = harness.step()
            sequences = [work.sequence for work in step.work]
            if streams:
                assert sequences == sorted(sequences)
                beyond = {work.position >= prompts[work.id] for work in step.work}
                assert len(beyond) <= 1, "prompts and answers in one step"
        answers.append([harness.done[number].answer for number, _, _ in asked])
    assert answers[0] == answers[1]


PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=20)


@given(PROMPTS, st.integers(1, 3), st.randoms(use_true_random=False))
def test_a_slot_continues_with_the_longest_prefix_of_its_own_or_another(
    prompts: list[list[int]], slots: int, chance: Random
) -> None:
    """Sequences end at any time and after any progress, and a new one starts with its own tokens only."""
    cells = KvCells(slots * 20, slots, streams=True)
    cache = PrefixCache(cells, total_cells=slots * 20, sequences=slots, shares=False, streams=True)
    running: dict[int, list[int]] = {}
    for prompt in prompts:
        while len(running) == slots or (running and chance.random() < 0.5):
            sequence = chance.choice(list(running))
            running.pop(sequence)
            if chance.random() < 0.5:
                cache.close(sequence, "prompt")
            else:
                cache.pause(sequence)
        last = {slot: cells.content(slot) for slot in range(slots)}
        opened = cache.open(prompt)
        assert opened is not None
        slot, reused = opened.sequence, opened.reused
        assert slot == min(set(range(slots)) - running.keys())
        assert reused < len(prompt)
        assert reused == max(common_length(tuple(prompt[:-1]), tuple(content)) for content in last.values())
        if reused == common_length(tuple(prompt[:-1]), tuple(last[slot])):
            assert not cells.copies, "what is there was copied"
        cells.copies.clear()
        rest = prompt[reused : reused + chance.randint(0, 12)]
        if rest:
            cells.decode(slot, reused, rest)
            cache.record_prefill(slot, len(rest))
        running[slot] = prompt
        assert cells.content(slot) == prompt[: cache.length(slot)]
        assert cache.used == sum(cache.length(each) for each in running)


def test_a_copy_must_save_more_than_it_costs() -> None:
    """Twenty tokens, here."""
    cells = KvCells(2 * 2560, 2, streams=True)
    cache = PrefixCache(cells, total_cells=2 * 2560, sequences=2, shares=False, streams=True, least_copied=20)
    first = list(range(100))
    opened = cache.open(first)
    assert opened is not None
    assert cache.match([*first[:19], 500, 501]) == Match(0, 0)  # too little to wait for
    assert cache.match([*first[:20], 500, 501]) == Match(0, 20, leader=opened.sequence)
    cells.decode(opened.sequence, 0, first[:30])
    cache.record_prefill(opened.sequence, 30)
    assert cache.match([*first[:30], 500]) == Match(30, 30)
    assert cache.match([*first[:19], 500]) == Match(0, 0)  # it is there, and not worth a copy
    assert cache.match([*first[:50], 500]) == Match(30, 50, leader=opened.sequence)
    for begins, reused in ((19, 0), (20, 20), (30, 20), (0, 0), (39, 30)):
        second = cache.open([*first[:begins], 500, 501])
        assert second is not None
        assert second.reused == reused, begins
        cache.close(second.sequence, "nothing")


def test_what_a_copy_must_save_grows_with_the_stream() -> None:
    assert least_copied(TOGETHER) == 1
    assert [least_copied(apart(replace(TOGETHER, cells=2 * cells, context=cells), 2)) for cells in (256, 8192)] == [
        16,
        64,
    ]


def test_every_slot_is_filled_though_prompts_take_all_of_it() -> None:
    harness = SchedulerHarness(
        4 * 64, slots=4, interactive_slots=0, budget=64, context=64, sequences=4, shares=False, streams=True
    )
    for number in range(4):
        harness.submit(number, [number] * 62, answer_tokens=2)
    for _ in range(4):
        harness.step()
    assert len(harness.step().work) == 4


def test_the_prefix_of_all_is_computed_once_and_copied() -> None:
    harness = SchedulerHarness(
        4 * 64, slots=4, interactive_slots=0, budget=16, context=64, sequences=4, shares=False, streams=True
    )
    for number in range(12):
        harness.submit(number, [*range(1, 11), 20 + number, 40 + number], answer_tokens=3)
    while harness.jobs:
        harness.step()
    totals = harness.schedule.totals
    assert totals.prompt_tokens_computed == 10 + 12 * 2
    assert len(harness.cells.copies) == 3  # to the other slots; later jobs reuse the prefix of their slot


def test_prefixes_of_slots_are_lost_with_the_context() -> None:
    cells = KvCells(40, 2, streams=True)
    cache = PrefixCache(cells, total_cells=40, sequences=2, shares=False, streams=True)
    for _ in range(2):
        opened = cache.open([1, 2, 3])
        assert opened is not None
        assert opened.reused == 0
        cells.decode(opened.sequence, 0, [1, 2, 3])
        cache.record_prefill(opened.sequence, 3)
        cache.close(opened.sequence, "prompt")
        cells.cells.clear()
        cache.clear()
