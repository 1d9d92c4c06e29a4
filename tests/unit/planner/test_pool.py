"""Size of CUDA's scratch pool, by the largest operation of a micro-batch."""

from dataclasses import replace

import pytest

from tokenmill.model.profile import Profile
from tokenmill.model.read import read
from tokenmill.planner.memory.kv_cells import KvContext
from tokenmill.planner.memory.weights import pool_bytes

KIMI, LLAMA = "kimi-k2.5:Q4_X", "llama-3.3-70b:Q4_K_M"


@pytest.fixture(scope="module")
def kimi() -> Profile:
    return read(KIMI)


@pytest.mark.parametrize(("ubatch", "rows"), [(512, 512), (4096, 4096), (8192, 8192)])
def test_experts_take_a_row_in_8_bits_for_each_of_them(kimi: Profile, ubatch: int, rows: int) -> None:
    context = KvContext(131072, ubatch=ubatch, batch=ubatch)
    assert pool_bytes(kimi, context) == rows * 8 * 7168 * 36 // 32


def test_a_dense_model_takes_its_widest_row_once() -> None:
    profile = read(LLAMA)
    assert pool_bytes(profile, KvContext(8192, ubatch=512)) == 512 * 28672 * 36 // 32


def test_a_short_context_has_no_larger_batch(kimi: Profile) -> None:
    assert pool_bytes(kimi, KvContext(256, ubatch=512)) == pool_bytes(kimi, KvContext(256, ubatch=256))


def test_a_cache_in_other_types_is_converted_whole(kimi: Profile) -> None:
    context = KvContext(131072, ubatch=512, type_k="q8_0", type_v="q8_0")
    assert pool_bytes(kimi, context) == 131072 * 576 * 2  # of a latent cache there is K alone
    assert pool_bytes(kimi, replace(context, flash_attention=False)) == pool_bytes(kimi, replace(context, type_k="f16"))
