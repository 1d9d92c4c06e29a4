"""Properties of forecasts for any machine, model and constants."""

from dataclasses import fields, replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from support.run_models import model
from support.runs import on_cards, on_processors, settings
from tokenmill.hardware import catalog
from tokenmill.hardware.machine import Machine
from tokenmill.model.profile import Profile
from tokenmill.planner.plan import Placement, Settings
from tokenmill.planner.speed.forecast import decode_speed, prefill_speed
from tokenmill.planner.speed.rates import RateConstants, family, standard, table

MACHINES = ("epyc-9175f", "desktop-ddr5", "threadripper-pro-3995wx", "epyc-9374f")
MODELS = ("kimi-k2.5:Q4_K_S", "gpt-oss-120b:MXFP4_MOE", "qwen3-235b-a22b:Q8_0", "llama-3.3-70b:Q4_K_M")
ENGINES = ("llama.cpp", "ik_llama")
machines, models, engines = st.sampled_from(MACHINES), st.sampled_from(MODELS), st.sampled_from(ENGINES)
find = cache(catalog.find)
many_times = examples(deadline=None, max_examples=50)  # the first example of a model reads its catalogue entry
depths, together = st.integers(0, 131072), st.integers(1, 64)


def _decode(
    machine: Machine, profile: Profile, chosen: Settings, placement: Placement, depth: int = 0, sequences: int = 1
) -> float:
    speed = decode_speed(machine, profile, chosen, placement, depth=depth, sequences=sequences)
    assert speed is not None
    return speed.tok_s


def _placed(profile: Profile, hybrid: bool) -> Placement:
    return on_cards(profile, 1) if hybrid else on_processors(profile)


@many_times
@given(machines, models, engines, st.booleans(), st.floats(1.0, 3.0), depths)
def test_more_bandwidth_is_never_slower(
    name: str, what: str, engine: str, hybrid: bool, more: float, depth: int
) -> None:
    machine, profile = find(name), model(what)
    assert machine.dram.nominal_gb_s is not None
    faster = replace(
        machine,
        dram=replace(machine.dram, nominal_gb_s=machine.dram.nominal_gb_s * more),
        gpus=tuple(replace(gpu, nominal_gb_s=(gpu.nominal_gb_s or 0) * more) for gpu in machine.gpus),
    )
    common = (profile, settings(engine, 16), _placed(profile, hybrid), depth)
    assert _decode(faster, *common) >= _decode(machine, *common) * (1 - 1e-12)


@many_times
@given(machines, models, engines, st.booleans(), depths, st.integers(0, 65536), together)
def test_deeper_is_never_faster(
    name: str, what: str, engine: str, hybrid: bool, depth: int, more: int, sequences: int
) -> None:
    machine, profile = find(name), model(what)
    common = (machine, profile, settings(engine, 16), _placed(profile, hybrid))
    near, far = (_decode(*common, at, sequences) for at in (depth, depth + more))
    assert far <= near * (1 + 1e-12)
    first, second = (prefill_speed(*common, depth=at, prompt=600) for at in (depth, depth + more))
    assert first is not None
    assert second is not None
    assert second.tok_s <= first.tok_s * (1 + 1e-12)


@many_times
@given(machines, st.sampled_from(MODELS[:3]), engines, st.integers(0, 60), st.integers(1, 10))
def test_more_experts_on_a_faster_card_are_never_slower(
    name: str, what: str, engine: str, first: int, more: int
) -> None:
    machine, profile = find(name), model(what)
    few, many = (
        on_cards(profile, 1, expert_layers=dict.fromkeys(range(min(count, profile.layers)), 0))
        for count in (first, first + more)
    )
    chosen = settings(engine, 16)
    assert _decode(machine, profile, chosen, many) >= _decode(machine, profile, chosen, few) * (1 - 1e-12)


@many_times
@given(machines, models, engines, st.booleans(), st.integers(1, 15))
def test_each_of_more_sequences_is_never_faster(
    name: str, what: str, engine: str, hybrid: bool, sequences: int
) -> None:
    machine, profile = find(name), model(what)
    common = (machine, profile, settings(engine, 16), _placed(profile, hybrid))
    alone, more = (_decode(*common, 512, count) / count for count in (sequences, sequences + 1))
    assert more <= alone * (1 + 1e-12)


@many_times
@given(machines, models, st.integers(1, 15))
def test_more_threads_help_while_cores_are_free_and_few(name: str, what: str, threads: int) -> None:
    machine, profile = find(name), model(what)
    if threads + 1 >= (machine.cpu.cores or 0):
        threads = 4
    fewer, more = (
        _decode(machine, profile, settings("llama.cpp", count), on_processors(profile))
        for count in (threads, threads + 1)
    )
    assert more >= fewer * 0.97  # near saturation, more threads may be slightly slower


@many_times
@given(machines, models, engines, st.integers(1, 5000), st.integers(1, 5000))
def test_a_longer_prompt_takes_longer(name: str, what: str, engine: str, tokens: int, more: int) -> None:
    machine, profile = find(name), model(what)
    chosen = settings(engine, 16)
    times = []
    for prompt in (tokens, tokens + more):
        speed = prefill_speed(machine, profile, chosen, on_processors(profile), depth=0, prompt=prompt)
        assert speed is not None
        times.append(prompt / speed.tok_s)
    assert times[1] >= times[0] * (1 - 1e-9)


def test_the_table_contains_exactly_the_constants() -> None:
    assert set(table().constants) == {item.name for item in fields(RateConstants)}


@pytest.mark.parametrize("name", sorted(table().constants))
def test_constants_are_documented_and_within_their_bounds(name: str) -> None:
    row = table().constants[name]
    assert len(row.stands_for) > 10
    assert len(row.source) > 10
    assert getattr(standard(), name) == row.value > 0
    if row.bounds is not None:
        assert row.bounds[0] <= row.value <= row.bounds[1]
    if row.unit.startswith("of nominal"):
        assert 0.1 <= row.value <= 0.9


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("F32", "float"),
        ("BF16", "float"),
        ("Q8_0", "q8"),
        ("Q8_K_R8", "q8"),
        ("Q4_K", "linear"),
        ("Q4_0", "linear"),
        ("MXFP4", "linear"),
        ("NVFP4", "linear"),
        ("IQ4_NL", "linear"),
        ("Q6_K_R4", "linear"),
        ("Q2_K", "low"),
        ("Q3_K_R4", "low"),
        ("IQ4_XS", "table"),
        ("IQ2_K", "table"),
        ("IQ2_KS", "table"),
        ("IQ3_K_R4", "table"),
        ("IQ2_XXS", "grid"),
        ("IQ3_S", "grid"),
        ("IQ1_S_R4", "grid"),
        ("IQ2_KT", "trellis"),
        ("IQ4_KT", "trellis"),
    ],
)
def test_families_of_types(kind: str, expected: str) -> None:
    assert family(kind) == expected
