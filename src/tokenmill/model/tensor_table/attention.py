"""Layers of architectures that only attend."""

from collections.abc import Iterator

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

_COMPRESSED_WITH_INDEXER = 4  # DeepSeek-V4: layers of this ratio select tokens, and overlap their windows


def deepseek2(own: ArchitectureKeys, layer: int, extras: Extras) -> Iterator[TensorSlot]:
    """DeepSeek-V2, V3 and Kimi-K2."""
    yield from latent_attention(own)
    yield "ffn_norm.weight", (own["embedding_length"],)
    yield from _dense_first(own, layer, extras)


def sparse_deepseek(own: ArchitectureKeys, layer: int, extras: Extras) -> Iterator[TensorSlot]:
    """DeepSeek-V3.2 and GLM-5: an indexer selects the tokens that latent attention reads."""
    yield from deepseek2(own, layer, extras)
    if own.has("attention.indexer.types") and layer < own.trunk and not own.at("attention.indexer.types", layer):
        return  # uses the selection of an earlier layer
    embed = own["embedding_length"]
    heads = own["attention.indexer.head_count"]
    head = own["attention.indexer.key_length"]
    yield "indexer.k_norm.weight", (head,)
    yield "indexer.k_norm.bias", (head,)
    yield "indexer.proj.weight", (embed, heads)
    yield "indexer.attn_k.weight", (embed, head)
    yield "indexer.attn_q_b.weight", (own["attention.q_lora_rank"], heads * head)


def _dense_first(own: ArchitectureKeys, layer: int, extras: Extras) -> Iterator[TensorSlot]:
    if layer < own.get("leading_dense_block_count"):
        yield from dense(own)
    else:
        yield from experts(own, shared_by_count(own), extras)


def deepseek4(own: ArchitectureKeys, layer: int, extras: Extras) -> Iterator[TensorSlot]:
    """DeepSeek-V4: one KV head, grouped output, compressed keys, hyper-connections, hashed routing."""
    embed = own["embedding_length"]
    heads = own["attention.head_count"]
    head = own["attention.key_length"]
    q_rank = own["attention.q_lora_rank"]
    groups = own["attention.output_group_count"]
    out_rank = own["attention.output_lora_rank"]
    yield "attn_norm.weight", (embed,)
    yield "attn_sinks.weight", (heads,)
    yield "attn_q_a.weight", (embed, q_rank)
    yield "attn_q_a_norm.weight", (q_rank,)
    yield "attn_q_b.weight", (q_rank, heads * head)
    yield "attn_kv.weight", (embed, head)
    yield "attn_kv_a_norm.weight", (head,)
    yield "attn_output_a.weight", (heads * head // groups, out_rank * groups)
    yield "attn_output_b.weight", (groups * out_rank, embed)
    yield from _compressor(own, layer)
    yield from _hyper_connections(own)
    yield "ffn_norm.weight", (embed,)
    hashed = layer < own["hash_layer_count"]
    yield from experts(own, shared_by_count(own), Extras(router_bias=not hashed))
    if hashed:
        yield "ffn_gate_tid2eid.weight", (own["expert_used_count"], own["vocab_size"])


def _compressor(own: ArchitectureKeys, layer: int) -> Iterator[TensorSlot]:
    ratio = own.at("attention.compress_ratios", layer)
    if not ratio:
        return
    embed = own["embedding_length"]
    head = own["attention.key_length"]
    wide = head * (2 if ratio == _COMPRESSED_WITH_INDEXER else 1)
    yield "attn_compressor_kv.weight", (embed, wide)
    yield "attn_compressor_gate.weight", (embed, wide)
    yield "attn_compressor_ape.weight", (wide, ratio)
    yield "attn_compressor_norm.weight", (head,)
    if ratio != _COMPRESSED_WITH_INDEXER:
        return
    index_heads = own["attention.indexer.head_count"]
    index = own["attention.indexer.key_length"]
    yield "indexer.proj.weight", (embed, index_heads)
    yield "indexer.attn_q_b.weight", (own["attention.q_lora_rank"], index_heads * index)
    yield "indexer_compressor_kv.weight", (embed, 2 * index)
    yield "indexer_compressor_gate.weight", (embed, 2 * index)
    yield "indexer_compressor_ape.weight", (2 * index, ratio)
    yield "indexer_compressor_norm.weight", (index,)


def _hyper_connections(own: ArchitectureKeys) -> Iterator[TensorSlot]:
    streams = own["hyper_connection.count"]
    mixed = (2 + streams) * streams
    for part in ("attn", "ffn"):
        yield f"hc_{part}_fn.weight", (streams * own["embedding_length"], mixed)
        yield f"hc_{part}_base.weight", (mixed,)
        yield f"hc_{part}_scale.weight", (3,)


def llama4(own: ArchitectureKeys, layer: int, extras: Extras) -> Iterator[TensorSlot]:
    """Llama 4, with experts in every layer or in every second one."""
    yield from ordinary_attention(own, extras)
    yield "ffn_norm.weight", (own["embedding_length"],)
    if (layer + 1) % own["interleave_moe_layer_step"]:
        yield from dense(own)
    else:
        yield from experts(own, own["expert_feed_forward_length"], extras)


def glm4moe(own: ArchitectureKeys, layer: int, extras: Extras) -> Iterator[TensorSlot]:
    """GLM-4.5 to 4.7."""
    yield from ordinary_attention(own, extras)
    yield "post_attention_norm.weight", (own["embedding_length"],)
    yield from _dense_first(own, layer, extras)


def qwen3moe(own: ArchitectureKeys, _layer: int, extras: Extras) -> Iterator[TensorSlot]:
    """Qwen3's mixtures of experts."""
    yield from ordinary_attention(own, extras)
    yield "ffn_norm.weight", (own["embedding_length"],)
    yield from experts(own, 0, extras)


def plain(own: ArchitectureKeys, _layer: int, extras: Extras) -> Iterator[TensorSlot]:
    """Models without experts."""
    yield from ordinary_attention(own, extras)
    yield "ffn_norm.weight", (own["embedding_length"],)
    yield from dense(own)


def gpt_oss(own: ArchitectureKeys, _layer: int, extras: Extras) -> Iterator[TensorSlot]:
    """gpt-oss."""
    embed = own["embedding_length"]
    count = own["expert_count"]
    hidden = own["expert_feed_forward_length"]
    yield from ordinary_attention(own, extras)
    yield "attn_output.bias", (embed,)
    yield "attn_sinks.weight", (own["attention.head_count"],)
    yield "post_attention_norm.weight", (embed,)
    yield from experts(own, 0, extras)
    yield "ffn_gate_inp.bias", (count,)
    yield "ffn_gate_exps.bias", (hidden, count)
    yield "ffn_up_exps.bias", (hidden, count)
    yield "ffn_down_exps.bias", (embed, count)


def minimax_m2(own: ArchitectureKeys, _layer: int, extras: Extras) -> Iterator[TensorSlot]:
    """MiniMax-M2, whose norms of queries and keys span all heads."""
    head = own["attention.key_length"]
    yield from ordinary_attention(own, extras)
    yield "attn_q_norm.weight", (own["attention.head_count"] * head,)
    yield "attn_k_norm.weight", (own["attention.head_count_kv"] * head,)
    yield "ffn_norm.weight", (own["embedding_length"],)
    yield from experts(own, 0, extras)


def minimax_m3(own: ArchitectureKeys, layer: int, extras: Extras) -> Iterator[TensorSlot]:
    """MiniMax-M3, whose layers with experts select blocks of the context."""
    embed = own["embedding_length"]
    yield from ordinary_attention(own, extras)
    yield "ffn_norm.weight", (embed,)
    yield from _dense_first(own, layer, extras)
    if layer >= own["leading_dense_block_count"]:
        head = own["attention.indexer.key_length"]
        yield "indexer.q_proj.weight", (embed, own["attention.indexer.head_count"] * head)
        yield "indexer.k_proj.weight", (embed, head)
        yield "indexer.q_norm.weight", (head,)
        yield "indexer.k_norm.weight", (head,)


def ernie_moe(own: ArchitectureKeys, layer: int, extras: Extras) -> Iterator[TensorSlot]:
    """ERNIE 4.5."""
    yield from ordinary_attention(own, extras)
    yield "ffn_norm.weight", (own["embedding_length"],)
    if layer < own["leading_dense_block_count"]:
        yield from dense(own)
    else:
        yield from experts(own, own.get("expert_shared_feed_forward_length"), extras)


def hunyuan_moe(own: ArchitectureKeys, _layer: int, extras: Extras) -> Iterator[TensorSlot]:
    """Hunyuan-A13B."""
    yield from ordinary_attention(own, extras)
    yield "ffn_norm.weight", (own["embedding_length"],)
    yield from experts(own, own["expert_shared_feed_forward_length"], extras)


def ling2(own: ArchitectureKeys, layer: int, extras: Extras) -> Iterator[TensorSlot]:
    """Ling 2, which stores queries, keys and values in one matrix."""
    embed = own["embedding_length"]
    head = own["attention.key_length"]
    yield "attn_norm.weight", (embed,)
    yield "attn_qkv.weight", (embed, embed + 2 * own["attention.head_count_kv"] * head)
    yield "attn_output.weight", (own["attention.head_count"] * head, embed)
    yield "attn_q_norm.weight", (head,)
    yield "attn_k_norm.weight", (head,)
    yield "ffn_norm.weight", (embed,)
    if layer < own["leading_dense_block_count"]:
        yield from dense(own)
    else:
        shared = own["expert_shared_feed_forward_length"] * own["expert_shared_count"]
        yield from experts(own, shared, extras)
    if layer >= own.trunk:
        yield "layer_output_norm.weight", (embed,)
