"""Narrow steps for interactive answers, and the counts of what limits the running batch jobs."""

from support.kv_cells import SchedulerHarness


def unlike(number: int, length: int) -> list[int]:
    return [1000 + number] * length


def harness(*, batch: int = 6, pauses: bool = True, narrow_rows: int = 4) -> SchedulerHarness:
    found = SchedulerHarness(4000, slots=8, interactive_slots=2, budget=256, ubatch=64)
    found.schedule.narrow_rows = narrow_rows
    found.schedule.pauses_batch = pauses
    for number in range(batch):
        found.submit(number, unlike(number, 5), answer_tokens=50)
    while not all(job.answer for job in found.jobs.values()):
        found.step()
    return found


def test_an_interactive_answer_is_decoded_without_the_batch_while_it_pauses() -> None:
    running = harness()
    running.submit("chat", unlike(90, 2), 5, "interactive")
    steps = [running.step() for _ in range(5)]
    assert [[work.id for work in step.work] for step in steps] == [["chat"]] * 5
    assert "chat" in running.done
    assert len(running.step().work) == 6


def test_the_batch_gets_a_step_when_the_pause_ends() -> None:
    running = harness()
    running.submit("chat", unlike(90, 2), 9, "interactive")
    assert len(running.step().work) == 1
    running.schedule.pauses_batch = False
    assert len(running.step().work) == 7
    running.schedule.pauses_batch = True
    assert len(running.step().work) == 1


def test_a_long_interactive_prompt_is_computed_together_with_the_batch() -> None:
    running = harness()
    running.submit("chat", unlike(90, 4), 3, "interactive")
    assert len(running.step().work) == 7
    assert [work.id for work in running.step().work] == ["chat"]


def test_without_interactive_jobs_the_pause_has_no_effect() -> None:
    assert len(harness().step().work) == 6


def test_paused_jobs_end_with_the_same_answers() -> None:
    running = harness()
    for number in range(3):
        running.submit(f"chat {number}", unlike(90 + number, 2), 7, "interactive")
    for step in range(400):
        running.schedule.pauses_batch = step % 5 != 0
        running.step()
    assert not running.jobs
    assert all(len(job.answer) == job.answer_tokens for job in running.done.values())


def test_a_step_counts_what_keeps_more_jobs_from_running() -> None:
    few = harness(batch=3)
    before = few.schedule.totals
    few.step()
    assert few.schedule.totals.slot_steps - before.slot_steps == 3
    assert few.schedule.totals.limited_steps["jobs"] == before.limited_steps["jobs"] + 1

    full = SchedulerHarness(4000, slots=2, budget=64)
    for number in range(5):
        full.submit(number, unlike(number, 5), answer_tokens=50)
    full.step()
    assert full.schedule.totals.limited_steps == {"slots": 1, "jobs": 0, "cells": 0, "prefix": 0, "prompts": 0}
    assert full.schedule.totals.slot_steps == 2

    small = SchedulerHarness(60, slots=4, budget=64)
    for number in range(4):
        small.submit(number, unlike(number, 25), answer_tokens=4)
    small.step()
    assert small.schedule.totals.limited_steps["cells"] == 1


def test_jobs_that_wait_for_a_prefix_are_counted() -> None:
    shared = SchedulerHarness(4000, slots=4, budget=16)
    for number in range(4):
        shared.submit(number, [*range(1, 40), 500 + number], answer_tokens=4)
    shared.step()
    assert shared.schedule.totals.limited_steps["prefix"] == 1
    assert shared.schedule.totals.slot_steps == 1


def test_interactive_steps_are_not_counted_as_batch_steps() -> None:
    running = harness()
    before = running.schedule.totals.limited_steps
    running.submit("chat", unlike(90, 2), 3, "interactive")
    running.step()
    assert running.schedule.totals.limited_steps == before
