"""Plans over several hosts: placement of all layers, ledgers, and network terms."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.errors import UsageError
from tokenmill.hardware.fleet import Fleet, FleetHost, NetworkLink
from tokenmill.hardware.machine import Cpu, Disk, Dram, Gpu, Machine
from tokenmill.model.profile import Profile, TensorClass
from tokenmill.model.read import read as read_model
from tokenmill.planner.goal import Goal
from tokenmill.planner.make import make
from tokenmill.planner.multi_host.forecast import reduce_terms, rpc_terms
from tokenmill.planner.multi_host.hosts import HostsPlan, part_of
from tokenmill.planner.multi_host.make import make_over
from tokenmill.planner.multi_host.vllm import stage_layers
from tokenmill.planner.plan import Speed
from tokenmill.units import GIB, format_bytes

LINK = NetworkLink(3.125, 50e-6)
read = cache(read_model)
DENSE, MIXTURE = "llama-3.3-70b:Q4_K_M", "gpt-oss-120b:MXFP4"


def box(dram_gib: float, *vram_gib: float, gb_s: float = 200.0) -> Machine:
    cards = tuple(
        Gpu(i, "NVIDIA H100 80GB HBM3", "nvidia", round(size * GIB), nominal_gb_s=3350.0)
        for i, size in enumerate(vram_gib)
    )
    return Machine(
        "box",
        Cpu(model="x", sockets=1, cores=16, threads_per_core=2, isa=("avx2",)),
        dram=Dram(total_bytes=round(dram_gib * GIB), nominal_gb_s=gb_s, channels=8, mts=3200),
        gpus=cards,
        disk=Disk("/", nominal_gb_s=3.0),
    )


def fleet(*machines: Machine, link: NetworkLink = LINK) -> Fleet:
    return Fleet(tuple(FleetHost(f"h{i}", one, f"10.0.0.{i + 1}") for i, one in enumerate(machines)), link)


def over(
    model: str, hosts: Fleet, layers: tuple[int, ...] | None = None, pipeline: int | None = None, **goal: Any
) -> HostsPlan:
    return make_over(hosts, read(model), Goal(**{"context": 8192, **goal}), layers=layers, pipeline_parallel=pipeline)


def linked(speed: Speed) -> float:
    return sum(term.seconds for term in speed.terms if term.name.startswith("link"))


def check(plan: HostsPlan) -> None:
    """Assert invariants of plans over hosts."""
    covered = [share.first + index for share in plan.shares for index in range(share.count)]
    if plan.settings.engine != "vllm":
        assert covered == list(range(plan.profile.layers))
    placement = plan.placement()
    known = {f"{host.name}/{tier.name}" for host in plan.fleet.hosts for tier in host.machine.tiers()}
    assert {*placement.homes, *placement.layers, placement.head} <= known
    assert {row.tier for row in plan.ledger.full_context} <= known
    for share in plan.shares:
        for tier in share.host.machine.tiers():
            fits = share.ledger.needed(tier.name) <= (tier.capacity_bytes or 0)
            assert fits or not plan.fits
    for speed in (*plan.forecast.decode, *plan.forecast.prefill):
        assert speed.tok_s == pytest.approx(speed.sequences / sum(term.seconds for term in speed.terms))


def test_a_model_too_large_for_one_host_is_placed_on_two() -> None:
    plan = over(MIXTURE, fleet(box(48), box(48)))
    check(plan)
    assert plan.fits
    assert [share.host.name for share in plan.shares] == ["h0", "h1"]
    assert not make(box(48), read(MIXTURE), Goal(context=8192)).fits
    weights = sum(row.bytes for row in plan.ledger.full_context if row.item == "weights")
    assert weights == plan.profile.bytes


def test_the_head_host_with_a_gpu_comes_last_and_has_the_output() -> None:
    plan = over(MIXTURE, fleet(box(8, 32), box(64)))
    check(plan)
    assert [share.host.name for share in plan.shares] == ["h1", "h0"]
    assert plan.placement().head == "h0/gpu0"
    assert over(MIXTURE, fleet(box(48), box(48))).placement().head == "h0/dram"


def test_a_host_that_is_not_needed_is_left_out() -> None:
    plan = over(DENSE, fleet(box(256), box(256)))
    check(plan)
    assert [share.host.name for share in plan.shares] == ["h0"]
    assert any(decision.name == "left out" and decision.value == "h1" for decision in plan.decisions)
    assert not any(linked(speed) for speed in plan.forecast.decode)


def test_a_faster_worker_gets_the_layers() -> None:
    plan = over(DENSE, fleet(box(256, gb_s=50.0), box(256, gb_s=400.0)))
    counts = {share.host.name: share.count for share in plan.shares}
    assert counts["h1"] > counts["h0"] == 1


def test_shortfalls_of_all_hosts_are_listed_by_tier() -> None:
    plan = over("kimi-k2.5:Q4_K_S", fleet(box(64), box(64)))
    assert not plan.fits
    assert {lack.tier.partition("/")[0] for lack in plan.shortfalls} <= {"h0", "h1"}
    assert all(lack.missing_bytes > 0 for lack in plan.shortfalls)


def test_requested_layers_are_placed_as_requested() -> None:
    plan = over(DENSE, fleet(box(64), box(64), box(64)), layers=(20, 30, 30))
    check(plan)
    assert [(share.first, share.count) for share in plan.shares] == [(0, 20), (20, 30), (50, 30)]


@pytest.mark.parametrize("layers", [(80,), (40, 41), (0, 80), (90, -10)])
def test_layers_with_a_wrong_sum_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(UsageError):
        over(DENSE, fleet(box(64), box(64)), layers=layers)


@pytest.mark.parametrize(
    ("goal", "said"),
    [
        ({"engine": "ik_llama"}, "ik_llama"),
        ({"engine": "llama.cpp-2025"}, "llama.cpp-2025"),
        ({"own_fit": True}, "--own-fit"),
        ({"engine": "vllm"}, "GPUs"),
    ],
)
def test_unsupported_goals_over_hosts_are_refused(goal: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        over(DENSE, fleet(box(64), box(64)), **goal)


def test_a_worker_keeps_neither_output_nor_embeddings() -> None:
    plan = over(DENSE, fleet(box(64), box(64)), layers=(40, 40))
    worker = plan.workers[0]
    assert not any(tensor.layer is None for tensor in worker.part.tensors)
    assert {tensor.layer for tensor in worker.part.tensors} == set(range(40))
    # without logits, its buffer is far smaller than that of the head host
    assert worker.ledger.of("dram", "compute") < plan.head.ledger.of("dram", "compute")
    assert worker.ledger.of("dram", "repack") == 0
    largest = max(tensor.bytes for tensor in worker.part.tensors)
    assert worker.ledger.total("dram", "load_peak") == worker.ledger.total("dram", "after_load") + largest
    # the server caches up to 1024 graphs
    assert worker.ledger.total("dram") - worker.ledger.total("dram", "after_load") == 1024 * 663 * 43 * 40


def test_experts_beyond_a_workers_gpu_stay_on_its_cpu_and_cost_hops() -> None:
    plan = over(MIXTURE, fleet(box(24, 12), box(64, 12)))
    check(plan)
    worker = plan.workers[0]
    assert worker.hops > 0
    assert {"gpu0", "dram"} <= set(worker.placement.homes)
    assert any(f"{worker.hops} times" in warning for warning in plan.warnings)


def test_the_network_adds_a_round_trip_for_every_worker() -> None:
    near = over(DENSE, fleet(box(64), box(64), box(64), link=NetworkLink(3.125, 10e-6)), layers=(20, 30, 30))
    far = over(DENSE, fleet(box(64), box(64), box(64), link=NetworkLink(3.125, 1e-3)), layers=(20, 30, 30))
    added = linked(far.forecast.decode[0]) - linked(near.forecast.decode[0])
    assert added == pytest.approx(2 * (1e-3 - 10e-6))


def test_states_cross_twice_for_every_worker() -> None:
    terms = {
        term.name: term
        for term in rpc_terms(LINK, embedding=8192, graph=40 * 43, tokens=512, cells=512, mask_bytes=2, prefill=True)
    }
    assert terms["link states"].bytes == pytest.approx(2 * 512 * 8192 * 4, rel=0.01)
    assert terms["link masks"].bytes == 512 * 512 * 2


def test_loading_sends_every_workers_weights() -> None:
    slow, fast = (
        over(DENSE, fleet(box(64), box(64), link=NetworkLink(gb_s, 50e-6)), layers=(40, 40)).forecast
        for gb_s in (0.1, 10.0)
    )
    sent = part_of(read(DENSE), 40, 40).bytes
    assert slow.load_warm_s is not None
    assert fast.load_warm_s is not None
    assert slow.load_warm_s - fast.load_warm_s == pytest.approx(sent / 0.1e9 - sent / 10e9)
    assert slow.load_bound_by == "the network"
    assert any("network" in note and format_bytes(sent) in note for note in slow.notes)


def test_an_unknown_rate_gives_a_note_and_no_forecast() -> None:
    blind = replace(box(64), dram=Dram(total_bytes=64 * GIB))
    plan = over(DENSE, fleet(box(64), blind), layers=(40, 40))
    assert plan.forecast.decode == ()
    assert any(note.startswith("h1:") and "unknown" in note for note in plan.forecast.notes)


@pytest.mark.parametrize(
    ("layers", "stages", "expected"), [(61, 2, [31, 30]), (80, 4, [20] * 4), (62, 4, [15, 16, 16, 15]), (5, 1, [5])]
)
def test_vllm_divides_layers_evenly(layers: int, stages: int, expected: list[int]) -> None:
    assert stage_layers(layers, stages) == expected


def test_vllm_has_a_stage_on_every_host() -> None:
    hosts = fleet(box(256, 80, 80), box(256, 80, 80))
    plan = over(DENSE, hosts, engine="vllm", sequences=4)
    check(plan)
    assert plan.fits
    assert (plan.settings.tensor_parallel, plan.pipeline_parallel) == (2, 2)
    assert [(share.first, share.count) for share in plan.shares] == [(0, 40), (40, 40)]
    alone = next(speed for speed in plan.forecast.decode if (speed.depth, speed.sequences) == (0, 1))
    two = next(speed for speed in plan.forecast.decode if (speed.depth, speed.sequences) == (0, 2))
    assert two.tok_s == pytest.approx(2 * alone.tok_s, rel=0.05)  # a second batch fills the second stage
    embeddings = [share for share in plan.shares if any(t.cls is TensorClass.EMBEDDING for t in share.part.tensors)]
    assert [share.host.name for share in embeddings] == ["h0"]


def test_vllm_sums_over_the_network_where_a_layer_spans_hosts() -> None:
    hosts = fleet(box(256, 80, 80), box(256, 80, 80))
    plan = over(DENSE, hosts, engine="vllm", tensor_parallel=4)
    check(plan)
    assert plan.pipeline_parallel == 1
    sums = next(term for term in plan.forecast.decode[0].terms if term.name == "link sums")
    assert sums.bytes == pytest.approx((2 * 80 + 1) * 8192 * 2)  # two hosts: each sends half and gets half, twice
    assert linked(plan.forecast.decode[0]) > linked(over(DENSE, hosts, engine="vllm").forecast.decode[0])


@pytest.mark.parametrize(("tensor", "pipeline"), [(3, None), (8, None), (2, 3), (4, 2)])
def test_vllm_refuses_parallelism_that_does_not_divide(tensor: int, pipeline: int | None) -> None:
    with pytest.raises(UsageError):
        over(DENSE, fleet(box(256, 80, 80), box(256, 80, 80)), engine="vllm", tensor_parallel=tensor, pipeline=pipeline)


def test_one_host_needs_no_all_reduce() -> None:
    assert reduce_terms(LINK, embedding=8192, layers=80, tokens=1, hosts=1) == []


@given(
    sizes=st.lists(st.tuples(st.integers(8, 128), st.lists(st.integers(8, 80), max_size=2)), min_size=2, max_size=3),
    context=st.sampled_from([1024, 8192]),
)
@settings(max_examples=8, deadline=None)
def test_every_plan_over_hosts_is_consistent(sizes: list[tuple[int, list[int]]], context: int) -> None:
    check(over(DENSE, fleet(*(box(dram, *cards) for dram, cards in sizes)), context=context))


def test_parts_make_up_the_whole() -> None:
    whole: Profile = read(MIXTURE)
    parts = [part_of(whole, 0, 20, embeddings=True, output=True), part_of(whole, 20, whole.layers - 20)]
    assert sum(part.bytes for part in parts) == whole.bytes
    assert sum(len(part.cache) for part in parts) == whole.layers
    assert all(tensor.layer is None or f".{tensor.layer}." in tensor.name for part in parts for tensor in part.tensors)
