"""What ik_llama.cpp computes for one micro-batch on one device, step by step: enough to size its buffers.

A GPU gets what it works on at the beginning of its part of the graph: hidden state, positions, mask. Replayed by
`arena`, the published buffers of Kimi-K2, DeepSeek-R1, Qwen3-235B and MiniMax-M2.5 come out to the page. Not drawn:
`-sm graph`, sliding windows (ik keeps them in full), recurrent layers, prediction layers.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from tokenmill.model.profile import Experts, Profile, Tensor
from tokenmill.planner.compute_graph.builder import F16, F32, I32, GraphBuilder, MicroBatch
from tokenmill.planner.compute_graph.ik_attention import Attention, latent_of
from tokenmill.planner.compute_graph.ik_options import IkOptions
from tokenmill.planner.compute_graph.layer_tensors import by_layer
from tokenmill.planner.plan import Settings

ExpertsAre = Literal["here", "copied", "on_host"]
"""Of one device's layer: its experts live on the device, are copied to it from host memory at every use, or are
computed by the host, which sends their results back."""


def dense(sketch: GraphBuilder, tensors: Mapping[str, Tensor], normed: int, suffix: str = "") -> int:
    """Gate and up in one, then down."""
    inner, embed = tensors[f"ffn_down{suffix}"].shape
    return sketch.add("down", embed, sketch.add("joined", inner, normed))


def experts(
    sketch: GraphBuilder,
    mixture: Experts,
    tensors: Mapping[str, Tensor],
    normed: int,
    are: ExpertsAre,
    options: IkOptions,
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


def _routed(sketch: GraphBuilder, mixture: Experts, normed: int, *, biased: bool) -> tuple[int, int]:
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
    sketch: GraphBuilder,
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


PAD_CELLS = 256  # the cache is a multiple of this
PAD_MASK_ROWS = 64
LEAST_ROWS = 32  # rows of each expert from which on host experts are copied to a GPU


def cells_of(settings: Settings) -> int:
    """KV cells of all sequences together, as the engine rounds them."""
    return -(-settings.cells // PAD_CELLS) * PAD_CELLS


def experts_travel(profile: Profile, settings: Settings, options: IkOptions) -> bool:
    """Whether a full micro-batch has experts of host memory copied to the GPU instead of computed on the host."""
    mixture = profile.experts or Experts(1, 1)
    return not options.rtr and settings.ubatch * mixture.used >= LEAST_ROWS * mixture.count


def draw(
    profile: Profile,
    settings: Settings,
    layers: Sequence[int],
    *,
    head: bool,
    first: bool,
    staged: Collection[int] = (),
    options: IkOptions,
) -> GraphBuilder:
    """The steps of one GPU; experts of `staged` layers live in host memory, the `first` GPU gets the embeddings."""
    sketch = _paper(settings)
    away: ExpertsAre = "copied" if experts_travel(profile, settings, options) else "on_host"
    hidden = sketch.add("hidden", profile.embedding_length or 0)
    positions = sketch.add("positions", 1)
    whole, half = _mask_bytes(settings, options)
    # the others get what the first one converted
    mask = sketch.block("mask", whole if first or not settings.flash_attention else half)
    attention = Attention(
        sketch,
        options,
        cells_of(settings),
        settings.cache_type_k,
        settings.flash_attention,
        True,
        positions,
        mask,
        half,
        first and half < whole,
        profile.heads or 1,
    )
    _body(profile, attention, hidden, ((layer, away if layer in staged else "here") for layer in layers), head=head)
    return sketch


def draw_processors(profile: Profile, settings: Settings, options: IkOptions) -> GraphBuilder:
    """The steps of a model without any GPU."""
    sketch = _paper(settings)
    hidden = _looked_up(sketch, profile, settings, options)
    whole, half = _mask_bytes(settings, options)
    inputs = sketch.inputs
    attention = Attention(
        sketch,
        options,
        cells_of(settings),
        settings.cache_type_k,
        settings.flash_attention,
        False,
        inputs["positions"],
        inputs["mask"],
        half,
        half < whole,
        profile.heads or 1,
    )
    _body(profile, attention, hidden, ((layer, "here") for layer in range(profile.layers)), head=True)
    return sketch


def draw_host(profile: Profile, settings: Settings, *, hosted: bool, options: IkOptions) -> GraphBuilder:
    """The steps that stay on the host of GPUs: embeddings, inputs, and experts where `hosted` and too few to travel."""
    sketch = _paper(settings)
    embed = profile.embedding_length or 0
    mixture = profile.experts
    sketch.store(sketch.view(_looked_up(sketch, profile, settings, options)))
    sketch.store(sketch.inputs["positions"], sketch.inputs["mask"])
    stacks = [tensors["ffn_down_exps"] for tensors in by_layer(profile).values() if "ffn_down_exps" in tensors]
    if hosted and mixture and stacks and not experts_travel(profile, settings, options):
        for _ in range(2):  # the second shows what the first leaves behind
            normed = sketch.add("normed", embed)
            chosen = sketch.add("chosen", mixture.used)
            joined = sketch.add("joined", stacks[0].shape[0] * mixture.used, normed, chosen)
            sketch.store(sketch.add("down", embed * mixture.used, joined, chosen))
    sketch.store(sketch.inputs["outputs"])
    return sketch


def _paper(settings: Settings) -> GraphBuilder:
    tokens = min(settings.ubatch, settings.cells)
    return GraphBuilder(MicroBatch(tokens, cells_of(settings)), tokens)


def _mask_bytes(settings: Settings, options: IkOptions) -> tuple[int, int]:
    """The mask as it is made, and as flash attention wants it."""
    rows = -(-min(settings.ubatch, settings.cells) // PAD_MASK_ROWS) * PAD_MASK_ROWS
    whole = cells_of(settings) * rows * F32
    half = cells_of(settings) * rows * F16
    if not settings.flash_attention:
        return whole, whole
    return (half if options.half_mask else whole), half


def _looked_up(sketch: GraphBuilder, profile: Profile, settings: Settings, options: IkOptions) -> int:
    """Inputs, and the embeddings of the tokens."""
    tokens = sketch.input("tokens", sketch.tokens * I32)
    sketch.input("positions", sketch.tokens * I32)
    sketch.input("mask", _mask_bytes(settings, options)[0])
    sketch.input("outputs", sketch.tokens * I32)
    return sketch.add("embd", profile.embedding_length or 0, tokens)


def _body(
    profile: Profile, attention: Attention, hidden: int, layers: Iterable[tuple[int, ExpertsAre]], *, head: bool
) -> None:
    """Layers and, at their end, logits of every token: the engine reserves for the worst case."""
    sketch = attention.sketch
    table = by_layer(profile)
    embed = profile.embedding_length or 0
    for index, are in layers:
        hidden = _layer(profile, attention, index, table.get(index, {}), hidden, are)
    if head:
        sketch.add("logits", profile.vocabulary or 0, sketch.add("normed", embed, hidden), keep=True)


def _layer(
    profile: Profile, attention: Attention, index: int, tensors: dict[str, Tensor], hidden: int, are: ExpertsAre
) -> int:
    sketch = attention.sketch
    embed = profile.embedding_length or 0
    out = sketch.add("attn_out", embed, _attended(profile, attention, index, tensors, hidden))
    if index == profile.layers - 1:
        wanted = sketch.inputs["outputs"] if "outputs" in sketch.inputs else sketch.add("outputs", 1)
        out = sketch.add("attn_out", embed, out, wanted)
        hidden = sketch.add("residual", embed, hidden, wanted)
    added = sketch.add("ffn_inp", embed, out, hidden, in_place=True)
    normed = sketch.add("normed", embed, added)
    if profile.experts and "ffn_down_exps" in tensors:
        result = experts(sketch, profile.experts, tensors, normed, are, attention.options)
    else:
        result = dense(sketch, tensors, normed)
    return sketch.add("l_out", embed, result, added, in_place=True)


def _attended(profile: Profile, attention: Attention, index: int, tensors: dict[str, Tensor], hidden: int) -> int:
    embed = profile.embedding_length or 0
    normed = attention.sketch.add("normed", embed, hidden)
    latent = latent_of(profile, tensors, index)
    if latent is not None and attention.options.mla > 0:
        rank = tensors["attn_q_a"].shape[1] if "attn_q_a" in tensors else 0
        return attention.latent(latent, rank, normed)
    width = tensors["attn_output"].shape[0] if "attn_output" in tensors else embed
    return attention.ordinary(profile.cache[index], width, normed)
