"""Tensor lists: counts and parameters as printed by llama.cpp for the real models."""

import pytest

from tokenmill.errors import UsageError
from tokenmill.model import catalog
from tokenmill.model.architectures import layer_of
from tokenmill.model.tensor_table.parts import Extras
from tokenmill.model.tensor_table.slots import slots as slots_of

# (model, tensors, parameters in units of the last printed digit): "model params" as llama.cpp and llama-bench print it
# for published files: github.com/ikawrakow/ik_llama.cpp/pull/259 (DeepSeek), github.com/ggml-org/llama.cpp/pull/19922
# (gpt-oss), github.com/ggml-org/llama.cpp/issues/14642 (Kimi-K2: 1096 tensors, 1.03 T),
# github.com/intel/ipex-llm/issues/13194 (Qwen3-235B: 1131 tensors); the rest from llama-bench tables in public threads.
PRINTED = [
    ("kimi-k2.5", 1096, 1.03e12, 1e10),
    ("deepseek-v3", None, 671.03e9, 1e7),
    ("llama-4-scout", None, 107.77e9, 1e7),
    ("llama-4-maverick", None, 400.71e9, 1e7),
    ("qwen3-235b-a22b", 1131, 235.09e9, 1e7),
    ("glm-4.5", 1761, 358.34e9, 1e7),
    ("gpt-oss-120b", 687, 116.83e9, 1e7),
    ("llama-3.3-70b", 724, 70.55e9, 1e7),
    ("qwen3-32b", 707, 32.76e9, 1e7),
]


def _elements(shape: tuple[int, ...]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total


def _published(text: str) -> tuple[float, float]:
    """A figure such as 1.6T, and half a unit of its last digit."""
    scale = {"B": 1e9, "T": 1e12}[text[-1]]
    decimals = len(text[:-1].partition(".")[2])
    return float(text[:-1]) * scale, 0.5 * scale / 10**decimals


@pytest.mark.parametrize("name", catalog.names())
def test_parameters_are_those_that_the_publisher_states(name: str) -> None:
    entry = catalog.entry(name)
    keys = entry.model.keys
    trunk = int(str(keys["block_count"])) - int(str(keys.get("nextn_predict_layers", 0)))
    found = sum(_elements(shape) for tensor, shape in entry.model.slots() if (layer_of(tensor) or 0) < trunk)
    published, rounding = _published(entry.parameters)
    assert abs(found - published) <= max(0.01 * published, rounding), f"{found / 1e9:.1f}B"


@pytest.mark.parametrize(("model", "tensors", "printed", "digit"), PRINTED)
def test_parameters_are_those_that_llama_cpp_prints(
    model: str, tensors: int | None, printed: float, digit: float
) -> None:
    slots = catalog.entry(model).model.slots()
    assert abs(sum(_elements(shape) for _, shape in slots) - printed) <= digit / 2
    assert tensors in (None, len(slots))


def test_kimi_layers_are_latent_with_one_dense_layer_first() -> None:
    slots = dict(catalog.entry("kimi-k2.5").model.slots())
    assert slots["blk.0.ffn_gate.weight"] == (7168, 18432)
    assert "blk.0.ffn_gate_exps.weight" not in slots
    assert slots["blk.1.ffn_down_exps.weight"] == (2048, 7168, 384)
    assert slots["blk.60.attn_kv_a_mqa.weight"] == (7168, 576)
    assert slots["blk.60.attn_k_b.weight"] == (128, 512, 64)
    assert slots["blk.60.attn_v_b.weight"] == (512, 128, 64)
    assert slots["blk.60.exp_probs_b.bias"] == (384,)


def test_maverick_has_experts_in_every_second_layer_and_scout_in_all() -> None:
    def layers(model: str) -> set[str]:
        return {name for name, _ in catalog.entry(model).model.slots() if "ffn_up_exps" in name}

    assert layers("llama-4-maverick") == {f"blk.{layer}.ffn_up_exps.weight" for layer in range(1, 48, 2)}
    assert layers("llama-4-scout") == {f"blk.{layer}.ffn_up_exps.weight" for layer in range(48)}


def test_the_prediction_layer_is_a_whole_layer_with_more() -> None:
    names = {name for name, _ in catalog.entry("glm-4.5").model.slots() if name.startswith("blk.92.")}
    assert {"blk.92.ffn_up_exps.weight", "blk.92.nextn.eh_proj.weight", "blk.92.attn_q.bias"} <= names


def test_tensors_are_in_the_order_llama_quantize_writes() -> None:
    names = [name for name, _ in catalog.entry("qwen3-32b").model.slots()]
    assert names[:3] == ["output.weight", "output_norm.weight", "token_embd.weight"]
    assert names.index("blk.9.attn_k.weight") < names.index("blk.10.attn_k.weight")
    assert len(set(names)) == len(names)


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        slots_of("rwkv7", {}, 10, Extras())
    assert "deepseek2" in str(caught.value.hint)
