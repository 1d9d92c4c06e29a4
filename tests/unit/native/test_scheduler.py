"""Admission of jobs, and the content of a step."""

import pytest

from support.kv_cells import KvCells, SchedulerHarness
from tokenmill.native.batching import DecodeStep, PromptCost
from tokenmill.native.kv.prefix_cache import PrefixCache
from tokenmill.native.scheduler import LOOK_AHEAD, StepScheduler

DIGEST = list(range(100, 130))


def shape(step: DecodeStep) -> list[tuple[object, int, bool]]:
    """Who computes how much, and whose logits are wanted."""
    return [(work.id, len(work.tokens), work.logits) for work in step.work]


def ids(step: DecodeStep) -> list[object]:
    return [work.id for work in step.work]


def test_a_prompt_is_computed_in_chunks_and_then_decoded_token_by_token() -> None:
    harness = SchedulerHarness(100, budget=8)
    harness.submit(1, list(range(20)), answer_tokens=3)
    assert shape(harness.step()) == [(1, 8, False)]
    assert shape(harness.step()) == [(1, 8, False)]
    assert shape(harness.step()) == [(1, 4, True)]
    assert shape(harness.step()) == [(1, 1, True)]
    assert harness.last.work[0].position == 20
    assert shape(harness.step()) == [(1, 1, True)]
    assert harness.done[1].spent == PromptCost(reused=0, computed=20, recomputed=0)
    assert shape(harness.step()) == []


def test_order_of_claims() -> None:
    """Decodes before prefills, interactive before batch, then by arrival."""
    harness = SchedulerHarness(400, slots=4, interactive_slots=4, budget=10)
    harness.submit("batch decode", [1], 99)
    harness.submit("chat decode", [2], 99, "interactive")
    harness.step()
    harness.submit("batch prefill", [3] * 20)
    harness.submit("batch prefill 2", [4] * 20)
    harness.submit("chat prefill", [5] * 20, 1, "interactive")
    decodes = [("chat decode", 1, True), ("batch decode", 1, True)]
    assert shape(harness.step()) == [*decodes, ("chat prefill", 8, False)]
    assert shape(harness.step()) == [*decodes, ("chat prefill", 8, False)]
    assert shape(harness.step()) == [*decodes, ("chat prefill", 4, True), ("batch prefill", 2, False)]
    harness.cancel("chat decode")
    assert shape(harness.step()) == [decodes[1], ("batch prefill", 9, False)]
    assert shape(harness.step()) == [decodes[1], ("batch prefill", 9, True)]
    assert shape(harness.step()) == [decodes[1], ("batch prefill 2", 9, False)]


def test_where_they_do_not_mix_prompts_come_before_answers() -> None:
    """All slots start decoding together, except while urgent jobs run."""
    harness = SchedulerHarness(400, slots=3, budget=8)
    harness.schedule.mixes = False
    harness.submit("first", [1] * 4, 4)
    assert shape(harness.step()) == [("first", 4, True)]
    assert shape(harness.step()) == [("first", 1, True)]
    harness.submit("second", [2] * 12, 2)
    harness.submit("third", [3] * 3, 2)
    assert shape(harness.step()) == [("second", 8, False)]
    assert shape(harness.step()) == [("second", 4, True), ("third", 3, True)]
    assert shape(harness.step()) == [("first", 1, True), ("second", 1, True), ("third", 1, True)]
    harness.submit("chat", [4] * 6, 9, "interactive")
    assert shape(harness.step()) == [("first", 1, True), ("chat", 6, True)]
    harness.submit("fourth", [5] * 20)
    assert shape(harness.step()) == [("chat", 1, True), ("fourth", 2, False)]  # a quarter of a micro-batch


def test_without_mixed_steps_later_prompts_do_not_delay_an_answer() -> None:
    harness = SchedulerHarness(400, slots=3, interactive_slots=0, budget=8)
    harness.schedule.mixes = False
    harness.submit("long", [1] * 4, 5)
    for number in range(200):
        harness.submit(number, [2 + number] * 8, 1)
    steps = [harness.step() for _ in range(20)]
    assert [number for number, step in enumerate(steps) if "long" in ids(step)] == [0, 3, 6, 9, 12]
    assert "long" in harness.done


def test_cells_are_kept_for_answers_that_wait_for_a_prompt() -> None:
    harness = SchedulerHarness(24, slots=2, interactive_slots=0, budget=32)
    harness.schedule.mixes = False
    harness.submit("first", [1] * 10, 5)
    harness.step()
    harness.submit("second", [2] * 13, 1)
    harness.run()
    assert harness.schedule.totals.preemptions == 0
    assert len(harness.done["first"].answer) == 5


def test_a_budget_smaller_than_the_decodes_is_kept() -> None:
    harness = SchedulerHarness(100, slots=4, budget=2)
    for number in range(4):
        harness.submit(number, [number], answer_tokens=4)
    step = harness.step()
    assert 0 < step.tokens <= 2
    harness.run()
    assert {number: len(job.answer) for number, job in harness.done.items()} == dict.fromkeys(range(4), 4)


def test_a_budget_that_shrinks_is_kept() -> None:
    harness = SchedulerHarness(100, slots=4, budget=4)
    for number in range(4):
        harness.submit(number, [number], answer_tokens=4)
    assert ids(harness.step()) == ids(harness.step()) == [0, 1, 2, 3]
    harness.schedule.budget = 2
    assert ids(harness.step()) == [0, 1]
    harness.run()


def test_a_job_whose_token_has_not_come_is_left_out() -> None:
    harness = SchedulerHarness(100)
    harness.schedule.submit("slow", [1, 2], "batch")
    step = harness.schedule.plan()
    harness.schedule.ran(step)
    assert harness.schedule.plan().work == ()
    harness.schedule.token("slow", 7)
    (work,) = harness.schedule.plan().work
    assert (work.tokens.tolist(), work.position, work.logits) == ([7], 2, True)


def test_slots_bound_batch_jobs_and_interactive_ones_go_beyond() -> None:
    harness = SchedulerHarness(400, slots=2, interactive_slots=1, budget=64)
    for number in range(4):
        harness.submit(number, [number, 1], answer_tokens=50)
    assert ids(harness.step()) == [0, 1]
    harness.submit(10, [10, 1], 3, "interactive")
    harness.submit(11, [11, 1], 50, "interactive")
    assert ids(harness.step()) == [0, 1, 10]
    harness.step()
    harness.step()
    assert ids(harness.step()) == [0, 1, 11], "ten has ended"
    harness.schedule.slots = 4
    assert ids(harness.step()) == [11, 0, 1, 2, 3]
    harness.schedule.slots = 1
    assert ids(harness.step()) == [11, 0, 1, 2, 3], "nobody is sent away for it"


def test_an_interactive_job_may_use_a_free_slot_too() -> None:
    harness = SchedulerHarness(400, slots=2, interactive_slots=1)
    for number in range(4):
        harness.submit(number, [number, 1], 50, "interactive")
    assert ids(harness.step()) == [0, 1, 2]


def test_interactive_jobs_enter_before_batch_jobs() -> None:
    harness = SchedulerHarness(400, slots=1, interactive_slots=0)
    harness.submit(1, [1, 1], 2)
    harness.submit(2, [2, 2], 2)
    harness.submit(3, [3, 3], 2, "interactive")
    harness.run()
    assert [harness.done[number].first_step for number in (3, 1, 2)] == [1, 3, 5]


@pytest.mark.parametrize("budget", [8, 16, 64, 512])
@pytest.mark.parametrize("slots", [1, 3, 8])
def test_a_cold_prefix_is_computed_once(budget: int, slots: int) -> None:
    harness = SchedulerHarness(400, slots=slots, budget=budget)
    for number in range(8):
        harness.submit(number, [*DIGEST, number, number, number], answer_tokens=4)
    harness.run()
    assert harness.schedule.totals.prompt_tokens_computed == 30 + 8 * 3
    assert harness.schedule.totals.prompt_tokens_reused == 7 * 30
    assert [harness.done[number].spent.reused for number in range(8)] == [0] + [30] * 7  # type: ignore[union-attr]


def test_jobs_that_wait_for_a_prefix_hold_no_slot() -> None:
    harness = SchedulerHarness(400, slots=2, budget=10)
    harness.submit(0, [*DIGEST, 0], 50)
    harness.submit(1, [*DIGEST, 1], 50)
    harness.submit(2, [9, 9], 50)
    harness.step()
    assert harness.schedule.totals.running == 2
    assert shape(harness.step()) == [(0, 10, False)]
    assert shape(harness.step()) == [(0, 10, False)]
    assert shape(harness.step()) == [(0, 1, True), (2, 2, True)]
    assert harness.jobs[1].first_step is None


def test_the_first_job_claims_first_even_after_waiting() -> None:
    harness = SchedulerHarness(400, slots=3, budget=10)
    harness.submit(0, [*DIGEST[:10], 0], 50)
    harness.submit(1, [*DIGEST[:10], *range(1, 10)], 50)
    harness.submit(2, [9] * 40, 50)
    assert shape(harness.step()) == [(0, 10, False)]
    assert shape(harness.step()) == [(0, 1, True), (1, 9, True)]
    assert harness.schedule.totals.running == 3


def test_a_follower_goes_on_where_their_prompts_part_not_where_the_leader_ends() -> None:
    harness = SchedulerHarness(400, slots=2, budget=10)
    harness.submit(0, [*DIGEST[:10], *range(40)], 50)
    harness.submit(1, [*DIGEST[:10], 99], 50)
    assert shape(harness.step()) == [(0, 10, False)]
    assert shape(harness.step()) == [(0, 10, False)]
    assert harness.schedule.spent(1).reused == 10


def test_followers_come_in_the_order_they_were_submitted() -> None:
    harness = SchedulerHarness(400, slots=2, budget=64)
    for number in range(5):
        harness.submit(number, [*DIGEST, number], answer_tokens=3)
    harness.run()
    assert [harness.done[number].first_step for number in range(5)] == sorted(
        job.first_step or 0 for job in harness.done.values()
    )


@pytest.mark.parametrize(("waiting", "running"), [(LOOK_AHEAD - 1, 3), (LOOK_AHEAD, 1)])
def test_looking_ahead_has_a_bound(waiting: int, running: int) -> None:
    harness = SchedulerHarness(400, slots=3, budget=10)
    for number in range(1 + waiting):
        harness.submit(number, [*DIGEST, number])
    harness.submit(1000, [9] * 10)
    harness.submit(1001, [8] * 10)
    harness.step()
    assert harness.schedule.totals.running == running


@pytest.mark.parametrize(("steps", "reused"), [(1, 10), (2, 20)])
def test_if_the_leader_is_cancelled_a_follower_continues_from_its_cells(steps: int, reused: int) -> None:
    harness = SchedulerHarness(400, slots=2, budget=10)
    harness.submit(0, [*DIGEST, 0])
    harness.submit(1, [*DIGEST, 1])
    harness.submit(2, [*DIGEST, 2])
    for _ in range(steps):
        harness.step()
    harness.cancel(0)
    harness.run()
    assert harness.done[1].spent == PromptCost(reused, 31 - reused, 0)
    assert harness.schedule.totals.prompt_tokens_computed == 30 + 2


def test_a_batch_job_inherits_the_priority_of_an_interactive_one_that_needs_its_prefix() -> None:
    harness = SchedulerHarness(400, slots=3, interactive_slots=3, budget=10)
    harness.submit("other", [7] * 40)
    harness.submit("leader", [*DIGEST, 0])
    harness.step()
    harness.submit("chat", [*DIGEST, 1], 1, "interactive")
    for _ in range(3):
        assert shape(harness.step()) == [("leader", 10, False)]
    assert shape(harness.step()) == [("chat", 1, True), ("other", 2, False)]
    assert shape(harness.step()) == [("other", 10, False)]


def test_a_batch_job_that_would_soon_be_preempted_is_not_let_in() -> None:
    harness = SchedulerHarness(64, slots=2, budget=64)
    harness.submit(0, [1] * 30, answer_tokens=10)
    harness.submit(1, [2] * 33, answer_tokens=10)  # 63 tokens, and two cells of headroom
    harness.submit(2, [3] * 2, answer_tokens=2)
    harness.step()
    assert harness.schedule.totals.running == 1, "nor is a smaller one let past it"
    harness.run()
    assert harness.schedule.totals.preemptions == 0


def test_no_batch_job_takes_the_cells_that_an_interactive_one_waits_for() -> None:
    harness = SchedulerHarness(64, slots=4, interactive_slots=1, budget=64)
    harness.submit(0, [1] * 30, 10, "interactive")
    harness.submit(1, [2] * 40, 10, "interactive")
    harness.submit(2, [3] * 4, 10)
    harness.step()
    assert harness.schedule.totals.running == 1
    harness.run()
    assert [harness.done[number].first_step for number in (0, 1, 2)] == [1, 11, 11]
    assert harness.schedule.totals.preemptions == 0


def test_what_others_have_promised_is_not_promised_again() -> None:
    harness = SchedulerHarness(64, slots=2, budget=4)
    harness.submit(0, [1] * 30, answer_tokens=2)
    harness.submit(1, [2] * 33, answer_tokens=2)
    harness.step()
    assert (harness.cache.used, harness.schedule.totals.running) == (4, 1)


def test_without_a_free_id_no_job_enters() -> None:
    harness = SchedulerHarness(64, slots=2, sequences=1)
    harness.submit(0, [1, 1], answer_tokens=2)
    harness.submit(1, [2, 2], answer_tokens=2)
    assert ids(harness.step()) == [0]
    harness.run()
    assert len(harness.done) == 2


def test_totals() -> None:
    harness = SchedulerHarness(200, slots=1)
    harness.submit(0, [*DIGEST, 0], answer_tokens=2)
    harness.submit(1, [*DIGEST, 1], answer_tokens=2)
    harness.submit(2, [*DIGEST, 2], answer_tokens=2)
    assert harness.schedule.totals.waiting == 3
    harness.step()
    totals = harness.schedule.totals
    assert (totals.running, totals.waiting, totals.prompt_tokens_computed) == (1, 2, 16)
    harness.run()
    totals = harness.schedule.totals
    assert (totals.running, totals.waiting, totals.evicted_tokens, totals.preemptions) == (0, 0, 0, 0)
    assert (totals.prompt_tokens_computed, totals.prompt_tokens_reused) == (33, 60)


def test_where_nothing_can_be_shared_every_job_computes_its_own() -> None:
    harness = SchedulerHarness(200, slots=4, shares=False)
    for number in range(4):
        harness.submit(number, [*DIGEST, number], answer_tokens=3)
    harness.run()
    assert harness.schedule.totals.prompt_tokens_computed == 4 * 31
    assert harness.cache.used == 0


def test_a_schedule_reads_well() -> None:
    """The loop of a worker, as the docstring has it."""
    cells = KvCells(50, 4)
    cache = PrefixCache(cells, total_cells=50, sequences=4, shares=True)
    schedule = StepScheduler(cache, slots=2, interactive_slots=1, budget=16, ubatch=16, context=50)
    schedule.submit("a", [1, 2, 3], "batch")
    answer: list[int] = []
    while len(answer) < 3:
        step = schedule.plan()
        for work in step.work:
            cells.decode(work.sequence, work.position, work.tokens)
        schedule.ran(step)
        for work in step.work:
            answer.append(len(answer))
            schedule.token(work.id, answer[-1])
    assert schedule.finish("a") == PromptCost(0, 3, 0)
