"""Admission of jobs, and the content of a step."""

import pytest

from support.kv_cells import KvCells, Mill
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
    mill = Mill(100, budget=8)
    mill.submit(1, list(range(20)), answer_tokens=3)
    assert shape(mill.step()) == [(1, 8, False)]
    assert shape(mill.step()) == [(1, 8, False)]
    assert shape(mill.step()) == [(1, 4, True)]
    assert shape(mill.step()) == [(1, 1, True)]
    assert mill.last.work[0].position == 20
    assert shape(mill.step()) == [(1, 1, True)]
    assert mill.done[1].spent == PromptCost(reused=0, computed=20, recomputed=0)
    assert shape(mill.step()) == []


def test_who_claims_first() -> None:
    """Decodes before prefills, interactive before batch, then by arrival."""
    mill = Mill(400, lanes=4, interactive_lanes=4, budget=10)
    mill.submit("batch decode", [1], 99)
    mill.submit("chat decode", [2], 99, "interactive")
    mill.step()
    mill.submit("batch prefill", [3] * 20)
    mill.submit("batch prefill 2", [4] * 20)
    mill.submit("chat prefill", [5] * 20, 1, "interactive")
    decodes = [("chat decode", 1, True), ("batch decode", 1, True)]
    assert shape(mill.step()) == [*decodes, ("chat prefill", 8, False)]
    assert shape(mill.step()) == [*decodes, ("chat prefill", 8, False)]
    assert shape(mill.step()) == [*decodes, ("chat prefill", 4, True), ("batch prefill", 2, False)]
    mill.cancel("chat decode")
    assert shape(mill.step()) == [decodes[1], ("batch prefill", 9, False)]
    assert shape(mill.step()) == [decodes[1], ("batch prefill", 9, True)]
    assert shape(mill.step()) == [decodes[1], ("batch prefill 2", 9, False)]


def test_where_they_do_not_mix_prompts_come_before_answers() -> None:
    """All slots start decoding together, except while urgent jobs run."""
    mill = Mill(400, lanes=3, budget=8)
    mill.schedule.mixes = False
    mill.submit("first", [1] * 4, 4)
    assert shape(mill.step()) == [("first", 4, True)]
    assert shape(mill.step()) == [("first", 1, True)]
    mill.submit("second", [2] * 12, 2)
    mill.submit("third", [3] * 3, 2)
    assert shape(mill.step()) == [("second", 8, False)]
    assert shape(mill.step()) == [("second", 4, True), ("third", 3, True)]
    assert shape(mill.step()) == [("first", 1, True), ("second", 1, True), ("third", 1, True)]
    mill.submit("chat", [4] * 6, 9, "interactive")
    assert shape(mill.step()) == [("first", 1, True), ("chat", 6, True)]
    mill.submit("fourth", [5] * 20)
    assert shape(mill.step()) == [("chat", 1, True), ("fourth", 2, False)]  # a quarter of a micro-batch


def test_where_they_do_not_mix_an_answer_is_not_held_up_by_who_comes_later() -> None:
    mill = Mill(400, lanes=3, interactive_lanes=0, budget=8)
    mill.schedule.mixes = False
    mill.submit("long", [1] * 4, 5)
    for number in range(200):
        mill.submit(number, [2 + number] * 8, 1)
    steps = [mill.step() for _ in range(20)]
    assert [number for number, step in enumerate(steps) if "long" in ids(step)] == [0, 3, 6, 9, 12]
    assert "long" in mill.done


def test_cells_are_kept_for_answers_that_wait_for_a_prompt() -> None:
    mill = Mill(24, lanes=2, interactive_lanes=0, budget=32)
    mill.schedule.mixes = False
    mill.submit("first", [1] * 10, 5)
    mill.step()
    mill.submit("second", [2] * 13, 1)
    mill.run()
    assert mill.schedule.totals.preemptions == 0
    assert len(mill.done["first"].answer) == 5


def test_a_budget_smaller_than_the_decodes_is_kept() -> None:
    mill = Mill(100, lanes=4, budget=2)
    for number in range(4):
        mill.submit(number, [number], answer_tokens=4)
    step = mill.step()
    assert 0 < step.tokens <= 2
    mill.run()
    assert {number: len(job.answer) for number, job in mill.done.items()} == dict.fromkeys(range(4), 4)


def test_a_budget_that_shrinks_is_kept() -> None:
    mill = Mill(100, lanes=4, budget=4)
    for number in range(4):
        mill.submit(number, [number], answer_tokens=4)
    assert ids(mill.step()) == ids(mill.step()) == [0, 1, 2, 3]
    mill.schedule.budget = 2
    assert ids(mill.step()) == [0, 1]
    mill.run()


def test_a_job_whose_token_has_not_come_is_left_out() -> None:
    mill = Mill(100)
    mill.schedule.submit("slow", [1, 2], "batch")
    step = mill.schedule.plan()
    mill.schedule.ran(step)
    assert mill.schedule.plan().work == ()
    mill.schedule.token("slow", 7)
    (work,) = mill.schedule.plan().work
    assert (work.tokens.tolist(), work.position, work.logits) == ([7], 2, True)


def test_lanes_bound_batch_jobs_and_interactive_ones_go_beyond() -> None:
    mill = Mill(400, lanes=2, interactive_lanes=1, budget=64)
    for number in range(4):
        mill.submit(number, [number, 1], answer_tokens=50)
    assert ids(mill.step()) == [0, 1]
    mill.submit(10, [10, 1], 3, "interactive")
    mill.submit(11, [11, 1], 50, "interactive")
    assert ids(mill.step()) == [0, 1, 10]
    mill.step()
    mill.step()
    assert ids(mill.step()) == [0, 1, 11], "ten has ended"
    mill.schedule.slots = 4
    assert ids(mill.step()) == [11, 0, 1, 2, 3]
    mill.schedule.slots = 1
    assert ids(mill.step()) == [11, 0, 1, 2, 3], "nobody is sent away for it"


def test_an_interactive_job_may_use_a_free_lane_too() -> None:
    mill = Mill(400, lanes=2, interactive_lanes=1)
    for number in range(4):
        mill.submit(number, [number, 1], 50, "interactive")
    assert ids(mill.step()) == [0, 1, 2]


def test_interactive_jobs_enter_before_batch_jobs() -> None:
    mill = Mill(400, lanes=1, interactive_lanes=0)
    mill.submit(1, [1, 1], 2)
    mill.submit(2, [2, 2], 2)
    mill.submit(3, [3, 3], 2, "interactive")
    mill.run()
    assert [mill.done[number].first_step for number in (3, 1, 2)] == [1, 3, 5]


@pytest.mark.parametrize("budget", [8, 16, 64, 512])
@pytest.mark.parametrize("lanes", [1, 3, 8])
def test_a_cold_head_is_computed_once(budget: int, lanes: int) -> None:
    mill = Mill(400, lanes=lanes, budget=budget)
    for number in range(8):
        mill.submit(number, [*DIGEST, number, number, number], answer_tokens=4)
    mill.run()
    assert mill.schedule.totals.prompt_tokens_computed == 30 + 8 * 3
    assert mill.schedule.totals.prompt_tokens_reused == 7 * 30
    assert [mill.done[number].spent.reused for number in range(8)] == [0] + [30] * 7  # type: ignore[union-attr]


def test_those_who_wait_for_a_head_hold_no_lane() -> None:
    mill = Mill(400, lanes=2, budget=10)
    mill.submit(0, [*DIGEST, 0], 50)
    mill.submit(1, [*DIGEST, 1], 50)
    mill.submit(2, [9, 9], 50)
    mill.step()
    assert mill.schedule.totals.running == 2
    assert shape(mill.step()) == [(0, 10, False)]
    assert shape(mill.step()) == [(0, 10, False)]
    assert shape(mill.step()) == [(0, 1, True), (2, 2, True)]
    assert mill.jobs[1].first_step is None


def test_who_came_first_claims_first_even_if_he_had_to_wait() -> None:
    mill = Mill(400, lanes=3, budget=10)
    mill.submit(0, [*DIGEST[:10], 0], 50)
    mill.submit(1, [*DIGEST[:10], *range(1, 10)], 50)
    mill.submit(2, [9] * 40, 50)
    assert shape(mill.step()) == [(0, 10, False)]
    assert shape(mill.step()) == [(0, 1, True), (1, 9, True)]
    assert mill.schedule.totals.running == 3


def test_a_follower_goes_on_where_their_prompts_part_not_where_the_leader_ends() -> None:
    mill = Mill(400, lanes=2, budget=10)
    mill.submit(0, [*DIGEST[:10], *range(40)], 50)
    mill.submit(1, [*DIGEST[:10], 99], 50)
    assert shape(mill.step()) == [(0, 10, False)]
    assert shape(mill.step()) == [(0, 10, False)]
    assert mill.schedule.spent(1).reused == 10


def test_followers_come_in_the_order_they_were_submitted() -> None:
    mill = Mill(400, lanes=2, budget=64)
    for number in range(5):
        mill.submit(number, [*DIGEST, number], answer_tokens=3)
    mill.run()
    assert [mill.done[number].first_step for number in range(5)] == sorted(
        job.first_step or 0 for job in mill.done.values()
    )


@pytest.mark.parametrize(("waiting", "running"), [(LOOK_AHEAD - 1, 3), (LOOK_AHEAD, 1)])
def test_looking_ahead_has_a_bound(waiting: int, running: int) -> None:
    mill = Mill(400, lanes=3, budget=10)
    for number in range(1 + waiting):
        mill.submit(number, [*DIGEST, number])
    mill.submit(1000, [9] * 10)
    mill.submit(1001, [8] * 10)
    mill.step()
    assert mill.schedule.totals.running == running


@pytest.mark.parametrize(("steps", "reused"), [(1, 10), (2, 20)])
def test_if_the_leader_is_cancelled_a_follower_goes_on_with_what_is_there(steps: int, reused: int) -> None:
    mill = Mill(400, lanes=2, budget=10)
    mill.submit(0, [*DIGEST, 0])
    mill.submit(1, [*DIGEST, 1])
    mill.submit(2, [*DIGEST, 2])
    for _ in range(steps):
        mill.step()
    mill.cancel(0)
    mill.run()
    assert mill.done[1].spent == PromptCost(reused, 31 - reused, 0)
    assert mill.schedule.totals.prompt_tokens_computed == 30 + 2


def test_an_interactive_job_lends_its_haste_to_the_batch_job_that_computes_its_head() -> None:
    mill = Mill(400, lanes=3, interactive_lanes=3, budget=10)
    mill.submit("other", [7] * 40)
    mill.submit("leader", [*DIGEST, 0])
    mill.step()
    mill.submit("chat", [*DIGEST, 1], 1, "interactive")
    for _ in range(3):
        assert shape(mill.step()) == [("leader", 10, False)]
    assert shape(mill.step()) == [("chat", 1, True), ("other", 2, False)]
    assert shape(mill.step()) == [("other", 10, False)]


def test_a_batch_job_that_would_soon_be_preempted_is_not_let_in() -> None:
    mill = Mill(64, lanes=2, budget=64)
    mill.submit(0, [1] * 30, answer_tokens=10)
    mill.submit(1, [2] * 33, answer_tokens=10)  # 63 tokens, and two cells of headroom
    mill.submit(2, [3] * 2, answer_tokens=2)
    mill.step()
    assert mill.schedule.totals.running == 1, "nor is a smaller one let past it"
    mill.run()
    assert mill.schedule.totals.preemptions == 0


def test_no_batch_job_takes_the_cells_that_an_interactive_one_waits_for() -> None:
    mill = Mill(64, lanes=4, interactive_lanes=1, budget=64)
    mill.submit(0, [1] * 30, 10, "interactive")
    mill.submit(1, [2] * 40, 10, "interactive")
    mill.submit(2, [3] * 4, 10)
    mill.step()
    assert mill.schedule.totals.running == 1
    mill.run()
    assert [mill.done[number].first_step for number in (0, 1, 2)] == [1, 11, 11]
    assert mill.schedule.totals.preemptions == 0


def test_what_others_have_promised_is_not_promised_again() -> None:
    mill = Mill(64, lanes=2, budget=4)
    mill.submit(0, [1] * 30, answer_tokens=2)
    mill.submit(1, [2] * 33, answer_tokens=2)
    mill.step()
    assert (mill.forest.used, mill.schedule.totals.running) == (4, 1)


def test_without_an_id_nobody_enters() -> None:
    mill = Mill(64, lanes=2, sequences=1)
    mill.submit(0, [1, 1], answer_tokens=2)
    mill.submit(1, [2, 2], answer_tokens=2)
    assert ids(mill.step()) == [0]
    mill.run()
    assert len(mill.done) == 2


def test_totals() -> None:
    mill = Mill(200, lanes=1)
    mill.submit(0, [*DIGEST, 0], answer_tokens=2)
    mill.submit(1, [*DIGEST, 1], answer_tokens=2)
    mill.submit(2, [*DIGEST, 2], answer_tokens=2)
    assert mill.schedule.totals.waiting == 3
    mill.step()
    totals = mill.schedule.totals
    assert (totals.running, totals.waiting, totals.prompt_tokens_computed) == (1, 2, 16)
    mill.run()
    totals = mill.schedule.totals
    assert (totals.running, totals.waiting, totals.evicted_tokens, totals.preemptions) == (0, 0, 0, 0)
    assert (totals.prompt_tokens_computed, totals.prompt_tokens_reused) == (33, 60)


def test_where_nothing_can_be_shared_every_job_computes_its_own() -> None:
    mill = Mill(200, lanes=4, shares=False)
    for number in range(4):
        mill.submit(number, [*DIGEST, number], answer_tokens=3)
    mill.run()
    assert mill.schedule.totals.prompt_tokens_computed == 4 * 31
    assert mill.forest.used == 0


def test_a_schedule_reads_well() -> None:
    """The loop of a worker, as the docstring has it."""
    cells = KvCells(50, 4)
    forest = PrefixCache(cells, total_cells=50, sequences=4, shares=True)
    schedule = StepScheduler(forest, slots=2, interactive_slots=1, budget=16, ubatch=16, context=50)
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
