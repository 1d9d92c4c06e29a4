"""Classes of tensors by name, and the names and shapes of an architecture's tensors, derived from GGUF keys.

The rules follow llama.cpp's per-architecture loaders: given the same keys, llama.cpp requests exactly these tensors.
Facts that no key contains (biases, norms per attention head, a stored rope table) are `Extras`.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill.errors import UsageError
from tokenmill.model.profile import TensorClass

_LAYER = re.compile(r"(?:^|\.)blk\.(\d+)\.(.+)$")

# Matched with the part of the name after `blk.N.`; the first match wins, so that `ffn_gate_inp` is a router.
_IN_LAYER: tuple[tuple[re.Pattern[str], TensorClass], ...] = tuple(
    (re.compile(pattern), cls)
    for pattern, cls in (
        (r"nextn\.", TensorClass.MTP),
        (r"(ffn_gate_inp_shexp|ffn_(gate|up|down|gate_up)_shexp)", TensorClass.SHARED_EXPERTS),
        (r"(ffn_gate_inp|exp_probs_b|ffn_gate_tid2eid)", TensorClass.ROUTER),
        (r"ffn_(gate|up|down|gate_up|up_gate)_(exps|chexps)", TensorClass.ROUTED_EXPERTS),
        (r"ffn_(gate|up|down)\.\d+\.", TensorClass.ROUTED_EXPERTS),  # one tensor per expert, before 2024
        (r"attn_v_exps", TensorClass.ROUTED_EXPERTS),
        (r"[a-z_0-9.]*norm[a-z_0-9]*(\.|$)", TensorClass.NORM),
        (r"(attn_|ssm_|time_mix_|shortconv\.|indexer|cross_attn|vis_attn|laurel_)", TensorClass.ATTENTION),
        (r"(ffn_|channel_mix_|vis_)", TensorClass.DENSE_FFN),
    )
)
_OUTSIDE: tuple[tuple[re.Pattern[str], TensorClass], ...] = tuple(
    (re.compile(pattern), cls)
    for pattern, cls in (
        (r"nextn\.", TensorClass.MTP),
        (r"(token_embd|per_layer_token_embd|position_embd|token_types)\.", TensorClass.EMBEDDING),
        (r"[a-z_0-9.]*norm[a-z_0-9]*(\.|$)", TensorClass.NORM),
        (r"(output|cls)\.", TensorClass.OUTPUT),
    )
)


def layer_of(name: str) -> int | None:
    """The layer of a tensor; None if it is outside the layers."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def classify(
    name: str, shape: tuple[int, ...], *, experts: int | None = None, layers: int | None = None
) -> TensorClass:
    """The class of a tensor.

    `experts` is the model's number of experts, `layers` its number of decoding layers; later layers are for multi-token
    prediction.
    """
    match = _LAYER.search(name)
    if match is None:
        return _first(_OUTSIDE, name) or TensorClass.OTHER
    if layers is not None and int(match[1]) >= layers:
        return TensorClass.MTP
    known = _first(_IN_LAYER, match[2])
    if known is not None:
        return known
    # a tensor with an unknown name and one matrix per expert contains the experts
    if experts and len(shape) == 3 and shape[2] == experts:
        return TensorClass.ROUTED_EXPERTS
    return TensorClass.OTHER


def _first(table: tuple[tuple[re.Pattern[str], TensorClass], ...], name: str) -> TensorClass | None:
    return next((cls for pattern, cls in table if pattern.match(name)), None)


TensorSlot = tuple[str, tuple[int, ...]]
"""A tensor's name and shape, fastest dimension first."""


@dataclass(frozen=True, slots=True)
class Extras:
    """Differences between models of one architecture that no key contains."""

    tied_output: bool = False  # the embedding table is also the output matrix
    head_norms: bool = False  # attn_q_norm, attn_k_norm: one norm over each attention head
    qkv_bias: bool = False
    rope_table: bool = False  # rope_freqs.weight: Llama 3 scaling as a tensor
    router_bias: bool = False  # exp_probs_b.bias: load-balancing bias of the router


class ArchitectureKeys:
    """The keys of one architecture by their names without prefix."""

    def __init__(self, architecture: str, keys: Mapping[str, Any]) -> None:
        self._prefix = f"{architecture}."
        self._keys = keys

    def __getitem__(self, name: str) -> int:
        return int(self._keys[self._prefix + name])

    def get(self, name: str, default: int = 0) -> int:
        """The number under `name`; `default` if the key is missing."""
        return int(self._keys.get(self._prefix + name, default))


def file_order(name: str) -> tuple[int, str]:
    """Sort key: the order in which llama-quantize writes tensors."""
    layer = layer_of(name)
    return (-1 if layer is None else layer), name


def slots(architecture: str, keys: Mapping[str, Any], vocabulary: int, extras: Extras) -> list[TensorSlot]:
    """All tensors of a model, in file order. Raises `UsageError` for an unknown architecture."""
    build = _ARCHITECTURES.get(architecture)
    if build is None:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise UsageError(f"the tensors of architecture {architecture!r} are unknown", hint=f"known: {known}")
    own = ArchitectureKeys(architecture, keys)
    embed = own["embedding_length"]
    found: list[TensorSlot] = [("token_embd.weight", (embed, vocabulary)), ("output_norm.weight", (embed,))]
    if not extras.tied_output:
        found.append(("output.weight", (embed, vocabulary)))
    if extras.rope_table:
        found.append(("rope_freqs.weight", (own["rope.dimension_count"] // 2,)))
    for layer in range(own["block_count"]):
        found += [(f"blk.{layer}.{name}", shape) for name, shape in build(own, layer, extras)]
    for layer in range(own["block_count"] - own.get("nextn_predict_layers"), own["block_count"]):
        found += [(f"blk.{layer}.nextn.{name}", shape) for name, shape in _prediction(embed, vocabulary)]
    return sorted(found, key=lambda slot: file_order(slot[0]))


def _attention(own: ArchitectureKeys, extras: Extras) -> Iterator[TensorSlot]:
    """Ordinary attention, grouped or not."""
    embed = own["embedding_length"]
    heads = own["attention.head_count"]
    kv_heads = own["attention.head_count_kv"]
    head = own.get("attention.key_length", embed // heads)
    value = own.get("attention.value_length", embed // heads)
    yield "attn_norm.weight", (embed,)
    for name, rows in (("q", heads * head), ("k", kv_heads * head), ("v", kv_heads * value)):
        yield f"attn_{name}.weight", (embed, rows)
        if extras.qkv_bias:
            yield f"attn_{name}.bias", (rows,)
    yield "attn_output.weight", (heads * value, embed)
    if extras.head_norms:
        yield "attn_q_norm.weight", (head,)
        yield "attn_k_norm.weight", (head,)


def _latent_attention(own: ArchitectureKeys) -> Iterator[TensorSlot]:
    """Multi-head latent attention with kv_b split into attn_k_b and attn_v_b, as in llama.cpp's files."""
    embed = own["embedding_length"]
    heads = own["attention.head_count"]
    q_rank = own["attention.q_lora_rank"]
    kv_rank = own["attention.kv_lora_rank"]
    rope = own["rope.dimension_count"]
    key = own["attention.key_length_mla"]
    value = own["attention.value_length_mla"]
    yield "attn_norm.weight", (embed,)
    yield "attn_q_a.weight", (embed, q_rank)
    yield "attn_q_a_norm.weight", (q_rank,)
    yield "attn_q_b.weight", (q_rank, heads * key)
    yield "attn_kv_a_mqa.weight", (embed, kv_rank + rope)
    yield "attn_kv_a_norm.weight", (kv_rank,)
    yield "attn_k_b.weight", (key - rope, kv_rank, heads)
    yield "attn_v_b.weight", (kv_rank, value, heads)
    yield "attn_output.weight", (heads * value, embed)


def _dense(own: ArchitectureKeys) -> Iterator[TensorSlot]:
    embed = own["embedding_length"]
    hidden = own["feed_forward_length"]
    yield "ffn_gate.weight", (embed, hidden)
    yield "ffn_up.weight", (embed, hidden)
    yield "ffn_down.weight", (hidden, embed)


def _experts(own: ArchitectureKeys, shared: int, extras: Extras) -> Iterator[TensorSlot]:
    """Router, routed experts and a shared expert of the width of `shared` experts."""
    embed = own["embedding_length"]
    count = own["expert_count"]
    hidden = own["expert_feed_forward_length"]
    yield "ffn_gate_inp.weight", (embed, count)
    if extras.router_bias:
        yield "exp_probs_b.bias", (count,)
    yield "ffn_gate_exps.weight", (embed, hidden, count)
    yield "ffn_up_exps.weight", (embed, hidden, count)
    yield "ffn_down_exps.weight", (hidden, embed, count)
    if shared:
        yield "ffn_gate_shexp.weight", (embed, hidden * shared)
        yield "ffn_up_shexp.weight", (embed, hidden * shared)
        yield "ffn_down_shexp.weight", (hidden * shared, embed)


def _prediction(embed: int, vocabulary: int) -> Iterator[TensorSlot]:
    """The additional tensors of a multi-token-prediction layer."""
    yield "eh_proj.weight", (2 * embed, embed)
    yield "embed_tokens.weight", (embed, vocabulary)
    yield "enorm.weight", (embed,)
    yield "hnorm.weight", (embed,)
    yield "shared_head_head.weight", (embed, vocabulary)
    yield "shared_head_norm.weight", (embed,)


def _deepseek2(own: ArchitectureKeys, layer: int, extras: Extras) -> Iterator[TensorSlot]:
    yield from _latent_attention(own)
    yield "ffn_norm.weight", (own["embedding_length"],)
    if layer < own["leading_dense_block_count"]:
        yield from _dense(own)
    else:
        yield from _experts(own, own["expert_shared_count"], extras)


def _llama4(own: ArchitectureKeys, layer: int, extras: Extras) -> Iterator[TensorSlot]:
    yield from _attention(own, extras)
    yield "ffn_norm.weight", (own["embedding_length"],)
    if (layer + 1) % own["interleave_moe_layer_step"]:
        yield from _dense(own)
    else:
        yield from _experts(own, 1, extras)


def _glm4moe(own: ArchitectureKeys, layer: int, extras: Extras) -> Iterator[TensorSlot]:
    yield from _attention(own, extras)
    yield "post_attention_norm.weight", (own["embedding_length"],)
    if layer < own["leading_dense_block_count"]:
        yield from _dense(own)
    else:
        yield from _experts(own, own["expert_shared_count"], extras)


def _qwen3moe(own: ArchitectureKeys, _layer: int, extras: Extras) -> Iterator[TensorSlot]:
    yield from _attention(own, extras)
    yield "ffn_norm.weight", (own["embedding_length"],)
    yield from _experts(own, 0, extras)


def _plain(own: ArchitectureKeys, _layer: int, extras: Extras) -> Iterator[TensorSlot]:
    yield from _attention(own, extras)
    yield "ffn_norm.weight", (own["embedding_length"],)
    yield from _dense(own)


def _gpt_oss(own: ArchitectureKeys, _layer: int, extras: Extras) -> Iterator[TensorSlot]:
    embed = own["embedding_length"]
    count = own["expert_count"]
    hidden = own["expert_feed_forward_length"]
    yield from _attention(own, extras)
    yield "attn_output.bias", (embed,)
    yield "attn_sinks.weight", (own["attention.head_count"],)
    yield "post_attention_norm.weight", (embed,)
    yield from _experts(own, 0, extras)
    yield "ffn_gate_inp.bias", (count,)
    yield "ffn_gate_exps.bias", (hidden, count)
    yield "ffn_up_exps.bias", (hidden, count)
    yield "ffn_down_exps.bias", (embed, count)


_ARCHITECTURES: dict[str, Callable[[ArchitectureKeys, int, Extras], Iterator[TensorSlot]]] = {
    "deepseek2": _deepseek2,
    "llama4": _llama4,
    "glm4moe": _glm4moe,
    "qwen3moe": _qwen3moe,
    "gpt-oss": _gpt_oss,
    "qwen3": _plain,
    "llama": _plain,
}
