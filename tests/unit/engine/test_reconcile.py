"""A plan compared with measured memory, item by item: flagged above 5 %, explained if the cause is known."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.plans import placed, settings
from tokenmill.engine import logs
from tokenmill.engine.fit_params import Buffer
from tokenmill.engine.loading.process import ProcessMemory
from tokenmill.engine.logs import RequestedContext
from tokenmill.engine.reconcile.reconcile import (
    FLOOR_BYTES,
    TOLERANCE,
    ObservedMemory,
    ReconciledItem,
    Reconciliation,
    differs,
    observed,
    reconcile,
    spanned_bytes,
)
from tokenmill.hardware.catalog import find
from tokenmill.model.profile import Profile
from tokenmill.model.read import read
from tokenmill.model.synthetic import generate
from tokenmill.planner.goal import Goal
from tokenmill.planner.make import make
from tokenmill.planner.plan import Plan
from tokenmill.units import GIB, MIB

DATA = Path(__file__).parents[2] / "data" / "logs"
KIMI = read("kimi-k2.5:Q4_K_S")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """The model of llama.cpp-moe-mmap-v4.log."""
    path = tmp_path_factory.mktemp("synth") / "moe.gguf"
    generate.write("moe", generate.sizes("moe", {}), path)
    return read(str(path))


def rows(found: Reconciliation) -> dict[tuple[str, str], ReconciledItem]:
    return {(row.tier, row.item): row for row in found.rows}


def of(plan: Plan, tier: str, *items: str) -> int:
    return sum(row.bytes for row in plan.ledger.after_load if row.tier == tier and row.item in items)


def test_a_real_log_agrees_with_its_plan(moe: Profile) -> None:
    plan = placed(moe, settings(1024, 2))
    log = logs.read("llama-server", (DATA / "llama.cpp-moe-mmap-v4.log").read_text(encoding="utf-8"))
    found = rows(reconcile(plan, observed(log)))
    assert set(found) == {("host", item) for item in ("weights", "repack", "kv", "compute", "output")}
    for item in ("repack", "kv"):
        row = found["host", item]
        assert row.share == pytest.approx(0, abs=0.001), item
    compute = found["host", "compute"]
    assert compute.as_asked_bytes == pytest.approx(12.02 * MIB, rel=0.001)  # two rows of logits, caches apart
    assert compute.predicted_bytes > (compute.as_asked_bytes or 0)
    assert not any(row.flagged for row in found.values())  # some differ by more, but by a few MiB only


def seen(plan: Plan, **changes: object) -> ObservedMemory:
    """An engine whose memory is as planned."""
    host = Buffer("CPU_Mapped", spanned_bytes(plan) or of(plan, "dram", "weights"))
    parts = [
        host,
        Buffer("CPU_REPACK", of(plan, "dram", "repack")),
        Buffer("CPU", 0, of(plan, "dram", "kv"), of(plan, "dram", "compute")),
    ]
    for index, tier in enumerate(plan.placement.gpus):
        sizes = (of(plan, tier, "weights"), of(plan, tier, "kv"), of(plan, tier, "compute", "staging"))
        parts.append(Buffer(f"CUDA{index}", *sizes))
    return replace(ObservedMemory(tuple(parts), mapped=True), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("cards", [0, 1, 2])
def test_an_engine_that_took_what_was_said(cards: int) -> None:
    plan = placed(KIMI, settings(), cards=cards, resident=range(2))
    found = reconcile(plan, seen(plan))
    assert found.flagged == ()
    assert {row.tier for row in found.rows} == {"host", *(f"gpu{index}" for index in range(cards))}
    assert all(row.difference_bytes == 0 for row in found.rows)


def test_logits_of_fewer_rows_are_the_reason() -> None:
    plan = placed(KIMI, settings())
    measured = of(plan, "dram", "compute") - 300 * MIB
    requested = RequestedContext(8192, 1, 512, outputs=1, unified=True)
    buffers = (*seen(plan).buffers[:2], Buffer("CPU", 0, of(plan, "dram", "kv"), measured))
    (row,) = reconcile(plan, seen(plan, buffers=buffers, requested=requested)).flagged
    assert (row.tier, row.item, row.difference_bytes) == ("host", "compute", 300 * MIB)
    assert "the logits of 1 tokens per batch, the plan counts 512; the prediction" in (row.explanation or "")


def test_a_smaller_context_is_the_reason() -> None:
    plan = placed(KIMI, settings())
    buffers = (*seen(plan).buffers[:2], Buffer("CPU", 0, of(plan, "dram", "kv") // 2, of(plan, "dram", "compute")))
    (row,) = reconcile(plan, seen(plan, buffers=buffers, requested=RequestedContext(4096))).flagged
    assert row.item == "kv"
    assert "4096 tokens" in (row.explanation or "")
    assert "8192" in (row.explanation or "")


def test_mapped_ranges_contain_tensors_of_the_gpu() -> None:
    plan = placed(KIMI, replace(settings(), repack=False), cards=1, resident=range(4))
    needed = of(plan, "dram", "weights")
    row = rows(reconcile(plan, seen(plan)))["host", "weights"]
    assert needed < row.predicted_bytes < KIMI.bytes, "tensors of the GPU lie between others"
    # without offsets in the file, the difference is only explained
    unread = replace(KIMI, tensors=tuple(replace(tensor, offset=0) for tensor in KIMI.tensors))
    blind = replace(plan, profile=unread)
    whole = replace(seen(plan).buffers[0], model_bytes=KIMI.bytes)
    (row,) = reconcile(blind, seen(blind, buffers=(whole, *seen(blind).buffers[1:]))).flagged
    assert (row.tier, row.item, row.predicted_bytes) == ("host", "weights", needed)
    assert "copied to a GPU" in (row.explanation or "")


def test_rewritten_tensors_are_not_in_the_mapped_buffer(moe: Profile) -> None:
    """Sizes from llama.cpp's log of this file, which are rounded to hundredths of MiB."""
    plan = placed(moe, settings(1024, 2))
    log = logs.read("llama-server", (DATA / "llama.cpp-moe-mmap-v4.log").read_text(encoding="utf-8"))
    row = rows(reconcile(plan, observed(log)))["host", "weights"]
    assert row.predicted_bytes == pytest.approx(row.measured_bytes, abs=0.011 * MIB)


def test_a_file_that_was_copied_although_it_was_to_be_mapped() -> None:
    plan = placed(KIMI, settings())
    buffers = (
        Buffer(
            "CPU",
            of(plan, "dram", "weights") - of(plan, "dram", "repack"),
            of(plan, "dram", "kv"),
            of(plan, "dram", "compute"),
        ),
        Buffer("CPU_REPACK", of(plan, "dram", "repack")),
    )
    found = rows(reconcile(plan, seen(plan, buffers=buffers, mapped=False)))
    assert found["host", "weights"].difference_bytes == 0  # repacked weights replace the weights
    assert found["host", "repack"].measured_bytes == 0
    assert found["host", "repack"].flagged


def test_a_split_buffer_is_compared_over_all_gpus() -> None:
    plan = placed(KIMI, replace(settings(), engine="ik_llama"), cards=2, resident=range(2))
    weights = of(plan, "gpu0", "weights") + of(plan, "gpu1", "weights")
    buffers = (Buffer("CPU", of(plan, "dram", "weights")), Buffer("CUDA_Split", weights - GIB), Buffer("CUDA1", GIB))
    found = rows(reconcile(plan, ObservedMemory(buffers)))
    assert found["gpus", "weights"].difference_bytes == 0
    assert not {tier for tier, _ in found} & {"gpu0", "gpu1"}


def test_a_gpu_that_the_plan_leaves_alone_is_shown() -> None:
    plan = placed(KIMI, settings(), cards=1, resident=range(2))
    found = rows(reconcile(plan, seen(plan, buffers=(*seen(plan).buffers, Buffer("CUDA1", GIB)))))
    assert (found["CUDA1", "weights"].predicted_bytes, found["CUDA1", "weights"].flagged) == (0, True)


def test_the_process() -> None:
    plan = placed(KIMI, replace(settings(), cache_ram_bytes=8 * GIB))
    weights, repack = of(plan, "dram", "weights"), of(plan, "dram", "repack")
    memory = ProcessMemory(anon_bytes=repack + GIB, file_bytes=weights // 2, shmem_bytes=0, swap_bytes=GIB)
    found = rows(reconcile(plan, seen(plan, memory=memory, prompt_cache_bytes=MIB)))
    assert (found["host", "mapped"].predicted_bytes, found["host", "mapped"].measured_bytes) == (weights, weights // 2)
    assert "not accessed yet" in (found["host", "mapped"].explanation or "")
    own = found["host", "own"]
    assert own.measured_bytes == repack + 2 * GIB
    assert own.predicted_bytes == of(plan, "dram", "kv", "compute", "repack", "prompt_cache", "runtime")
    assert "requests" in (found["host", "prompt_cache"].explanation or "")
    assert (found["host", "mapped"].source, own.source) == ("process", "process")


def test_a_small_model_s_process_is_explained_by_the_estimate(moe: Profile) -> None:
    plan = placed(moe, settings(1024, 2))
    memory = ProcessMemory(anon_bytes=120 * MIB, file_bytes=60 * MIB)
    found = rows(reconcile(plan, seen(plan, memory=memory)))
    assert "1.0 GiB" in (found["host", "own"].explanation or "")
    assert "shared libraries" in (found["host", "mapped"].explanation or "")


def test_the_driver() -> None:
    plan = placed(KIMI, settings(), cards=2, resident=range(2))
    held = of(plan, "gpu0", "weights", "kv", "compute", "staging")
    memory = ProcessMemory(anon_bytes=GIB, file_bytes=GIB)
    found = rows(reconcile(plan, seen(plan, vram_bytes={0: held + 300 * MIB}, memory=memory)))
    total = found["gpu0", "total"]
    assert total.predicted_bytes == held + of(plan, "gpu0", "runtime")  # without the reserve
    assert (total.measured_bytes, total.source) == (held + 300 * MIB, "driver")
    runtime = found["gpu0", "runtime"]
    assert (runtime.measured_bytes, runtime.flagged) == (300 * MIB, True)
    assert "estimates" in (runtime.explanation or "")
    unknown = found["gpu1", "total"]
    assert (unknown.measured_bytes, unknown.share, unknown.flagged, unknown.difference_bytes) == (
        None,
        None,
        False,
        None,
    )
    assert ("gpu1", "runtime") not in found
    assert ("host", "own") not in found  # pinned memory is not counted as resident


def test_nothing_seen_is_nothing_compared() -> None:
    plan = placed(KIMI, settings(), cards=1)
    assert reconcile(plan, ObservedMemory()).rows == ()


def test_vllm_is_compared_in_what_it_says() -> None:
    plan = make(find("h200-1x"), read("llama-4-scout:Q6_K"), Goal(engine="vllm", context=8192))
    weights, kv = of(plan, "gpu0", "weights"), of(plan, "gpu0", "kv")
    log = f"""\
INFO 03-13 08:56:39 [model_runner.py:1146] Model loading took {weights / GIB:.4f} GiB and 0.742108 seconds
INFO 03-13 08:56:40 [worker.py:267] PyTorch activation peak memory takes 1.39GiB; reserved for KV Cache is {0.9 * kv / GIB:.2f}GiB.
"""
    found = rows(reconcile(plan, observed(logs.read("vllm", log))))
    assert set(found) == {("gpu0", "weights"), ("gpu0", "kv")}  # activations are part of one estimate, the runtime
    assert (found["gpu0", "weights"].flagged, found["gpu0", "kv"].flagged) == (False, True)


def test_what_vllm_does_not_say_is_unknown_and_not_nothing() -> None:
    plan = make(find("epyc-7763"), read("llama-4-scout:Q6_K"), Goal(engine="vllm", context=8192, cpu_only=True))
    found = rows(reconcile(plan, ObservedMemory((Buffer("CPU", context_bytes=4 * GIB),))))  # all that it logs there
    assert found["host", "kv"].measured_bytes == 4 * GIB
    assert found["host", "weights"].predicted_bytes > 0
    assert found["host", "weights"].measured_bytes is None
    assert not found["host", "weights"].flagged


@given(st.integers(0, 1 << 42), st.integers(0, 1 << 42))
def test_flags(predicted: int, measured: int) -> None:
    row = ReconciledItem("host", "kv", predicted, measured, "engine")
    gap = abs(predicted - measured)
    assert row.flagged == differs(predicted, measured)
    assert not row.flagged or gap > FLOOR_BYTES
    assert row.flagged or gap <= max(FLOOR_BYTES, TOLERANCE * measured)
    if measured:
        assert row.share is not None
        assert (row.share > 0) == (predicted > measured)
