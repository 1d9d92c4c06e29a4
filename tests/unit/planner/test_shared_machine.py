"""Several engines on one machine: memory, threads and bandwidth are added up, reserves counted once."""

from dataclasses import replace
from typing import Any

import pytest

from tokenmill.hardware.catalog import find
from tokenmill.model.read import read
from tokenmill.planner.goal import Goal
from tokenmill.planner.make import make
from tokenmill.planner.plan import LedgerRow, Plan
from tokenmill.planner.shared_machine import share_machine
from tokenmill.units import GIB

MACHINE = find("epyc-9175f")


def plan(model: str, **goal: Any) -> Plan:
    return make(MACHINE, read(model), Goal(**goal))


@pytest.fixture(scope="module")
def on_cpu() -> Plan:
    return plan("llama-4-scout:Q6_K", cpu_only=True, context=8192, sequences=1, threads=15, repack=False)


@pytest.fixture(scope="module")
def on_gpu() -> Plan:
    return plan("llama-4-scout:nvfp4", engine="vllm", context=110_000, sequences=1, gpu_memory_utilization=0.88)


def test_the_published_pair_fits(on_cpu: Plan, on_gpu: Plan) -> None:
    """Scout on the processors next to Scout on vLLM, as published for this machine."""
    found = share_machine(MACHINE, {"cpu": on_cpu, "gpu": on_gpu})
    assert found.fits
    tiers = {tier.name: tier for tier in found.tiers}
    for name, tier in tiers.items():
        reserves = [plan.ledger.of(name, "reserve") for plan in (on_cpu, on_gpu)]
        assert tier.reserve_bytes == max(reserves)
        alone = [plan.ledger.needed(name) for plan in (on_cpu, on_gpu)]
        assert tier.needed_bytes == sum(alone) - min(reserves)
    assert tiers["dram"].by_engine["cpu"] > 80 * GIB
    assert tiers["gpu0"].by_engine == {
        "cpu": 0,
        "gpu": on_gpu.ledger.needed("gpu0") - on_gpu.ledger.of("gpu0", "reserve"),
    }
    assert found.threads == 16, "15, and the one that feeds the card"
    for engine in found.engines:
        assert engine.together_tok_s == engine.decode_tok_s, "they use different memories"


def test_two_on_the_processors_share_bandwidth_and_cores(on_cpu: Plan) -> None:
    found = share_machine(MACHINE, {"one": on_cpu, "other": on_cpu}, reserve_cores=3)
    assert found.fits
    assert found.cores == 13
    assert found.threads == 30
    for engine in found.engines:
        assert engine.together_tok_s is not None
        assert engine.decode_tok_s is not None
        assert 0.45 * engine.decode_tok_s < engine.together_tok_s < 0.9 * engine.decode_tok_s


def test_what_fits_alone_may_not_fit_together() -> None:
    kimi = plan("kimi-k2.5:Q4_K_S", cpu_only=True, context=8192, sequences=1)
    maverick = plan("llama-4-maverick:Q4_K_M", cpu_only=True, context=8192, sequences=1)
    assert kimi.fits
    assert maverick.fits
    found = share_machine(MACHINE, {"kimi": kimi, "maverick": maverick})
    assert not found.fits
    (lack,) = found.shortfalls
    assert lack.tier == "dram"
    assert lack.needed_bytes == sum(tier.needed_bytes for tier in found.tiers if tier.name == "dram")


def test_one_engine_needs_what_its_plan_needs(on_cpu: Plan) -> None:
    found = share_machine(MACHINE, {"one": on_cpu})
    assert [tier.needed_bytes for tier in found.tiers] == [on_cpu.ledger.needed(tier.name) for tier in found.tiers]
    with pytest.raises(ValueError, match="no plans"):
        share_machine(MACHINE, {})


def test_an_engine_must_have_room_to_load_next_to_the_others(on_cpu: Plan) -> None:
    rows = (*on_cpu.ledger.full_context, LedgerRow("dram", "staging", GIB))
    loading = replace(on_cpu, ledger=replace(on_cpu.ledger, load_peak=rows))
    peak = loading.ledger.needed("dram", "load_peak")
    used = on_cpu.ledger.needed("dram") - on_cpu.ledger.of("dram", "reserve")
    enough = replace(MACHINE, dram=replace(MACHINE.dram, total_bytes=peak + used))
    assert share_machine(enough, {"first": on_cpu, "second": loading}).fits
    short = replace(MACHINE, dram=replace(MACHINE.dram, total_bytes=peak + used - 1))
    (lack,) = share_machine(short, {"first": on_cpu, "second": loading}).shortfalls
    assert lack.moment == "load_peak"
    assert lack.missing_bytes == 1
