"""Any content of a folder results in a profile or a `TokenmillError`, quickly."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from support.safetensors_folder import header, write_raw
from tokenmill.errors import ModelError, UsageError
from tokenmill.model.huggingface.safetensors import read_folder
from tokenmill.model.huggingface.safetensors_header import DTYPE_BITS

FUZZ = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
GOOD, GOOD_BYTES = header(
    {
        "model.embed_tokens.weight": ("BF16", [16, 8]),
        "model.layers.0.self_attn.k_proj.weight": ("BF16", [4, 8]),
        "model.layers.0.mlp.gate.weight": ("BF16", [2, 8]),
        "model.layers.0.mlp.experts.0.w1.weight_packed": ("I32", [8, 1]),
        "model.layers.0.mlp.experts.0.w1.weight_scale": ("BF16", [8, 1]),
        "model.layers.1.mlp.experts.down_proj": ("U8", [2, 4, 8]),
    }
)
CONFIG = {"model_type": "qwen3_moe", "num_hidden_layers": 1, "num_experts": 2, "num_experts_per_tok": 1}

numbers = st.one_of(st.integers(-2, 70), st.integers(), st.sampled_from([1 << 31, 1 << 62, 1 << 63, 10**18]))
junk = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.floats(), st.text(max_size=12)),
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(st.text(max_size=8), inner, max_size=5)),
    max_leaves=12,
)
proper_names = st.one_of(
    st.sampled_from(
        [
            "model.layers.0.self_attn.q_proj.weight",
            "model.layers.0.self_attn.k_proj.scales",
            "lm_head.weight",
            "model.layers.99999.mlp.experts.0.w1.qweight",
            "model.layers.0.mlp.experts.gate_up_proj_blocks",
            "model.layers.0.mlp.experts.1.w1.weight",
            "mtp.layers.0.x",
            "vision_tower.layers.0.x",
            "a.weight.absmax",
            "model.layers.0.linear_attn.A_log",
            "model.layers.0.mlp.experts.1.w1.weight_scale",
            "a.weight",
            "a.qzeros",
            "model.layers.1.self_attn.k_proj.weight",
            "model.layers.1.mlp.gate.weight",
            "model.embed_tokens.weight",
        ]
    ),
    st.text(alphabet="abw._*0123", min_size=1, max_size=20),
)
names = st.one_of(proper_names, st.just("__metadata__"), st.text(max_size=20))
entries = st.fixed_dictionaries(
    {
        "dtype": st.one_of(st.sampled_from([*DTYPE_BITS, "F3"]), junk),
        "shape": st.one_of(st.lists(st.integers(0, 9), max_size=4), st.lists(numbers, max_size=4), junk),
        "data_offsets": st.one_of(st.lists(st.integers(0, 99), min_size=2, max_size=2).map(sorted), junk),
    }
)
KEYS = [
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "num_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "sliding_window",
    "layer_types",
    "sliding_window_pattern",
    "hybrid_override_pattern",
    "attention_chunk_size",
    "no_rope_layers",
    "max_position_embeddings",
    "attn_layer_period",
    "attn_layer_offset",
    "full_attention_interval",
    "mamba_d_state",
    "mamba_n_heads",
    "block_types",
    "linear_attn_config",
    "attn_type_list",
    "num_kv_shared_layers",
    "conv_L_cache",
    "architectures",
    "vocab_size",
    "is_encoder_decoder",
    "use_sliding_window",
    "max_window_layers",
    "index_topk",
    "index_head_dim",
    "ffn_config",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "quantization",
]
values = st.one_of(
    st.integers(0, 9),
    junk,
    st.lists(st.sampled_from(["full_attention", "mamba", "sliding_attention", "x"]), max_size=4),
)
quantized = st.one_of(
    junk,
    st.fixed_dictionaries(
        {
            "quant_method": st.sampled_from(
                ["fp8", "awq", "gptq", "compressed-tensors", "modelopt", "mxfp4", "quark", "bitsandbytes"]
            ),
        },
        optional={
            "bits": values,
            "quant_algo": st.one_of(st.sampled_from(["NVFP4", "MIXED_PRECISION"]), junk),
            "config_groups": junk,
            "quantized_layers": junk,
            "global_quant_config": junk,
            "group_size": values,
        },
    ),
)
configs: st.SearchStrategy[dict[str, Any]] = st.dictionaries(st.sampled_from(KEYS), values, max_size=14).flatmap(
    lambda keys: st.fixed_dictionaries(
        {
            "model_type": st.one_of(st.sampled_from(["llama", "gemma3", "jamba", "mamba2", "falcon_h1", "rwkv"]), junk),
            "quantization_config": quantized,
            **{key: st.just(value) for key, value in keys.items()},
        }
    )
)


def read_quickly(folder: Path) -> None:
    started = time.process_time()
    try:
        profile = read_folder(folder)
    except (ModelError, UsageError) as error:
        assert error.message.isprintable()
    else:
        assert profile.parameters > 0
        assert profile.bits_per_weight >= 0
        assert 0 <= profile.active_parameters <= profile.parameters
        assert len(profile.cache) == profile.layers
        assert sum(file.bytes for file in profile.files) >= profile.bytes
        json.dumps([profile.name, profile.architecture, profile.quantisation, *profile.guesses]).encode()
        assert all(guess.isprintable() for guess in profile.guesses)
    assert time.process_time() - started < 1


@FUZZ
@given(raw=st.binary(max_size=300))
@example(raw=b"")
@example(raw=b"\x02\0\0\0\0\0\0\0{}")
def test_any_bytes_for_weights(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    read_quickly(tmp_path)


@FUZZ
@given(at=st.integers(0, len(GOOD) + 7), patch=st.binary(min_size=1, max_size=6), cut=st.integers(0, 400))
def test_a_good_file_with_a_few_wrong_bytes(tmp_path: Path, at: int, patch: bytes, cut: int) -> None:
    path = write_raw(tmp_path / "model.safetensors", GOOD, GOOD_BYTES)
    raw = bytearray(path.read_bytes())
    raw[at : at + len(patch)] = patch
    path.write_bytes(bytes(raw[: max(0, len(raw) - cut)] if cut < 40 else raw))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    read_quickly(tmp_path)


@FUZZ
@given(table=st.one_of(junk, st.dictionaries(names, st.one_of(entries, junk), max_size=6)), data=st.integers(0, 200))
def test_any_json_for_a_header(tmp_path: Path, table: object, data: int) -> None:
    write_raw(tmp_path / "model.safetensors", json.dumps(table).encode(), data)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    read_quickly(tmp_path)


@FUZZ
@given(
    table=st.dictionaries(
        proper_names,
        st.tuples(st.sampled_from(sorted(DTYPE_BITS)), st.lists(st.integers(0, 9).map(lambda n: 2 * n), max_size=4)),
        min_size=1,
        max_size=12,
    ),
    config=st.one_of(configs, configs.map(lambda inner: {"model_type": "outer", "text_config": inner}), junk),
)
def test_any_config_over_a_true_table(tmp_path: Path, table: dict[str, Any], config: object) -> None:
    write_raw(tmp_path / "model.safetensors", *header(table))
    (tmp_path / "config.json").write_text(json.dumps(config))
    read_quickly(tmp_path)


@FUZZ
@given(
    index=st.one_of(
        junk, st.fixed_dictionaries({"weight_map": st.one_of(junk, st.dictionaries(names, junk, max_size=4))})
    )
)
def test_any_index(tmp_path: Path, index: object) -> None:
    write_raw(tmp_path / "model.safetensors", GOOD, GOOD_BYTES)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    read_quickly(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json", "tokenizer_config.json"])
@FUZZ
@given(
    raw=st.one_of(
        st.binary(max_size=60), st.text(max_size=60).map(str.encode), st.sampled_from([b"[" * 9999, b"9" * 9999])
    )
)
def test_any_bytes_for_the_json_beside_the_weights(tmp_path: Path, file: str, raw: bytes) -> None:
    write_raw(tmp_path / "model.safetensors", GOOD, GOOD_BYTES)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / file).write_bytes(raw)
    read_quickly(tmp_path)
