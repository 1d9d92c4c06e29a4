"""Graphs of ik_llama.cpp for one micro-batch on one device, detailed enough to size its buffers.

A GPU receives its inputs (hidden state, positions, mask) at the start of its part of the graph. Replayed by
`allocator`, these graphs reproduce the published buffers of Kimi-K2, DeepSeek-R1, Qwen3-235B and MiniMax-M2.5 to the
page. Not modelled: `-sm graph`, sliding windows (ik keeps the full context), recurrent and prediction layers.
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
"""Location of a layer's experts, as seen from its device: on the device, copied to it from host memory at every use,
or computed by the host, which sends back the results.
"""


def dense(graph: GraphBuilder, tensors: Mapping[str, Tensor], normed: int, suffix: str = "") -> int:
    """Dense feed-forward: gate and up in one operation, then down."""
    inner, embed = tensors[f"ffn_down{suffix}"].shape
    return graph.add("down", embed, graph.add("joined", inner, normed))


def experts(
    graph: GraphBuilder,
    mixture: Experts,
    tensors: Mapping[str, Tensor],
    normed: int,
    are: ExpertsAre,
    options: IkOptions,
) -> int:
    """Routed experts, weighted and summed, plus the shared expert."""
    embed = tensors["ffn_down_exps"].shape[1]
    used = mixture.used
    biased = any(name.startswith("exp_probs_b") for name in tensors)
    chosen, weights = _routed(graph, mixture, normed, biased=biased)
    read = graph.view(normed)
    if are == "on_host":
        graph.store(graph.view(read), chosen)
        result = graph.add("moe_down", embed * used)
    else:
        result = _computed(graph, tensors, used, read, chosen, options, copied=are == "copied")
    if options.fused_sum:
        total = graph.add("moe_out", embed, result, weights)
    else:
        weighed = graph.add("moe_weighed", embed * used, result, weights, in_place=True)
        total = graph.add("moe_out", embed, graph.view(weighed))
    if "ffn_down_shexp" in tensors:
        shared = dense(graph, tensors, normed, "_shexp")
        total = graph.add("moe_merged", embed, total, shared, in_place=True)
    return total


def _routed(graph: GraphBuilder, mixture: Experts, normed: int, *, biased: bool) -> tuple[int, int]:
    """Chosen experts of each token, and their weights."""
    count = mixture.count
    used = mixture.used
    chances = graph.add("probs", count, graph.add("logits", count, normed), in_place=True)
    ranked = graph.add("biased", count, chances) if biased else chances
    chosen = graph.view(graph.add("argsort", count, ranked))
    weights = graph.view(graph.add("weights", used, graph.view(chances), chosen))
    shares = graph.add("weights", used, weights, graph.add("sum", 1, weights))
    return chosen, graph.add("weights", used, graph.view(shares))


def _computed(
    graph: GraphBuilder,
    tensors: Mapping[str, Tensor],
    used: int,
    read: int,
    chosen: int,
    options: IkOptions,
    *,
    copied: bool,
) -> int:
    """Products on this device; `copied` experts are copied right before use, up and gate together if they are fused."""
    inner, embed, _ = tensors["ffn_down_exps"].shape
    names = [name for name in ("ffn_up_exps", "ffn_gate_exps", "ffn_gate_up_exps") if name in tensors]
    rounds = [names] if options.fmoe or options.muge else [[name] for name in names]
    made = []
    for group in rounds:
        copies = [graph.block("copied", tensors[name].bytes) for name in group if copied]
        made.append(graph.add("joined", inner * used, *copies, read, chosen))
    joined = made[0] if len(made) == 1 else graph.add("joined", inner * used, *made)
    copies = [graph.block("copied", tensors["ffn_down_exps"].bytes)] if copied else []
    return graph.add("moe_down", embed * used, *copies, joined, chosen)


PAD_CELLS = 256  # the cache size is a multiple of this
PAD_MASK_ROWS = 64
MIN_OFFLOAD_ROWS = 32  # rows per expert from which host experts are copied to a GPU


def cells_of(settings: Settings) -> int:
    """KV cells of all sequences together, rounded as the engine does."""
    return -(-settings.cells // PAD_CELLS) * PAD_CELLS


def copies_experts(profile: Profile, settings: Settings, options: IkOptions) -> bool:
    """Whether host experts are copied to the GPU for a full micro-batch instead of computed on the host."""
    mixture = profile.experts or Experts(1, 1)
    return not options.rtr and settings.ubatch * mixture.used >= MIN_OFFLOAD_ROWS * mixture.count


def build_gpu_graph(
    profile: Profile,
    settings: Settings,
    layers: Sequence[int],
    *,
    head: bool,
    first: bool,
    staged: Collection[int] = (),
    options: IkOptions,
) -> GraphBuilder:
    """Build the graph of one GPU; experts of `staged` layers live on the host, the `first` GPU gets the embeddings."""
    graph = _builder(settings)
    away: ExpertsAre = "copied" if copies_experts(profile, settings, options) else "on_host"
    hidden = graph.add("hidden", profile.embedding_length or 0)
    positions = graph.add("positions", 1)
    whole, half = _mask_bytes(settings, options)
    # the other GPUs receive the mask converted by the first
    mask = graph.block("mask", whole if first or not settings.flash_attention else half)
    attention = Attention(
        graph,
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
    return graph


def build_cpu_graph(profile: Profile, settings: Settings, options: IkOptions) -> GraphBuilder:
    """Build the graph of a machine without GPUs."""
    graph = _builder(settings)
    hidden = _looked_up(graph, profile, settings, options)
    whole, half = _mask_bytes(settings, options)
    inputs = graph.inputs
    attention = Attention(
        graph,
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
    return graph


def build_host_graph(profile: Profile, settings: Settings, *, hosted: bool, options: IkOptions) -> GraphBuilder:
    """Build the host's graph next to GPUs: embeddings, inputs and, if `hosted`, experts not copied to a GPU."""
    graph = _builder(settings)
    embed = profile.embedding_length or 0
    mixture = profile.experts
    graph.store(graph.view(_looked_up(graph, profile, settings, options)))
    graph.store(graph.inputs["positions"], graph.inputs["mask"])
    stacks = [tensors["ffn_down_exps"] for tensors in by_layer(profile).values() if "ffn_down_exps" in tensors]
    if hosted and mixture and stacks and not copies_experts(profile, settings, options):
        for _ in range(2):  # the second layer includes memory that the first one leaves allocated
            normed = graph.add("normed", embed)
            chosen = graph.add("chosen", mixture.used)
            joined = graph.add("joined", stacks[0].shape[0] * mixture.used, normed, chosen)
            graph.store(graph.add("down", embed * mixture.used, joined, chosen))
    graph.store(graph.inputs["outputs"])
    return graph


def _builder(settings: Settings) -> GraphBuilder:
    tokens = min(settings.ubatch, settings.cells)
    return GraphBuilder(MicroBatch(tokens, cells_of(settings)), tokens)


def _mask_bytes(settings: Settings, options: IkOptions) -> tuple[int, int]:
    """Bytes of the mask as created, and as flash attention reads it."""
    rows = -(-min(settings.ubatch, settings.cells) // PAD_MASK_ROWS) * PAD_MASK_ROWS
    whole = cells_of(settings) * rows * F32
    half = cells_of(settings) * rows * F16
    if not settings.flash_attention:
        return whole, whole
    return (half if options.half_mask else whole), half


def _looked_up(graph: GraphBuilder, profile: Profile, settings: Settings, options: IkOptions) -> int:
    """Inputs and the embeddings of the tokens."""
    tokens = graph.input("tokens", graph.tokens * I32)
    graph.input("positions", graph.tokens * I32)
    graph.input("mask", _mask_bytes(settings, options)[0])
    graph.input("outputs", graph.tokens * I32)
    return graph.add("embd", profile.embedding_length or 0, tokens)


def _body(
    profile: Profile, attention: Attention, hidden: int, layers: Iterable[tuple[int, ExpertsAre]], *, head: bool
) -> None:
    """Add the layers and, with `head`, the logits of every token, for which the engine always reserves memory."""
    graph = attention.graph
    table = by_layer(profile)
    embed = profile.embedding_length or 0
    for index, are in layers:
        hidden = _layer(profile, attention, index, table.get(index, {}), hidden, are)
    if head:
        graph.add("logits", profile.vocabulary or 0, graph.add("normed", embed, hidden), keep=True)


def _layer(
    profile: Profile, attention: Attention, index: int, tensors: dict[str, Tensor], hidden: int, are: ExpertsAre
) -> int:
    graph = attention.graph
    embed = profile.embedding_length or 0
    out = graph.add("attn_out", embed, _attended(profile, attention, index, tensors, hidden))
    if index == profile.layers - 1:
        wanted = graph.inputs["outputs"] if "outputs" in graph.inputs else graph.add("outputs", 1)
        out = graph.add("attn_out", embed, out, wanted)
        hidden = graph.add("residual", embed, hidden, wanted)
    added = graph.add("ffn_inp", embed, out, hidden, in_place=True)
    normed = graph.add("normed", embed, added)
    if profile.experts and "ffn_down_exps" in tensors:
        result = experts(graph, profile.experts, tensors, normed, are, attention.options)
    else:
        result = dense(graph, tensors, normed)
    return graph.add("l_out", embed, result, added, in_place=True)


def _attended(profile: Profile, attention: Attention, index: int, tensors: dict[str, Tensor], hidden: int) -> int:
    embed = profile.embedding_length or 0
    normed = attention.graph.add("normed", embed, hidden)
    latent = latent_of(profile, tensors, index)
    if latent is not None and attention.options.mla > 0:
        rank = tensors["attn_q_a"].shape[1] if "attn_q_a" in tensors else 0
        return attention.latent(latent, rank, normed)
    width = tensors["attn_output"].shape[0] if "attn_output" in tensors else embed
    return attention.ordinary(profile.cache[index], width, normed)
