"""The second half of a layer as ik_llama.cpp computes it: dense feed-forward, or router, routed and shared experts.

Up, gate and what joins them are one operation, so nothing stands between the input and the joined result.
"""

from collections.abc import Mapping
from typing import Literal

from tokenmill.model.profile import Experts, Tensor
from tokenmill.planner.ik_options import IkOptions
from tokenmill.planner.sketch import Sketch

ExpertsAre = Literal["here", "copied", "on_host"]
"""Of one device's layer: its experts live on the device, are copied to it from host memory at every use, or are
computed by the host, which sends their results back."""


def dense(sketch: Sketch, tensors: Mapping[str, Tensor], normed: int, suffix: str = "") -> int:
    """Gate and up in one, then down."""
    inner, embed = tensors[f"ffn_down{suffix}"].shape
    return sketch.add("down", embed, sketch.add("joined", inner, normed))


def experts(
    sketch: Sketch, mixture: Experts, tensors: Mapping[str, Tensor], normed: int, are: ExpertsAre, options: IkOptions
) -> int:
    """Routed experts, weighed and added up, and the shared one."""
    embed = tensors["ffn_down_exps"].shape[1]
    used = mixture.used
    biased = any(name.startswith("exp_probs_b") for name in tensors)
    chosen, weights = _routed(sketch, mixture, normed, biased=biased)
    read = sketch.view(normed)
    if are == "on_host":
        sketch.store(sketch.view(read), chosen)
        result = sketch.add("moe_down", embed * used)
    else:
        result = _computed(sketch, tensors, used, read, chosen, options, copied=are == "copied")
    if options.fused_sum:
        total = sketch.add("moe_out", embed, result, weights)
    else:
        weighed = sketch.add("moe_weighed", embed * used, result, weights, in_place=True)
        total = sketch.add("moe_out", embed, sketch.view(weighed))
    if "ffn_down_shexp" in tensors:
        shared = dense(sketch, tensors, normed, "_shexp")
        total = sketch.add("moe_merged", embed, total, shared, in_place=True)
    return total


def _routed(sketch: Sketch, mixture: Experts, normed: int, *, biased: bool) -> tuple[int, int]:
    """Which experts each token goes to, and their weights."""
    count = mixture.count
    used = mixture.used
    chances = sketch.add("probs", count, sketch.add("logits", count, normed), in_place=True)
    ranked = sketch.add("biased", count, chances) if biased else chances
    chosen = sketch.view(sketch.add("argsort", count, ranked))
    weights = sketch.view(sketch.add("weights", used, sketch.view(chances), chosen))
    shares = sketch.add("weights", used, weights, sketch.add("sum", 1, weights))
    return chosen, sketch.add("weights", used, sketch.view(shares))


def _computed(
    sketch: Sketch,
    tensors: Mapping[str, Tensor],
    used: int,
    read: int,
    chosen: int,
    options: IkOptions,
    *,
    copied: bool,
) -> int:
    """The products on this device; `copied` experts come in right before, up and gate together when they are fused."""
    inner, embed, _ = tensors["ffn_down_exps"].shape
    names = [name for name in ("ffn_up_exps", "ffn_gate_exps", "ffn_gate_up_exps") if name in tensors]
    rounds = [names] if options.fmoe or options.muge else [[name] for name in names]
    made = []
    for group in rounds:
        copies = [sketch.block("copied", tensors[name].bytes) for name in group if copied]
        made.append(sketch.add("joined", inner * used, *copies, read, chosen))
    joined = made[0] if len(made) == 1 else sketch.add("joined", inner * used, *made)
    copies = [sketch.block("copied", tensors["ffn_down_exps"].bytes)] if copied else []
    return sketch.add("moe_down", embed * used, *copies, joined, chosen)
