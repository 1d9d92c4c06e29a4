"""Recurrent layers of llama.cpp's graphs: gated delta net, Kimi delta attention and Mamba 2.

A layer reads the states of all sequences of the micro-batch from the cache, convolves its projections with the last
tokens of each sequence, updates the states, and writes both back. `recurrent` adds one layer up to its output
projection. Layers of other kinds are approximated by their projections.
"""

from collections.abc import Mapping

from tokenmill.model.profile import LayerCache, Tensor
from tokenmill.planner.compute_graph.builder import F32, I32, GraphBuilder

Tensors = Mapping[str, Tensor]
DELTA_NET = "ssm_dt.bias"
KIMI_DELTA = "ssm_conv1d_q"
MAMBA_2 = "ssm_d"


def is_drawn(tensors: Tensors) -> bool:
    """Whether the operations of a recurrent layer with these tensors are known."""
    return (KIMI_DELTA in tensors and bool({"ssm_g", "ssm_g_a"} & tensors.keys())) or (
        "ssm_conv1d" in tensors and (MAMBA_2 in tensors or "attn_gate" in tensors)
    )


def recurrent(graph: GraphBuilder, tensors: Tensors, cache: LayerCache, hidden: int, embed: int) -> int:
    """Add the normalization and the operations of one layer."""
    if not is_drawn(tensors):
        return _approximated(graph, tensors, embed, graph.norm(hidden, embed))
    if KIMI_DELTA in tensors:
        return _kimi_delta(graph, tensors, cache, hidden, embed)
    if MAMBA_2 in tensors:
        return _mamba_2(graph, tensors, cache, hidden, embed)
    return _delta_net(graph, tensors, cache, hidden, embed)


def _delta_net(graph: GraphBuilder, tensors: Tensors, cache: LayerCache, hidden: int, embed: int) -> int:
    """Gated delta net, as in Qwen3-Next and Qwen3.5."""
    kernel, channels = tensors["ssm_conv1d"].shape
    inner = tensors["ssm_out"].shape[0]
    heads = tensors["ssm_dt.bias"].shape[0]
    keys = (channels - inner) // 2
    kept = (kernel - 1) * channels
    normed = graph.norm(hidden, embed)
    tail = _states(graph, kept)
    mixed = _with_tail(graph, tail, graph.add("qkv", channels, normed), kept, channels)
    state = _states(graph, cache.state_bytes // F32 - kept)
    mixed = graph.add("conv", channels, graph.add("conv", channels, mixed), in_place=True)
    queries_and_keys = []
    for name in ("q", "k"):
        part = graph.add(name, keys, graph.add(name, keys, graph.view(mixed)), in_place=True)
        # one query and key head serves several value heads; only Qwen3-Next copies them
        repeats = keys != inner and "ssm_ba" in tensors
        queries_and_keys.append(graph.add(name, inner, graph.view(part)) if repeats else part)
    gate, beta = _gate_and_beta(graph, tensors, heads, normed)
    parts = (*queries_and_keys, graph.view(mixed), graph.view(gate), graph.view(beta), state)
    result = graph.view(_updated(graph, inner, cache.state_bytes // F32 - kept, *parts))
    result = graph.add("norm", inner, graph.add("norm", inner, result, in_place=True), in_place=True)
    z = graph.view(graph.add("z", inner, normed))
    return graph.view(graph.add("gated", inner, result, graph.add("z", inner, z, in_place=True), in_place=True))


def _gate_and_beta(graph: GraphBuilder, tensors: Tensors, heads: int, normed: int) -> tuple[int, int]:
    """The decay and the learning rate of each head."""
    if "ssm_ba" in tensors:
        both = graph.add("beta_alpha", 2 * heads, normed)
        alpha = graph.add("alpha", heads, graph.view(both))
    else:
        both = None
        alpha = graph.view(graph.add("alpha", heads, normed))
    for _ in ("bias", "softplus", "scale"):
        alpha = graph.add("alpha", heads, alpha, in_place=True)
    beta = graph.add("beta", heads, normed if both is None else graph.view(both))
    return alpha, graph.add("beta", heads, graph.view(beta), in_place=True)


def _kimi_delta(graph: GraphBuilder, tensors: Tensors, cache: LayerCache, hidden: int, embed: int) -> int:
    """Kimi delta attention, whose queries, keys and values are convolved separately."""
    kernel, inner = tensors[KIMI_DELTA].shape[0], tensors["ssm_dt.bias"].shape[0]
    heads = tensors["ssm_beta"].shape[1]
    kept = (kernel - 1) * inner
    state_size = cache.state_bytes // F32 - 3 * kept
    normed = graph.norm(hidden, embed)
    tail = _states(graph, 3 * kept)
    mixed = [_with_tail(graph, tail, graph.add(name, inner, normed), kept, inner) for name in ("q", "k", "v")]
    state = _states(graph, state_size)
    parts = []
    for name, convolved in zip(("q", "k", "v"), mixed, strict=True):
        part = graph.add(name, inner, graph.view(graph.add(name, inner, convolved)), in_place=True)
        if name != "v":
            part = graph.add(name, inner, graph.add(name, inner, graph.view(part), in_place=True), in_place=True)
        parts.append(part)
    gate = _by_low_rank(graph, tensors, "ssm_f", inner, normed)
    for _ in ("bias", "softplus", "scale"):
        gate = graph.add("gate", inner, graph.view(gate), in_place=True)
    beta = graph.add("beta", heads, graph.view(graph.add("beta", heads, normed)), in_place=True)
    updated = _updated(graph, inner, state_size, *parts[:2], graph.view(parts[2]), graph.view(gate), beta, state)
    result = graph.view(graph.add("copied", inner, graph.view(updated)))
    result = graph.add("norm", inner, graph.add("norm", inner, result, in_place=True), in_place=True)
    opening = graph.view(_by_low_rank(graph, tensors, "ssm_g", inner, normed))
    opening = graph.add("opening", inner, opening, in_place=True)
    return graph.add("copied", inner, graph.add("gated", inner, result, opening, in_place=True))


def _by_low_rank(graph: GraphBuilder, tensors: Tensors, name: str, inner: int, normed: int) -> int:
    """A projection: one matrix, or a product of two (`_a`, `_b`) if the file has both."""
    if name in tensors:
        return graph.add(name, inner, normed)
    rank = tensors[f"{name}_a"].shape[1]
    first = graph.add(name, rank, normed)
    return graph.add(name, inner, first) if f"{name}_b" in tensors else first


def _mamba_2(graph: GraphBuilder, tensors: Tensors, cache: LayerCache, hidden: int, embed: int) -> int:
    """Mamba 2, as in Nemotron-H."""
    kernel, channels = tensors["ssm_conv1d"].shape
    inner = tensors["ssm_out"].shape[0]
    heads = tensors["ssm_dt.bias"].shape[0]
    kept = (kernel - 1) * channels
    state_size = cache.state_bytes // F32 - kept
    tail = _states(graph, kept)
    normed = graph.norm(hidden, embed)
    both = graph.add("zxbcdt", tensors["ssm_in"].shape[1], normed)
    mixed = _with_tail(graph, tail, graph.view(both), kept, channels)
    mixed = graph.add("conv", channels, mixed)
    for _ in ("bias", "silu"):
        mixed = graph.add("conv", channels, mixed, in_place=True)
    steps = graph.add("dt", heads, graph.add("dt", heads, graph.view(both)), in_place=True)
    reads = (graph.view(mixed), steps, graph.view(mixed), graph.view(mixed), sequence_index(graph))
    scanned = _updated(graph, inner, state_size, *reads, others=True)
    z = graph.add("z", inner, graph.view(both))
    skipped = graph.add("skipped", inner, graph.view(mixed))
    result = graph.add("y", inner, graph.view(scanned), skipped, in_place=True)
    result = graph.view(graph.add("gated", inner, graph.view(z), result))
    return graph.view(graph.add("norm", inner, graph.add("norm", inner, result, in_place=True), in_place=True))


def sequence_index(graph: GraphBuilder) -> int:
    """The cache rows of the sequences of the micro-batch."""
    return graph.input("states", graph.batch.sequences * I32)


def _states(graph: GraphBuilder, size: int) -> int:
    """Read the states of all sequences, `size` numbers each."""
    states = graph.block("states", size * graph.batch.sequences * F32, sequence_index(graph))
    used = graph.view(states)
    graph.hold(graph.view(states))  # the states of other sequences are written back
    return used


def _with_tail(graph: GraphBuilder, tail: int, projected: int, kept: int, channels: int) -> int:
    """Prepend the previous last tokens of each sequence to the new tokens, and store the new last ones."""
    size = (graph.tokens * channels + kept * graph.batch.sequences) * F32
    joined = graph.block("conv_input", size, graph.view(tail), graph.view(projected))
    graph.hold(graph.view(joined))
    return joined


def _updated(graph: GraphBuilder, inner: int, state_size: int, *reads: int, others: bool = False) -> int:
    """The outputs of all tokens, followed by the new states, which are written back.

    Mamba reads the states of the micro-batch in place and copies only those of other sequences.
    """
    batch = graph.batch
    states = state_size * batch.sequences * (1 + batch.snapshots)
    result = graph.block("updated", (graph.tokens * inner + states) * F32, *reads)
    if others:
        copied = graph.block("other_states", state_size * (batch.sequences - 1) * F32, sequence_index(graph))
        graph.hold(graph.view(copied))
    graph.hold(graph.view(result))
    return result


def _approximated(graph: GraphBuilder, tensors: Tensors, embed: int, normed: int) -> int:
    """All projections of the hidden state and their sum."""
    sizes = [
        tensor.shape[1]
        for name, tensor in tensors.items()
        if len(tensor.shape) == 2 and tensor.shape[0] == embed and not name.startswith("ffn_")
    ]
    parts = [graph.add("part", size, normed) for size in sizes]
    return graph.add("mixed", max(sizes, default=embed), *(parts or [normed]))
