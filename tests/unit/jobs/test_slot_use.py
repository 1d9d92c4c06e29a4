"""Counts of slots per forward pass, over restarts of the engine and over several engines."""

from tokenmill.engine.engine import Counters
from tokenmill.jobs.worker.slot_use import SlotUse, combined


def counters(slot_steps: int, **limits: int) -> Counters:
    return Counters(slot_steps=slot_steps, limited_steps={"slots": 0, "jobs": 0, **limits})  # type: ignore[dict-item]


def test_the_difference_of_two_statuses_counts() -> None:
    use = SlotUse().plus(counters(70, slots=8, jobs=4), counters(10, slots=2))
    assert (use.steps, use.slot_steps) == (10, 60)
    assert use.slots == 6
    assert (use.share("slots"), use.share("jobs"), use.share("cells")) == (0.6, 0.4, 0.0)


def test_a_restarted_engine_counts_from_zero() -> None:
    use = SlotUse(5, 20, {"slots": 5}).plus(counters(6, jobs=2), counters(70, slots=8))
    assert (use.steps, use.slot_steps) == (7, 26)
    assert use.limited_steps == {"slots": 5, "jobs": 2}


def test_engines_that_do_not_count_change_nothing() -> None:
    use = SlotUse(5, 20, {"slots": 5})
    assert use.plus(Counters(), Counters()) is use
    assert SlotUse().slots == 0.0


def test_several_engines_are_summed() -> None:
    whole = combined([SlotUse(5, 20, {"slots": 5}), SlotUse(5, 10, {"jobs": 5})])
    assert (whole.steps, whole.slots, whole.share("jobs")) == (10, 3.0, 0.5)
