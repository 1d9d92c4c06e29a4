"""Decoding with offloaded experts: when it pays according to the forecast, and how plans and tuning use it.

The machine is an H200 with 16 slow cores, as measured; for comparison, an EPYC with twelve memory channels.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from prove_again import slice_profile
from prove_plans import placed
from prove_rows import read as read_rows

from support.run_models import model
from tokenmill.hardware import machine_file
from tokenmill.hardware.catalog import find
from tokenmill.hardware.machine import Machine
from tokenmill.native.worker_config import goal_for, max_slots, sequences_for
from tokenmill.planner.goal import DialectName, Goal
from tokenmill.planner.make import make
from tokenmill.planner.plan import Plan
from tokenmill.planner.speed.forecast import decode_speed
from tokenmill.planner.speed.offload import choose_min_batch, compare_offload, effective_min_batch
from tokenmill.tuner.point import Aim, Figures, Trial
from tokenmill.tuner.search.forecasts import forecaster
from tokenmill.tuner.search.search import Search
from tokenmill.tuner.search.space import MANY, SEQUENCES, space_for, start_for

FOLDER = Path(__file__).parents[3] / "docs" / "validation" / "h200-kimi-slice"
AIM = Aim(prompt_tokens=512, tail_tokens=32, output_tokens=64)


@cache
def h200() -> Machine:
    return machine_file.read(FOLDER / "machine.toml")


@cache
def hybrid(sequences: int | None = None, *, mmap: bool = False, context: int = 1024) -> Plan:
    goal = goal_for(Goal(context=context, sequences=sequences, mmap=mmap, repack=False, cache_type_k="f16"))
    profile = slice_profile()
    return make(h200(), profile, goal, placement=placed(h200(), profile, []))


@pytest.mark.parametrize(
    ("sequences", "mmap", "rows"),
    [
        (16, False, None),
        (32, False, 128),
        (64, False, None),
        (224, False, None),
        (16, True, None),
        (64, True, 128),
        (224, True, 256),
    ],
)
def test_the_threshold_is_kept_if_offloading_pays(sequences: int, mmap: bool, rows: int | None) -> None:
    plan = hybrid()
    settings = replace(plan.settings, sequences=sequences, mmap=mmap)
    assert choose_min_batch(plan.machine, plan.profile, settings, plan.placement) == rows
    assert choose_min_batch(plan.machine, plan.profile, settings, plan.placement, 96) == 96, "a requested value is kept"


def test_batches_too_small_for_offloading_stay_on_the_cpu() -> None:
    """With twice the cores, offloading pays from more rows on, and the threshold is where both are equally fast."""
    plan = hybrid()
    cpu = replace(plan.machine.cpu, cores=48)
    wide = replace(plan.machine, cpu=cpu)
    settings = replace(plan.settings, sequences=224, threads=40, threads_batch=40)
    rows = choose_min_batch(wide, plan.profile, settings, plan.placement)
    assert rows is not None
    assert 32 < rows <= 224
    below, above = (
        compare_offload(wide, plan.profile, replace(settings, sequences=count), plan.placement)
        for count in (rows // 2, rows)
    )
    assert below is not None
    assert below.gpu_tok_s < below.cpu_tok_s
    assert above is not None
    assert above.gpu_tok_s >= above.cpu_tok_s


def test_machines_without_bandwidths_have_no_comparison() -> None:
    plan = hybrid()
    bare = replace(plan.machine, measured=None, dram=replace(plan.machine.dram, nominal_gb_s=None))
    settings = replace(plan.settings, sequences=224)
    assert compare_offload(bare, plan.profile, settings, plan.placement) is None
    assert choose_min_batch(bare, plan.profile, settings, plan.placement) == 256


def test_a_plan_reports_that_decoding_is_offloaded() -> None:
    goal = replace(goal_for(Goal(context=1024, sequences=224, mmap=False, repack=False)), gpu_margin_bytes=130 << 30)
    plan = make(h200(), slice_profile(), goal)
    assert effective_min_batch(plan.profile, plan.settings, plan.placement) == 32
    (decision,) = [each for each in plan.decisions if each.name == "decoding"]
    assert "copied to the GPU" in decision.value
    assert "224 sequences" in decision.reason
    few = make(h200(), slice_profile(), replace(goal, sequences=8))
    assert not [each for each in few.decisions if each.name == "decoding"]


def test_predictions_agree_with_measurements() -> None:
    """In measurement and forecast, the GPU with 64 and 224 sequences is faster than the CPU with 16."""
    rows = read_rows([FOLDER], "speed")
    tok_s = {
        count: rows[f"experts on the CPU / 15t {count}s ub512 d512"]["measured"]["decode"] for count in (16, 64, 224)
    }
    assert tok_s[16] < tok_s[64] < tok_s[224]
    plan = hybrid(context=848)
    for count in (64, 224):
        found = compare_offload(plan.machine, plan.profile, replace(plan.settings, sequences=count), plan.placement)
        assert found is not None
        assert found.pays
        assert found.gpu_tok_s == pytest.approx(tok_s[count], rel=0.15)


def test_tuning_tries_many_sequences_only_if_offloading_may_pay() -> None:
    plan = hybrid()
    space = space_for(plan, AIM, cores=16, max_sequences=224)
    assert space.sequences[-len(MANY) :] == MANY
    assert space.offload_min_batch == (32,)
    assert max(space_for(plan, AIM, cores=16, max_sequences=128).sequences) == 128
    mapped = space_for(hybrid(mmap=True), AIM, cores=16, max_sequences=224)
    assert (max(mapped.sequences), mapped.offload_min_batch) == (max(SEQUENCES), (128,))
    fast = make(find("epyc-9175f"), model("kimi-k2.5:Q4_K_S"), Goal(context=4096, sequences=8))
    assert max(space_for(fast, AIM, cores=16, max_sequences=224).sequences) <= max(SEQUENCES)


def test_tuning_finds_many_sequences() -> None:
    """By the forecast, 24 sequences are better than 32, and 224 are best."""
    plan = hybrid()
    space, says = space_for(plan, AIM, cores=16, max_sequences=224), forecaster(plan, AIM)
    search = Search(space, AIM, start_for(plan, space), forecast=says, max_trials=18)
    while (dials := search.ask()) is not None:
        rate = says(dials)
        search.tell(Trial(dials, "measured", Figures(decode_tok_s=rate, jobs_tok_s=rate)))
    best = search.best()
    assert best is not None
    assert (best.dials.sequences, best.dials.offload_min_batch) == (224, 32)


def test_a_plan_that_has_many_is_tuned_without_gaps() -> None:
    space = space_for(hybrid(224), AIM, cores=16, max_sequences=224)
    assert space.sequences == (*SEQUENCES, *MANY)


def test_a_model_with_windows_has_fewer_slots() -> None:
    """Its cells need two ids each: see the native engine's contexts."""
    assert max_slots(model("gpt-oss-120b:MXFP4_MOE")) == 123
    assert sequences_for(123, 4) == 127
    assert max_slots(slice_profile()) == 251
    assert sequences_for(251, 4) == 255


def test_other_engines_tiles_and_draws_were_not_measured() -> None:
    """Nine sequences on a GPU are not slower than eight, and there is no term for sampling."""
    plan = hybrid()
    on_card = placed(h200(), plan.profile, list(range(plan.profile.layers)))
    engines: tuple[DialectName, ...] = ("ik_llama", "vllm")
    for engine in engines:
        settings = replace(plan.settings, engine=engine, output_rows=None)
        eight, nine = (
            decode_speed(plan.machine, plan.profile, settings, on_card, depth=512, sequences=count) for count in (8, 9)
        )
        assert eight is not None
        assert nine is not None
        assert nine.tok_s > eight.tok_s
        assert not any(term.name == "drawing tokens" for term in nine.terms)
