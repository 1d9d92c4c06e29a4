"""Preemption when cells run out, the end of jobs, and decoder failures."""

import pytest

from support.kv_cells import KvCells, Mill
from tokenmill.errors import RequestRefused, TooLong
from tokenmill.native.batching import DecodeStep, PromptCost
from tokenmill.native.kv.prefix_cache import PrefixCache


def ids(step: DecodeStep) -> list[object]:
    return [work.id for work in step.work]


def test_the_youngest_batch_job_yields_and_its_answer_goes_on() -> None:
    mill = Mill(40, lanes=3, budget=64)
    for number in range(3):
        mill.submit(number, [number] * 8, answer_tokens=20)
    preempted: list[object] = []
    while mill.jobs:
        preempted += mill.step().preempted
    assert preempted[0] == 2
    assert 0 not in preempted
    assert mill.schedule.totals.preemptions == len(preempted)
    alone = Mill(40)
    for number in range(3):
        alone.submit(number, [number] * 8, answer_tokens=20)
        alone.run()
        assert mill.done[number].answer == alone.done[number].answer
        spent = mill.done[number].spent
        assert spent is not None
        assert (spent.reused, spent.computed) == (0, 8)
    assert mill.schedule.totals.recomputed_tokens == sum(
        job.spent.recomputed for job in mill.done.values() if job.spent
    )


def test_a_preempted_job_is_first_in_the_queue() -> None:
    mill = Mill(40, lanes=2, budget=64)
    mill.submit(0, [0] * 10, answer_tokens=20)
    mill.submit(1, [1] * 10, answer_tokens=20)
    mill.submit(2, [2] * 10, answer_tokens=2)
    mill.submit(3, [3] * 10, answer_tokens=2)
    while 1 not in mill.step().preempted:
        pass
    assert [job.id for job in mill.schedule._queues["batch"]] == [1, 2, 3]
    while 0 in mill.jobs:
        mill.step()
    assert 1 in ids(mill.step())


def test_an_interactive_job_drives_out_batch_jobs_youngest_first() -> None:
    mill = Mill(40, lanes=2, budget=64)
    mill.submit(0, [0] * 15, answer_tokens=5)
    mill.submit(1, [1] * 15, answer_tokens=5)
    mill.step()
    mill.submit(2, [2] * 20, 3, "interactive")
    step = mill.step()
    assert step.preempted == (1,)
    assert ids(step) == [0, 2]
    mill.run()
    assert not any(job.cut_short for job in mill.done.values())


def test_even_the_oldest_batch_job_yields_to_an_interactive_one() -> None:
    mill = Mill(40, lanes=2, budget=64)
    mill.submit(0, [0] * 30, answer_tokens=9)
    mill.step()
    mill.submit(1, [1] * 38, 2, "interactive")
    preempted: list[object] = []
    while mill.jobs:
        preempted += mill.step().preempted
    assert preempted == [0]
    assert list(mill.done) == [1, 0]


def test_no_interactive_job_yields_to_a_batch_job() -> None:
    mill = Mill(40, lanes=2, interactive_lanes=1, budget=64)
    mill.submit(0, [0] * 10, answer_tokens=25)
    mill.submit(1, [1] * 10, 20, "interactive")
    preempted: list[object] = []
    while mill.jobs:
        preempted += mill.step().preempted
    assert 1 not in preempted
    assert list(mill.done) == [1, 0]


def test_among_interactive_jobs_the_youngest_yields() -> None:
    mill = Mill(40, lanes=2, budget=64)
    mill.submit(0, [0] * 10, 25, "interactive")
    mill.submit(1, [1] * 10, 25, "interactive")
    preempted: list[object] = []
    while mill.jobs:
        preempted += mill.step().preempted
    assert set(preempted) == {1}
    assert not any(job.cut_short for job in mill.done.values())


def test_idle_heads_go_before_anybody_yields() -> None:
    mill = Mill(64, lanes=2, budget=64)
    mill.submit(0, [0] * 40)
    mill.run()
    assert mill.forest.used == 40
    mill.submit(1, [1] * 20, answer_tokens=10)
    mill.submit(2, [2] * 20, answer_tokens=10)
    mill.run()
    assert mill.schedule.totals.preemptions == 0
    assert mill.schedule.totals.evicted_tokens >= 40 + 40 + 18 - 64


def test_what_a_preempted_job_had_is_used_again_as_far_as_it_is_there() -> None:
    mill = Mill(40, lanes=2, budget=64)
    mill.submit(0, [0] * 10, answer_tokens=12)
    mill.submit(1, [1] * 18, answer_tokens=12)
    preempted: list[object] = []
    while mill.jobs:
        preempted += mill.step().preempted
    assert preempted == [1]
    recomputed = mill.done[1].spent.recomputed  # type: ignore[union-attr]
    assert 0 < recomputed < 18


def test_a_preempted_job_whose_token_comes_later() -> None:
    mill = Mill(20, lanes=2, interactive_lanes=1, budget=64)
    schedule = mill.schedule
    schedule.submit("slow", [1] * 8, "batch")
    schedule.ran(step := schedule.plan())
    mill.cells.decode(step.work[0].sequence, 0, step.work[0].tokens)
    schedule.submit("chat", [2] * 18, "interactive")
    step = schedule.plan()
    assert ids(step) == ["chat"]
    mill.cells.decode(step.work[0].sequence, 0, step.work[0].tokens)
    schedule.ran(step)
    while "slow" not in step.preempted:
        schedule.token("chat", 3)
        step = schedule.plan()
        mill.cells.decode(step.work[0].sequence, step.work[0].position, step.work[0].tokens)
        schedule.ran(step)
    schedule.finish("chat")
    assert schedule.plan().work == (), "its logits are out, and must not be given twice"
    schedule.token("slow", 5)
    (work,) = schedule.plan().work
    assert work.tokens[-1] == 5
    assert work.position + len(work.tokens) == 9
    assert work.logits


@pytest.mark.parametrize(("cells", "context"), [(20, 20), (20, 100), (100, 20)])
def test_a_job_that_can_go_no_further_is_ended_for_length(cells: int, context: int) -> None:
    mill = Mill(cells, context=context)
    mill.submit(1, [1] * 10, answer_tokens=100)
    mill.run()
    assert mill.done[1].cut_short
    assert len(mill.done[1].answer) == 11, "the last token needs no cell"


def test_a_job_that_fills_the_cells_with_others_waiting() -> None:
    mill = Mill(20)
    mill.submit(1, [1] * 10, answer_tokens=100)
    mill.submit(2, [2] * 9, answer_tokens=11)
    mill.run()
    assert (mill.done[1].cut_short, mill.done[2].cut_short) == (True, False)


def test_pins_can_leave_too_little_for_a_prompt() -> None:
    mill = Mill(30)
    mill.submit(1, [1] * 20)
    mill.run()
    mill.forest.pin([1] * 20)
    mill.submit(2, [2] * 15)
    mill.run()
    assert mill.done[2].cut_short
    assert mill.done[2].answer == []


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_cancelling_frees_cells_at_once(steps: int) -> None:
    mill = Mill(100, budget=10)
    mill.submit(1, [1] * 15, answer_tokens=50)
    for _ in range(steps):
        mill.step()
    assert mill.forest.used == min(10 * steps, 15 + max(0, steps - 2))
    spent = mill.schedule.cancel(1)
    assert spent == PromptCost(0, min(10 * steps, 15), 0)
    assert mill.forest.used == mill.cells.used == 0
    assert mill.schedule.cancel(1) is None
    assert mill.schedule.plan() == DecodeStep(())


@pytest.mark.parametrize(("priority", "kept"), [("batch", 10), ("interactive", 14)])
def test_what_is_kept_unless_told(priority: str, kept: int) -> None:
    mill = Mill(100)
    mill.submit(1, [1] * 10, 5, "batch" if priority == "batch" else "interactive")
    mill.run()
    assert mill.forest.used == kept, "the last token of an answer is never decoded"


def test_what_is_kept_if_told() -> None:
    mill = Mill(100)
    mill.submit(1, [1] * 10, 5, "interactive", "nothing")
    mill.submit(2, [2] * 10, 5, "batch", "all")
    mill.run()
    assert mill.forest.used == 14


def test_what_was_generated_before_a_preemption_is_no_prompt_in_the_end() -> None:
    mill = Mill(40, lanes=2, budget=64)
    mill.submit(0, [0] * 30, answer_tokens=9)
    for _ in range(4):
        mill.step()
    mill.submit(1, [1] * 40, 1, "interactive", "nothing")
    mill.run()
    assert mill.schedule.totals.preemptions == 1
    assert mill.schedule.totals.recomputed_tokens == 33
    assert mill.forest.used == 30


@pytest.mark.parametrize("length", [0, 21])
@pytest.mark.parametrize(("cells", "context"), [(20, 30), (30, 20)])
def test_prompts_that_cannot_be_computed_are_refused(length: int, cells: int, context: int) -> None:
    mill = Mill(cells, context=context)
    with pytest.raises(RequestRefused) as refused:
        mill.schedule.submit(1, [1] * length, "batch")
    assert refused.value.hint
    if length:
        assert isinstance(refused.value, TooLong)
        assert (refused.value.needed_tokens, refused.value.context_tokens) == (21, 20)
    mill.schedule.submit(1, [1] * 20, "batch")
    with pytest.raises(ValueError, match="job 1"):
        mill.schedule.submit(1, [1], "batch")


def test_without_a_slot_idle_heads_go_then_the_youngest_then_the_last_is_ended() -> None:
    mill = Mill(100, lanes=3, budget=64)
    mill.submit(9, [9] * 10)
    mill.run()
    for number in range(3):
        mill.submit(number, [number] * 10, answer_tokens=30)
    mill.step()
    mill.schedule.plan()
    step = mill.schedule.failed_for_room()
    assert (mill.forest.used, ids(step), step.preempted) == (30, [0, 1, 2], ())
    step = mill.schedule.failed_for_room()
    assert (mill.forest.used, ids(step), step.preempted) == (20, [0, 1], (2,))
    step = mill.schedule.failed_for_room()
    assert (mill.forest.used, ids(step), step.preempted) == (10, [0], (1,))
    step = mill.schedule.failed_for_room()
    assert (ids(step), step.preempted, step.exhausted) == ([], (), (0,))
    mill.perform(step)
    mill.run()
    assert [job.cut_short for job in mill.done.values()].count(True) == 1


def test_after_a_missing_slot_nobody_enters_until_somebody_leaves() -> None:
    mill = Mill(100, lanes=3, budget=64)
    for number in range(3):
        mill.submit(number, [number] * 10, answer_tokens=4 + 20 * (number == 1))
    mill.step()
    mill.schedule.plan()
    step = mill.schedule.failed_for_room()
    assert step.preempted == (2,)
    while True:
        mill.perform(step)
        if 0 in mill.done:
            break
        assert ids(step) == [0, 1]
        step = mill.schedule.plan()
    assert ids(mill.step()) == [1, 2]


def test_interactive_jobs_are_the_last_to_go_when_there_is_no_slot() -> None:
    mill = Mill(100, lanes=2, interactive_lanes=2, budget=64)
    mill.submit(0, [0] * 10, 30)
    mill.submit(1, [1] * 10, 30, "interactive")
    mill.submit(2, [2] * 10, 30, "interactive")
    mill.step()
    mill.schedule.plan()
    assert mill.schedule.failed_for_room().preempted == (0,)
    assert mill.schedule.failed_for_room().preempted == (2,)
    assert mill.schedule.failed_for_room().exhausted == (1,)


def test_a_context_built_anew_loses_no_job() -> None:
    mill = Mill(100, lanes=3, budget=8)
    for number in range(4):
        mill.submit(number, [number] * 10, answer_tokens=8)
    for _ in range(6):
        mill.step()
    mill.forest.pin([1] * 5)
    mill.forest.evicted = 7
    mill.cells = KvCells(60, 4)
    mill.forest = PrefixCache(mill.cells, total_cells=60, sequences=4, shares=True)
    mill.schedule.restart(mill.forest)
    assert [job.id for job in mill.schedule._queues["batch"]] == [0, 1, 2, 3]
    assert mill.schedule.totals.running == 0
    mill.run()
    alone = Mill(100)
    for number in range(4):
        alone.submit(number, [number] * 10, answer_tokens=8)
        alone.run()
        assert mill.done[number].answer == alone.done[number].answer
    assert mill.schedule.totals.preemptions == 0
    assert mill.schedule.totals.evicted_tokens == 7, "counters go on"
    assert [pin.tolist() for pin in mill.forest.pins] == [[1] * 5]


def test_work_of_a_job_that_ended_meanwhile_is_not_recorded() -> None:
    mill = Mill(100)
    mill.schedule.submit(1, [1] * 10, "batch")
    step = mill.schedule.plan()
    mill.schedule.cancel(1)
    mill.schedule.ran(step)
    assert mill.forest.used == 0
