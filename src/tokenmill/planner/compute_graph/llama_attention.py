"""Attention of llama.cpp's graphs: ordinary, windowed and latent, with and without the index of sparse attention.

`attention` and `latent` add the operations of one layer up to the output projection; `cache_inputs` the inputs that
layers with equal caches share.
"""

from collections.abc import Mapping

from tokenmill.model.profile import LayerCache, Profile, Tensor
from tokenmill.model.tensor_types import cache_bytes
from tokenmill.planner.compute_graph.builder import F16, F32, I32, I64, GraphBuilder
from tokenmill.planner.compute_graph.llama_sparse import INDEX, chosen_mask, index_keys

HADAMARD = 64  # smallest side of the matrices that rotate the inputs of a quantized cache
# recurrent layers order the tokens
_NO_POSITIONS = frozenset({"kimi-linear", "kimi-k3", "nemotron_h", "nemotron_h_moe"})
_POSITIONS = dict.fromkeys(("qwen2vl", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"), 4)  # per token; else one
_EXACT_CACHE_TYPES = ("f32", "f16", "bf16")


def positions(graph: GraphBuilder, profile: Profile) -> int:
    """The positions of all tokens."""
    return graph.input("positions", graph.batch.tokens * I32 * _POSITIONS.get(profile.architecture, 1))


def _windowed(graph: GraphBuilder, cache: LayerCache) -> bool:
    return cache.span_tokens is not None and graph.batch.window_cells is not None


def _cells(graph: GraphBuilder, cache: LayerCache) -> int:
    window = graph.batch.window_cells if cache.span_tokens is not None else None
    return graph.batch.cells if window is None else window


def cache_inputs(graph: GraphBuilder, cache: LayerCache) -> tuple[int, int, int]:
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


def attention(
    graph: GraphBuilder, profile: Profile, tensors: Mapping[str, Tensor], cache: LayerCache, normed: int
) -> int:
    """Ordinary or windowed attention; in Qwen3-Next, with a gate of its output."""
    out_size = tensors["attn_output"].shape[0] if "attn_output" in tensors else profile.embedding_length or 0
    sizes = {
        "attn_q": tensors["attn_q"].shape[1] if "attn_q" in tensors else out_size,
        "attn_k": cache.k_elements,
        "attn_v": cache.v_elements,
    }
    fused = graph.add("qkv", tensors["attn_qkv"].shape[1], normed) if "attn_qkv" in tensors else None
    # llama.cpp's two kinds of cache read K and V in different orders.
    order = ("attn_q", "attn_k", "attn_v") if graph.batch.window_cells is not None else ("attn_q", "attn_v", "attn_k")
    gated = sizes["attn_q"] == 2 * out_size  # the query of each head is followed by a gate of its output
    both = graph.add("attn_q", 2 * out_size, normed) if gated else fused
    made = {}
    for name in order:
        turn = _turn(graph, profile, cache, of_v=name == "attn_v")
        # Llama 4's full-attention layers use no positions, but scale their queries
        rope = name == "attn_q" or not (profile.architecture == "llama4" and cache.span_tokens is None)
        places = positions(graph, profile) if rope and profile.architecture not in _NO_POSITIONS else None
        source = both if name == "attn_q" else fused
        size = out_size if name == "attn_q" else sizes[name]
        made[name] = _projected(graph, tensors, name, size, normed, source, turn, places)
    to_k, to_v, mask = cache_inputs(graph, cache)
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
    if turn is not None:
        attended = graph.add("turned", out_size, turn, graph.view(attended))
    if both is None or not gated:
        return attended
    gate = graph.add("gate", out_size, graph.add("gate", out_size, graph.view(both)), in_place=True)
    return graph.add("gated", out_size, graph.view(attended), gate, in_place=True)


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
    places: int | None,
) -> int:
    """Build Q, K or V: projection, bias, norm per attention head, position, rotation."""
    result = graph.add(name, size, normed) if fused is None else graph.view(fused)
    if f"{name}.bias" in tensors:
        result = graph.add(name, size, result, in_place=True)
    result = graph.view(result)  # split into attention heads
    if f"{name}_norm" in tensors:
        result = graph.norm(result, size)
    if name != "attn_v" and places is not None:
        result = graph.add(name, size, result, places, in_place=True)
    return result if turn is None else graph.add(name, size, turn, graph.view(result))


def latent(graph: GraphBuilder, profile: Profile, tensors: Mapping[str, Tensor], cache: LayerCache, normed: int) -> int:
    """Latent attention, which projects queries into the compressed space and values out of it."""
    heads = profile.heads or 1
    lora = cache.v_elements
    width = cache.k_elements
    nope = tensors["attn_k_b"].shape[0]
    v_head = tensors["attn_v_b"].shape[1]
    if INDEX in tensors:
        index_keys(graph, tensors, normed, positions(graph, profile))
    query = normed
    if "attn_q_a" in tensors:
        rank = tensors["attn_q_a"].shape[1]
        query = graph.norm(graph.add("q_a", rank, normed), rank)
    ranked = query
    q = graph.add("q", heads * (nope + width - lora), query)
    absorbed = graph.add("q_nope_absorbed", heads * lora, graph.view(q))
    query = graph.add("q", heads * width, graph.view(absorbed), _rotated(graph, profile, heads * (width - lora), q))
    compressed = graph.add("kv_a", width, normed)
    values = graph.norm(graph.view(compressed), lora)
    k = graph.add("k", width, graph.view(values), _rotated(graph, profile, width - lora, compressed))
    to_k, _, mask = cache_inputs(graph, cache)
    graph.store(graph.view(k), to_k)
    if cache.indexer_top_k:
        mask = chosen_mask(graph, tensors, cache, normed, ranked, mask, positions(graph, profile))
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
    out = graph.add("kqv_out", heads * v_head, graph.view(out))
    if "attn_gate" not in tensors:
        return out
    gate = graph.add("gate", heads, graph.view(graph.add("gate", heads, normed)), in_place=True)
    return graph.add("gated", heads * v_head, graph.add("gated", heads * v_head, graph.view(out), gate, in_place=True))


def compressed(graph: GraphBuilder, tensors: Mapping[str, Tensor], cache: LayerCache, normed: int) -> int:
    """Attention of DeepSeek-V4, approximated without its compressor and index."""
    rank, size = tensors["attn_q_b"].shape
    query = graph.add("q_b", size, graph.norm(graph.add("q_a", rank, normed), rank))
    query = graph.norm(graph.view(query), size)
    values = graph.norm(graph.add("kv", cache.k_elements, normed), cache.k_elements)
    to_k, _, mask = cache_inputs(graph, cache)
    graph.store(graph.view(values), to_k)
    attended = graph.add("attended", size, graph.view(query), mask)
    return graph.add("narrowed", tensors["attn_output_b"].shape[0], graph.view(attended))


def _rotated(graph: GraphBuilder, profile: Profile, size: int, projected: int) -> int:
    """The part of a query or key that depends on positions."""
    part = graph.view(projected)
    return (
        part if profile.architecture in _NO_POSITIONS else graph.add("rotated", size, part, positions(graph, profile))
    )
