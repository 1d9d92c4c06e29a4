"""Rates of a run from what its answers took, and what its prompts had to cost."""

import asyncio
from dataclasses import replace

import pytest

from support.fake_engine import FakeEngine
from tokenmill.engine.engine import Answer, Timings, Usage
from tokenmill.jobs.models import Job, State
from tokenmill.jobs.openai.call import Call
from tokenmill.jobs.scheduler.shape import EngineShape
from tokenmill.jobs.worker import stats as accounts_module
from tokenmill.jobs.worker.attempts import Attempt
from tokenmill.jobs.worker.progress import Least
from tokenmill.jobs.worker.reuse import Reckoned, counted
from tokenmill.jobs.worker.stats import RunStats
from tokenmill.jobs.worker.throughput import Throughput

ANSWER = Answer("yes", "stop", Usage(1000, 50, 900), Timings(0.0, 2.0, 10.0))


def test_rates_explain_the_time_that_passed() -> None:
    pace = Throughput()
    pace.passed(20.0, at_work=4)
    pace.passed(5.0, at_work=0)  # nothing to do: the engine's speed is not told by it
    for _ in range(8):
        pace.received(20)
        pace.answered(ANSWER, received=20)
    assert (pace.tokens.prompt, pace.tokens.cached, pace.tokens.computed, pace.tokens.generated) == (
        8000,
        7200,
        800,
        400,
    )
    rates = pace.rates()
    decode = rates.decode_at(4)
    assert rates.prefill_tok_s is not None
    assert decode is not None
    assert 800 / rates.prefill_tok_s + 400 / decode == pytest.approx(20.0)
    # a prompt's token took 20 ms of its lane and a written one 200 ms, four lanes at a time
    assert rates.prefill_tok_s / decode == pytest.approx((0.2 / 4) / 0.02)


def test_an_engine_that_does_not_say_has_one_rate_with_prompts_in_it() -> None:
    pace = Throughput()
    pace.passed(10.0, at_work=2)
    pace.answered(replace(ANSWER, timings=Timings()), received=0)
    assert pace.rates().prefill_tok_s is None
    assert pace.rates().decode_at(8) == pytest.approx(5.0)


def test_speeds_are_told_by_how_many_were_at_work() -> None:
    pace = Throughput()
    alone = pace.mark
    pace.passed(12.0, at_work=1)
    pace.answered(ANSWER, received=0, since=alone)
    assert pace.by_lanes().decode_tok_s == ()  # fifty tokens tell nothing
    pace.answered(ANSWER, received=0, since=alone)
    beside = pace.mark
    pace.passed(10.0, at_work=4)
    pace.passed(1.0, at_work=3)
    for _ in range(4):
        pace.answered(replace(ANSWER, timings=Timings(0.0, 2.0, 20.0)), received=0, since=beside)
    found = pace.by_lanes()
    assert found.decode_tok_s == ((1, 5.0), (4, 10.0))
    assert found.prefill_tok_s == 50.0
    pace.answered(replace(ANSWER, timings=Timings()), received=0, since=pace.mark)  # it tells no times
    assert pace.by_lanes() == found


def test_what_is_left_of_a_prompt_does_not_tell_what_its_head_takes() -> None:
    pace = Throughput()
    pace.passed(10.0, at_work=1)
    for _ in range(20):
        pace.answered(replace(ANSWER, usage=Usage(1000, 50, 990), timings=Timings(0.0, 0.5, 10.0)), received=0)
    assert pace.head_tok_s is None
    assert pace.by_lanes().prefill_tok_s == 20.0
    pace.answered(replace(ANSWER, usage=Usage(1000, 50, 0), timings=Timings(0.0, 2.0, 10.0)), received=0)
    assert pace.head_tok_s == pace.by_lanes().prefill_tok_s == 500.0


def test_nothing_is_known_before_the_first_answer() -> None:
    pace = Throughput()
    pace.passed(10.0, at_work=2)
    pace.received(30)
    assert pace.rates().decode_at(1) is None
    assert pace.tokens.generated == 30


def test_the_least_is_reckoned_from_bytes_and_counted_in_tokens() -> None:
    reckoned = Reckoned()
    reckoned.add(b"head head head one", Usage(18, 1, 0))
    reckoned.add(b"head head head two", Usage(18, 1, 15))
    assert round(reckoned.least) == 18 + 3

    async def work() -> int | None:
        calls = [Call("completion", {"prompt": f"head head head {word}"}) for word in ("one", "two", "two")]
        return await counted(FakeEngine(), calls)

    assert asyncio.run(work()) == 18 + 3 + 1  # the last token of a prompt is always computed


def test_what_cannot_all_be_counted_is_reckoned_and_corrected_by_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template's 50 tokens come behind every prompt, and bytes know nothing of them."""
    monkeypatch.setattr(accounts_module, "MOST_JOBS", 4)
    told = RunStats(EngineShape(reuse="shares", width=1), "native")
    head = b"h" * 90
    for number in range(4):
        told.answered(_flight(number), ANSWER, head + b"tail" + bytes(6 * [65 + number]))
    assert told.least(4 * 60 + 90) == Least(4 * 60 + 90, exact=True)
    for number in range(4, 12):
        told.answered(_flight(number), ANSWER, head + b"tail" + bytes(6 * [65 + number]))
    assert told.countable == [0, 1, 2, 3]
    whole = told.least(4 * 60 + 90)
    alone = told.least(None)
    assert whole is not None
    assert alone is not None
    assert not whole.exact
    assert whole.tokens / alone.tokens == pytest.approx((4 * 60 + 90) / (1000 + 3 * 60), rel=0.01)


def _flight(number: int) -> Attempt:
    job = Job(number, f"job-{number}", State.RUNNING, None, None, 0, 100, None, None, 0, 0, "{}")
    return Attempt(job, Call("completion", {"prompt": "x"}), 100, 0.0, None, 0)
