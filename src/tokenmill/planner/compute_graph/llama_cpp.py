"""Graphs of llama.cpp for one micro-batch, detailed enough to size its buffers.

The operations are derived from the tensor table (for example, a query norm or a stack of experts), so the sizes of
unlisted architectures are close, too. The order of operations matters, because the allocator replays it. Follows
llama.cpp b11549; ordinary, windowed and latent attention match to the page, recurrent layers and the index of sparse
attention are approximate.
"""

from collections.abc import Collection, Mapping, Sequence

from tokenmill.model.profile import Experts, LayerCache, Profile, Tensor
from tokenmill.model.tensor_types import cache_bytes
from tokenmill.planner.compute_graph.builder import F16, F32, I32, I64, GraphBuilder, MicroBatch
from tokenmill.planner.compute_graph.layer_tensors import by_layer

MAX_FUSED_EXPERTS = 15  # experts per token that CUDA sums in one kernel: ggml's MOE_WEIGHTED_REDUCTION_MAX_EXPERTS


def dense(graph: GraphBuilder, tensors: Mapping[str, Tensor], normed: int, suffix: str = "") -> int:
    """Dense feed-forward: gate and up, joined, then down."""
    inner, embed = tensors[f"ffn_down{suffix}"].shape
    up = tensors.get(f"ffn_up{suffix}")
    if f"ffn_gate{suffix}" in tensors:
        gate = graph.add("gate", inner, normed)
        joined = graph.add("joined", inner, gate, graph.add("up", inner, normed))
    elif up is not None and up.shape[1] == 2 * inner:  # gate and up in one matrix
        joined = graph.add("joined", inner, graph.add("gate_up", 2 * inner, normed))
    else:
        joined = graph.add("joined", inner, graph.add("up", inner, normed), in_place=True)
    return graph.add("down", embed, joined)


def experts(graph: GraphBuilder, profile: Profile, tensors: Mapping[str, Tensor], normed: int, *, stage: bool) -> int:
    """Routed experts, summed per token, plus the shared expert; `stage` first copies each stack to the device."""
    mixture = profile.experts or Experts(1, 1)
    (inner, embed, _), used = tensors["ffn_down_exps"].shape, mixture.used
    before = profile.architecture == "llama4"  # weights the experts' inputs, not their outputs
    order, weights = _routed(graph, tensors, mixture, normed, by_logits=before)
    read = graph.view(normed)
    if before:
        read = graph.add("weighted", embed * used, graph.add("repeated", embed * used, read), weights, in_place=True)
    joined = _joined(graph, tensors, inner * used, read, order, stage=stage)
    made = result = _times(graph, tensors, "ffn_down_exps", embed * used, joined, order, stage=stage)
    fuses = graph.batch.fuses and not before and 2 <= used <= MAX_FUSED_EXPERTS
    if not before:
        result = graph.add("moe_weighted", embed * used, result, weights, in_place=not fuses)
    total = _added_up(graph, result, embed, used)
    if fuses:
        graph.hold(made, weights)
    if "ffn_down_shexp" in tensors:
        shared = dense(graph, tensors, normed, "_shexp")
        total = graph.add("moe_merged", embed, total, shared, in_place=True)
    return total


def _routed(
    graph: GraphBuilder, tensors: Mapping[str, Tensor], mixture: Experts, normed: int, *, by_logits: bool
) -> tuple[int, int]:
    """Chosen experts of each token and their weights; `by_logits` chooses them before the sigmoid."""
    count = mixture.count
    used = mixture.used
    logits = graph.add("logits", count, normed)
    if "ffn_gate_inp.bias" in tensors:
        logits = graph.add("logits", count, logits, in_place=True)
    probabilities = graph.add("probabilities", count, logits, in_place=True)
    rows = graph.view(probabilities)
    ranked = logits if by_logits else probabilities
    if "exp_probs_b.bias" in tensors or "exp_probs_b" in tensors:
        ranked = graph.add("biased", count, ranked, in_place=True)
    order = graph.view(graph.add("argsort", count, ranked))
    weights = graph.add("weights", used, rows, order)
    if by_logits:
        return order, weights
    row = graph.view(weights)
    total = graph.add("weights_sum", 1, graph.add("weights_sum", 1, row), in_place=True)
    return order, graph.view(graph.add("weights_norm", used, row, total))


def _joined(
    graph: GraphBuilder, tensors: Mapping[str, Tensor], size: int, read: int, order: int, *, stage: bool
) -> int:
    """Gate and up of the chosen experts."""
    if "ffn_gate_up_exps" in tensors:
        both = _times(graph, tensors, "ffn_gate_up_exps", 2 * size, read, order, stage=stage)
        return graph.add("moe_joined", size, graph.view(both), graph.view(both))
    names = [name for name in ("ffn_gate_exps", "ffn_up_exps") if name in tensors]
    made = [_times(graph, tensors, name, size, read, order, stage=stage) for name in names]
    return graph.add("moe_joined", size, *made, in_place=len(made) == 1)


def _times(
    graph: GraphBuilder,
    tensors: Mapping[str, Tensor],
    name: str,
    per_token: int,
    read: int,
    order: int,
    *,
    stage: bool,
) -> int:
    """Product with a stack of expert matrices; each token uses its own selection."""
    staged = [graph.block("staged", tensors[name].bytes)] if stage else []
    result = graph.add(name, per_token, *staged, read, order)
    if f"{name}.bias" in tensors:
        result = graph.add(name, per_token, result, order, in_place=True)
    return result


def _added_up(graph: GraphBuilder, result: int, embed: int, used: int) -> int:
    views = [graph.view(result) for _ in range(used)]
    total = graph.add("moe_out", embed, *views[:2])
    for view in views[2:]:
        total = graph.add("moe_out", embed, total, view, in_place=True)
    return total


HADAMARD = 64  # smallest side of the matrices that rotate the inputs of a quantized cache
_EXACT_CACHE_TYPES = ("f32", "f16", "bf16")


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
    _positions(graph)
    for cache in profile.cache:
        if cache.kind not in ("recurrent", "none"):
            _cache_inputs(graph, cache)
    _chosen(graph)


def _positions(graph: GraphBuilder) -> int:
    return graph.input("positions", graph.batch.tokens * I32)


def _chosen(graph: GraphBuilder) -> int:
    return graph.input("outputs", _outputs(graph.batch) * I32)


def _outputs(batch: MicroBatch) -> int:
    return batch.tokens if batch.outputs is None else min(batch.tokens, batch.outputs)


def _windowed(graph: GraphBuilder, cache: LayerCache) -> bool:
    return cache.span_tokens is not None and graph.batch.window_cells is not None


def _cells(graph: GraphBuilder, cache: LayerCache) -> int:
    window = graph.batch.window_cells if cache.span_tokens is not None else None
    return graph.batch.cells if window is None else window


def _cache_inputs(graph: GraphBuilder, cache: LayerCache) -> tuple[int, int, int]:
    """Cache indices of K and V, and the mask; sliding windows have their own."""
    batch = graph.batch
    which = "window_" if _windowed(graph, cache) else ""
    # Without flash attention V is stored transposed, element by element.
    v_places = 1 if batch.flash_attention else cache.v_elements
    to_k = graph.input(f"{which}k_cells", batch.tokens * I64)
    to_v = to_k if cache.kind == "latent" else graph.input(f"{which}v_cells", batch.tokens * v_places * I64)
    halved = batch.flash_attention and not batch.casts_mask
    mask = graph.input(f"{which}mask", _cells(graph, cache) * batch.tokens * (F16 if halved else F32))
    return to_k, to_v, graph.cast(mask) if batch.casts_mask and batch.flash_attention else mask


def _layer(
    graph: GraphBuilder, profile: Profile, index: int, tensors: Mapping[str, Tensor], hidden: int, *, stage: bool
) -> int:
    embed = profile.embedding_length or 0
    cache = profile.cache[index]
    normed = graph.norm(hidden, embed)
    if cache.kind == "latent" and "attn_k_b" in tensors:
        attended = _latent(graph, profile, tensors, cache, normed)
    elif cache.kind in ("recurrent", "none"):
        attended = _mixed(graph, tensors, embed, normed)
    else:
        attended = _attention(graph, profile, tensors, cache, normed)
    out = graph.add("attn_out", embed, attended)
    if "attn_output.bias" in tensors:
        out = graph.add("attn_out", embed, out, in_place=True)
    if index == profile.layers - 1:
        chosen = _chosen(graph)
        graph.tokens = _outputs(graph.batch)
        out = graph.add("attn_out", embed, out, chosen)
        hidden = graph.add("residual", embed, hidden, chosen)
    added = graph.add("ffn_inp", embed, out, hidden, in_place=True)
    if "ffn_down_exps" in tensors:
        result = experts(graph, profile, tensors, graph.norm(added, embed), stage=stage)
    elif "ffn_down" in tensors:
        result = dense(graph, tensors, graph.norm(added, embed))
    else:
        return added
    return graph.add("l_out", embed, result, added, in_place=True)


def _attention(
    graph: GraphBuilder, profile: Profile, tensors: Mapping[str, Tensor], cache: LayerCache, normed: int
) -> int:
    out_size = tensors["attn_output"].shape[0] if "attn_output" in tensors else profile.embedding_length or 0
    sizes = {
        "attn_q": tensors["attn_q"].shape[1] if "attn_q" in tensors else out_size,
        "attn_k": cache.k_elements,
        "attn_v": cache.v_elements,
    }
    fused = graph.add("qkv", tensors["attn_qkv"].shape[1], normed) if "attn_qkv" in tensors else None
    # llama.cpp's two kinds of cache read K and V in different orders.
    order = ("attn_q", "attn_k", "attn_v") if graph.batch.window_cells is not None else ("attn_q", "attn_v", "attn_k")
    made = {}
    for name in order:
        turn = _turn(graph, profile, cache, of_v=name == "attn_v")
        # Llama 4's full-attention layers use no positions, but scale their queries
        rope = name == "attn_q" or not (profile.architecture == "llama4" and cache.span_tokens is None)
        made[name] = _projected(graph, tensors, name, sizes[name], normed, fused, turn, rope=rope)
    to_k, to_v, mask = _cache_inputs(graph, cache)
    graph.store(graph.view(made["attn_k"]), to_k)
    graph.store(graph.view(made["attn_v"]), to_v)
    query = graph.view(made["attn_q"])
    if graph.batch.flash_attention:
        attended = graph.add("attended", out_size, query, mask)
    else:
        per_token = _cells(graph, cache) * (profile.heads or 1)
        scores = graph.add("soft", per_token, graph.add("kq", per_token, query), mask, in_place=True)
        attended = graph.add("attended", out_size, graph.view(graph.add("kqv", out_size, scores)))
    turn = _turn(graph, profile, cache, of_v=True)
    return attended if turn is None else graph.add("turned", out_size, turn, graph.view(attended))


def _mixed(graph: GraphBuilder, tensors: Mapping[str, Tensor], embed: int, normed: int) -> int:
    """Recurrent layers, approximated as all projections of the hidden state and their sum."""
    sizes = [
        tensor.shape[1]
        for name, tensor in tensors.items()
        if len(tensor.shape) == 2 and tensor.shape[0] == embed and not name.startswith("ffn_")
    ]
    parts = [graph.add("part", size, normed) for size in sizes]
    return graph.add("mixed", max(sizes, default=embed), *(parts or [normed]))


def _turn(graph: GraphBuilder, profile: Profile, cache: LayerCache, *, of_v: bool) -> int | None:
    """The Hadamard matrix that rotates inputs of a quantized cache to spread outliers; None without rotation."""
    cache_type = graph.batch.cache_type_v if of_v else graph.batch.cache_type_k
    head = (cache.v_elements if of_v else cache.k_elements) // (profile.kv_heads or 1)
    if cache_type in _EXACT_CACHE_TYPES or head == 0 or head % HADAMARD:
        return None
    side = HADAMARD if of_v else head & -head  # the largest power of two that divides it
    which = "window_" if _windowed(graph, cache) else ""
    return graph.input(f"{which}turn_{'v' if of_v else 'k'}", side * side * F32)


def _projected(
    graph: GraphBuilder,
    tensors: Mapping[str, Tensor],
    name: str,
    size: int,
    normed: int,
    fused: int | None,
    turn: int | None,
    *,
    rope: bool,
) -> int:
    """Build Q, K or V: projection, bias, norm per attention head, position, rotation."""
    result = graph.add(name, size, normed) if fused is None else graph.view(fused)
    if f"{name}.bias" in tensors:
        result = graph.add(name, size, result, in_place=True)
    result = graph.view(result)  # split into attention heads
    if f"{name}_norm" in tensors:
        result = graph.norm(result, size)
    if name != "attn_v" and rope:
        result = graph.add(name, size, result, _positions(graph), in_place=True)
    return result if turn is None else graph.add(name, size, turn, graph.view(result))


def _latent(
    graph: GraphBuilder, profile: Profile, tensors: Mapping[str, Tensor], cache: LayerCache, normed: int
) -> int:
    """Latent attention, which projects queries into the compressed space and values out of it."""
    heads = profile.heads or 1
    lora = cache.v_elements
    width = cache.k_elements
    nope = tensors["attn_k_b"].shape[0]
    v_head = tensors["attn_v_b"].shape[1]
    query = normed
    if "attn_q_a" in tensors:
        rank = tensors["attn_q_a"].shape[1]
        query = graph.norm(graph.add("q_a", rank, normed), rank)
    q = graph.add("q", heads * (nope + width - lora), query)
    absorbed = graph.add("q_nope_absorbed", heads * lora, graph.view(q))
    rotated = graph.add("q_pe", heads * (width - lora), graph.view(q), _positions(graph))
    query = graph.add("q", heads * width, graph.view(absorbed), rotated)
    compressed = graph.add("kv_a", width, normed)
    values = graph.norm(graph.view(compressed), lora)
    k_pe = graph.add("k_pe", width - lora, graph.view(compressed), _positions(graph))
    k = graph.add("k", width, graph.view(values), k_pe)
    to_k, _, mask = _cache_inputs(graph, cache)
    graph.store(graph.view(k), to_k)
    if graph.batch.flash_attention:
        attended = graph.view(graph.add("attended", heads * lora, graph.view(query), mask))
    else:
        cells = graph.batch.cells
        v = graph.block("v_cont", round(cache_bytes(graph.batch.cache_type_k, cells * lora)))
        scores = graph.add(
            "soft", cells * heads, graph.add("kq", cells * heads, graph.view(query)), mask, in_place=True
        )
        attended = graph.add("kqv", heads * lora, v, scores)
    out = graph.add("v_mla", heads * v_head, attended)
    return graph.add("kqv_out", heads * v_head, graph.view(out))


def _head(graph: GraphBuilder, profile: Profile, hidden: int) -> int:
    embed = profile.embedding_length or 0
    normed = graph.add("norm", embed, hidden, in_place=True)
    normed = graph.add("result_norm", embed, normed, in_place=True, keep=True)
    return graph.add("logits", profile.vocabulary or 0, normed, keep=True)
