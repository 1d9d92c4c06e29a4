"""KV caches of layers for all forms of configs."""

from itertools import groupby
from typing import Any

import pytest

from tokenmill.model.huggingface.config import ConfigReader, declared_experts, declared_heads, language_model
from tokenmill.model.huggingface.kv_layout import Projections, layout
from tokenmill.model.huggingface.safetensors_header import StoredTensor
from tokenmill.model.huggingface.tensors import TensorRole, projections
from tokenmill.model.profile import LayerCache, TensorClass

FULL, WIDE = LayerCache("full", 1024, 1024), {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
NONE = LayerCache("none")


def window(span: int) -> LayerCache:
    return LayerCache("window", 1024, 1024, span_tokens=span)


def recurrent(state_bytes: int) -> LayerCache:
    return LayerCache("recurrent", state_bytes=state_bytes)


def runs(config: dict[str, Any], layers: int, seen: Projections | None = None) -> list[tuple[int, LayerCache]]:
    found = layout(ConfigReader(config), layers, seen or Projections())
    return [(len([*group]), cache) for cache, group in groupby(found.layers)]


LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 64}
MAMBA2 = {"mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4}
MAMBA2_STATE = 4 * 128 * 64 * 128 + 2 * 3 * (128 * 64 + 2 * 8 * 128)
DELTA = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
DELTA_STATE = 32 * 128 * 128, 3 * (2 * 16 * 128 + 32 * 128)


CHUNKED = LayerCache("chunked", 1024, 1024, span_tokens=8192)
DELTA_32, DELTA_16 = (recurrent(size * DELTA_STATE[0] + 2 * DELTA_STATE[1]) for size in (4, 2))
JAMBA = {"hidden_size": 4096, "attn_layer_period": 4, "attn_layer_offset": 2, "mamba_d_state": 16, "mamba_d_conv": 4}
JAMBA_STATE = recurrent(4 * 8192 * 16 + 2 * 3 * 8192)
BAMBA = {"hidden_size": 4096, "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_d_state": 128, "mamba_n_groups": 8}
KDA = {"kda_layers": [1, 2], "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4}
KDA_STATE = recurrent(4 * 32 * 128 * 128 + 2 * 3 * 3 * 32 * 128)
GRIFFIN = {"lru_width": 2560, "conv1d_width": 4, "attention_window_size": 2048}
GRIFFIN_STATE = recurrent(4 * 2560 + 2 * 3 * 2560)


def wide(family: str, **keys: Any) -> dict[str, Any]:
    return {"model_type": family, **WIDE, **keys}


FAMILIES: dict[str, tuple[dict[str, Any], list[tuple[int, LayerCache]]]] = {
    "grouped queries": (wide("llama"), [(4, FULL)]),
    "head size from width": ({"model_type": "llama", "num_attention_heads": 8, "hidden_size": 1024}, [(4, FULL)]),
    "multi-query": (
        {
            "model_type": "falcon",
            "num_attention_heads": 71,
            "num_kv_heads": 71,
            "hidden_size": 4544,
            "multi_query": True,
        },
        [(2, LayerCache("full", 64, 64))],
    ),
    "latent": ({"model_type": "deepseek_v3", **LATENT}, [(3, LayerCache("latent", 576, 512))]),
    "latent with an index": (
        {"model_type": "deepseek_v32", **LATENT, "index_head_dim": 128, "index_topk": 2048},
        [(3, LayerCache("latent", 576, 512, indexer_elements=128))],
    ),
    "narrow values": (wide("mimo_v2_flash", v_head_dim=64), [(1, LayerCache("full", 1024, 512))]),
    "window everywhere": (wide("mistral", sliding_window=4096), [(2, window(4096))]),
    "no window": (wide("mistral", sliding_window=None), [(2, FULL)]),
    "window beyond the context": (wide("phi3", sliding_window=262144, max_position_embeddings=131072), [(2, FULL)]),
    "window switched off": (wide("qwen2", sliding_window=4096, use_sliding_window=False), [(2, FULL)]),
    "window in the upper layers": (
        wide("qwen2", sliding_window=4096, use_sliding_window=True, max_window_layers=3),
        [(3, FULL), (2, window(4096))],
    ),
    "one full of six": (
        wide("gemma3_text", sliding_window=1024, sliding_window_pattern=6),
        [(5, window(1024)), (1, FULL), (1, window(1024))],
    ),
    "alternating by family": (
        wide("gemma2", sliding_window=4096),
        [(1, window(4096)), (1, FULL), (1, window(4096))],
    ),
    "pattern in letters": (
        wide("exaone4", sliding_window=4096, sliding_window_pattern="LLLG"),
        [(3, window(4096)), (1, FULL), (1, window(4096))],
    ),
    "listed": (
        wide("gpt_oss", sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 2),
        [(1, window(128)), (1, FULL), (1, window(128)), (1, FULL)],
    ),
    "pattern in numbers": (
        wide("mimo_v2_flash", sliding_window=128, hybrid_layer_pattern=[0, 1, 1]),
        [(1, FULL), (2, window(128))],
    ),
    "three of four chunked": (wide("llama4_text", attention_chunk_size=8192), [(3, CHUNKED), (1, FULL), (1, CHUNKED)]),
    "chunked where positions rotate": (
        wide("llama4_text", attention_chunk_size=8192, no_rope_layers=[0, 1, 1]),
        [(1, FULL), (2, CHUNKED)],
    ),
    "the last layers share": (
        wide("gemma3n_text", num_kv_shared_layers=2, layer_types=["full_attention"] * 4),
        [(2, FULL), (2, NONE)],
    ),
    "delta net": (
        wide("qwen3_next", **DELTA, full_attention_interval=4),
        [(3, DELTA_32), (1, FULL), (1, DELTA_32)],
    ),
    "delta net in 16 bits": (
        wide("qwen3_5_moe", **DELTA, mamba_ssm_dtype="bfloat16", layer_types=["linear_attention", "full_attention"]),
        [(1, DELTA_16), (1, FULL)],
    ),
    "kimi linear": (
        {"model_type": "kimi_linear", **LATENT, "linear_attn_config": KDA},
        [(2, KDA_STATE), (1, LayerCache("latent", 576, 512))],
    ),
    "nemotron_h": (
        wide("nemotron_h", **MAMBA2, hybrid_override_pattern="M-M*E"),
        [(1, recurrent(MAMBA2_STATE)), (1, NONE), (1, recurrent(MAMBA2_STATE)), (1, FULL), (1, NONE)],
    ),
    "jamba": (wide("jamba", **JAMBA), [(2, JAMBA_STATE), (1, FULL), (1, JAMBA_STATE)]),
    "bamba": (
        wide("bamba", **BAMBA, mamba_d_conv=4, attn_layer_indices=[1]),
        [(1, recurrent(MAMBA2_STATE)), (1, FULL)],
    ),
    "both at once": (wide("falcon_h1", **MAMBA2), [(2, LayerCache("full", 1024, 1024, state_bytes=MAMBA2_STATE))]),
    "mamba2": (
        {"model_type": "mamba2", "num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8, "conv_kernel": 4},
        [(2, recurrent(MAMBA2_STATE))],
    ),
    "mamba": (
        {"model_type": "mamba", "hidden_size": 768, "intermediate_size": 1536, "state_size": 16, "conv_kernel": 4},
        [(2, recurrent(4 * 1536 * 16 + 2 * 3 * 1536))],
    ),
    "short convolution": (
        wide("lfm2", hidden_size=2048, conv_L_cache=3, layer_types=["conv", "full_attention"]),
        [(1, recurrent(2 * 2048 * 2)), (1, FULL)],
    ),
    "recurrent gemma": (
        wide("recurrent_gemma", **GRIFFIN, block_types=["recurrent", "recurrent", "attention"]),
        [(2, GRIFFIN_STATE), (1, window(2048)), (1, GRIFFIN_STATE)],
    ),
    "lightning attention": (
        wide("minimax_text_01", attn_type_list=[0, 1]),
        [(1, recurrent(4 * 32 * 128 * 128)), (1, FULL)],
    ),
}


@pytest.mark.parametrize("case", FAMILIES)
def test_layers_of_known_families(case: str) -> None:
    config, expected = FAMILIES[case]
    layers = sum(count for count, _ in expected)
    assert runs(config, layers) == expected
    found = layout(ConfigReader(config), layers, Projections())
    assert [guess for guess in found.guesses if "recurrent state" not in guess] == []


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "wobble", **WIDE}, "'wobble'"),
        (dict(WIDE), "'unknown'"),
        ({"model_type": "llama"}, "size of the KV cache"),
        ({"model_type": "llama", **WIDE, "sliding_window": 4096}, "sliding window"),
        (wide("llama", layer_types=["frob", "full_attention", "full_attention"]), "type frob"),
        ({"model_type": "llama", **WIDE, "layer_types": ["full_attention"]}, "types of 1 of 3 layers"),
        ({"model_type": "rwkv7", **WIDE}, "size of the recurrent state"),
        (wide("jamba", **JAMBA), "in 32-bit floats"),
    ],
)
def test_assumptions_are_reported(config: dict[str, Any], words: str) -> None:
    guesses = layout(ConfigReader(config), 3, Projections()).guesses
    assert [guess for guess in guesses if words in guess]


def test_rows_of_the_projections_win_over_the_config() -> None:
    seen = Projections(k_rows={0: 512, 1: 2048}, v_rows={0: 256, 1: 2048}, attending=frozenset({0, 1}))
    caches = runs({"model_type": "llama", **WIDE}, 2, seen)
    assert caches == [(1, LayerCache("full", 512, 256)), (1, LayerCache("full", 2048, 2048))]


def test_a_layer_without_attention_keeps_nothing() -> None:
    assert runs({"model_type": "llama", **WIDE}, 3, Projections(attending=frozenset({0, 2}))) == [
        (1, FULL),
        (1, NONE),
        (1, FULL),
    ]


def test_a_layer_with_queries_only_has_no_cache() -> None:
    seen = Projections(k_rows={0: 1024}, query_only=frozenset({1}), attending=frozenset({0, 1}))
    assert runs({"model_type": "hunyuan_v1_moe", **WIDE}, 2, seen) == [(1, FULL), (1, NONE)]


def test_recurrent_layers_are_found_in_the_tensor_table() -> None:
    seen = Projections(stateful=frozenset({0}), attending=frozenset({0, 1}))
    assert runs({"model_type": "wobble", **WIDE, **MAMBA2}, 2, seen) == [(1, recurrent(MAMBA2_STATE)), (1, FULL)]


def test_projections_are_collected_from_the_table() -> None:
    table = {
        "model.layers.0.self_attn.q_proj.weight": ("BF16", (4096, 4096)),
        "model.layers.0.self_attn.k_proj.weight": ("F8_E4M3", (1024, 4096)),
        "model.layers.0.self_attn.v_proj.weight_packed": ("I32", (512, 512)),
        "model.layers.1.self_attn.q_proj.qweight": ("I32", (4096, 512)),
        "model.layers.1.self_attn.k_proj.qweight": ("I32", (4096, 128)),
        "model.layers.1.self_attn.k_proj.scales": ("F16", (32, 1024)),
        "model.layers.2.self_attn.q_proj.weight": ("BF16", (4096, 4096)),
        "model.layers.2.cross_attn.k_proj.weight": ("BF16", (77, 4096)),
        "model.layers.3.linear_attn.A_log": ("F32", (32,)),
        "model.layers.4.self_attn.k_proj.weight": ("U8", (2097152, 1)),
    }
    place = {name: TensorRole(TensorClass.ATTENTION, int(name.split(".")[2])) for name in table}
    assert projections((name, StoredTensor(*kept), place[name]) for name, kept in table.items()) == Projections(
        k_rows={0: 1024, 1: 1024},
        v_rows={0: 512},
        query_only=frozenset({2}),
        stateful=frozenset({3}),
        attending=frozenset({0, 1, 2, 3, 4}),
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1}, (256, 8, 1)),
        ({"num_local_experts": 16, "num_experts_per_tok": 1}, (16, 1, None)),
        ({"num_experts": 128, "num_experts_per_tok": 8}, (128, 8, None)),
        ({"moe_num_experts": [64, 64], "moe_k": 6, "moe_num_shared_experts": 2}, (64, 6, 2)),
        ({"ffn_config": {"moe_num_experts": 16, "moe_top_k": 4}}, (16, 4, None)),
        ({"num_experts": 64, "moe_topk": [8, 8], "num_shared_expert": [1, 1]}, (64, 8, 1)),
        ({"num_experts": 0, "num_experts_per_tok": -1, "n_shared_experts": "1"}, (None, None, None)),
    ],
)
def test_experts_by_many_names(config: dict[str, Any], expected: tuple[int | None, ...]) -> None:
    assert declared_experts(ConfigReader(config)) == expected


def test_the_language_model_is_found_inside_a_multimodal_config() -> None:
    config = {
        "model_type": "qwen_omni",
        "vocab_size": 7,
        "num_hidden_layers": 99,
        "thinker_config": {"text_config": {"model_type": "inner", "num_hidden_layers": 2, **WIDE}},
        "vision_config": {"num_hidden_layers": 55},
    }
    settings = language_model(config)
    assert (settings.word("model_type"), settings.count("num_hidden_layers"), settings.count("vocab_size")) == (
        "inner",
        2,
        7,
    )
    assert declared_heads(settings) == (32, 8)


@pytest.mark.parametrize("value", [True, "8", -8, 0, 8.0, None, 1 << 60, [], ["8"], {"a": 1}])
def test_counts_of_wrong_types_are_missing(value: object) -> None:
    assert ConfigReader({"num_hidden_layers": value}).count("num_hidden_layers") is None
