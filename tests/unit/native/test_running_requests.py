"""The reported progress of running sequences."""

from support.kv_cells import SchedulerHarness
from tokenmill.native.batching import RunningSequence

HEAD = list(range(100, 120))


def test_a_sequence_reads_its_prompt_and_then_answers() -> None:
    harness = SchedulerHarness(200, slots=2, interactive_slots=1, budget=8)
    harness.submit(1, HEAD, answer_tokens=3)
    assert harness.schedule.running_sequences() == []
    harness.step()
    assert harness.schedule.running_sequences() == [RunningSequence(1, "batch", "prompt", 20, 8, 0, 0)]
    harness.step()
    harness.step()
    assert harness.schedule.running_sequences() == [RunningSequence(1, "batch", "answer", 20, 20, 0, 1)]


def test_the_oldest_comes_first_and_reuse_is_reported() -> None:
    harness = SchedulerHarness(200, slots=2, interactive_slots=1, budget=32)
    harness.submit("first", HEAD, answer_tokens=9)
    harness.step()
    harness.submit("second", [*HEAD, 1, 2, 3], 9, "interactive")
    harness.step()
    first, second = harness.schedule.running_sequences()
    assert (first.id, second.id) == ("first", "second")
    assert (second.priority, second.doing, second.prompt_tokens, second.reused_tokens) == (
        "interactive",
        "answer",
        23,
        20,
    )
