"""The second half of a layer as `graph` draws it: dense feed-forward, or router, routed and shared experts."""

from collections.abc import Mapping

from tokenmill.model.profile import Experts, Profile, Tensor
from tokenmill.planner.sketch import Sketch

MOST_FUSED = 15  # experts of a token that CUDA adds up in one kernel: ggml's MOE_WEIGHTED_REDUCTION_MAX_EXPERTS


def dense(sketch: Sketch, tensors: Mapping[str, Tensor], normed: int, suffix: str = "") -> int:
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


def experts(sketch: Sketch, profile: Profile, tensors: Mapping[str, Tensor], normed: int, *, stage: bool) -> int:
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
    sketch: Sketch, tensors: Mapping[str, Tensor], mixture: Experts, normed: int, *, by_logits: bool
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


def _joined(sketch: Sketch, tensors: Mapping[str, Tensor], size: int, read: int, order: int, *, stage: bool) -> int:
    """Gate and up of the chosen experts."""
    if "ffn_gate_up_exps" in tensors:
        both = _times(sketch, tensors, "ffn_gate_up_exps", 2 * size, read, order, stage=stage)
        return sketch.add("moe_joined", size, sketch.view(both), sketch.view(both))
    names = [name for name in ("ffn_gate_exps", "ffn_up_exps") if name in tensors]
    made = [_times(sketch, tensors, name, size, read, order, stage=stage) for name in names]
    return sketch.add("moe_joined", size, *made, in_place=len(made) == 1)


def _times(
    sketch: Sketch, tensors: Mapping[str, Tensor], name: str, per_token: int, read: int, order: int, *, stage: bool
) -> int:
    """The product with a stack of expert matrices, each token with its own few."""
    staged = [sketch.block("staged", tensors[name].bytes)] if stage else []
    result = sketch.add(name, per_token, *staged, read, order)
    if f"{name}.bias" in tensors:
        result = sketch.add(name, per_token, result, order, in_place=True)
    return result


def _added_up(sketch: Sketch, result: int, embed: int, used: int) -> int:
    views = [sketch.view(result) for _ in range(used)]
    total = sketch.add("moe_out", embed, *views[:2])
    for view in views[2:]:
        total = sketch.add("moe_out", embed, total, view, in_place=True)
    return total
