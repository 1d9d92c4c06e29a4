"""The ledger against output of engines: a slice of Kimi on an H200, and reports of the first users."""

from dataclasses import replace

import pytest

from support.slices import kimi_slice
from tokenmill.hardware.catalog import find
from tokenmill.model.profile import Profile
from tokenmill.model.read import read
from tokenmill.planner.goal import DialectName, Goal
from tokenmill.planner.memory.costs import MemoryCosts, costs_of
from tokenmill.planner.memory.ledger import ledger
from tokenmill.planner.placement import assemble
from tokenmill.planner.plan import Ledger, Settings
from tokenmill.units import MIB


def settings(
    context: int, *, engine: DialectName = "llama.cpp", ubatch: int = 512, cache_type: str = "f16"
) -> Settings:
    return Settings(
        engine=engine,
        context=context,
        sequences=1,
        ubatch=ubatch,
        batch=2048,
        cache_type_k=cache_type,
        cache_type_v=cache_type,
        threads=14,
        threads_batch=14,
        flash_attention=True,
        mmap=True,
        mlock=False,
        repack=False,
        cache_ram_bytes=0,
    )


@pytest.fixture(scope="module")
def slice_of_kimi() -> Profile:
    return kimi_slice()


@pytest.mark.parametrize(
    ("resident", "context", "gpu", "host"),
    [  # (model, context, compute) in MiB, llama.cpp b11549 on an H200, -ub 512, flash attention
        ((1, 2, 3, 4), 8192, (38612, 45, 384), (1190, 0, 64)),
        ((1, 2, 3, 4), 32768, (38612, 180, 408), (1190, 0, 88)),
        ((1, 2, 3, 4), 131072, (38612, 720, 504), (1190, 0, 184)),
        ((), 8192, (2324, 45, 3232), (37478, 0, 64)),
        ((), 32768, (2324, 180, 3256), (37478, 0, 88)),
        ((), 131072, (2324, 720, 3352), (37478, 0, 184)),
        ((3, 4), 8192, (20468, 45, 3232), (19334, 0, 64)),  # -ncmoe 3: the first three layers' experts stay
        ((3, 4), 32768, (20468, 180, 3256), (19334, 0, 88)),
        ((3, 4), 131072, (20468, 720, 3352), (19334, 0, 184)),
    ],
)
def test_h200(
    resident: tuple[int, ...], context: int, gpu: tuple[int, ...], host: tuple[int, ...], slice_of_kimi: Profile
) -> None:
    placement = assemble(slice_of_kimi, "dram", ["gpu0"] * 5, "gpu0", frozenset(resident))
    found = ledger(find("h200-1x"), MemoryCosts(slice_of_kimi, settings(context)), placement, Goal())
    for tier, (weights, kv, compute) in (("gpu0", gpu), ("dram", host)):
        assert found.of(tier, "weights") / MIB == pytest.approx(weights, rel=0.001)
        assert found.of(tier, "kv") / MIB == pytest.approx(kv, abs=0.5)
        both = found.of(tier, "compute") + found.of(tier, "staging")
        assert both / MIB == pytest.approx(compute, rel=0.02, abs=1)


def cpu_ledger(model: str, context: int, engine: DialectName, *, repack: bool = False) -> Ledger:
    profile = read(model)
    chosen = replace(settings(context, engine=engine), repack=repack)
    placement = assemble(profile, "dram", ["dram"] * profile.layers, "dram", frozenset())
    return ledger(find("epyc-9175f"), costs_of(profile, chosen), placement, Goal())


@pytest.mark.parametrize(("model", "context", "kv_mib"), [("Q4_K_S", 16384, 1098 + 976), ("Q4_K_M", 32768, 4148)])
def test_llama_cpp_2025_stores_k_and_v(model: str, context: int, kv_mib: int) -> None:
    found = cpu_ledger(f"kimi-k2.5:{model}", context, "llama.cpp-2025")
    assert found.of("dram", "kv") == kv_mib * MIB
    assert round(found.of("dram", "compute") / MIB) == 348


def test_seed_weights_and_repack() -> None:
    found = cpu_ledger("kimi-k2.5:Q4_K_M", 32768, "llama.cpp-2025", repack=True)
    assert found.of("dram", "weights") / MIB == pytest.approx(578.57 * 1024, rel=0.005)
    # the owner's file keeps a few more tensors in Q6_K than llama-quantize does by itself
    assert found.of("dram", "repack") / MIB == pytest.approx(459_665, rel=0.005)


def test_seed_prompt_cache_state() -> None:
    profile = read("kimi-k2.5:Q4_K_S")
    assert profile.cache_bytes(1260, latent_v=True) / MIB == pytest.approx(159.5, abs=0.05)


def test_current_latent_caches_store_only_k() -> None:
    assert cpu_ledger("kimi-k2.5:Q4_K_S", 16384, "llama.cpp").of("dram", "kv") == 1098 * MIB


def test_typical_layers_give_the_buffer_of_all_layers() -> None:
    """The replay over typical layers gives the size of the whole graph."""
    for name in ("kimi-k2.5:Q4_K_S", "llama-4-maverick:Q4_K_M", "gpt-oss-120b:MXFP4_MOE", "glm-4.5:Q4_K_M"):
        profile = read(name)
        costs = MemoryCosts(profile, settings(32768))
        everything = range(profile.layers)
        whole = costs._device_bytes(tuple(everything), True, True, False)
        assert costs.host_compute(everything, head=True) == whole
        staged = costs._device_bytes(tuple(everything), False, True, True)
        both = costs.compute(everything, head=True) + costs.staging(everything, head=True, staged=everything)
        assert both == staged


def test_a_small_micro_batch_stages_nothing(slice_of_kimi: Profile) -> None:
    everything = range(5)
    assert MemoryCosts(slice_of_kimi, settings(8192, ubatch=16)).staging(everything, head=True, staged=everything) == 0
    assert (
        MemoryCosts(slice_of_kimi, settings(8192, ubatch=32)).staging(everything, head=True, staged=everything)
        > 2000 * MIB
    )


def test_a_device_cache_for_experts_is_counted(slice_of_kimi: Profile) -> None:
    placement = assemble(slice_of_kimi, "dram", ["gpu0"] * 2 + ["gpu1"] * 3, "gpu1", frozenset())
    plain = MemoryCosts(slice_of_kimi, settings(8192))
    cached = MemoryCosts(slice_of_kimi, replace(settings(8192), moe_cache_bytes=1000 * MIB))
    before, after = (ledger(find("h200-1x"), costs, placement, Goal()) for costs in (plain, cached))
    grown = [after.total(gpu) - before.total(gpu) for gpu in ("gpu0", "gpu1")]
    assert grown == [400 * MIB, 600 * MIB]
    assert cached.base(1) - plain.base(1) == 200 * MIB
