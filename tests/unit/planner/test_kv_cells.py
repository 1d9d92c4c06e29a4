"""Cells and bytes of llama.cpp's caches; integration tests compare them with llama.cpp."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.model import catalog
from tokenmill.model.describe import describe
from tokenmill.model.profile import LayerCache, Profile
from tokenmill.planner.memory.kv_cells import PAD, KvContext, cells, kv_bytes, largest_batch, output_bytes
from tokenmill.units import MIB


def profile(name: str) -> Profile:
    return describe((catalog.header(name),), format="catalog")


@pytest.mark.parametrize(
    ("context", "sequences", "ubatch", "span", "unified", "expected"),
    [
        (8192, 1, 512, None, True, 8192),
        (8193, 1, 512, None, True, 8448),  # padded to 256
        (1000, 3, 512, None, True, 3072),  # all sequences in one
        (1000, 3, 512, None, False, 1024),  # one sequence's own
        (8192, 1, 512, 128, True, 768),  # a window and the batch that moves through it, padded
        (8192, 4, 512, 128, True, 1024),  # four windows in one cache
        (8192, 4, 512, 128, False, 768),
        (512, 1, 512, 4096, True, 512),  # never more than the whole
        (32768, 1, 2048, 8192, True, 10240),
    ],
)
def test_cells(context: int, sequences: int, ubatch: int, span: int | None, unified: bool, expected: int) -> None:
    assert cells(context, sequences, ubatch, span, unified) == expected


@given(st.integers(1, 300_000), st.integers(1, 64), st.integers(1, 4096), st.integers(1, 10_000), st.booleans())
def test_cells_are_padded_and_enough(context: int, sequences: int, ubatch: int, span: int, unified: bool) -> None:
    full = cells(context, sequences, ubatch, None, unified)
    window = cells(context, sequences, ubatch, span, unified)
    assert full % PAD == window % PAD == 0
    assert 0 < window <= full
    assert full * (1 if unified else sequences) >= context * sequences
    assert window >= min(context, span)


def test_the_latent_cache_of_the_seeds() -> None:
    kimi = profile("kimi-k2.5:Q4_K_M")
    assert [sum(kv_bytes(kimi, KvContext(tokens))) // MIB for tokens in (16384, 32768)] == [1098, 2196]
    assert len(kv_bytes(kimi, KvContext(16384))) == 61
    q8_0 = sum(kv_bytes(kimi, KvContext(16384, type_k="q8_0", type_v="q8_0")))
    assert q8_0 == 16384 * 61 * 576 // 32 * 34


def test_windows_keep_less_unless_full_windows_are_set() -> None:
    gpt_oss = profile("gpt-oss-120b:MXFP4")
    small, full = kv_bytes(gpt_oss, KvContext(8192)), kv_bytes(gpt_oss, KvContext(8192, full_windows=True))
    assert (small[0], small[1]) == (768 * 512 * 4, 8192 * 512 * 4)
    assert full[0] == full[1] == small[1]


def test_recurrent_state_is_kept_for_each_sequence_and_wide_v_is_padded_when_transposed() -> None:
    mixed = profile("qwen3-32b:Q4_K_M")
    layers = (
        LayerCache("recurrent", state_bytes=1000),
        LayerCache("none"),
        LayerCache("full", 128, 64),
        LayerCache("full", 128, 128),
    )
    odd = Profile(**{field: getattr(mixed, field) for field in Profile.__slots__} | {"cache": layers})
    assert kv_bytes(odd, KvContext(256, 2)) == (2000, 0, 512 * 192 * 2, 512 * 256 * 2)
    assert kv_bytes(odd, KvContext(256, 2, flash_attention=False)) == (2000, 0, 512 * 256 * 2, 512 * 256 * 2)


def test_the_largest_batch_is_what_llama_cpp_reserves_for() -> None:
    scout = profile("llama-4-scout:Q6_K")
    batch = largest_batch(scout, KvContext(5000, 3, ubatch=512, outputs=3))
    assert (batch.tokens, batch.cells, batch.window_cells, batch.outputs) == (513, 15104, 15104, 3)
    short = largest_batch(scout, KvContext(300))
    assert (short.tokens, short.cells, short.outputs) == (300, 512, 300)
    assert largest_batch(profile("qwen3-32b:Q4_K_M"), KvContext(8192)).window_cells is None
    assert output_bytes(scout, KvContext(8192, 4)) == 202048 * 4 * 4
