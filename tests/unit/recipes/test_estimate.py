"""Tokens, hours and costs of a recipe before it runs."""

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.api.engines.speeds import EngineSpeeds
from tokenmill.jobs.lint.run import Lint
from tokenmill.jobs.scheduler.estimates import MeasuredRates
from tokenmill.recipes.estimate import KnownCosts, RecipeForecast, StageForecast, forecast
from tokenmill.recipes.history import Lengths
from tokenmill.recipes.runner import Budget, Line, Prospect, StageProspect, chat_line

HEAD = "You write one line about a thing. " * 40
FAST = EngineSpeeds(
    MeasuredRates(100.0, ((1, 10.0), (8, 40.0))),
    8,
    measured=True,
    source="measured",
    confidence="measured",
    load_s=60.0,
)


def words(text: str) -> int:
    """A tokenizer with one token per word."""
    return max(1, len(text.split()))


def asked(count: int, *, head: str = HEAD, tokens: int | None = 50, first: int = 0) -> tuple[Line, ...]:
    return tuple(
        chat_line(
            f"n{number}",
            [
                {"role": "system", "content": head},
                {"role": "user", "content": f"Thing number {number:06} of the list, in one line."},
            ],
            max_tokens=tokens,
        )
        for number in range(first, first + count)
    )


def reckoned(*stages: StageProspect, speeds: EngineSpeeds | None = FAST, **known: Any) -> RecipeForecast:
    return forecast(Prospect(stages, rows=7, notes=("mind the gap",)), lambda _depth: speeds, KnownCosts(**known))


def stage(count: int = 100, **more: Any) -> StageProspect:
    lines = asked(count)
    return StageProspect(**{"stage": "write", "jobs": count, "lines": lines, "output_tokens": 50, **more})


def test_a_shared_prefix_is_computed_once() -> None:
    found = reckoned(stage(), count=words)
    (one,) = found.stages
    whole, head = 100 * words(HEAD), words(HEAD)
    assert one.prompt_tokens == pytest.approx(whole + 100 * 9, rel=0.03)
    assert head < one.computed_tokens < head + 100 * 9 + 60
    assert one.output_tokens == 100 * 50
    assert one.expected_output_tokens is None
    assert (found.counted, found.rows, found.notes) == (True, 7, ("mind the gap",))


def test_the_estimate_agrees_with_lint() -> None:
    look = Lint(count=words)
    for number, line in enumerate(asked(100), 1):
        look.add(number, json.dumps(line))
    report = look.report()
    (one,) = reckoned(stage(), count=words).stages
    assert one.prompt_tokens == report.tokens(report.prompt_bytes)
    assert one.computed_tokens == report.tokens(report.compute_bytes)


@settings(max_examples=15, deadline=None)
@given(jobs=st.integers(60, 400), share=st.floats(0.2, 1.0), heads=st.integers(1, 4))
def test_a_sample_is_extrapolated(jobs: int, share: float, heads: int) -> None:
    texts = [HEAD + f"Manner {letter}." for letter in "abcd"[:heads]]
    lines = [asked(1, head=texts[number % heads], first=number)[0] for number in range(jobs)]
    sample = tuple(lines[: max(24, int(share * jobs))])
    full = reckoned(stage(jobs, lines=tuple(lines)), count=words).stages[0]
    some = reckoned(stage(jobs, lines=sample), count=words).stages[0]
    assert some.jobs == full.jobs == jobs
    assert some.prompt_tokens == pytest.approx(full.prompt_tokens, rel=0.05)
    assert some.computed_tokens == pytest.approx(full.computed_tokens, rel=0.15)
    assert some.output_tokens == full.output_tokens


def test_without_lines_bytes_are_used() -> None:
    blind = StageProspect("judge", 10, prompt_bytes=40_000, shared_bytes=3_000, output_tokens=5, assumed="mean lengths")
    (one,) = reckoned(blind).stages
    assert (one.prompt_tokens, one.computed_tokens, one.output_tokens) == (10_000, 3_250, 50)
    found = reckoned(stage(), blind, count=words)
    assert found.stages[1].prompt_tokens == round(40_000 / found.bytes_per_token)
    assert found.assumed == ("judge: mean lengths",)
    assert not reckoned(blind, count=words).counted


def test_time_is_prefill_plus_decode() -> None:
    found = reckoned(stage(), count=words)
    (one,) = found.stages
    work_s = one.computed_tokens / 100 + 5000 / 40
    assert one.seconds == pytest.approx(work_s)
    assert found.seconds == pytest.approx(work_s + 60)
    assert (one.expected_s, found.expected_s) == (None, None)


def test_few_jobs_do_not_fill_the_slots() -> None:
    (one,) = reckoned(stage(1), count=words).stages
    assert one.seconds == pytest.approx(one.computed_tokens / 100 + 50 / 10)


def test_expected_lengths_come_from_earlier_answers() -> None:
    known = {"write": Lengths(0.3, 120, same_stage=True)}
    found = reckoned(stage(), lengths=known)
    (one,) = found.stages
    assert (one.output_tokens, one.expected_output_tokens, one.lengths) == (5000, 1500, known["write"])
    assert one.expected_s is not None
    assert one.seconds is not None
    assert one.seconds - one.expected_s == pytest.approx(3500 / 40)
    mixed = reckoned(stage(), stage(stage="judge"), lengths=known)
    assert (mixed.total.expected_output_tokens, mixed.expected_s) == (None, None)


def test_answered_lines_cost_nothing() -> None:
    found = reckoned(stage(), settled={"write": frozenset(range(60))}, count=words)
    (one,) = found.stages
    assert (one.jobs, one.answered, one.output_tokens) == (40, 60, 2000)
    rest = reckoned(stage(40, lines=asked(40, first=60)), count=words).stages[0]
    assert (one.prompt_tokens, one.computed_tokens) == (rest.prompt_tokens, rest.computed_tokens)


def test_a_finished_recipe_takes_no_time_and_no_load() -> None:
    found = reckoned(stage(), settled={"write": frozenset(range(100))}, count=words, per_hour=2.0)
    assert (found.total.jobs, found.total.answered, found.seconds, found.cost) == (0, 100, 0.0, 0.0)
    assert found.counted


def test_without_a_speed_only_tokens_are_estimated() -> None:
    found = reckoned(stage(), speeds=None, per_hour=1.0, budget=Budget(seconds=3600))
    assert found.total.output_tokens == 5000
    assert (found.seconds, found.cost, found.runs, found.stages[0].seconds) == (None, None, None, None)


def test_costs_are_hours_times_the_price() -> None:
    found = reckoned(stage(), per_hour=3.6, lengths={"write": Lengths(0.5, 9, same_stage=False)})
    assert found.seconds is not None
    assert found.expected_s is not None
    assert found.cost == pytest.approx(found.seconds / 1000)
    assert found.expected_cost == pytest.approx(found.expected_s / 1000)
    assert reckoned(stage()).cost is None


@pytest.mark.parametrize(
    ("budget", "runs"),
    [
        (Budget(), lambda total: None),
        (Budget(tokens=1000), lambda total: math.ceil((total.computed_tokens + total.output_tokens) / 1000)),
        (Budget(tokens=10**9), lambda total: 1),
        (Budget(seconds=90.0), lambda total: math.ceil(total.seconds / 30)),
        (Budget(tokens=10**9, seconds=90.0), lambda total: math.ceil(total.seconds / 30)),
        (Budget(seconds=60.0), lambda total: None),  # loading takes all of it
    ],
)
def test_a_budget_divides_the_work_into_runs(budget: Budget, runs: Any) -> None:
    found = reckoned(stage(), budget=budget)
    assert found.runs == runs(found.total)


def test_lines_that_do_not_fit_are_named() -> None:
    found = reckoned(stage(), count=words, context=words(HEAD))
    assert len(found.notes) == 2
    assert found.notes[1].startswith("write: prompts do not fit the context; line ")


def test_max_tokens_of_each_line_count() -> None:
    lines = (*asked(2, tokens=10), *asked(1, tokens=None, first=2))
    (one,) = reckoned(stage(3, lines=lines, output_tokens=100)).stages
    assert one.output_tokens == 120


def test_speeds_are_requested_for_the_middle_of_an_answer() -> None:
    depths: list[int] = []

    def speeds(depth: int) -> EngineSpeeds:
        depths.append(depth)
        return FAST

    one = forecast(Prospect((stage(),)), speeds, KnownCosts(count=words)).stages[0]
    assert depths == [round(one.prompt_tokens / 100 + 25)]


def test_the_total_is_the_sum_of_the_stages() -> None:
    found = reckoned(
        stage(),
        stage(20, stage="judge"),
        lengths={name: Lengths(0.5, 9, same_stage=True) for name in ("write", "judge")},
    )

    def summed(name: str) -> float:
        values: Sequence[float] = [getattr(one, name) for one in found.stages]
        return sum(values)

    total: StageForecast = found.total
    for name in ("jobs", "answered", "prompt_tokens", "computed_tokens", "output_tokens", "seconds", "expected_s"):
        assert getattr(total, name) == pytest.approx(summed(name))


def test_the_number_of_answered_jobs_is_extrapolated() -> None:
    found = reckoned(stage(1000, lines=asked(100)), settled={"write": frozenset(range(25))}, count=words)
    (one,) = found.stages
    assert (one.jobs, one.answered, one.output_tokens) == (750, 250, 750 * 50)
    assert any(note.startswith("write: ") and "100 lines" in note for note in found.notes)
    done = reckoned(stage(1000, lines=asked(100)), settled={"write": frozenset(range(100))}, count=words)
    assert (done.total.jobs, done.total.computed_tokens, done.seconds) == (0, 0, 0.0)


def test_more_lines_than_jobs_cost_no_more() -> None:
    more, same = stage(20, lines=asked(100)), stage(20, lines=asked(20))
    assert reckoned(more, count=words).stages == reckoned(same, count=words).stages


def test_blocks_of_adjacent_lines_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    full = reckoned(stage(600), count=words).stages[0]
    monkeypatch.setattr("tokenmill.recipes.estimate._BLOCKS", 5)
    some = reckoned(stage(600), count=words).stages[0]
    assert (some.jobs, some.output_tokens) == (full.jobs, full.output_tokens)
    assert some.prompt_tokens == pytest.approx(full.prompt_tokens, rel=0.05)
    assert some.computed_tokens == pytest.approx(full.computed_tokens, rel=0.15)
