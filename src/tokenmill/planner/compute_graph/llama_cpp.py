"""Graphs of llama.cpp for one micro-batch, detailed enough to size its buffers.

The operations are derived from the tensor table (for example, a query norm or a stack of experts), so the sizes of
unlisted architectures are close, too. The order of operations matters, because the allocator replays it. Follows
llama.cpp b11549: attention (ordinary, windowed, latent, with the index of sparse attention) and recurrent layers (gated
delta net, Kimi delta attention, Mamba 2) match to the page; other recurrent layers are approximate.

llama_attention   attention up to the output projection
llama_sparse      the index of sparse attention
llama_recurrent   recurrent layers
llama_experts     dense and routed feed-forward networks
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tokenmill.model.profile import LayerCache, Profile, Tensor
from tokenmill.planner.compute_graph.builder import F32, I32, I64, GraphBuilder, MicroBatch
from tokenmill.planner.compute_graph.layer_tensors import by_layer
from tokenmill.planner.compute_graph.llama_attention import attention, cache_inputs, compressed, latent, positions
from tokenmill.planner.compute_graph.llama_experts import dense, experts
from tokenmill.planner.compute_graph.llama_recurrent import is_drawn, recurrent, sequence_index
from tokenmill.planner.compute_graph.llama_sparse import index_inputs

EXACT = frozenset(
    {
        "bailingmoe2",
        "bailingmoe3",
        "deepseek2",
        "deepseek32",
        "ernie4_5-moe",
        "glm-dsa",
        "glm4moe",
        "gpt-oss",
        "hunyuan-moe",
        "kimi-linear",
        "llama",
        "llama4",
        "minimax-m2",
        "mistral4",
        "nemotron_h_moe",
        "qwen3",
        "qwen35moe",
        "qwen3moe",
        "qwen3next",
    }
)
"""Architectures whose buffers were compared with llama.cpp's own projection; those of others are close."""


_LAYERS_PER_CHECKPOINT = 12  # Kimi K3's attn_res.block_size


def undrawn(profile: Profile) -> bool:
    """Whether some layers are of a kind that is only approximated."""
    table = by_layer(profile)
    return any(
        cache.kind == "compressed"
        or "attn_res_score" in table.get(layer, {})
        or (cache.indexer_elements and not cache.indexer_top_k)
        or (cache.kind == "recurrent" and not is_drawn(table.get(layer, {})))
        for layer, cache in enumerate(profile.cache)
    )


def build_graph(
    profile: Profile,
    batch: MicroBatch,
    layers: Sequence[int] | None = None,
    *,
    embed: bool = True,
    head: bool = True,
    staged: Collection[int] = (),
) -> GraphBuilder:
    """Build the part of the graph that one device computes.

    `layers` are those of the device, None all. `embed` adds the embedding lookup, without which the hidden state is
    copied from another device; `head` adds the output matrix. Experts of `staged` layers live in host memory and are
    copied to the device, one tensor at a time, when they are used. Next to a GPU, the host's own buffer is that of
    `layers=()`.
    """
    table = by_layer(profile)
    graph = GraphBuilder(batch, batch.tokens)
    wanted = range(profile.layers) if layers is None else layers
    hidden = _embedded(graph, profile.embedding_length or 0, looked_up=embed, used=0 in wanted)
    for layer in wanted:
        parts = LayerParts(table.get(layer, {}), profile.cache[layer], layer == profile.layers - 1, layer in staged)
        hidden = add_layer(graph, profile, parts, hidden)
    if not wanted:
        _all_inputs(graph, profile)
    if head:
        _head(graph, profile, hidden)
    return graph


def _embedded(graph: GraphBuilder, width: int, *, looked_up: bool, used: bool) -> int:
    """Token ids to hidden state.

    Since 2026 every batch also reserves an input for embeddings. They are copied and mixed with looked-up rows into a
    tensor on the device of the first layer, which stays allocated because a text batch never reads it.
    """
    tokens = graph.tokens
    if not graph.batch.mixes_embeddings:
        if looked_up:
            return graph.add("embd", width, graph.input("tokens", tokens * I32))
        return graph.input("hidden", tokens * width * F32)
    if looked_up:
        hidden = graph.add("embd", width, graph.input("tokens", tokens * I32))
        rows = graph.add("rows", width, graph.input("mixed_tokens", tokens * I32))
        graph.input("embd", tokens * width * F32)  # the input of an embedding-only batch
        slots = graph.input("mixed_slots", tokens * I64)
        given = graph.input("mixed_embd", tokens * width * F32)
    elif used:
        given = graph.input("mixed_embd", tokens * width * F32)
        rows = graph.input("rows", tokens * width * F32)
        slots = graph.input("mixed_slots", tokens * I64)
        hidden = graph.input("hidden", tokens * width * F32)
    else:
        return graph.input("hidden", tokens * width * F32)
    if used:
        mixed = graph.add("mixed", width, given)
        graph.store(rows, slots, mixed)
        graph.view(mixed)  # never read
    return hidden


def _all_inputs(graph: GraphBuilder, profile: Profile) -> None:
    """Add the inputs that the host holds for the layers of GPUs."""
    positions(graph, profile)
    for cache in profile.cache:
        if cache.kind == "recurrent":
            sequence_index(graph)
        elif cache.kind != "none":
            cache_inputs(graph, cache)
        if cache.indexer_top_k:
            index_inputs(graph, cache)
    _chosen(graph)


def _chosen(graph: GraphBuilder) -> int:
    return graph.input("outputs", _outputs(graph.batch) * I32)


def _outputs(batch: MicroBatch) -> int:
    return batch.tokens if batch.outputs is None else min(batch.tokens, batch.outputs)


@dataclass(frozen=True, slots=True)
class LayerParts:
    """One layer of a graph."""

    tensors: Mapping[str, Tensor]
    cache: LayerCache
    last: bool  # only the rows with logits are computed further
    stage: bool  # the experts are copied from host memory


def add_layer(graph: GraphBuilder, profile: Profile, parts: LayerParts, hidden: int) -> int:
    """Add all operations of a layer; returns the new hidden state."""
    embed = profile.embedding_length or 0
    tensors = parts.tensors
    streams = _streams(graph, profile, tensors, hidden)
    if parts.cache.kind == "none" and FEED_FORWARD & tensors.keys():
        out, tensors = _feed_forward(graph, profile, parts, graph.norm(hidden, embed)), {}
    else:
        out = graph.add("attn_out", embed, _attended(graph, profile, parts, hidden))
    if "attn_output.bias" in tensors:
        out = graph.add("attn_out", embed, out, in_place=True)
    if parts.last:
        chosen = _chosen(graph)
        graph.tokens = _outputs(graph.batch)
        out = graph.add("attn_out", embed, out, chosen)
        hidden = graph.add("residual", embed, hidden, chosen)
    added = graph.add("ffn_inp", embed, out, hidden, in_place=True)
    if not FEED_FORWARD & tensors.keys():
        return added
    result = _feed_forward(graph, profile, parts, graph.norm(added, embed))
    graph.hold(*streams)
    return graph.add("l_out", embed, result, added, in_place=True)


def _streams(graph: GraphBuilder, profile: Profile, tensors: Mapping[str, Tensor], hidden: int) -> tuple[int, ...]:
    """Hidden states that a layer keeps in addition to its input; approximate.

    DeepSeek-V4 has several streams of them, Kimi K3 one of every twelfth layer, which it joins into a new block.
    """
    embed = profile.embedding_length or 0
    if "hc_attn_fn" in tensors:
        return (graph.add("streams", tensors["hc_attn_fn"].shape[0], hidden),)
    if "attn_res_score" in tensors:
        return (graph.add("stack", embed * -(-profile.layers // _LAYERS_PER_CHECKPOINT), hidden),)
    return ()


FEED_FORWARD = frozenset({"ffn_down_exps", "ffn_down"})


def _feed_forward(graph: GraphBuilder, profile: Profile, parts: LayerParts, normed: int) -> int:
    if "ffn_down_exps" in parts.tensors:
        return experts(graph, profile, parts.tensors, normed, stage=parts.stage)
    return dense(graph, parts.tensors, normed)


def _attended(graph: GraphBuilder, profile: Profile, parts: LayerParts, hidden: int) -> int:
    """Everything from the hidden state to the input of the output projection."""
    embed = profile.embedding_length or 0
    cache = parts.cache
    if cache.kind in ("recurrent", "none"):
        return recurrent(graph, parts.tensors, cache, hidden, embed)
    normed = graph.norm(hidden, embed)
    if cache.kind == "compressed":
        return compressed(graph, parts.tensors, cache, normed)
    if cache.kind == "latent" and "attn_k_b" in parts.tensors:
        return latent(graph, profile, parts.tensors, cache, normed)
    return attention(graph, profile, parts.tensors, cache, normed)


_CROPPED_EARLY = frozenset({"nemotron_h_moe"})  # drop rows without logits before the feed-forward network


def build_prediction_graph(profile: Profile, batch: MicroBatch) -> GraphBuilder:
    """Build the graph that drafts a token with a layer for multi-token prediction.

    The layer reads the hidden state that the model computed for a token, and the token after it.
    """
    graph = GraphBuilder(batch, batch.tokens)
    embed = profile.embedding_length or 0
    tensors = {
        name: tensor
        for name, tensor in by_layer(profile).get(profile.layers, {}).items()
        if not name.startswith("indexer.")
    }
    token = graph.add("embd", embed, graph.input("tokens", batch.tokens * I32))
    hidden = graph.norm(graph.input("hidden", batch.tokens * embed * F32), embed)
    both = graph.add("joined", 2 * embed, graph.norm(token, embed), hidden)
    early = profile.architecture in _CROPPED_EARLY
    parts = LayerParts(tensors, profile.prediction[0], last=early, stage=False)
    hidden = add_layer(graph, profile, parts, graph.add("eh_proj", embed, both))
    if not early:
        hidden = graph.norm(hidden, embed)
        chosen = _chosen(graph)
        graph.tokens = _outputs(graph.batch)
        hidden = graph.add("rows", embed, hidden, chosen)
    _head(graph, profile, hidden)
    return graph


def _head(graph: GraphBuilder, profile: Profile, hidden: int) -> int:
    embed = profile.embedding_length or 0
    normed = graph.add("norm", embed, hidden, in_place=True)
    normed = graph.add("result_norm", embed, normed, in_place=True, keep=True)
    return graph.add("logits", profile.vocabulary or 0, normed, keep=True)
