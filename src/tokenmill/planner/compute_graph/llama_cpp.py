"""What llama.cpp computes for one micro-batch, as a list of results with sizes: enough to size its buffers.

The operations are read off the tensor table (a query norm is there or it is not, an expert stack is there or it is
not), so that architectures nobody listed come out close too. Order matters: the allocator replays it. Drawn after
the graphs of llama.cpp b11549, where ordinary, windowed and latent attention come out to the page; recurrent layers
and the index of sparse attention are rough.
"""

from collections.abc import Collection, Mapping, Sequence

from tokenmill.model.profile import Experts, LayerCache, Profile, Tensor
from tokenmill.model.tensor_types import cache_bytes
from tokenmill.planner.compute_graph.builder import F16, F32, I32, I64, GraphBuilder, MicroBatch
from tokenmill.planner.compute_graph.layer_tensors import by_layer

MOST_FUSED = 15  # experts of a token that CUDA adds up in one kernel: ggml's MOE_WEIGHTED_REDUCTION_MAX_EXPERTS


def dense(sketch: GraphBuilder, tensors: Mapping[str, Tensor], normed: int, suffix: str = "") -> int:
    """Gate and up, joined, then down."""
    inner, embed = tensors[f"ffn_down{suffix}"].shape
    up = tensors.get(f"ffn_up{suffix}")
    if f"ffn_gate{suffix}" in tensors:
        gate = sketch.add("gate", inner, normed)
        joined = sketch.add("joined", inner, gate, sketch.add("up", inner, normed))
    elif up is not None and up.shape[1] == 2 * inner:  # gate and up in one matrix
        joined = sketch.add("joined", inner, sketch.add("gate_up", 2 * inner, normed))
    else:
        joined = sketch.add("joined", inner, sketch.add("up", inner, normed), in_place=True)
    return sketch.add("down", embed, joined)


def experts(sketch: GraphBuilder, profile: Profile, tensors: Mapping[str, Tensor], normed: int, *, stage: bool) -> int:
    """Routed experts, each token's few added up, and the shared one; `stage` copies each expert tensor in first."""
    mixture = profile.experts or Experts(1, 1)
    (inner, embed, _), used = tensors["ffn_down_exps"].shape, mixture.used
    before = profile.architecture == "llama4"  # weighs what goes in, not what comes out
    order, weights = _routed(sketch, tensors, mixture, normed, by_logits=before)
    read = sketch.view(normed)
    if before:
        read = sketch.add("weighted", embed * used, sketch.add("repeated", embed * used, read), weights, in_place=True)
    joined = _joined(sketch, tensors, inner * used, read, order, stage=stage)
    made = result = _times(sketch, tensors, "ffn_down_exps", embed * used, joined, order, stage=stage)
    fuses = sketch.batch.fuses and not before and 2 <= used <= MOST_FUSED
    if not before:
        result = sketch.add("moe_weighted", embed * used, result, weights, in_place=not fuses)
    total = _added_up(sketch, result, embed, used)
    if fuses:
        sketch.hold(made, weights)
    if "ffn_down_shexp" in tensors:
        shared = dense(sketch, tensors, normed, "_shexp")
        total = sketch.add("moe_merged", embed, total, shared, in_place=True)
    return total


def _routed(
    sketch: GraphBuilder, tensors: Mapping[str, Tensor], mixture: Experts, normed: int, *, by_logits: bool
) -> tuple[int, int]:
    """Which experts each token goes to, and their weights; `by_logits` when they are chosen before the sigmoid."""
    count = mixture.count
    used = mixture.used
    logits = sketch.add("logits", count, normed)
    if "ffn_gate_inp.bias" in tensors:
        logits = sketch.add("logits", count, logits, in_place=True)
    probabilities = sketch.add("probabilities", count, logits, in_place=True)
    rows = sketch.view(probabilities)
    ranked = logits if by_logits else probabilities
    if "exp_probs_b.bias" in tensors or "exp_probs_b" in tensors:
        ranked = sketch.add("biased", count, ranked, in_place=True)
    order = sketch.view(sketch.add("argsort", count, ranked))
    weights = sketch.add("weights", used, rows, order)
    if by_logits:
        return order, weights
    row = sketch.view(weights)
    total = sketch.add("weights_sum", 1, sketch.add("weights_sum", 1, row), in_place=True)
    return order, sketch.view(sketch.add("weights_norm", used, row, total))


def _joined(
    sketch: GraphBuilder, tensors: Mapping[str, Tensor], size: int, read: int, order: int, *, stage: bool
) -> int:
    """Gate and up of the chosen experts."""
    if "ffn_gate_up_exps" in tensors:
        both = _times(sketch, tensors, "ffn_gate_up_exps", 2 * size, read, order, stage=stage)
        return sketch.add("moe_joined", size, sketch.view(both), sketch.view(both))
    names = [name for name in ("ffn_gate_exps", "ffn_up_exps") if name in tensors]
    made = [_times(sketch, tensors, name, size, read, order, stage=stage) for name in names]
    return sketch.add("moe_joined", size, *made, in_place=len(made) == 1)


def _times(
    sketch: GraphBuilder,
    tensors: Mapping[str, Tensor],
    name: str,
    per_token: int,
    read: int,
    order: int,
    *,
    stage: bool,
) -> int:
    """The product with a stack of expert matrices, each token with its own few."""
    staged = [sketch.block("staged", tensors[name].bytes)] if stage else []
    result = sketch.add(name, per_token, *staged, read, order)
    if f"{name}.bias" in tensors:
        result = sketch.add(name, per_token, result, order, in_place=True)
    return result


def _added_up(sketch: GraphBuilder, result: int, embed: int, used: int) -> int:
    views = [sketch.view(result) for _ in range(used)]
    total = sketch.add("moe_out", embed, *views[:2])
    for view in views[2:]:
        total = sketch.add("moe_out", embed, total, view, in_place=True)
    return total


__all__ = ["GraphBuilder", "MicroBatch", "draw"]

HADAMARD = 64  # least side of the matrices that turn what goes into a quantised cache
_EXACT_CACHE_TYPES = ("f32", "f16", "bf16")


def draw(
    profile: Profile,
    batch: MicroBatch,
    layers: Sequence[int] | None = None,
    *,
    embed: bool = True,
    head: bool = True,
    staged: Collection[int] = (),
) -> GraphBuilder:
    """The part of the graph that one device computes.

    `layers` are those it computes; `embed` adds the embedding lookup (without it the hidden state is copied in from
    another device), `head` the output matrix. Experts of `staged` layers live in host memory and are copied to the
    device, one tensor at a time, while they are used. With a GPU, the host's own buffer is `draw(..., layers=())`.
    """
    table = by_layer(profile)
    sketch = GraphBuilder(batch, batch.tokens)
    wanted = range(profile.layers) if layers is None else layers
    hidden = _embedded(sketch, profile.embedding_length or 0, looked_up=embed, used=0 in wanted)
    for layer in wanted:
        hidden = _layer(sketch, profile, layer, table.get(layer, {}), hidden, stage=layer in staged)
    if not wanted:
        _all_inputs(sketch, profile)
    if head:
        _head(sketch, profile, hidden)
    return sketch


def _embedded(sketch: GraphBuilder, width: int, *, looked_up: bool, used: bool) -> int:
    """Token ids to hidden state.

    Since 2026 every batch also has room for ready-made embeddings: they are copied and mixed with looked-up rows into a
    tensor that a batch of text never reads, and that therefore stays. The device of the first layer does that.
    """
    tokens = sketch.tokens
    if not sketch.batch.mixes_embeddings:
        if looked_up:
            return sketch.add("embd", width, sketch.input("tokens", tokens * I32))
        return sketch.input("hidden", tokens * width * F32)
    if looked_up:
        hidden = sketch.add("embd", width, sketch.input("tokens", tokens * I32))
        rows = sketch.add("rows", width, sketch.input("mixed_tokens", tokens * I32))
        sketch.input("embd", tokens * width * F32)  # the same room for a batch of embeddings alone
        slots = sketch.input("mixed_slots", tokens * I64)
        given = sketch.input("mixed_embd", tokens * width * F32)
    elif used:
        given = sketch.input("mixed_embd", tokens * width * F32)
        rows = sketch.input("rows", tokens * width * F32)
        slots = sketch.input("mixed_slots", tokens * I64)
        hidden = sketch.input("hidden", tokens * width * F32)
    else:
        return sketch.input("hidden", tokens * width * F32)
    if used:
        mixed = sketch.add("mixed", width, given)
        sketch.store(rows, slots, mixed)
        sketch.view(mixed)  # which nobody reads
    return hidden


def _all_inputs(sketch: GraphBuilder, profile: Profile) -> None:
    """What the host keeps for the layers that GPUs compute."""
    _positions(sketch)
    for cache in profile.cache:
        if cache.kind not in ("recurrent", "none"):
            _cache_inputs(sketch, cache)
    _chosen(sketch)


def _positions(sketch: GraphBuilder) -> int:
    return sketch.input("positions", sketch.batch.tokens * I32)


def _chosen(sketch: GraphBuilder) -> int:
    return sketch.input("outputs", _outputs(sketch.batch) * I32)


def _outputs(batch: MicroBatch) -> int:
    return batch.tokens if batch.outputs is None else min(batch.tokens, batch.outputs)


def _windowed(sketch: GraphBuilder, cache: LayerCache) -> bool:
    return cache.span_tokens is not None and sketch.batch.window_cells is not None


def _cells(sketch: GraphBuilder, cache: LayerCache) -> int:
    window = sketch.batch.window_cells if cache.span_tokens is not None else None
    return sketch.batch.cells if window is None else window


def _cache_inputs(sketch: GraphBuilder, cache: LayerCache) -> tuple[int, int, int]:
    """Where K and V go, and the mask; windows have their own."""
    batch = sketch.batch
    which = "window_" if _windowed(sketch, cache) else ""
    # Without flash attention V is stored transposed, number by number.
    v_places = 1 if batch.flash_attention else cache.v_elements
    to_k = sketch.input(f"{which}k_cells", batch.tokens * I64)
    to_v = to_k if cache.kind == "latent" else sketch.input(f"{which}v_cells", batch.tokens * v_places * I64)
    halved = batch.flash_attention and not batch.casts_mask
    mask = sketch.input(f"{which}mask", _cells(sketch, cache) * batch.tokens * (F16 if halved else F32))
    return to_k, to_v, sketch.cast(mask) if batch.casts_mask and batch.flash_attention else mask


def _layer(
    sketch: GraphBuilder, profile: Profile, index: int, tensors: Mapping[str, Tensor], hidden: int, *, stage: bool
) -> int:
    embed = profile.embedding_length or 0
    cache = profile.cache[index]
    normed = sketch.norm(hidden, embed)
    if cache.kind == "latent" and "attn_k_b" in tensors:
        attended = _latent(sketch, profile, tensors, cache, normed)
    elif cache.kind in ("recurrent", "none"):
        attended = _mixed(sketch, tensors, embed, normed)
    else:
        attended = _attention(sketch, profile, tensors, cache, normed)
    out = sketch.add("attn_out", embed, attended)
    if "attn_output.bias" in tensors:
        out = sketch.add("attn_out", embed, out, in_place=True)
    if index == profile.layers - 1:
        chosen = _chosen(sketch)
        sketch.tokens = _outputs(sketch.batch)
        out = sketch.add("attn_out", embed, out, chosen)
        hidden = sketch.add("residual", embed, hidden, chosen)
    added = sketch.add("ffn_inp", embed, out, hidden, in_place=True)
    if "ffn_down_exps" in tensors:
        result = experts(sketch, profile, tensors, sketch.norm(added, embed), stage=stage)
    elif "ffn_down" in tensors:
        result = dense(sketch, tensors, sketch.norm(added, embed))
    else:
        return added
    return sketch.add("l_out", embed, result, added, in_place=True)


def _attention(
    sketch: GraphBuilder, profile: Profile, tensors: Mapping[str, Tensor], cache: LayerCache, normed: int
) -> int:
    out_size = tensors["attn_output"].shape[0] if "attn_output" in tensors else profile.embedding_length or 0
    sizes = {
        "attn_q": tensors["attn_q"].shape[1] if "attn_q" in tensors else out_size,
        "attn_k": cache.k_elements,
        "attn_v": cache.v_elements,
    }
    fused = sketch.add("qkv", tensors["attn_qkv"].shape[1], normed) if "attn_qkv" in tensors else None
    # llama.cpp's two kinds of cache take K and V in different order.
    order = ("attn_q", "attn_k", "attn_v") if sketch.batch.window_cells is not None else ("attn_q", "attn_v", "attn_k")
    made = {}
    for name in order:
        turn = _turn(sketch, profile, cache, of_v=name == "attn_v")
        # Llama 4's layers with full attention know no positions; their queries are scaled instead.
        rope = name == "attn_q" or not (profile.architecture == "llama4" and cache.span_tokens is None)
        made[name] = _projected(sketch, tensors, name, sizes[name], normed, fused, turn, rope=rope)
    to_k, to_v, mask = _cache_inputs(sketch, cache)
    sketch.store(sketch.view(made["attn_k"]), to_k)
    sketch.store(sketch.view(made["attn_v"]), to_v)
    query = sketch.view(made["attn_q"])
    if sketch.batch.flash_attention:
        attended = sketch.add("attended", out_size, query, mask)
    else:
        per_token = _cells(sketch, cache) * (profile.heads or 1)
        scores = sketch.add("soft", per_token, sketch.add("kq", per_token, query), mask, in_place=True)
        attended = sketch.add("attended", out_size, sketch.view(sketch.add("kqv", out_size, scores)))
    turn = _turn(sketch, profile, cache, of_v=True)
    return attended if turn is None else sketch.add("turned", out_size, turn, sketch.view(attended))


def _mixed(sketch: GraphBuilder, tensors: Mapping[str, Tensor], embed: int, normed: int) -> int:
    """What stands in the place of attention, roughly: every projection of the hidden state at once, then their sum."""
    sizes = [
        tensor.shape[1]
        for name, tensor in tensors.items()
        if len(tensor.shape) == 2 and tensor.shape[0] == embed and not name.startswith("ffn_")
    ]
    parts = [sketch.add("part", size, normed) for size in sizes]
    return sketch.add("mixed", max(sizes, default=embed), *(parts or [normed]))


def _turn(sketch: GraphBuilder, profile: Profile, cache: LayerCache, *, of_v: bool) -> int | None:
    """The Hadamard matrix that turns what goes into a quantised cache, to spread outliers; None where there is none."""
    cache_type = sketch.batch.cache_type_v if of_v else sketch.batch.cache_type_k
    head = (cache.v_elements if of_v else cache.k_elements) // (profile.kv_heads or 1)
    if cache_type in _EXACT_CACHE_TYPES or head == 0 or head % HADAMARD:
        return None
    side = HADAMARD if of_v else head & -head  # the largest power of two in it
    which = "window_" if _windowed(sketch, cache) else ""
    return sketch.input(f"{which}turn_{'v' if of_v else 'k'}", side * side * F32)


def _projected(
    sketch: GraphBuilder,
    tensors: Mapping[str, Tensor],
    name: str,
    size: int,
    normed: int,
    fused: int | None,
    turn: int | None,
    *,
    rope: bool,
) -> int:
    """One of Q, K and V: projection, bias, norm of each head, position, rotation."""
    result = sketch.add(name, size, normed) if fused is None else sketch.view(fused)
    if f"{name}.bias" in tensors:
        result = sketch.add(name, size, result, in_place=True)
    result = sketch.view(result)  # as heads
    if f"{name}_norm" in tensors:
        result = sketch.norm(result, size)
    if name != "attn_v" and rope:
        result = sketch.add(name, size, result, _positions(sketch), in_place=True)
    return result if turn is None else sketch.add(name, size, turn, sketch.view(result))


def _latent(
    sketch: GraphBuilder, profile: Profile, tensors: Mapping[str, Tensor], cache: LayerCache, normed: int
) -> int:
    """Latent attention: queries are taken into the compressed space, values out of it."""
    heads = profile.heads or 1
    lora = cache.v_elements
    width = cache.k_elements
    nope = tensors["attn_k_b"].shape[0]
    v_head = tensors["attn_v_b"].shape[1]
    query = normed
    if "attn_q_a" in tensors:
        rank = tensors["attn_q_a"].shape[1]
        query = sketch.norm(sketch.add("q_a", rank, normed), rank)
    q = sketch.add("q", heads * (nope + width - lora), query)
    absorbed = sketch.add("q_nope_absorbed", heads * lora, sketch.view(q))
    rotated = sketch.add("q_pe", heads * (width - lora), sketch.view(q), _positions(sketch))
    query = sketch.add("q", heads * width, sketch.view(absorbed), rotated)
    compressed = sketch.add("kv_a", width, normed)
    values = sketch.norm(sketch.view(compressed), lora)
    k_pe = sketch.add("k_pe", width - lora, sketch.view(compressed), _positions(sketch))
    k = sketch.add("k", width, sketch.view(values), k_pe)
    to_k, _, mask = _cache_inputs(sketch, cache)
    sketch.store(sketch.view(k), to_k)
    if sketch.batch.flash_attention:
        attended = sketch.view(sketch.add("attended", heads * lora, sketch.view(query), mask))
    else:
        cells = sketch.batch.cells
        v = sketch.block("v_cont", round(cache_bytes(sketch.batch.cache_type_k, cells * lora)))
        scores = sketch.add(
            "soft", cells * heads, sketch.add("kq", cells * heads, sketch.view(query)), mask, in_place=True
        )
        attended = sketch.add("kqv", heads * lora, v, scores)
    out = sketch.add("v_mla", heads * v_head, attended)
    return sketch.add("kqv_out", heads * v_head, sketch.view(out))


def _head(sketch: GraphBuilder, profile: Profile, hidden: int) -> int:
    embed = profile.embedding_length or 0
    normed = sketch.add("norm", embed, hidden, in_place=True)
    normed = sketch.add("result_norm", embed, normed, in_place=True, keep=True)
    return sketch.add("logits", profile.vocabulary or 0, normed, keep=True)
