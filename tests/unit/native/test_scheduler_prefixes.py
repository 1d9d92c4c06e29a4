"""Jobs in depth-first order: every prefix is computed once for any number of slots, and few slots are idle."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.kv_cells import SchedulerHarness

TEMPLATE = [900, 901, 902]
SLOTS = st.sampled_from([1, 1, 2, 3, 4, 8])


def head(number: int, length: int) -> list[int]:
    return [1000 * number + 1000 + place for place in range(length)]


def shared(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((place for place, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


def minimum(prompts: list[list[int]]) -> int:
    """Tokens to compute if none is computed twice, but for the last of each prompt: its logits are wanted."""
    found = 0
    for at, prompt in enumerate(prompts):
        found += len(prompt) - min(len(prompt) - 1, max((shared(prompt, other) for other in prompts[:at]), default=0))
    return found


@st.composite
def forests(draw: st.DrawFn) -> list[list[int]]:
    """Prompts in the order of a walk through a tree, a node's own before or after those below it, some of them twice."""
    chance = draw(st.randoms(use_true_random=False))

    def walk(depth: int, above: list[int]) -> Iterator[list[int]]:
        here = [*above, *head(0, chance.choice([1, 3, 8, 20]))]
        children = chance.randint(1, 4) if depth and chance.random() < 0.8 else 0
        own = "before" if not children else chance.choice(["no", "no", "before", "after"])
        if own == "before":
            yield from [here] * chance.choice([1, 1, 1, 2])
        for child in range(children):
            yield from walk(depth - 1, [*here, 100 + child])
        if own == "after":
            yield here

    return list(walk(3, draw(st.sampled_from([[], TEMPLATE]))))[:60]


def branches(prompts: list[list[int]], number: int) -> set[int]:
    """Where later prompts diverge from one."""
    return {min(shared(prompts[number], other), len(other) - 1) for other in prompts[number + 1 :]}


def mill_for(prompts: list[list[int]], slots: int, budget: int = 16, *, cuts: bool = True) -> SchedulerHarness:
    """With cells and ids for all; without them, the oldest prefixes would be evicted."""
    ids = slots + 49 if cuts else slots + 4 * len(prompts)
    return SchedulerHarness(sum(map(len, prompts)) + 1000, slots=slots, budget=budget, sequences=ids, cuts=cuts)


@settings(max_examples=150, deadline=None)
@given(
    prompts=forests(),
    slots=SLOTS,
    budget=st.sampled_from([4, 16, 64]),
    in_flight=st.booleans(),
    cuts=st.booleans(),
    data=st.data(),
)
def test_depth_first_no_token_is_computed_twice(
    prompts: list[list[int]], slots: int, budget: int, in_flight: bool, cuts: bool, data: st.DataObject
) -> None:
    """Whether all jobs are submitted at the beginning, or twice as many as there are slots at a time."""
    harness = mill_for(prompts, slots, budget, cuts=cuts)
    answers = data.draw(st.lists(st.sampled_from([1, 2, 5, 30]), min_size=len(prompts), max_size=len(prompts)))
    most = slots + max(2, slots) if in_flight else len(prompts)
    waiting = list(enumerate(zip(prompts, answers, strict=True)))
    while waiting or harness.jobs:
        while waiting and len(harness.jobs) < most:
            number, (prompt, answer) = waiting.pop(0)
            harness.submit(number, prompt, answer, branches=branches(prompts, number))
        harness.step()
    totals = harness.schedule.totals
    assert totals.prompt_tokens_computed == minimum(prompts)
    assert totals.preemptions == totals.evicted_tokens == 0


@pytest.mark.parametrize("cuts", [True, False])
@pytest.mark.parametrize("slots", [1, 2, 4, 8])
def test_nested_prefixes_that_are_longer_than_their_tails(slots: int, cuts: bool) -> None:
    prompts = [
        [*TEMPLATE, *head(outer, 40), *head(10 + inner, 10), 10 + job]
        for outer in range(3)
        for inner in range(3)
        for job in range(3)
    ]
    harness = mill_for(prompts, slots, cuts=cuts)
    for number, prompt in enumerate(prompts):
        harness.submit(number, prompt, answer_tokens=3)
    harness.run()
    assert harness.schedule.totals.prompt_tokens_computed == 3 + 3 * (40 + 3 * (10 + 3))


@pytest.mark.parametrize("template", [[], TEMPLATE])
def test_pairs_whose_first_jobs_run_together_and_end_together(template: list[int]) -> None:
    """Eight slots, eight digests: the second job of each still waits when the first ones all end in one step."""
    harness = SchedulerHarness(4000, slots=8, budget=1000, sequences=60)
    for number in range(16):
        harness.submit(number, [*template, *head(number // 2, 20), 10 + number], answer_tokens=3)
    harness.run()
    assert harness.schedule.totals.prompt_tokens_computed == len(template) + 8 * (20 + 2)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=20),
    slots=st.integers(1, 8),
    template=st.sampled_from([[], TEMPLATE]),
)
def test_where_prompts_have_nothing_in_common_the_newest_alone_is_idle(
    lengths: list[int], slots: int, template: list[int]
) -> None:
    prompts = [[*template, *head(number, length)] for number, length in enumerate(lengths)]
    harness = mill_for(prompts, slots)
    for number, prompt in enumerate(prompts):
        harness.submit(number, prompt, answer_tokens=1 + number % 4)
    while harness.jobs:
        harness.step()
        running = sum(max(0, job.position - len(template)) for job in harness.schedule._running.values())
        ended = [len(job.prompt) for job in harness.done.values()]
        assert harness.cache.used - running <= max(ended, default=len(template))
    assert harness.cache.used in {len(prompt) for prompt in prompts}


def test_a_preempted_job_leaves_no_more_than_any_other() -> None:
    harness = SchedulerHarness(100, slots=2, interactive_slots=1, budget=100)
    harness.submit(0, [1] * 20, answer_tokens=10)
    for _ in range(6):
        harness.step()
    harness.submit("chat", [2] * 78, 1, "interactive", "nothing")
    assert harness.step().preempted == (0,)
    assert harness.cache.used == 22, "what there was room for beside the chat"
    harness.run()
    assert harness.schedule.totals.recomputed_tokens == 25 - 22
    assert harness.cache.used == 20, "its prompt, and nothing of its answer"


def test_cells_of_a_preempted_job_are_free_when_it_is_cancelled() -> None:
    harness = SchedulerHarness(100, slots=2, interactive_slots=1, budget=100)
    harness.submit(0, [1] * 20, answer_tokens=10)
    harness.submit(1, [3] * 20, answer_tokens=50)
    for _ in range(6):
        harness.step()
    harness.submit("chat", [2] * 55, 9, "interactive")
    assert harness.step().preempted == (1,)
    before = harness.cache.used
    harness.submit(2, [3] * 40, answer_tokens=1)
    harness.cancel(2)
    assert harness.cache.used == before, "one that had nothing takes nothing from it"
    harness.cancel(1)
    assert harness.cache.used == 26 + 55
    harness.run()
