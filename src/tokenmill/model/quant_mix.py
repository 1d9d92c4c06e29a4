"""Chooses the type of each tensor in a named mix such as Q4_K_M.

The rules are those of llama-quantize (build b11549), which depend on a tensor's purpose and layer. Mixes with types
set per tensor (unsloth's UD-, ubergarm's) are in the catalogue as patterns; real files have a tensor table instead. An
importance matrix is assumed only for mixes that require one.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tokenmill.errors import UsageError
from tokenmill.model.architectures import layer_of
from tokenmill.model.tensor_table.parts import TensorSlot
from tokenmill.model.tensor_types import BY_NAME


@dataclass(frozen=True, slots=True)
class MixTraits:
    """Properties of the model that the choices depend on."""

    layers: int
    experts: int = 0
    queries_per_kv_head: int = 1
    tied_output: bool = False
    llama_70b: bool = False  # llama.cpp has a special rule for the 80-layer grouped-query llama
    mxfp4_experts_only: bool = False  # Ling 3, where MXFP4_MOE leaves other stacked matrices alone


@dataclass(frozen=True, slots=True)
class _Spot:
    """Position of a tensor: its index among those of its kind, and its layer."""

    nth: int
    of: int  # number of tensors of this kind
    layer: int
    traits: MixTraits


FILE_TYPES: Mapping[str, tuple[int, str]] = {
    "F32": (0, "F32"),
    "F16": (1, "F16"),
    "BF16": (32, "BF16"),
    "Q4_0": (2, "Q4_0"),
    "Q4_1": (3, "Q4_1"),
    "Q5_0": (8, "Q5_0"),
    "Q5_1": (9, "Q5_1"),
    "Q8_0": (7, "Q8_0"),
    "Q2_K": (10, "Q2_K"),
    "Q2_K_S": (21, "Q2_K"),
    "Q3_K_S": (11, "Q3_K"),
    "Q3_K_M": (12, "Q3_K"),
    "Q3_K_L": (13, "Q3_K"),
    "Q4_K_S": (14, "Q4_K"),
    "Q4_K_M": (15, "Q4_K"),
    "Q5_K_S": (16, "Q5_K"),
    "Q5_K_M": (17, "Q5_K"),
    "Q6_K": (18, "Q6_K"),
    "IQ1_S": (24, "IQ1_S"),
    "IQ1_M": (31, "IQ1_M"),
    "IQ2_XXS": (19, "IQ2_XXS"),
    "IQ2_XS": (20, "IQ2_XS"),
    "IQ2_S": (28, "IQ2_XS"),
    "IQ2_M": (29, "IQ2_S"),
    "IQ3_XXS": (23, "IQ3_XXS"),
    "IQ3_XS": (22, "IQ3_S"),
    "IQ3_S": (26, "IQ3_S"),
    "IQ3_M": (27, "IQ3_S"),
    "IQ4_NL": (25, "IQ4_NL"),
    "IQ4_XS": (30, "IQ4_XS"),
    "MXFP4_MOE": (38, "MXFP4"),
}
"""Mix -> (number in `general.file_type`, type of most tensors)."""

_KEPT = ("_norm.", "ffn_gate_inp.", "ffn_gate_tid2eid.", "ssm_conv1d", "indexer.k_proj.", "indexer.q_proj.")
_INDEXER_PROJECTION = re.compile(r"indexer\.[kq]_proj\.")
_ATTENTION_ROLES = {  # part of a name -> role; joined and latent matrices follow the rules for values
    "attn_qkv": "attn_v",
    "attn_kv_b": "attn_v",
    "attn_v": "attn_v",
    "attn_k": "attn_k",
    "attn_q": "attn_q",
    "attn_output": "attn_output",
}
_TINY = frozenset({"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M"})
_SMALL_BLOCK = {  # llama.cpp's substitute for rows that are not a multiple of 256 elements
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    "IQ1_S": "IQ4_NL",
    "IQ1_M": "IQ4_NL",
    "IQ2_XXS": "IQ4_NL",
    "IQ2_XS": "IQ4_NL",
    "IQ2_S": "IQ4_NL",
    "IQ3_XXS": "IQ4_NL",
    "IQ3_S": "IQ4_NL",
    "IQ4_XS": "IQ4_NL",
}


def _always(_spot: _Spot) -> bool:
    return True


def _grouped(spot: _Spot) -> bool:
    return spot.traits.queries_per_kv_head >= 4


def _eighth(spot: _Spot) -> bool:
    return spot.layer < spot.traits.layers // 8


def _sixteenth(spot: _Spot) -> bool:
    return spot.layer < spot.traits.layers // 16


def _middle(spot: _Spot) -> bool:
    return spot.traits.layers // 8 <= spot.layer < 7 * spot.traits.layers // 8


def more_bits(nth: int, of: int) -> bool:
    """Whether the _M mixes use more bits: in the first and last eighth, and in every third layer between."""
    return nth < of // 8 or nth >= 7 * of // 8 or (nth - of // 8) % 3 == 2


def _layer_more_bits(spot: _Spot) -> bool:
    return more_bits(spot.layer, spot.traits.layers)


_Rule = tuple[str, Callable[[_Spot], bool], str]  # mixes, condition, type; the first match wins
_TABLE: Mapping[str, Sequence[_Rule]] = {
    "attn_v": (
        ("IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ2_M", lambda s: _grouped(s) or s.traits.experts >= 4, "Q4_K"),
        ("IQ2_S IQ2_M", _always, "IQ3_S"),
        ("IQ1_S IQ1_M IQ2_XXS IQ2_XS", _always, "Q2_K"),
        ("Q2_K Q2_K_S IQ3_XXS IQ3_XS IQ3_S", _grouped, "Q4_K"),
        ("Q2_K", _always, "Q3_K"),
        ("IQ3_M", _always, "Q4_K"),
        ("Q3_K_M", lambda s: s.nth < 2, "Q5_K"),
        ("Q3_K_M", _always, "Q4_K"),
        ("Q3_K_L", _always, "Q5_K"),
        ("IQ4_NL IQ4_XS", _grouped, "Q5_K"),
        ("Q4_K_M Q5_K_M", lambda s: more_bits(s.nth, s.of), "Q6_K"),
        ("Q4_K_S", lambda s: s.nth < 4, "Q5_K"),
    ),
    "attn_k": (("IQ3_XS", _always, "IQ3_XXS"), ("IQ3_XXS", _always, "IQ2_S")),
    "attn_q": (("IQ3_XS", _always, "IQ3_XXS"), ("IQ3_XXS", _always, "IQ2_S")),
    "attn_output": (
        ("IQ1_S IQ1_M", _always, "IQ2_XXS"),
        ("IQ2_S IQ2_M IQ3_XXS", _always, "IQ3_S"),
        ("Q2_K", _always, "Q3_K"),
        ("Q3_K_M IQ3_M", _always, "Q4_K"),
        ("Q3_K_L", _always, "Q5_K"),
    ),
    "ffn_down": (
        ("IQ2_S IQ2_M", lambda s: s.nth < s.traits.layers // 8, "IQ3_S"),
        ("IQ1_S IQ1_M IQ2_XXS IQ2_XS", lambda s: s.nth < s.traits.layers // 8, "Q2_K"),
        ("Q2_K", _always, "Q3_K"),
        ("Q2_K_S IQ3_M", _eighth, "Q4_K"),
        ("IQ3_M", lambda s: s.traits.experts == 8 and _layer_more_bits(s), "Q4_K"),
        ("Q3_K_M", _sixteenth, "Q5_K"),
        ("Q3_K_M", _always, "Q4_K"),
        ("Q3_K_L", _always, "Q5_K"),
        ("Q4_K_M Q5_K_M", _layer_more_bits, "Q6_K"),
        ("Q4_K_S IQ4_NL IQ4_XS", _eighth, "Q5_K"),
    ),
    "ffn_gate": (("IQ3_XS", _middle, "IQ3_XXS"),),
    "ffn_up": (("IQ3_XS", _middle, "IQ3_XXS"),),
    "token_embd": (
        ("IQ1_S IQ1_M IQ2_XXS IQ2_XS", _always, "Q2_K"),
        ("IQ2_S IQ2_M IQ3_XXS", _always, "IQ3_S"),
    ),
}
_RULES = {
    role: [(frozenset(mixes.split()), holds, kind) for mixes, holds, kind in rules] for role, rules in _TABLE.items()
}
# llama-quantize treats models with eight experts as Mixtral, whose small attention tensors get more bits
_MIXTRAL_OUTPUT = _TINY | {
    "Q2_K",
    "IQ3_XS",
    "IQ3_XXS",
    "Q3_K_S",
    "Q3_K_M",
    "IQ4_NL",
    "Q4_K_S",
    "Q4_K_M",
    "IQ3_S",
    "IQ3_M",
    "IQ4_XS",
}


def choose(mix: str, slots: Sequence[TensorSlot], traits: MixTraits, overrides: Mapping[str, str]) -> list[str]:
    """The type of each tensor; `slots` must be in file order, and the first matching override wins.

    Raises `UsageError` for an unknown mix.
    """
    if mix not in FILE_TYPES:
        raise UsageError(f"unknown quantization {mix}", hint=f"use one of {', '.join(FILE_TYPES)}")
    patterns = [(re.compile(pattern), kind) for pattern, kind in overrides.items()]
    totals: dict[str, int] = {}
    for name, _ in slots:
        totals[_role(name)] = totals.get(_role(name), 0) + 1
    seen: dict[str, int] = {}
    chosen = []
    for name, shape in slots:
        role = _role(name)
        if not quantizable(name, shape):
            chosen.append(_kept(name))
            continue
        spot = _Spot(seen.get(role, 0), totals[role], layer_of(name) or 0, traits)
        seen[role] = spot.nth + 1
        override = next((kind for pattern, kind in patterns if pattern.search(name)), None)
        chosen.append(fitting(override or _standard(mix, role, shape, spot), shape[0]))
    return chosen


def quantizable(name: str, shape: tuple[int, ...]) -> bool:
    """Whether mixes apply to a tensor: a matrix that is not among those that llama-quantize keeps."""
    return len(shape) > 1 and name.endswith(".weight") and not any(part in name for part in _KEPT)


def _kept(name: str) -> str:
    """The type of a tensor that is not quantized, as convert_hf_to_gguf.py writes it."""
    if "ffn_gate_tid2eid." in name:
        return "I32"
    return "BF16" if _INDEXER_PROJECTION.search(name) else "F32"


def _role(name: str) -> str:
    if name in ("output.weight", "token_embd.weight"):
        return name.removesuffix(".weight")
    for part, role in _ATTENTION_ROLES.items():
        if f"{part}.weight" in name:
            return role
    return next((role for role in ("ffn_up", "ffn_gate", "ffn_down") if role in name), "other")


def _standard(mix: str, role: str, shape: tuple[int, ...], spot: _Spot) -> str:
    base = FILE_TYPES[mix][1]
    if base in ("F32", "F16", "BF16"):
        return base
    if role == "output" or (role == "token_embd" and spot.traits.tied_output):
        return _output(mix, base, shape[0])
    if mix == "MXFP4_MOE":
        stacked = role.startswith("ffn_") if spot.traits.mxfp4_experts_only else True
        return "MXFP4" if len(shape) == 3 and stacked else "Q8_0"
    if spot.traits.experts == 8 and role in ("attn_v", "attn_k", "attn_output"):
        return _mixtral(mix, role, base)
    for mixes, holds, kind in _RULES.get(role, ()):
        if mix in mixes and holds(spot):
            base = kind
            break
    if role == "attn_v" and spot.traits.llama_70b and mix not in _TINY and base in ("Q3_K", "Q4_K"):
        return "Q5_K"
    return base


def _output(mix: str, base: str, columns: int) -> str:
    if mix == "MXFP4_MOE" or columns % BY_NAME[base].block:
        return "Q8_0"
    if mix in _TINY or mix == "IQ3_XXS":
        return "Q5_K"
    return base if base == "Q8_0" else "Q6_K"


def _mixtral(mix: str, role: str, base: str) -> str:
    if role == "attn_output":
        return "Q5_K" if mix in _MIXTRAL_OUTPUT else base
    return "Q4_K" if mix in _TINY else "Q8_0"


def fitting(kind: str, columns: int) -> str:
    """`kind`, or a substitute whose blocks divide a row of `columns` elements."""
    if columns % BY_NAME[kind].block == 0:
        return kind
    small = _SMALL_BLOCK.get(kind, kind)
    return small if columns % BY_NAME[small].block == 0 else "F16"
