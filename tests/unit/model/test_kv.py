"""Cache layouts against measurements and output of engines."""

from typing import Any

import pytest

from tokenmill.model.kv_layout import layout
from tokenmill.model.profile import LayerCache
from tokenmill.units import MIB


def keys(architecture: str, **values: Any) -> dict[str, Any]:
    return {f"{architecture}.{name.replace('__', '.')}": value for name, value in values.items()}


KIMI = keys(
    "deepseek2",
    embedding_length=7168,
    attention__head_count=64,
    attention__head_count_kv=1,
    attention__kv_lora_rank=512,
    attention__key_length=576,
    attention__value_length=512,
    attention__key_length_mla=192,
    rope__dimension_count=64,
)
SCOUT = keys(
    "llama4",
    embedding_length=5120,
    attention__head_count=40,
    attention__head_count_kv=8,
    attention__key_length=128,
    attention__value_length=128,
)
GPT_OSS = keys(
    "gpt-oss",
    embedding_length=2880,
    attention__head_count=64,
    attention__head_count_kv=8,
    attention__key_length=64,
    attention__value_length=64,
    attention__sliding_window=128,
)


def total(layers: tuple[LayerCache, ...], context: int, cache_type: str = "f16", *, latent_v: bool = False) -> float:
    return sum(layer.bytes_per_token(cache_type, cache_type, latent_v=latent_v) * context for layer in layers)


@pytest.mark.parametrize(("context", "k_mib", "v_mib"), [(16384, 1098, 976), (32768, 2196, 1952)])
def test_kimi_as_its_server_printed_it(context: int, k_mib: int, v_mib: int) -> None:
    layers = layout(KIMI, "deepseek2", 61).layers
    assert {layer.kind for layer in layers} == {"latent"}
    assert total(layers, context) == k_mib * MIB
    assert total(layers, context, latent_v=True) == (k_mib + v_mib) * MIB


def test_scout_is_chunked_on_three_of_four_layers() -> None:
    layers = layout(SCOUT, "llama4", 48).layers
    assert [layer.kind for layer in layers[:5]] == ["chunked", "chunked", "chunked", "full", "chunked"]
    assert layers[0].span_tokens == 8192
    assert total(layers, 1) == 196_608  # 20.2 GiB hold 110 256 tokens in vLLM's own words
    assert layers[0].tokens_kept(100_000) == 8192
    assert layers[3].tokens_kept(100_000) == 100_000


def test_gpt_oss_alternates_windows() -> None:
    layers = layout(GPT_OSS, "gpt-oss", 36).layers
    assert [(layer.kind, layer.span_tokens) for layer in layers[:2]] == [("window", 128), ("full", None)]
    assert layers[0].k_elements == 512


def test_window_pattern_of_the_file_wins() -> None:
    by_count = layout(GPT_OSS | {"gpt-oss.attention.sliding_window_pattern": 3}, "gpt-oss", 6).layers
    assert [layer.kind for layer in by_count] == ["window", "window", "full"] * 2
    by_layer = layout(GPT_OSS | {"gpt-oss.attention.sliding_window_pattern": (True, True, False)}, "gpt-oss", 3).layers
    assert [layer.kind for layer in by_layer] == ["window", "window", "full"]


def test_window_that_engines_ignore() -> None:
    found = keys("qwen3", embedding_length=64, attention__head_count=4, attention__sliding_window=4096)
    assert layout(found, "qwen3", 1).layers == (LayerCache("full", 64, 64),)


def test_deepseek_files_of_early_2025_have_a_latent_cache() -> None:
    found = keys(
        "deepseek2",
        embedding_length=7168,
        attention__head_count=128,
        attention__head_count_kv=128,
        attention__key_length=192,
        attention__value_length=128,
        attention__kv_lora_rank=512,
        rope__dimension_count=64,
    )
    made = layout(found, "deepseek2", 1)
    assert made.layers == (LayerCache("latent", 576, 512),)
    assert len(made.guesses) == 1
    del found["deepseek2.attention.kv_lora_rank"]
    assert layout(found, "deepseek2", 1).layers == (LayerCache("full", 128 * 192, 128 * 128),)


def test_sparse_attention_keeps_index_keys() -> None:
    found = {key.replace("deepseek2", "deepseek32"): value for key, value in KIMI.items()}
    found["deepseek32.attention.indexer.key_length"] = 128
    assert layout(found, "deepseek32", 1).layers[0].bytes_per_token() == 2 * (576 + 128)


def test_mamba_keeps_a_state_and_no_tokens() -> None:
    found = keys("mamba", embedding_length=768, ssm__conv_kernel=4, ssm__inner_size=1536, ssm__state_size=16)
    (layer,) = layout(found, "mamba", 1).layers
    assert (layer.kind, layer.bytes_per_token()) == ("recurrent", 0)
    assert layer.state_bytes == 4 * (3 * 1536 + 16 * 1536)


def test_hybrid_alternates() -> None:
    found = keys(
        "qwen3next",
        embedding_length=2048,
        attention__head_count=16,
        attention__head_count_kv=2,
        attention__key_length=256,
        attention__value_length=256,
        ssm__conv_kernel=4,
        ssm__inner_size=4096,
        ssm__state_size=128,
        ssm__group_count=16,
    )
    layers = layout(found, "qwen3next", 8).layers
    assert [layer.kind for layer in layers] == ["recurrent"] * 3 + ["full"] + ["recurrent"] * 3 + ["full"]
    assert layers[0].state_bytes == 4 * (3 * (4096 + 2 * 16 * 128) + 128 * 4096)
    assert layers[3].k_elements == 512


def test_layers_without_kv_heads() -> None:
    per_layer = keys(
        "granitehybrid",
        embedding_length=64,
        attention__head_count=4,
        attention__head_count_kv=(0, 2),
        ssm__conv_kernel=4,
        ssm__inner_size=128,
        ssm__state_size=16,
        ssm__group_count=1,
    )
    assert [layer.kind for layer in layout(per_layer, "granitehybrid", 2).layers] == ["recurrent", "full"]
    deci = keys("deci", embedding_length=64, attention__head_count=4, attention__head_count_kv=(2, 0))
    assert [layer.kind for layer in layout(deci, "deci", 2).layers] == ["full", "none"]


def test_unknown_architectures_are_reported_as_guesses() -> None:
    found = layout(keys("novel", embedding_length=64, attention__head_count=4), "novel", 2)
    assert found.layers == (LayerCache("full", 64, 64),) * 2
    assert "'novel'" in found.guesses[0]
    nothing = layout({}, "novel", 1)
    assert nothing.layers == (LayerCache("none"),)
    assert len(nothing.guesses) == 2
    assert layout(KIMI, "deepseek2", 61).guesses == ()
