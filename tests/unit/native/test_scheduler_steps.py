"""The length of a step, and the time to first token of an interactive job during an endless batch."""

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.kv_cells import SchedulerHarness
from tokenmill.native.batching import DecodeStep

UBATCH = 64
SHARE, FLOOR = UBATCH // 4, UBATCH // 16


def tokens_of(step: DecodeStep, id: object) -> int:
    return sum(len(work.tokens) for work in step.work if work.id == id)


def unlike(number: int, length: int) -> list[int]:
    """A prompt that shares nothing with another number's."""
    return [1000 + number] * length


class Busy:
    """A scheduler whose batch slots are always busy, with jobs waiting."""

    def __init__(self, slots: int = 2, *, prompt: int = 150, answer: int = 3) -> None:
        self.harness = SchedulerHarness(4000, slots=slots, interactive_slots=2, budget=4 * UBATCH, ubatch=UBATCH)
        self.slots, self.prompt, self.answer = slots, prompt, answer
        self._numbers = count()

    def step(self) -> DecodeStep:
        while sum(isinstance(job, int) for job in self.harness.jobs) < 2 * self.slots:
            number = next(self._numbers)
            self.harness.submit(number, unlike(number, self.prompt), self.answer)
        return self.harness.step()

    def batch_prompt_tokens(self) -> int:
        """Of the last step."""
        works = (work for work in self.harness.last.work if isinstance(work.id, int))
        return sum(len(work.tokens) for work in works if work.position < self.prompt)


@pytest.mark.parametrize(
    ("decodes", "budget", "tokens"),
    [
        (0, 256, 64),
        (1, 256, 64),
        (48, 256, 64),
        (49, 256, 128),  # less than a quarter would be left
        (64, 256, 128),
        (120, 256, 192),
        (49, 100, 100),  # the decoder has no room for more
        (0, 40, 40),
    ],
)
def test_a_step_is_one_micro_batch_unless_decodes_fill_it(decodes: int, budget: int, tokens: int) -> None:
    harness = SchedulerHarness(40_000, slots=decodes + 1, budget=budget, ubatch=UBATCH, sequences=decodes + 2)
    for number in range(decodes):
        harness.submit(number, unlike(number, 1), answer_tokens=99)
    while any(not job.answer for job in harness.jobs.values()):
        harness.step()
    harness.submit("prompt", unlike(500, 600))
    step = harness.step()
    assert step.tokens == tokens
    assert tokens_of(step, "prompt") == tokens - decodes


def test_during_an_interactive_answer_batch_prompts_have_a_quarter_and_batch_answers_continue() -> None:
    busy = Busy(prompt=400, answer=20)
    while not any(job.answer for job in busy.harness.jobs.values()):
        busy.step()
    decoding = next(name for name, job in busy.harness.jobs.items() if job.answer)
    busy.harness.submit("chat", unlike(900, 5), 30, "interactive")
    for _ in range(10):
        step = busy.step()
        assert tokens_of(step, decoding) == 1
        assert busy.batch_prompt_tokens() <= SHARE
    assert step.tokens == 2 + SHARE


def test_when_the_last_interactive_job_ends_steps_are_whole_again() -> None:
    busy = Busy(slots=1, prompt=1000)
    busy.step()
    busy.harness.submit("chat", unlike(900, 5), 3, "interactive")
    busy.harness.submit("other", unlike(901, 5), 4, "interactive")
    told = [(busy.step().tokens, busy.batch_prompt_tokens()) for _ in range(6)]
    assert told == [(26, 16), (18, 16), (18, 16), (17, 16), (64, 64), (64, 64)]


def test_a_batch_job_that_computes_an_interactive_ones_prefix_is_not_held_up() -> None:
    harness = SchedulerHarness(4000, slots=3, interactive_slots=1, budget=256, ubatch=UBATCH)
    for number in range(2):
        harness.submit(number, unlike(number, 1000))
    harness.submit("leader", unlike(900, 100))
    assert tokens_of(harness.step(), 0) == 64
    harness.submit("chat", [*unlike(900, 90), 7], 1, "interactive")
    step = harness.step()
    assert (tokens_of(step, "leader"), tokens_of(step, 0)) == (60, 4), "what it waits for is computed first"
    assert harness.jobs["chat"].first_step is None
    step = harness.step()
    assert (tokens_of(step, "leader"), tokens_of(step, 0)) == (40, 16)
    step = harness.step()
    assert (tokens_of(step, "chat"), tokens_of(step, 0)) == (1, 16)


def test_a_job_waiting_for_a_slot_delays_no_other() -> None:
    harness = SchedulerHarness(4000, slots=1, interactive_slots=0, budget=256, ubatch=UBATCH)
    harness.submit(0, unlike(0, 200))
    harness.step()
    harness.submit("chat", unlike(900, 5), 1, "interactive")
    assert harness.step().tokens == harness.step().tokens == UBATCH


def test_no_stream_of_interactive_prompts_stops_the_batch() -> None:
    harness = SchedulerHarness(4000, slots=1, interactive_slots=1, budget=256, ubatch=UBATCH)
    harness.submit("batch", unlike(0, 100))
    for number in count(1):
        if "batch" in harness.done:
            break
        harness.submit(number, unlike(number, 640), 1, "interactive")
        while number in harness.jobs:
            harness.step()
    assert harness.steps <= 100 // FLOOR + 1
    assert harness.schedule.totals.preemptions == 0


@pytest.mark.parametrize("prompt", [1, 20, 60])
@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("arrives_after", [1, 2, 3, 7])
def test_a_short_interactive_prompt_has_its_token_at_the_end_of_the_next_step(
    prompt: int, slots: int, arrives_after: int
) -> None:
    busy = Busy(slots)
    for _ in range(arrives_after):
        assert busy.step().tokens <= UBATCH
    busy.harness.submit("chat", unlike(900, prompt), 2, "interactive")
    step = busy.step()
    assert len(busy.harness.jobs["chat"].answer) == 1
    decodes = sum(len(work.tokens) == 1 for work in step.work if work.id != "chat")
    assert step.tokens <= min(UBATCH, prompt + decodes + SHARE), "and that step is not longer for the batch"


@settings(max_examples=80, deadline=None)
@given(
    slots=st.integers(1, 8),
    batch_prompt=st.integers(1, 200),
    answer=st.integers(1, 12),
    before=st.integers(0, 40),
    prompt=st.integers(1, 900),
)
def test_the_first_token_comes_after_its_own_prompt_and_hardly_more(
    slots: int, batch_prompt: int, answer: int, before: int, prompt: int
) -> None:
    """Whoever arrives during a step waits for its end, and then computes in steps that are his but for a little."""
    busy = Busy(slots, prompt=batch_prompt, answer=answer)
    for _ in range(before):
        busy.step()
        assert busy.harness.last.tokens <= UBATCH
    busy.harness.submit("chat", unlike(900, prompt), 3, "interactive")
    steps = tokens = 0
    while not busy.harness.jobs["chat"].answer:
        tokens += busy.step().tokens
        steps += 1
        assert busy.harness.last.tokens <= UBATCH
    assert steps == 1 or steps <= -(-prompt // (UBATCH - FLOOR - slots))
    assert tokens <= prompt + steps * (slots + FLOOR) + SHARE


def test_a_slot_is_free_for_the_next_one_in_the_step_after_a_cancellation() -> None:
    busy = Busy(slots=1, prompt=10, answer=500)
    busy.step()
    for number, name in enumerate(("chat", "chat 2", "chat 3")):
        busy.harness.submit(name, unlike(900 + number, 10), 500, "interactive")
    assert [work.id for work in busy.step().work] == [0, "chat", "chat 2"]
    busy.harness.cancel("chat")
    assert tokens_of(busy.step(), "chat 3") == 10
    busy.harness.cancel(0)
    assert tokens_of(busy.step(), 1) == 10
