"""Pieces of layers that several architectures share."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
    conv_bias: bool = False  # ssm_conv1d.bias


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

    def at(self, name: str, layer: int) -> int:
        """The number of one layer; a single number counts for all layers."""
        value = self._keys[self._prefix + name]
        return int(value[layer]) if isinstance(value, list | tuple) else int(value)

    def has(self, name: str) -> bool:
        """Whether the key exists."""
        return self._prefix + name in self._keys

    @property
    def trunk(self) -> int:
        """Number of layers without those for multi-token prediction."""
        return self["block_count"] - self.get("nextn_predict_layers")


def ordinary_attention(
    own: ArchitectureKeys, extras: Extras, layer: int = 0, *, gated: int = 1
) -> Iterator[TensorSlot]:
    """Grouped or ungrouped attention and its norm; `gated=2` if queries are stored with a gate."""
    embed = own["embedding_length"]
    heads = own["attention.head_count"]
    kv_heads = own.at("attention.head_count_kv", layer)
    head = own.get("attention.key_length", embed // heads)
    value = own.get("attention.value_length", embed // heads)
    yield "attn_norm.weight", (embed,)
    for name, rows in (("q", heads * head * gated), ("k", kv_heads * head), ("v", kv_heads * value)):
        yield f"attn_{name}.weight", (embed, rows)
        if extras.qkv_bias:
            yield f"attn_{name}.bias", (rows,)
    yield "attn_output.weight", (heads * value, embed)
    if extras.head_norms:
        yield "attn_q_norm.weight", (head,)
        yield "attn_k_norm.weight", (head,)


def latent_attention(own: ArchitectureKeys) -> Iterator[TensorSlot]:
    """Multi-head latent attention with kv_b split into attn_k_b and attn_v_b, as in llama.cpp's files."""
    embed = own["embedding_length"]
    heads = own["attention.head_count"]
    kv_rank = own["attention.kv_lora_rank"]
    rope = own["rope.dimension_count"]
    key = own["attention.key_length_mla"]
    value = own["attention.value_length_mla"]
    yield "attn_norm.weight", (embed,)
    if own.has("attention.q_lora_rank"):
        q_rank = own["attention.q_lora_rank"]
        yield "attn_q_a.weight", (embed, q_rank)
        yield "attn_q_a_norm.weight", (q_rank,)
        yield "attn_q_b.weight", (q_rank, heads * key)
    else:
        yield "attn_q.weight", (embed, heads * key)
    yield "attn_kv_a_mqa.weight", (embed, kv_rank + rope)
    yield "attn_kv_a_norm.weight", (kv_rank,)
    yield "attn_k_b.weight", (key - rope, kv_rank, heads)
    yield "attn_v_b.weight", (kv_rank, value, heads)
    yield "attn_output.weight", (heads * value, embed)


def dense(own: ArchitectureKeys) -> Iterator[TensorSlot]:
    """A feed-forward network without experts."""
    embed = own["embedding_length"]
    hidden = own["feed_forward_length"]
    yield "ffn_gate.weight", (embed, hidden)
    yield "ffn_up.weight", (embed, hidden)
    yield "ffn_down.weight", (hidden, embed)


def experts(own: ArchitectureKeys, shared_width: int, extras: Extras, width: int | None = None) -> Iterator[TensorSlot]:
    """Router, routed experts and a shared expert; `width` is that of the routed experts' space if it is their own."""
    embed = own["embedding_length"]
    count = own["expert_count"]
    hidden = own["expert_feed_forward_length"]
    yield "ffn_gate_inp.weight", (embed, count)
    if extras.router_bias:
        yield "exp_probs_b.bias", (count,)
    yield "ffn_gate_exps.weight", (width or embed, hidden, count)
    yield "ffn_up_exps.weight", (width or embed, hidden, count)
    yield "ffn_down_exps.weight", (hidden, width or embed, count)
    if shared_width:
        yield "ffn_gate_shexp.weight", (embed, shared_width)
        yield "ffn_up_shexp.weight", (embed, shared_width)
        yield "ffn_down_shexp.weight", (shared_width, embed)


def shared_by_count(own: ArchitectureKeys) -> int:
    """Width of the shared expert where the keys have its number only."""
    return own["expert_feed_forward_length"] * own.get("expert_shared_count")


def prediction(own: ArchitectureKeys, vocabulary: int, *, embeddings: bool) -> Iterator[TensorSlot]:
    """The additional tensors of a multi-token-prediction layer; `embeddings`: with its own vocabulary matrices."""
    embed = own["embedding_length"]
    yield "nextn.eh_proj.weight", (2 * embed, embed)
    yield "nextn.enorm.weight", (embed,)
    yield "nextn.hnorm.weight", (embed,)
    yield "nextn.shared_head_norm.weight", (embed,)
    if embeddings:
        yield "nextn.embed_tokens.weight", (embed, vocabulary)
        yield "nextn.shared_head_head.weight", (embed, vocabulary)
