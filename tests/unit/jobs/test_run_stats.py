"""Throughput and RunStats: measured rates, and the minimum prompt tokens of a run."""

import asyncio
from dataclasses import replace

import pytest

from support.fake_engine import FakeEngine
from tokenmill.engine.engine import Answer, Timings, Usage
from tokenmill.jobs.models import Counts, Job, State
from tokenmill.jobs.openai.call import Call
from tokenmill.jobs.scheduler.estimates import AnswerLengths, ExpectedJobs, MeasuredRates, RemainingWork
from tokenmill.jobs.scheduler.prefix_groups import Pending
from tokenmill.jobs.scheduler.shape import EngineShape
from tokenmill.jobs.worker import stats as stats_module
from tokenmill.jobs.worker.attempts import Attempt
from tokenmill.jobs.worker.progress import MinimumTokens, Snapshot
from tokenmill.jobs.worker.reuse import MinimumEstimate, counted
from tokenmill.jobs.worker.stats import RunStats
from tokenmill.jobs.worker.throughput import Throughput

ANSWER = Answer("yes", "stop", Usage(1000, 50, 900), Timings(0.0, 2.0, 10.0))


def test_rates_add_up_to_the_elapsed_time() -> None:
    throughput = Throughput()
    throughput.passed(20.0, in_flight=4)
    throughput.passed(5.0, in_flight=0)  # nothing to do: the engine's speed is not stats by it
    for _ in range(8):
        throughput.received(20)
        throughput.answered(ANSWER, received=20)
    assert (
        throughput.tokens.prompt,
        throughput.tokens.cached,
        throughput.tokens.computed,
        throughput.tokens.generated,
    ) == (
        8000,
        7200,
        800,
        400,
    )
    rates = throughput.rates()
    decode = rates.decode_at(4)
    assert rates.prefill_tok_s is not None
    assert decode is not None
    assert 800 / rates.prefill_tok_s + 400 / decode == pytest.approx(20.0)
    # a prompt's token took 20 ms of its lane and a written one 200 ms, four lanes at a time
    assert rates.prefill_tok_s / decode == pytest.approx((0.2 / 4) / 0.02)


def test_without_timings_there_is_one_rate_that_includes_prompts() -> None:
    throughput = Throughput()
    throughput.passed(10.0, in_flight=2)
    throughput.answered(replace(ANSWER, timings=Timings()), received=0)
    assert throughput.rates().prefill_tok_s is None
    assert throughput.rates().decode_at(8) == pytest.approx(5.0)


def test_rates_by_concurrency() -> None:
    throughput = Throughput()
    alone = throughput.mark
    throughput.passed(12.0, in_flight=1)
    throughput.answered(ANSWER, received=0, since=alone)
    assert throughput.by_concurrency().decode_tok_s == ()  # too few tokens
    throughput.answered(ANSWER, received=0, since=alone)
    mark = throughput.mark
    throughput.passed(10.0, in_flight=4)
    throughput.passed(1.0, in_flight=3)
    for _ in range(4):
        throughput.answered(replace(ANSWER, timings=Timings(0.0, 2.0, 20.0)), received=0, since=mark)
    found = throughput.by_concurrency()
    assert found.decode_tok_s == ((1, 5.0), (4, 10.0))
    assert found.prefill_tok_s == 50.0
    throughput.answered(replace(ANSWER, timings=Timings()), received=0, since=throughput.mark)  # no timings
    assert throughput.by_concurrency() == found


def test_short_suffixes_do_not_count_for_the_prefill_rate() -> None:
    throughput = Throughput()
    throughput.passed(10.0, in_flight=1)
    for _ in range(20):
        throughput.answered(replace(ANSWER, usage=Usage(1000, 50, 990), timings=Timings(0.0, 0.5, 10.0)), received=0)
    assert throughput.long_prefill_tok_s is None
    assert throughput.by_concurrency().prefill_tok_s == 20.0
    throughput.answered(replace(ANSWER, usage=Usage(1000, 50, 0), timings=Timings(0.0, 2.0, 10.0)), received=0)
    assert throughput.long_prefill_tok_s == throughput.by_concurrency().prefill_tok_s == 500.0


def test_rates_are_unknown_before_the_first_answer() -> None:
    throughput = Throughput()
    throughput.passed(10.0, in_flight=2)
    throughput.received(30)
    assert throughput.rates().decode_at(1) is None
    assert throughput.tokens.generated == 30


def test_the_minimum_is_estimated_from_bytes_and_counted_in_tokens() -> None:
    estimate = MinimumEstimate()
    estimate.add(b"head head head one", Usage(18, 1, 0))
    estimate.add(b"head head head two", Usage(18, 1, 15))
    assert round(estimate.tokens) == 18 + 3

    async def work() -> int | None:
        calls = [Call("completion", {"prompt": f"head head head {word}"}) for word in ("one", "two", "two")]
        return await counted(FakeEngine(), calls)

    assert asyncio.run(work()) == 18 + 3 + 1  # the last token of a prompt is always computed


def test_the_estimate_is_corrected_by_a_sample_if_not_all_can_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template's 50 tokens come behind every prompt, and bytes know nothing of them."""
    monkeypatch.setattr(stats_module, "MAX_COUNTED_JOBS", 4)
    stats = RunStats(EngineShape(reuse="shares", width=1), "native")
    head = b"h" * 90
    for number in range(4):
        stats.answered(_flight(number), ANSWER, head + b"tail" + bytes(6 * [65 + number]))
    assert stats.minimum(4 * 60 + 90) == MinimumTokens(4 * 60 + 90, exact=True)
    for number in range(4, 12):
        stats.answered(_flight(number), ANSWER, head + b"tail" + bytes(6 * [65 + number]))
    assert stats.sample == [0, 1, 2, 3]
    whole = stats.minimum(4 * 60 + 90)
    alone = stats.minimum(None)
    assert whole is not None
    assert alone is not None
    assert not whole.exact
    assert whole.tokens / alone.tokens == pytest.approx((4 * 60 + 90) / (1000 + 3 * 60), rel=0.01)


def _flight(number: int) -> Attempt:
    job = Job(number, f"job-{number}", State.RUNNING, None, None, 0, 100, None, None, 0, 0, "{}")
    return Attempt(job, Call("completion", {"prompt": "x"}), 100, 0.0, None, 0)


def test_a_forecast_counts_until_the_first_answer() -> None:
    expected = ExpectedJobs(RemainingWork(100.0, 50.0), MeasuredRates(200.0, ((1, 10.0), (4, 20.0))))
    stats = RunStats(EngineShape("shares", 4), "native", expected)
    lengths = AnswerLengths()

    def now(counts: Counts, in_flight: list[int]) -> Snapshot:
        return stats.snapshot(1.0, counts, in_flight=in_flight, retrying=0, lengths=lengths, down=None, output=None)

    first = now(Counts(pending=6, running=4), [0, 0, 0, 0])
    assert first.left == RemainingWork(1_000.0, 500.0)
    assert (first.eta_s, first.share, first.forecast) == (1_000 / 200 + 500 / 20, 0.0, True)
    decoding = now(Counts(pending=6, running=4), [10, 0, 0, 0])
    assert decoding.left == RemainingWork(1_000.0, 490.0)
    stats.throughput.passed(10.0, in_flight=1)
    stats.throughput.answered(ANSWER, received=0)
    lengths.finished(Pending(1, b"", 4_000), ANSWER.usage)
    after = now(Counts(pending=9, done=1), [])
    assert after.left == RemainingWork(9 * 100.0, 9 * 50.0)
    lengths.finished(Pending(2, b"", 4_000), replace(ANSWER.usage, cached_tokens=1_000))  # all of its prompt
    stats.throughput.answered(ANSWER, received=0)
    mean = (4 * 100.0 + 2 * 50.0) / 6  # the forecast counts as four jobs
    left = now(Counts(pending=8, done=2), []).left
    assert left is not None
    assert (left.prompt_tokens, left.output_tokens) == pytest.approx((8 * mean, 8 * 50.0))
    assert not after.forecast
    assert after.share == pytest.approx(0.1)
    unknown = RunStats(EngineShape("shares", 4), "native")
    assert (
        unknown.snapshot(
            1.0, Counts(pending=1), in_flight=[], retrying=0, lengths=AnswerLengths(), down=None, output=None
        ).eta_s
        is None
    )
