"""Feed-forward networks of llama.cpp's graphs: dense ones, and routed experts with a shared one."""

from collections.abc import Mapping

from tokenmill.model.profile import Experts, Profile, Tensor
from tokenmill.planner.compute_graph.builder import GraphBuilder

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
    narrowed = "ffn_latent_down" in tensors  # Nemotron's experts work on a narrower hidden state
    read = graph.view(graph.add("narrowed", embed, normed) if narrowed else normed)
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
    if narrowed:
        embed = tensors["ffn_latent_up"].shape[1]
        total = graph.add("widened", embed, total)
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
