"""Layers of architectures with recurrent state."""

from collections.abc import Iterator
from dataclasses import replace

from tokenmill.model.tensor_table.parts import (
    ArchitectureKeys,
    Extras,
    TensorSlot,
    dense,
    experts,
    latent_attention,
    ordinary_attention,
    shared_by_count,
)

_GATED = 2  # queries are stored with a gate of the same width


def _delta_net(own: ArchitectureKeys) -> Iterator[TensorSlot]:
    """Gated delta net without its projection of alpha and beta."""
    embed = own["embedding_length"]
    state = own["ssm.state_size"]
    heads = own["ssm.time_step_rank"]
    keys = state * own["ssm.group_count"]
    values = state * heads
    yield "attn_norm.weight", (embed,)
    yield "attn_qkv.weight", (embed, 2 * keys + values)
    yield "attn_gate.weight", (embed, values)
    yield "ssm_conv1d.weight", (own["ssm.conv_kernel"], 2 * keys + values)
    yield "ssm_dt.bias", (heads,)
    yield "ssm_a", (heads,)
    yield "ssm_norm.weight", (state,)
    yield "ssm_out.weight", (values, embed)


def _recurrent(own: ArchitectureKeys, layer: int) -> bool:
    return layer < own.trunk and (layer + 1) % own["full_attention_interval"] != 0


def qwen3next(own: ArchitectureKeys, layer: int, extras: Extras) -> Iterator[TensorSlot]:
    """Qwen3-Next, which stores alpha and beta in one matrix."""
    yield from _qwen_layer(own, layer, extras)
    if _recurrent(own, layer):
        yield "ssm_ba.weight", (own["embedding_length"], 2 * own["ssm.time_step_rank"])


def qwen35moe(own: ArchitectureKeys, layer: int, extras: Extras) -> Iterator[TensorSlot]:
    """Qwen3.5, which stores alpha and beta separately."""
    yield from _qwen_layer(own, layer, extras)
    if _recurrent(own, layer):
        yield "ssm_beta.weight", (own["embedding_length"], own["ssm.time_step_rank"])
        yield "ssm_alpha.weight", (own["embedding_length"], own["ssm.time_step_rank"])


def _qwen_layer(own: ArchitectureKeys, layer: int, extras: Extras) -> Iterator[TensorSlot]:
    embed = own["embedding_length"]
    if _recurrent(own, layer):
        yield from _delta_net(own)
    else:
        yield from ordinary_attention(own, replace(extras, head_norms=True), gated=_GATED)
    yield "post_attention_norm.weight", (embed,)
    yield from experts(own, own["expert_shared_feed_forward_length"], extras)
    yield "ffn_gate_inp_shexp.weight", (embed,)


def _kimi_delta(own: ArchitectureKeys) -> Iterator[TensorSlot]:
    """Kimi delta attention without the projections of its gates."""
    embed = own["embedding_length"]
    heads = own["attention.head_count"]
    head = own["kda.head_dim"]
    inner = heads * head
    yield "attn_norm.weight", (embed,)
    for name in ("q", "k", "v"):
        yield f"ssm_conv1d_{name}.weight", (own["ssm.conv_kernel"], 1, inner)
        yield f"attn_{name}.weight", (embed, inner)
    yield "ssm_beta.weight", (embed, heads)
    yield "ssm_dt.bias", (inner,)
    yield "ssm_norm.weight", (head,)
    yield "attn_output.weight", (inner, embed)


def kimi_k3(own: ArchitectureKeys, layer: int, extras: Extras) -> Iterator[TensorSlot]:
    """Kimi-K3: experts work in a narrower space, and layers attend to the outputs of earlier ones."""
    embed = own["embedding_length"]
    heads = own["attention.head_count"]
    if own.at("attention.head_count_kv", layer):
        yield from latent_attention(own)
        yield "attn_gate.weight", (embed, heads * own["attention.value_length_mla"])
    else:
        head = own["kda.head_dim"]
        yield from _kimi_delta(own)
        yield "ssm_f_a.weight", (embed, head)
        yield "ssm_f_b.weight", (head, heads * head)
        yield "ssm_a", (heads,)
        yield "ssm_g.weight", (embed, heads * head)
    yield "attn_res_score.weight", (embed,)
    yield "ffn_res_score.weight", (embed,)
    yield "ffn_norm.weight", (embed,)
    if layer < own["leading_dense_block_count"]:
        yield from dense(own)
        return
    width = own.get("expert_latent_length", embed)
    yield from experts(own, shared_by_count(own), extras, width)
    if width != embed:
        yield "ffn_routed_down.weight", (embed, width)
        yield "ffn_routed_up.weight", (width, embed)
        yield "ffn_routed_norm.weight", (width,)


def ling3(own: ArchitectureKeys, layer: int, extras: Extras) -> Iterator[TensorSlot]:
    """Ling 3."""
    embed = own["embedding_length"]
    heads = own["attention.head_count"]
    if own.at("attention.head_count_kv", layer):
        yield from latent_attention(own)
        yield "attn_gate.weight", (embed, heads)
    else:
        inner = heads * own["kda.head_dim"]
        yield from _kimi_delta(own)
        yield "ssm_f_a.weight", (embed, inner)
        yield "ssm_a", (1, heads)
        yield "ssm_g_a.weight", (embed, inner)
    yield "ffn_norm.weight", (embed,)
    if layer < own["leading_dense_block_count"]:
        yield from dense(own)
    else:
        yield from experts(own, own["expert_shared_feed_forward_length"], extras)


def nemotron_h(own: ArchitectureKeys, layer: int, extras: Extras) -> Iterator[TensorSlot]:
    """Nemotron-H: Mamba 2, attention or experts; a prediction layer has attention and experts."""
    embed = own["embedding_length"]
    attends = own.at("attention.head_count_kv", layer)
    routed = own.at("feed_forward_length", layer)
    if attends:
        yield from ordinary_attention(own, extras, layer)
    else:
        yield "attn_norm.weight", (embed,)
    if routed:
        yield from _ungated_experts(own)
    if attends and routed:
        yield "post_attention_norm.weight", (embed,)
    elif not attends and not routed:
        yield from _mamba2(own, extras)


def _ungated_experts(own: ArchitectureKeys) -> Iterator[TensorSlot]:
    embed = own["embedding_length"]
    count = own["expert_count"]
    hidden = own["expert_feed_forward_length"]
    width = own.get("moe_latent_size", embed)
    shared = own["expert_shared_feed_forward_length"]
    yield "ffn_gate_inp.weight", (embed, count)
    yield "exp_probs_b.bias", (count,)
    if width != embed:
        yield "ffn_latent_down.weight", (embed, width)
        yield "ffn_latent_up.weight", (width, embed)
    yield "ffn_down_exps.weight", (hidden, width, count)
    yield "ffn_up_exps.weight", (width, hidden, count)
    yield "ffn_down_shexp.weight", (shared, embed)
    yield "ffn_up_shexp.weight", (embed, shared)


def _mamba2(own: ArchitectureKeys, extras: Extras) -> Iterator[TensorSlot]:
    embed = own["embedding_length"]
    inner = own["ssm.inner_size"]
    heads = own["ssm.time_step_rank"]
    groups = own["ssm.group_count"]
    mixed = inner + 2 * groups * own["ssm.state_size"]
    yield "ssm_in.weight", (embed, inner + mixed + heads)
    yield "ssm_conv1d.weight", (own["ssm.conv_kernel"], mixed)
    if extras.conv_bias:
        yield "ssm_conv1d.bias", (mixed,)
    yield "ssm_dt.bias", (heads,)
    yield "ssm_a", (1, heads)
    yield "ssm_d", (1, heads)
    yield "ssm_norm.weight", (inner // groups, groups)
    yield "ssm_out.weight", (inner, embed)
