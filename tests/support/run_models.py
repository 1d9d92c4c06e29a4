"""Models of published runs: catalogue entries with other tensor types, and models that are not in the catalogue.

Expert types follow the names and sizes stated for the runs; `_REST` is everything except routed experts.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import prod

from tokenmill.model.profile import Experts, LayerCache, Profile, Tensor, TensorClass
from tokenmill.model.read import read
from tokenmill.model.tensor_types import tensor_bytes

_LATENT = LayerCache("latent", 576, 512)


def retyped(profile: Profile, rules: Mapping[str, str]) -> Profile:
    """The same model with other tensor types; the first pattern found in a tensor's name decides."""
    tensors = []
    for tensor in profile.tensors:
        kind = next((kind for pattern, kind in rules.items() if re.search(pattern, tensor.name)), tensor.type)
        if kind == tensor.type or len(tensor.shape) == 1 or tensor.type == "F32":
            tensors.append(tensor)
            continue
        kind = kind if tensor.shape[0] % 256 == 0 else "Q8_0"
        tensors.append(replace(tensor, type=kind, bytes=tensor_bytes(kind, tensor.shape)))
    return replace(profile, tensors=tuple(tensors))


def first_layers(profile: Profile, count: int) -> Profile:
    """A slice of a model: its first layers, its embedding and its output."""
    kept = tuple(tensor for tensor in profile.tensors if tensor.layer is None or tensor.layer < count)
    return replace(profile, tensors=kept, layers=count, cache=profile.cache[:count])


def drawn(
    name: str,
    *,
    layers: int,
    embed: int,
    experts: Experts,
    expert_ff: int,
    attention: Mapping[str, tuple[int, int]],
    vocabulary: int,
    heads: int,
    kv_heads: int,
    cache: Sequence[LayerCache],
    expert_types: tuple[str, str],
    rest_type: str,
    shared_ff: int = 0,
    dense_layers: int = 0,
    dense_ff: int = 0,
) -> Profile:
    """A model from its shape alone. `attention` lists the matrices of a layer, `expert_types` gate and up, and down."""
    rows: list[Tensor] = []

    def add(name: str, cls: TensorClass, layer: int | None, shape: tuple[int, ...], kind: str) -> None:
        kind = kind if shape[0] % 256 == 0 or kind in ("F32", "BF16") else "Q8_0"
        rows.append(Tensor(name, cls, layer, shape, kind, tensor_bytes(kind, shape), prod(shape)))

    add("token_embd.weight", TensorClass.EMBEDDING, None, (embed, vocabulary), rest_type)
    add("output.weight", TensorClass.OUTPUT, None, (embed, vocabulary), rest_type)
    for layer in range(layers):
        at = f"blk.{layer}."
        for matrix, shape in attention.items():
            add(f"{at}{matrix}.weight", TensorClass.ATTENTION, layer, shape, rest_type)
        if layer < dense_layers:
            for matrix in ("gate", "up", "down"):
                add(f"{at}ffn_{matrix}.weight", TensorClass.DENSE_FFN, layer, (embed, dense_ff), rest_type)
            continue
        add(f"{at}ffn_gate_inp.weight", TensorClass.ROUTER, layer, (embed, experts.count), "F32")
        stack = (embed, expert_ff, experts.count)
        add(f"{at}ffn_gate_exps.weight", TensorClass.ROUTED_EXPERTS, layer, stack, expert_types[0])
        add(f"{at}ffn_up_exps.weight", TensorClass.ROUTED_EXPERTS, layer, stack, expert_types[0])
        down = (expert_ff, embed, experts.count)
        add(f"{at}ffn_down_exps.weight", TensorClass.ROUTED_EXPERTS, layer, down, expert_types[1])
        if shared_ff:
            for matrix in ("gate", "up", "down"):
                add(f"{at}ffn_{matrix}_shexp.weight", TensorClass.SHARED_EXPERTS, layer, (embed, shared_ff), rest_type)
    return Profile(name, "catalog", name, tuple(rows), (), layers, tuple(cache), experts, embed, heads, kv_heads)


def _alternating(layers: int, full: LayerCache, state: LayerCache) -> tuple[LayerCache, ...]:
    """Three linear layers, then one of full attention."""
    return tuple(full if layer % 4 == 3 else state for layer in range(layers))


@cache
def model(name: str) -> Profile:
    """A profile by the short name used below."""
    base, _, mix = name.partition("/")
    made = _DRAWN.get(name)
    if made is not None:
        return made()
    return retyped(read(base), _MIXES[mix]) if mix else read(base)


_REST = r"attn|shexp|ffn_(gate|up|down)\.|output|token_embd"
_MIXES: dict[str, dict[str, str]] = {
    "UD-Q2_K_XL": {"_exps": "Q2_K"},
    "Q2_K_R4": {"ffn_down_exps": "Q3_K_R4", "_exps": "Q2_K_R4", _REST: "Q8_0"},
    "IQ2_K_R4": {"ffn_down_exps": "IQ3_K_R4", "_exps": "IQ2_K_R4", _REST: "IQ5_KS"},
    "IQ3_K_R4": {"ffn_down_exps": "IQ4_KS_R4", "_exps": "IQ3_K_R4", _REST: "Q8_0"},
    "IQ3_KT": {"ffn_down_exps": "IQ4_KT", "_exps": "IQ3_KT", _REST: "IQ5_KS"},
    "IQ2_XXS": {"ffn_down_exps": "IQ2_KS", "_exps": "IQ2_XXS", _REST: "IQ5_KS"},
    "IQ2_KT": {"ffn_down_exps": "IQ2_KT", "_exps": "IQ2_KT", _REST: "IQ5_KS"},
    "IQ5_K": {"ffn_down_exps": "IQ6_K", "_exps": "IQ5_K", _REST: "Q8_0"},
    "5.06bpw": {"ffn_down_exps": "IQ4_K", "_exps": "IQ5_KS", _REST: "Q8_0"},
    "6.25bpw": {"ffn_down_exps": "IQ5_K", "_exps": "IQ6_K", _REST: "Q8_0"},
    "UD-Q5_K_XL": {"ffn_down_exps": "Q6_K", "_exps": "Q5_K", _REST: "Q8_0"},
    "F16": {_REST: "F16"},
    "IQ2_KL": {"ffn_down_exps": "IQ3_K", "_exps": "IQ2_KL", _REST: "IQ5_K"},
}
_DRAWN: dict[str, Callable[[], Profile]] = {
    # config.json of MiniMaxAI/MiniMax-M2.5
    "minimax-m2.5/IQ5_K": lambda: drawn(
        "minimax-m2.5",
        layers=62,
        embed=3072,
        experts=Experts(256, 8),
        expert_ff=1536,
        vocabulary=200064,
        heads=48,
        kv_heads=8,
        cache=(LayerCache("full", 1024, 1024),) * 62,
        expert_types=("IQ5_K", "IQ5_K"),
        rest_type="Q8_0",
        attention={"attn_q": (3072, 6144), "attn_k": (3072, 1024), "attn_v": (3072, 1024), "attn_output": (6144, 3072)},
    ),
    # GLM-5 technical report, table of the architecture
    "glm-5.1/IQ3_KS": lambda: drawn(
        "glm-5.1",
        layers=78,
        embed=6144,
        experts=Experts(256, 8, 1),
        expert_ff=2048,
        vocabulary=154880,
        heads=64,
        kv_heads=1,
        cache=(_LATENT,) * 78,
        expert_types=("IQ3_KS", "IQ4_KS"),
        rest_type="Q6_K",
        shared_ff=2048,
        dense_layers=3,
        dense_ff=12288,
        attention={
            "attn_q_a": (6144, 2048),
            "attn_q_b": (2048, 16384),
            "attn_kv_a_mqa": (6144, 576),
            "attn_k_b": (192, 512 * 64),
            "attn_v_b": (512, 256 * 64),
            "attn_output": (16384, 6144),
        },
    ),
    # config.json of Qwen/Qwen3.5-397B-A17B
    "qwen3.5-397b/IQ4_NL": lambda: drawn(
        "qwen3.5-397b",
        layers=60,
        embed=4096,
        experts=Experts(512, 10, 1),
        expert_ff=1024,
        vocabulary=248320,
        heads=32,
        kv_heads=2,
        cache=_alternating(60, LayerCache("full", 512, 512), LayerCache("recurrent", state_bytes=4 << 20)),
        expert_types=("IQ4_NL", "IQ4_NL"),
        rest_type="Q8_0",
        shared_ff=1024,
        attention={"attn_qkv": (4096, 12288), "attn_gate": (4096, 8192), "attn_output": (8192, 4096)},
    ),
    # config.json of Qwen/Qwen3-Coder-Next
    "qwen3-coder-next/IQ4_NL": lambda: drawn(
        "qwen3-coder-next",
        layers=48,
        embed=2048,
        experts=Experts(512, 10, 1),
        expert_ff=512,
        vocabulary=151936,
        heads=16,
        kv_heads=2,
        cache=_alternating(48, LayerCache("full", 512, 512), LayerCache("recurrent", state_bytes=2 << 20)),
        expert_types=("IQ4_NL", "IQ4_NL"),
        rest_type="IQ4_NL",
        shared_ff=512,
        attention={"attn_qkv": (2048, 8192), "attn_gate": (2048, 4096), "attn_output": (4096, 2048)},
    ),
    "qwen3-coder-next/BF16": lambda: drawn(
        "qwen3-coder-next",
        layers=48,
        embed=2048,
        experts=Experts(512, 10, 1),
        expert_ff=512,
        vocabulary=151936,
        heads=16,
        kv_heads=2,
        cache=_alternating(48, LayerCache("full", 512, 512), LayerCache("recurrent", state_bytes=2 << 20)),
        expert_types=("BF16", "BF16"),
        rest_type="BF16",
        shared_ff=512,
        attention={"attn_qkv": (2048, 8192), "attn_gate": (2048, 4096), "attn_output": (4096, 2048)},
    ),
    # config.json of zai-org/GLM-4.7-Flash
    "glm-4.7-flash/IQ5_K": lambda: drawn(
        "glm-4.7-flash",
        layers=47,
        embed=2048,
        experts=Experts(64, 4, 1),
        expert_ff=1536,
        vocabulary=154880,
        heads=20,
        kv_heads=1,
        cache=(_LATENT,) * 47,
        expert_types=("IQ5_K", "IQ5_K"),
        rest_type="Q8_0",
        shared_ff=1536,
        dense_layers=1,
        dense_ff=10240,
        attention={
            "attn_q_a": (2048, 768),
            "attn_q_b": (768, 5120),
            "attn_kv_a_mqa": (2048, 576),
            "attn_k_b": (192, 512 * 20),
            "attn_v_b": (512, 256 * 20),
            "attn_output": (5120, 2048),
        },
    ),
}
