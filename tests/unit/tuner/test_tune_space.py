"""The values of a plan's settings in the search space."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.hardware.catalog import find
from tokenmill.model.read import read
from tokenmill.planner.goal import Goal
from tokenmill.planner.make import make
from tokenmill.planner.plan import Plan
from tokenmill.tuner.point import Aim, TrialSettings
from tokenmill.tuner.search.forecasts import fits, forecaster
from tokenmill.tuner.search.space import Space, space_for, start_for


@cache
def plan(model: str, machine: str, **goal: Any) -> Plan:
    return make(find(machine), read(model), Goal(**goal))


def small(**goal: Any) -> Plan:
    return plan("qwen3-32b:Q4_K_M", "h200-1x", **{"context": 16384, "sequences": 4, **goal})


def hybrid(**goal: Any) -> Plan:
    """Experts in host memory, everything else on the GPU."""
    return plan("kimi-k2.5:Q4_K_S", "epyc-9175f", **{"context": 4096, "sequences": 32, **goal})


def test_threads_are_physical_cores_less_the_reserve() -> None:
    assert space_for(small(), Aim(), cores=16, max_sequences=64).threads == tuple(range(1, 17))
    kept = space_for(small(reserve_cores=3), Aim(), cores=16, max_sequences=64)
    assert kept.threads == tuple(range(1, 14))
    assert max(kept.threads_batch) <= 26


def test_hyper_threads_count_where_cores_are_few() -> None:
    found = small()
    twice = replace(found, machine=replace(found.machine, cpu=replace(found.machine.cpu, threads_per_core=2)))
    assert space_for(twice, Aim(), cores=2, max_sequences=8).threads == (1, 2, 3, 4)
    assert space_for(twice, Aim(), cores=8, max_sequences=8).threads == tuple(range(1, 9))


def test_freed_cores_are_free_in_prefill_too() -> None:
    space = space_for(small(), Aim("cores"), cores=16, max_sequences=8)
    assert space.threads_batch == ()
    turned = space.turned(start_for(small(), space), "threads", 5)
    assert (turned.threads, turned.threads_batch) == (5, 5)
    assert space.holds(turned)
    assert not space.holds(replace(turned, threads_batch=6))


def test_sequences_are_what_the_ledger_has_room_for() -> None:
    space = space_for(small(), Aim(), cores=16, max_sequences=64)
    start = start_for(small(), space)
    most = {types: count for types, _, count in space.max_sequences}
    assert most["q8_0", "q8_0"] > most["f16", "f16"] >= 4
    for types, count in most.items():
        at = replace(space.turned(start, "cache_types", types), sequences=count)
        assert fits(small(), at)
        assert space.holds(at)
        more = next((value for value in (*space.sequences, 64) if value > count), None)
        assert more is None or not fits(small(), replace(at, sequences=more))
    assert space_for(small(), Aim(), cores=16, max_sequences=8).sequences[-1] == 8


def test_what_the_goal_names_stays() -> None:
    said = small(threads=12, threads_batch=14, ubatch=256, cache_type_k="q8_0", cache_type_v="q8_0")
    space = space_for(said, Aim(), cores=16, max_sequences=16)
    assert (space.threads, space.threads_batch, space.ubatch) == ((12,), (14,), (256,))
    assert space.cache_types == (("q8_0", "q8_0"),)
    assert space.flash_attention == (True,)  # a quantized V needs it
    assert space.free == ("sequences",)


def test_small_cache_types_only_for_context() -> None:
    assert ("q4_0", "q4_0") not in space_for(small(), Aim(), cores=16, max_sequences=8).cache_types
    longer = space_for(small(), Aim("context"), cores=16, max_sequences=8)
    assert ("q4_0", "q4_0") in longer.cache_types
    assert longer.context[-1] == small().profile.training_context
    assert len(longer.context) > 3


def test_least_context_and_sequences() -> None:
    space = space_for(small(), Aim("context", least_context=8192, least_sequences=2), cores=16, max_sequences=16)
    assert min(space.context) == 8192
    assert min(space.sequences) == 2
    given_ = space_for(small(), Aim(), cores=16, max_sequences=16, contexts=(2048, 8192))
    assert given_.context == (2048, 8192)


def test_loads_only_where_the_forecast_says_they_win() -> None:
    assert space_for(small(), Aim(), cores=16, max_sequences=64).reload == ()  # all on the GPU: nothing to win
    mapped = hybrid(sequences=8)
    assert not mapped.settings.mmap
    slow = replace(mapped, settings=replace(mapped.settings, mmap=True))
    space = space_for(slow, Aim(), cores=16, max_sequences=8)
    assert space.reload == ("mmap",)
    assert any(reason.startswith("mmap False: ") for reason in space.reasons)


@pytest.mark.parametrize(("most", "rows"), [(64, 128), (24, 32)])
def test_every_trial_has_the_threshold_that_its_engine_is_loaded_with(most: int, rows: int) -> None:
    space = space_for(hybrid(), Aim(), cores=16, max_sequences=most)
    assert space.offload_min_batch == (rows,)
    assert start_for(hybrid(), space).offload_min_batch == rows
    assert space_for(small(), Aim(), cores=16, max_sequences=most).offload_min_batch == (None,)
    asked = space_for(hybrid(offload_min_batch=64), Aim(), cores=16, max_sequences=most)
    assert asked.offload_min_batch == (64,)


def test_the_forecast_of_dials_knows_the_threshold_that_is_set_for_them() -> None:
    found = hybrid()
    says, start = forecaster(found, Aim()), start_for(found, space_for(found, Aim(), cores=16, max_sequences=64))
    unknown, set_, own = (
        [says(replace(start, sequences=count, offload_min_batch=rows)) or 0.0 for count in (16, 32)]
        for rows in (None, 128, 32)
    )
    assert unknown[1] == set_[1] > unknown[0]  # as an engine that is started for them has it
    assert own[1] < 0.5 * set_[1]


def test_trials_say_where_weights_were() -> None:
    space = space_for(hybrid(), Aim(), cores=16, max_sequences=8)
    (where,) = space.placement
    assert where.startswith("experts dram")
    start = start_for(hybrid(), space)
    assert not space.holds(replace(start, placement="plan")), "of trials from before nobody knows"
    says = forecaster(hybrid(), Aim())
    assert says(start) is not None
    assert says(replace(start, placement="experts gpu0, rest gpu0")) is None
    alone = plan("kimi-k2.5:Q4_K_S", "epyc-9175f", context=4096, sequences=4, cpu_only=True)
    assert space_for(alone, Aim(), cores=16, max_sequences=8).placement == ("plan",)


def test_start_is_the_plan_itself() -> None:
    found = small()
    space = space_for(found, Aim(), cores=16, max_sequences=64)
    start, now = start_for(found, space), found.settings
    assert space.holds(start)
    assert (start.threads, start.threads_batch, start.sequences, start.ubatch, start.context) == (
        now.threads,
        now.threads_batch,
        now.sequences,
        now.ubatch,
        now.context,
    )


def test_space_of_a_model_that_does_not_fit_is_left_to_the_engine() -> None:
    found = plan("kimi-k2.5:Q4_K_S", "desktop-ddr5", context=8192, sequences=1)
    assert not found.fits
    space = space_for(found, Aim(), cores=8, max_sequences=4)
    assert space.sequences == (1, 2, 4)
    assert space.holds(start_for(found, space))


spaces = st.builds(
    Space,
    threads=st.sampled_from(((4,), (1, 2, 3), (8, 16))),
    sequences=st.sampled_from(((1,), (1, 2, 8), (4, 16))),
    ubatch=st.sampled_from(((128,), (256, 512, 1024))),
    context=st.sampled_from(((512,), (512, 8192))),
    threads_batch=st.sampled_from(((), (2,), (2, 4))),
    cache_types=st.sampled_from(((("f16", "f16"),), (("q8_0", "q8_0"),), (("f16", "f16"), ("q8_0", "q8_0")))),
    flash_attention=st.sampled_from(((True,), (True, False))),
    mmap=st.sampled_from(((True,), (False, True))),
    offload_min_batch=st.sampled_from(((None,), (None, 128))),
    max_sequences=st.sampled_from(
        ((), ((("f16", "f16"), 8192, 2),), ((("f16", "f16"), 512, 0), (("q8_0", "q8_0"), 512, 8)))
    ),
)


@given(space=spaces)
def test_all_counts_the_combinations(space: Space) -> None:
    everything = list(space.combinations())
    assert len(everything) == len(set(everything)) == space.all()
    assert all(space.holds(dials) for dials in everything)


@given(
    space=spaces,
    dials=st.builds(
        TrialSettings,
        threads=st.integers(1, 64),
        threads_batch=st.integers(1, 64),
        sequences=st.integers(1, 128),
        ubatch=st.integers(1, 4096),
        context=st.integers(1, 100_000),
        cache_type_k=st.sampled_from(("f16", "q4_0")),
        flash_attention=st.booleans(),
        placement=st.sampled_from(("plan", "other")),
    ),
)
def test_nearest_is_in_the_space_and_keeps_valid_settings(space: Space, dials: TrialSettings) -> None:
    near = space.nearest(dials)
    roomy = space.most((near.cache_type_k, near.cache_type_v), near.context) >= space.sequences[0]
    assert space.holds(near) == (roomy and space.ubatch[0] <= near.context)
    assert space.nearest(near) == near
    if space.holds(dials):
        assert near == dials
