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

from tokenmill.model.profile import Profile, Tensor
from tokenmill.planner.compute_graph.builder import F32, I32, I64, GraphBuilder, MicroBatch
from tokenmill.planner.compute_graph.layer_tensors import by_layer
from tokenmill.planner.compute_graph.llama_attention import attention, cache_inputs, latent, positions
from tokenmill.planner.compute_graph.llama_experts import dense, experts
from tokenmill.planner.compute_graph.llama_recurrent import recurrent, sequence_index
from tokenmill.planner.compute_graph.llama_sparse import index_inputs


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
        hidden = _layer(graph, profile, layer, table.get(layer, {}), hidden, stage=layer in staged)
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


def _layer(
    graph: GraphBuilder, profile: Profile, index: int, tensors: Mapping[str, Tensor], hidden: int, *, stage: bool
) -> int:
    embed = profile.embedding_length or 0
    if profile.cache[index].kind == "none" and FEED_FORWARD & tensors.keys():
        out, tensors = _feed_forward(graph, profile, tensors, graph.norm(hidden, embed), stage=stage), {}
    else:
        out = graph.add("attn_out", embed, _attended(graph, profile, index, tensors, hidden))
    if "attn_output.bias" in tensors:
        out = graph.add("attn_out", embed, out, in_place=True)
    if index == profile.layers - 1:
        chosen = _chosen(graph)
        graph.tokens = _outputs(graph.batch)
        out = graph.add("attn_out", embed, out, chosen)
        hidden = graph.add("residual", embed, hidden, chosen)
    added = graph.add("ffn_inp", embed, out, hidden, in_place=True)
    if not FEED_FORWARD & tensors.keys():
        return added
    result = _feed_forward(graph, profile, tensors, graph.norm(added, embed), stage=stage)
    return graph.add("l_out", embed, result, added, in_place=True)


FEED_FORWARD = frozenset({"ffn_down_exps", "ffn_down"})


def _feed_forward(
    graph: GraphBuilder, profile: Profile, tensors: Mapping[str, Tensor], normed: int, *, stage: bool
) -> int:
    if "ffn_down_exps" in tensors:
        return experts(graph, profile, tensors, normed, stage=stage)
    return dense(graph, tensors, normed)


def _attended(graph: GraphBuilder, profile: Profile, index: int, tensors: Mapping[str, Tensor], hidden: int) -> int:
    """Everything from the hidden state to the input of the output projection."""
    embed = profile.embedding_length or 0
    cache = profile.cache[index]
    if cache.kind in ("recurrent", "none"):
        return recurrent(graph, tensors, cache, hidden, embed)
    normed = graph.norm(hidden, embed)
    if cache.kind == "latent" and "attn_k_b" in tensors:
        return latent(graph, profile, tensors, cache, normed)
    return attention(graph, profile, tensors, cache, normed)


def _head(graph: GraphBuilder, profile: Profile, hidden: int) -> int:
    embed = profile.embedding_length or 0
    normed = graph.add("norm", embed, hidden, in_place=True)
    normed = graph.add("result_norm", embed, normed, in_place=True, keep=True)
    return graph.add("logits", profile.vocabulary or 0, normed, keep=True)
