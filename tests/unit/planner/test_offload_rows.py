"""A plan's forecast uses the offload threshold that the plan sets."""

from dataclasses import replace

import pytest

from support.run_models import model
from tokenmill.hardware.catalog import find
from tokenmill.planner.goal import DialectName, Goal
from tokenmill.planner.make import make
from tokenmill.planner.plan import Plan, Speed
from tokenmill.planner.speed.forecast import decode_speed, prefill_speed
from tokenmill.planner.speed.offload import choose_min_batch, effective_min_batch

KIMI = "kimi-k2.5:Q4_K_S"


def hybrid(sequences: int, *, engine: DialectName = "llama.cpp", rows: int | None = None) -> Plan:
    goal = Goal(context=4096, sequences=sequences, engine=engine, ubatch=512, offload_min_batch=rows)
    return make(find("epyc-9175f"), model(KIMI), goal)


def streamed(speed: Speed | None) -> bool:
    assert speed is not None
    return any(term.name.startswith("pcie") for term in speed.terms)


@pytest.mark.parametrize(
    ("sequences", "asked", "rows", "in_force"),
    [
        (16, None, None, 32),
        (31, None, None, 32),
        (32, None, 128, 128),
        (64, None, 128, 128),
        (128, None, 256, 256),
        (12, 128, 128, 128),
        (48, 32, 32, 32),
    ],
)
def test_rows_by_sequences(sequences: int, asked: int | None, rows: int | None, in_force: int) -> None:
    plan = hybrid(8)
    settings = replace(plan.settings, sequences=sequences)
    assert choose_min_batch(plan.machine, plan.profile, settings, plan.placement, asked) == rows
    set_so = replace(settings, offload_min_batch=rows)
    assert effective_min_batch(plan.profile, set_so, plan.placement) == in_force


def test_the_variable_is_unset_without_offloading() -> None:
    for plan in (
        make(find("epyc-9175f"), model(KIMI), Goal(context=4096, sequences=32, cpu_only=True, offload_min_batch=64)),
        make(find("h200-1x"), model("gpt-oss-120b:MXFP4_MOE"), Goal(context=4096, sequences=32)),
        hybrid(32, engine="ik_llama"),
    ):
        assert plan.settings.offload_min_batch is None
        assert effective_min_batch(plan.profile, plan.settings, plan.placement) is None


def test_a_plan_with_a_raised_threshold_forecasts_no_cliff() -> None:
    few, many = hybrid(16), hybrid(32)
    assert (few.settings.offload_min_batch, many.settings.offload_min_batch) == (None, 128)
    at = {speed.sequences: speed for speed in many.forecast.decode if speed.depth == 0}
    assert not any(streamed(at[count]) for count in (16, 32, 64))
    assert at[32].tok_s > at[16].tok_s
    assert not any("OFFLOAD" in note for note in many.forecast.notes)
    # an engine started for 16 sequences would offload with 32
    before = {speed.sequences: speed for speed in few.forecast.decode if speed.depth == 0}
    assert streamed(before[32])
    assert any("from 32 sequences" in note for note in few.forecast.notes)


def test_a_given_placement_keeps_the_callers_environment() -> None:
    own = hybrid(32)
    given = make(own.machine, own.profile, own.goal, placement=own.placement)
    assert given.settings.offload_min_batch is None
    assert any("from 32 sequences" in note for note in given.forecast.notes)
    asked = make(own.machine, own.profile, replace(own.goal, offload_min_batch=128), placement=own.placement)
    assert asked.settings == own.settings


def test_a_requested_threshold_applies() -> None:
    plan = hybrid(12, rows=64)
    given = (plan.machine, plan.profile, plan.settings, plan.placement)
    assert [streamed(decode_speed(*given, depth=0, sequences=count)) for count in (32, 63, 64)] == [False, False, True]
    assert [streamed(prefill_speed(*given, depth=0, prompt=count)) for count in (63, 64)] == [False, True]
    assert streamed(decode_speed(*given, depth=0, sequences=32, min_batch=32))
    assert any("from 64 sequences" in note for note in plan.forecast.notes)
