"""Preemption when cells run out, the end of jobs, and decoder failures."""

import pytest

from support.kv_cells import KvCells, SchedulerHarness
from tokenmill.errors import RequestRefused, TooLong
from tokenmill.native.batching import DecodeStep, PromptCost
from tokenmill.native.kv.prefix_cache import PrefixCache


def ids(step: DecodeStep) -> list[object]:
    return [work.id for work in step.work]


def test_the_youngest_batch_job_yields_and_its_answer_goes_on() -> None:
    harness = SchedulerHarness(40, slots=3, budget=64)
    for number in range(3):
        harness.submit(number, [number] * 8, answer_tokens=20)
    preempted: list[object] = []
    while harness.jobs:
        preempted += harness.step().preempted
    assert preempted[0] == 2
    assert 0 not in preempted
    assert harness.schedule.totals.preemptions == len(preempted)
    alone = SchedulerHarness(40)
    for number in range(3):
        alone.submit(number, [number] * 8, answer_tokens=20)
        alone.run()
        assert harness.done[number].answer == alone.done[number].answer
        spent = harness.done[number].spent
        assert spent is not None
        assert (spent.reused, spent.computed) == (0, 8)
    assert harness.schedule.totals.recomputed_tokens == sum(
        job.spent.recomputed for job in harness.done.values() if job.spent
    )


def test_a_preempted_job_is_first_in_the_queue() -> None:
    harness = SchedulerHarness(40, slots=2, budget=64)
    harness.submit(0, [0] * 10, answer_tokens=20)
    harness.submit(1, [1] * 10, answer_tokens=20)
    harness.submit(2, [2] * 10, answer_tokens=2)
    harness.submit(3, [3] * 10, answer_tokens=2)
    while 1 not in harness.step().preempted:
        pass
    assert [job.id for job in harness.schedule._queues["batch"]] == [1, 2, 3]
    while 0 in harness.jobs:
        harness.step()
    assert 1 in ids(harness.step())


def test_an_interactive_job_drives_out_batch_jobs_youngest_first() -> None:
    harness = SchedulerHarness(40, slots=2, budget=64)
    harness.submit(0, [0] * 15, answer_tokens=5)
    harness.submit(1, [1] * 15, answer_tokens=5)
    harness.step()
    harness.submit(2, [2] * 20, 3, "interactive")
    step = harness.step()
    assert step.preempted == (1,)
    assert ids(step) == [0, 2]
    harness.run()
    assert not any(job.cut_short for job in harness.done.values())


def test_even_the_oldest_batch_job_yields_to_an_interactive_one() -> None:
    harness = SchedulerHarness(40, slots=2, budget=64)
    harness.submit(0, [0] * 30, answer_tokens=9)
    harness.step()
    harness.submit(1, [1] * 38, 2, "interactive")
    preempted: list[object] = []
    while harness.jobs:
        preempted += harness.step().preempted
    assert preempted == [0]
    assert list(harness.done) == [1, 0]


def test_no_interactive_job_yields_to_a_batch_job() -> None:
    harness = SchedulerHarness(40, slots=2, interactive_slots=1, budget=64)
    harness.submit(0, [0] * 10, answer_tokens=25)
    harness.submit(1, [1] * 10, 20, "interactive")
    preempted: list[object] = []
    while harness.jobs:
        preempted += harness.step().preempted
    assert 1 not in preempted
    assert list(harness.done) == [1, 0]


def test_among_interactive_jobs_the_youngest_yields() -> None:
    harness = SchedulerHarness(40, slots=2, budget=64)
    harness.submit(0, [0] * 10, 25, "interactive")
    harness.submit(1, [1] * 10, 25, "interactive")
    preempted: list[object] = []
    while harness.jobs:
        preempted += harness.step().preempted
    assert set(preempted) == {1}
    assert not any(job.cut_short for job in harness.done.values())


def test_idle_prefixes_are_evicted_before_a_job_is_preempted() -> None:
    harness = SchedulerHarness(64, slots=2, budget=64)
    harness.submit(0, [0] * 40)
    harness.run()
    assert harness.cache.used == 40
    harness.submit(1, [1] * 20, answer_tokens=10)
    harness.submit(2, [2] * 20, answer_tokens=10)
    harness.run()
    assert harness.schedule.totals.preemptions == 0
    assert harness.schedule.totals.evicted_tokens >= 40 + 40 + 18 - 64


def test_what_a_preempted_job_had_is_used_again_as_far_as_it_is_there() -> None:
    harness = SchedulerHarness(40, slots=2, budget=64)
    harness.submit(0, [0] * 10, answer_tokens=12)
    harness.submit(1, [1] * 18, answer_tokens=12)
    preempted: list[object] = []
    while harness.jobs:
        preempted += harness.step().preempted
    assert preempted == [1]
    recomputed = harness.done[1].spent.recomputed  # type: ignore[union-attr]
    assert 0 < recomputed < 18


def test_a_preempted_job_whose_token_comes_later() -> None:
    harness = SchedulerHarness(20, slots=2, interactive_slots=1, budget=64)
    schedule = harness.schedule
    schedule.submit("slow", [1] * 8, "batch")
    schedule.ran(step := schedule.plan())
    harness.cells.decode(step.work[0].sequence, 0, step.work[0].tokens)
    schedule.submit("chat", [2] * 18, "interactive")
    step = schedule.plan()
    assert ids(step) == ["chat"]
    harness.cells.decode(step.work[0].sequence, 0, step.work[0].tokens)
    schedule.ran(step)
    while "slow" not in step.preempted:
        schedule.token("chat", 3)
        step = schedule.plan()
        harness.cells.decode(step.work[0].sequence, step.work[0].position, step.work[0].tokens)
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
    harness = SchedulerHarness(cells, context=context)
    harness.submit(1, [1] * 10, answer_tokens=100)
    harness.run()
    assert harness.done[1].cut_short
    assert len(harness.done[1].answer) == 11, "the last token needs no cell"


def test_a_job_that_fills_the_cells_with_others_waiting() -> None:
    harness = SchedulerHarness(20)
    harness.submit(1, [1] * 10, answer_tokens=100)
    harness.submit(2, [2] * 9, answer_tokens=11)
    harness.run()
    assert (harness.done[1].cut_short, harness.done[2].cut_short) == (True, False)


def test_pins_can_leave_too_little_for_a_prompt() -> None:
    harness = SchedulerHarness(30)
    harness.submit(1, [1] * 20)
    harness.run()
    harness.cache.pin([1] * 20)
    harness.submit(2, [2] * 15)
    harness.run()
    assert harness.done[2].cut_short
    assert harness.done[2].answer == []


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_cancelling_frees_cells_at_once(steps: int) -> None:
    harness = SchedulerHarness(100, budget=10)
    harness.submit(1, [1] * 15, answer_tokens=50)
    for _ in range(steps):
        harness.step()
    assert harness.cache.used == min(10 * steps, 15 + max(0, steps - 2))
    spent = harness.schedule.cancel(1)
    assert spent == PromptCost(0, min(10 * steps, 15), 0)
    assert harness.cache.used == harness.cells.used == 0
    assert harness.schedule.cancel(1) is None
    assert harness.schedule.plan() == DecodeStep(())


@pytest.mark.parametrize(("priority", "kept"), [("batch", 10), ("interactive", 14)])
def test_what_is_kept_by_default(priority: str, kept: int) -> None:
    harness = SchedulerHarness(100)
    harness.submit(1, [1] * 10, 5, "batch" if priority == "batch" else "interactive")
    harness.run()
    assert harness.cache.used == kept, "the last token of an answer is never decoded"


def test_what_is_kept_on_request() -> None:
    harness = SchedulerHarness(100)
    harness.submit(1, [1] * 10, 5, "interactive", "nothing")
    harness.submit(2, [2] * 10, 5, "batch", "all")
    harness.run()
    assert harness.cache.used == 14


def test_what_was_generated_before_a_preemption_is_no_prompt_in_the_end() -> None:
    harness = SchedulerHarness(40, slots=2, budget=64)
    harness.submit(0, [0] * 30, answer_tokens=9)
    for _ in range(4):
        harness.step()
    harness.submit(1, [1] * 40, 1, "interactive", "nothing")
    harness.run()
    assert harness.schedule.totals.preemptions == 1
    assert harness.schedule.totals.recomputed_tokens == 33
    assert harness.cache.used == 30


@pytest.mark.parametrize("length", [0, 21])
@pytest.mark.parametrize(("cells", "context"), [(20, 30), (30, 20)])
def test_prompts_that_cannot_be_computed_are_refused(length: int, cells: int, context: int) -> None:
    harness = SchedulerHarness(cells, context=context)
    with pytest.raises(RequestRefused) as refused:
        harness.schedule.submit(1, [1] * length, "batch")
    assert refused.value.hint
    if length:
        assert isinstance(refused.value, TooLong)
        assert (refused.value.needed_tokens, refused.value.context_tokens) == (21, 20)
    harness.schedule.submit(1, [1] * 20, "batch")
    with pytest.raises(ValueError, match="job 1"):
        harness.schedule.submit(1, [1], "batch")


def test_without_a_slot_idle_prefixes_go_then_the_youngest_then_the_last_is_ended() -> None:
    harness = SchedulerHarness(100, slots=3, budget=64)
    harness.submit(9, [9] * 10)
    harness.run()
    for number in range(3):
        harness.submit(number, [number] * 10, answer_tokens=30)
    harness.step()
    harness.schedule.plan()
    step = harness.schedule.failed_for_room()
    assert (harness.cache.used, ids(step), step.preempted) == (30, [0, 1, 2], ())
    step = harness.schedule.failed_for_room()
    assert (harness.cache.used, ids(step), step.preempted) == (20, [0, 1], (2,))
    step = harness.schedule.failed_for_room()
    assert (harness.cache.used, ids(step), step.preempted) == (10, [0], (1,))
    step = harness.schedule.failed_for_room()
    assert (ids(step), step.preempted, step.exhausted) == ([], (), (0,))
    harness.perform(step)
    harness.run()
    assert [job.cut_short for job in harness.done.values()].count(True) == 1


def test_after_a_missing_slot_no_job_enters_until_one_ends() -> None:
    harness = SchedulerHarness(100, slots=3, budget=64)
    for number in range(3):
        harness.submit(number, [number] * 10, answer_tokens=4 + 20 * (number == 1))
    harness.step()
    harness.schedule.plan()
    step = harness.schedule.failed_for_room()
    assert step.preempted == (2,)
    while True:
        harness.perform(step)
        if 0 in harness.done:
            break
        assert ids(step) == [0, 1]
        step = harness.schedule.plan()
    assert ids(harness.step()) == [1, 2]


def test_interactive_jobs_are_the_last_to_go_when_there_is_no_slot() -> None:
    harness = SchedulerHarness(100, slots=2, interactive_slots=2, budget=64)
    harness.submit(0, [0] * 10, 30)
    harness.submit(1, [1] * 10, 30, "interactive")
    harness.submit(2, [2] * 10, 30, "interactive")
    harness.step()
    harness.schedule.plan()
    assert harness.schedule.failed_for_room().preempted == (0,)
    assert harness.schedule.failed_for_room().preempted == (2,)
    assert harness.schedule.failed_for_room().exhausted == (1,)


def test_a_context_built_anew_loses_no_job() -> None:
    harness = SchedulerHarness(100, slots=3, budget=8)
    for number in range(4):
        harness.submit(number, [number] * 10, answer_tokens=8)
    for _ in range(6):
        harness.step()
    harness.cache.pin([1] * 5)
    harness.cache.evicted = 7
    harness.cells = KvCells(60, 4)
    harness.cache = PrefixCache(harness.cells, total_cells=60, sequences=4, shares=True)
    harness.schedule.restart(harness.cache)
    assert [job.id for job in harness.schedule._queues["batch"]] == [0, 1, 2, 3]
    assert harness.schedule.totals.running == 0
    harness.run()
    alone = SchedulerHarness(100)
    for number in range(4):
        alone.submit(number, [number] * 10, answer_tokens=8)
        alone.run()
        assert harness.done[number].answer == alone.done[number].answer
    assert harness.schedule.totals.preemptions == 0
    assert harness.schedule.totals.evicted_tokens == 7, "counters go on"
    assert [pin.tolist() for pin in harness.cache.pins] == [[1] * 5]


def test_work_of_a_job_that_ended_meanwhile_is_not_recorded() -> None:
    harness = SchedulerHarness(100)
    harness.schedule.submit(1, [1] * 10, "batch")
    step = harness.schedule.plan()
    harness.schedule.cancel(1)
    harness.schedule.ran(step)
    assert harness.cache.used == 0
