"""The number of slots: the choice among trials, and the measurement of an engine with known throughput."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from support.slot_engines import RatedEngine
from tokenmill.engine.engine import Request
from tokenmill.errors import EngineDied
from tokenmill.tuner.point import Figures, SlotPoint, SlotTrial
from tokenmill.tuner.slots import (
    EXTRA_ROUNDS,
    LIMIT_S,
    MIN_BATCH_RATIO,
    MIN_TRIAL_TOKENS,
    ROUNDS,
    TRIAL_TOKENS,
    Workload,
    choose,
    fit,
    measure,
    slot_counts,
    trial_tokens,
    worth_measuring,
)


def trials(*rates: float | None) -> list[SlotTrial]:
    return [SlotTrial(slots, Figures(decode_tok_s=rate)) for slots, rate in zip((1, 2, 4, 8, 16), rates, strict=False)]


@pytest.mark.parametrize(
    ("rates", "slots"),
    [
        ((100, 120, 140, 160, 180), 16),
        ((100, 120, 140, 160, 161), 8),  # twice the slots for nothing
        ((100, 99, 98, 90, 80), 1),
        ((100, 101, 102), 1),  # nearly as fast, and fewer
        ((100, 90, 140, 130, 120), 4),
        ((None, None), 1),  # an engine that reports no times
    ],
)
def test_the_smallest_number_that_is_nearly_the_fastest_wins(rates: tuple[float | None, ...], slots: int) -> None:
    assert choose(trials(*rates)).slots == slots


@pytest.mark.parametrize(("limit", "counts"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (24, (1, 2, 4, 8, 16, 24))])
def test_the_limit_itself_is_measured(limit: int, counts: tuple[int, ...]) -> None:
    assert slot_counts(limit) == counts


def test_only_long_batches_are_worth_measuring() -> None:
    worth = MIN_BATCH_RATIO * trial_tokens(8)
    assert worth_measuring(worth, 8)
    assert not worth_measuring(worth - 1, 8)
    assert not worth_measuring(1e9, 1)


def measured(engine: RatedEngine, requests: Sequence[Request], limit: int) -> SlotPoint:
    return asyncio.run(asyncio.wait_for(measure(engine, requests, limit), 10))


def prompts(count: int) -> list[Request]:
    return [Request(f"job {number}") for number in range(count)]


def test_an_engine_is_measured_and_left_with_its_best_number() -> None:
    engine = RatedEngine({1: 50.0, 2: 70.0, 4: 90.0, 8: 80.0})
    requests = [replace(request, max_tokens=900, slot=3, stop=("x",)) for request in prompts(8)]
    assert measured(engine, requests, 8).slots == 4
    assert engine.set_to == [1, 1, 2, 4, 8, 1, 2, 4, 8, 4]
    assert {request.max_tokens for request in engine.requests} == {1, MIN_TRIAL_TOKENS, TRIAL_TOKENS}
    assert all(request.ignore_eos and request.slot is None and not request.stop for request in engine.requests)


def test_the_point_has_the_figures() -> None:
    point = measured(RatedEngine({1: 41.25, 2: 60.5}), prompts(2), 2)
    assert dict(point.decode_tok_s) == pytest.approx({1: 41.25, 2: 60.5})
    assert point.measured
    assert "1: 41.2, 2: 60.5" in (point.slots_reason or "")


def test_figures_that_fall_are_measured_again() -> None:
    engine = RatedEngine({1: 50.0, 2: 30.0})
    assert measured(engine, prompts(2), 2).slots == 1
    assert engine.set_to.count(2) == ROUNDS + EXTRA_ROUNDS


def test_few_requests_limit_the_slots() -> None:
    engine = RatedEngine({1: 50.0, 2: 70.0, 3: 90.0})
    assert measured(engine, prompts(3), 16).slots == 3


def test_a_slow_engine_generates_less_and_skips_what_would_take_too_long() -> None:
    engine = RatedEngine({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0, 16: 1.0})
    point = asyncio.run(measure(engine, prompts(16), 16))
    assert max(request.max_tokens or 0 for request in engine.requests) == MIN_TRIAL_TOKENS
    assert 16 * MIN_TRIAL_TOKENS > LIMIT_S
    assert [trial.slots for trial in point.trials] == [1, 2, 4, 8]
    assert point.slots == 1
    assert "60 s" in (point.slots_reason or "")


def test_a_short_batch_gets_less_time() -> None:
    engine = RatedEngine({1: 50.0, 2: 50.0, 4: 50.0})
    point = asyncio.run(measure(engine, prompts(4), 4, expected_tokens=500.0))  # ten seconds of work: half a second
    assert max(request.max_tokens or 0 for request in engine.requests) == MIN_TRIAL_TOKENS
    assert "0.5 s" in (asyncio.run(measure(engine, prompts(16), 16, expected_tokens=500.0)).slots_reason or "")
    assert point.slots == 1


def test_a_number_with_which_it_hangs_ends_the_measurement_and_its_streams() -> None:
    engine = RatedEngine({1: 50.0, 2: 90.0, 4: 90.0}, max_slots=4, hangs_at=4)
    point = asyncio.run(asyncio.wait_for(measure(engine, prompts(4), 4, limit_s=0.3), 10))
    assert [trial.slots for trial in point.trials] == [1, 2]
    assert engine.closed == 4
    assert point.slots == engine.slots == 4  # two were faster than one, and the engine has four


def test_an_engine_that_generates_nothing_in_time_keeps_its_own_number() -> None:
    engine = RatedEngine({1: 50.0}, max_slots=6, hangs_at=1)
    point = asyncio.run(asyncio.wait_for(measure(engine, prompts(6), 6, limit_s=0.05), 10))
    assert (point.slots, point.trials, point.measured) == (6, (), True)
    assert engine.slots == 6


def test_refused_prompts_do_not_count() -> None:
    engine = RatedEngine({1: 50.0, 2: 70.0})
    requests = [Request("a long one"), Request("one"), Request("another long one"), Request("two")]
    assert measured(engine, requests, 2).slots == 2
    assert measured(RatedEngine({1: 50.0}, max_slots=2), requests[:2], 2).slots == 1
    assert measured(RatedEngine({}, max_slots=2), requests[:1], 2).slots == 2


def test_each_trial_is_reported() -> None:
    reported: list[str] = []
    asyncio.run(measure(RatedEngine({1: 50.0, 2: 70.0}), prompts(2), 2, report=reported.append))
    assert len(reported) == 2 * ROUNDS
    assert ["1 slot" in text for text in reported] == [True, False] * ROUNDS


LONG = Workload(pending_jobs=100, output_tokens=1e6, requests=tuple(prompts(4)))


def test_fit_measures_a_long_workload() -> None:
    engine = RatedEngine({1: 50.0, 2: 70.0}, max_slots=2)
    point = asyncio.run(fit(engine, LONG))
    assert (point.slots, point.measured, engine.slots) == (2, True, 2)


@pytest.mark.parametrize("workload", [replace(LONG, output_tokens=100.0), replace(LONG, requests=())])
def test_fit_leaves_the_slots_of_short_workloads_and_of_those_without_requests(workload: Workload) -> None:
    engine = RatedEngine({1: 50.0, 2: 70.0}, max_slots=2)
    point = asyncio.run(fit(engine, workload))
    assert (point.slots, point.measured, point.trials) == (2, False, ())
    assert engine.set_to == []


def test_fit_does_not_measure_what_is_known() -> None:
    engine = RatedEngine({1: 50.0, 2: 70.0}, max_slots=2)
    known = asyncio.run(fit(engine, LONG))
    engine.set_to.clear()
    assert asyncio.run(fit(engine, LONG, known=known)) == known
    assert engine.set_to == []
    assert asyncio.run(fit(engine, LONG, known=SlotPoint(1, None))).measured  # it was not measured before


def test_an_engine_that_fails_while_it_is_measured_keeps_its_own_number() -> None:
    engine = RatedEngine({1: 50.0}, max_slots=2, fails_at=(2, EngineDied("killed")))
    point = asyncio.run(fit(engine, LONG))
    assert (point.slots, point.measured) == (2, False)
