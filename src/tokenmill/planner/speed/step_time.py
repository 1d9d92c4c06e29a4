"""Predicts the duration of one step, a pass of some tokens through all layers, as a sum of named terms.

A decode step is one token of each sequence, a prefill step one micro-batch. The time to read a memory and the time that
arithmetic adds to it are separate terms, so that the largest term shows which upgrade helps.
"""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, replace

from tokenmill.planner.compute_graph.engines import TRAITS
from tokenmill.planner.memory.kv_cells import PAD
from tokenmill.planner.plan import Settings, Term
from tokenmill.planner.speed.devices import CPU, CardRates, Devices, Processors
from tokenmill.planner.speed.rates import RateConstants
from tokenmill.planner.speed.work import PROCESSORS, CacheGroup, StepWork, WeightGroup

ACTIVATION_BYTES = 4
QUANTIZED_CACHE_OPS = 3  # extra operations per layer with a quantized cache: rotate, quantize K and V
GIGA = 1e9


@dataclass(frozen=True, slots=True)
class ForecastStep:
    """The batch of one step."""

    tokens: int  # tokens in the step
    attended: float  # cells that each token attends to
    caches: int  # number of distinct sequences
    streams: bool  # host weights are copied to the GPUs and computed there
    prefill: bool = False
    shares_reads: bool = False  # all tokens attend to the same cells, which are read once


class Missing(Exception):
    """A required fact is unknown; the message is its name. Always caught within this package."""


def offload_threshold(work: StepWork, settings: Settings, min_batch: int | None = None) -> int | None:
    """Batch size from which a step copies host weights to the GPUs; None: never.

    llama.cpp compares the batch size with GGML_OP_OFFLOAD_MIN_BATCH (`min_batch`, else the settings' value, else 32),
    ik_llama.cpp the rows per expert with 32.
    """
    traits = TRAITS[settings.engine]
    if not work.streams_to or traits.offload_rows is None:
        return None
    configured = settings.offload_min_batch if min_batch is None else min_batch
    rows = traits.offload_rows if configured is None else configured
    if traits.ik is None:
        return rows
    # only the CPU can use weights that were repacked while loading
    return None if settings.repack else round(rows / work.routed_share())


def step_terms(
    step: ForecastStep,
    work: StepWork,
    devices: Devices,
    processors: Processors,
    settings: Settings,
    rates: RateConstants,
) -> list[Term]:
    """The terms of one step; raises `Missing` if a fact is unknown."""
    terms: defaultdict[str, float] = defaultdict(float)
    moved: defaultdict[str, float] = defaultdict(float)

    def add(name: str, seconds: float, count: float = 0.0) -> None:
        terms[name] += seconds
        moved[name] += count

    share = 1 / max(1, settings.tensor_parallel) if settings.engine == "vllm" else 1.0
    for group in work.weights:
        kind = "experts" if group.routed else "weights"
        count = group.bytes * (work.touched_share(step.tokens) if group.routed else 1.0)
        if group.tier.startswith("gpu"):
            seconds = _card_seconds(group, step, work, _card(devices, group.tier), group.tier, rates)
            add(f"{group.tier} {kind}", seconds * share, count)
        elif step.streams and not group.cpu_only:
            for name, part in work.streams_to.items():
                split = part / sum(work.streams_to.values())
                card = _card(devices, name)
                if card.link_gb_s is None:
                    raise Missing(f"the PCIe link of {name}")
                link = min(card.link_gb_s, processors.tier_gb_s.get(group.tier, card.link_gb_s))
                add(f"pcie {name} {kind}", split * count / link / GIGA, split * count)
                add(f"{name} {kind}", split * _card_seconds(group, step, work, card, name, rates))
        else:
            memory, whole = _host_seconds(group, step, work, processors, devices, rates)
            add(f"{group.tier} {kind}", memory, count)
            add("processors unpacking" if step.tokens == 1 else "processors arithmetic", whole - memory)
    for cache_group in work.caches:
        add(*_attention(cache_group, step, devices, processors, settings, rates))
    for device, count in _operations(work, step, settings).items():
        if device == PROCESSORS:
            add("processors operations", count * processors.op_s)
        else:
            card = _card(devices, device)
            add(f"{device} launches", count * (card.graph_op_s if _uses_cuda_graph(work, settings) else card.op_s))
    for name, seconds in _hops(work, step, devices).items():
        add(name, seconds)
    add("engine", devices.step_s)
    if not step.prefill:
        # sampling for the first sequence is part of the engine's step
        add("drawing tokens", (step.caches - 1) * work.vocabulary * devices.draw_s)
    return [
        Term(name, seconds, moved[name] or None, moved[name] / seconds / GIGA if moved[name] and seconds else None)
        for name, seconds in terms.items()
        if seconds > 0
    ]


def _host_seconds(
    group: WeightGroup,
    step: ForecastStep,
    work: StepWork,
    processors: Processors,
    devices: Devices,
    rates: RateConstants,
) -> tuple[float, float]:
    """Seconds of reading alone, and of reading and computing together, which partly overlap."""
    if CPU in devices.missing:
        raise Missing(devices.missing[CPU])
    rate = processors.tier_gb_s.get(group.tier)
    if rate is None:
        raise Missing(devices.missing.get(group.tier, f"the bandwidth of {group.tier}"))
    touched = group.elements * (work.touched_share(step.tokens) if group.routed else 1.0)
    rows = group.elements * (work.used_share() if group.routed else 1.0) * step.tokens
    memory = group.bytes * touched / group.elements / rate / GIGA
    unpack = rates.unpack_cost(group.family) / processors.gweights_s / GIGA
    # a product by rows unpacks the weights for every row; a blocked one unpacks once but is inefficient for few rows
    blocked = touched * unpack + 2 * (rows + rates.cpu_matmul_rows * touched) / processors.matmul_gflops / GIGA
    arithmetic = min(rows * unpack, blocked)
    whole = (memory**rates.overlap + arithmetic**rates.overlap) ** (1 / rates.overlap)
    return memory, whole


def _card_seconds(
    group: WeightGroup, step: ForecastStep, work: StepWork, card: CardRates, name: str, rates: RateConstants
) -> float:
    """Seconds of products with weights on a GPU, or copied there."""
    gb_s = card.gb_s / (rates.gpu_unpack_grid if group.family in ("grid", "trellis") else 1.0)
    if group.routed:
        touched = work.touched_share(step.tokens)
        used = work.used_share() * step.tokens
        # with few tokens, each reads its own experts, in pieces too small for the full rate
        singly = group.bytes * used * (1 / gb_s + 1 / rates.gpu_expert_gb_s) / GIGA
        if card.expert_tflops is None:
            if step.tokens > BANDWIDTH_BOUND_TOKENS:
                raise Missing(f"the compute rate of {name}")
            return singly
        tiles = rates.gpu_matmul_rows
        if card.tiled:  # llama.cpp uses smaller tiles for batches with fewer rows
            tiles *= step.tokens / (step.tokens + rates.gpu_matmul_half)
        padded = group.elements * (used + tiles * touched)
        grouped = max(group.bytes * touched / gb_s / GIGA, 2 * padded / card.expert_tflops / GIGA / 1000)
        if card.tiled:
            return singly if step.tokens <= BANDWIDTH_BOUND_TOKENS else grouped
        return min(singly, grouped)
    reading = group.bytes / gb_s / GIGA
    if step.tokens <= BANDWIDTH_BOUND_TOKENS:
        return reading
    if card.dense_tflops is None:
        raise Missing(f"the compute rate of {name}")
    return max(reading, 2 * group.elements * step.tokens / card.dense_tflops / GIGA / 1000)


BANDWIDTH_BOUND_TOKENS = 8
"""Batch size up to which a GPU's products are limited by reading the weights, whatever its compute rate."""


def _attention(
    group: CacheGroup,
    step: ForecastStep,
    devices: Devices,
    processors: Processors,
    settings: Settings,
    rates: RateConstants,
) -> tuple[str, float, float]:
    cache = group.cache
    cells = cache.tokens_kept(step.attended)
    traits = TRAITS[settings.engine]
    each = cache.bytes_per_token(settings.cache_type_k, settings.cache_type_v, latent_v=traits.stores_latent_v)
    count = group.layers * (
        each * cells * (1 if step.shares_reads else step.caches) + 2 * cache.state_bytes * step.caches
    )
    expands = step.prefill and traits.ik is not None
    flops = group.layers * (group.flops_expanded if expands else group.flops) * cells * step.tokens
    if group.device == PROCESSORS:
        host = next((tier for tier in ("dram", "pmem") if tier in processors.tier_gb_s), None)
        if host is None:
            raise Missing(devices.missing.get("dram", "the bandwidth of dram"))
        reading = count / processors.tier_gb_s[host] / GIGA
        pairs = group.layers * group.pairs * cells * step.tokens
        batch = processors.attention_batch if step.prefill else 1.0
        return "processors attention", max(reading, pairs / processors.attention_pairs_s / batch), count
    card = _card(devices, group.device)
    share = rates.gpu_latent_fraction if cache.kind == "latent" else rates.gpu_cache_fraction
    reading = count / (card.gb_s * share) / GIGA
    if card.attention_tflops is None:
        return f"{group.device} attention", reading, count
    most = math.inf if step.prefill else rates.gpu_attention_row_tflops * step.tokens
    return f"{group.device} attention", max(reading, flops / min(card.attention_tflops, most) / GIGA / 1000), count


def _operations(work: StepWork, step: ForecastStep, settings: Settings) -> Counter[str]:
    counts = Counter(work.operations)
    if settings.cache_type_k not in ("f16", "bf16", "f32"):
        for group in work.caches:
            counts[group.device] += QUANTIZED_CACHE_OPS * group.layers
    if step.streams:
        counts[min(work.streams_to)] += counts.pop(PROCESSORS, 0)
    return counts


def _uses_cuda_graph(work: StepWork, settings: Settings) -> bool:
    """Whether a GPU's operations run as one CUDA graph, which ik_llama.cpp and partial CPU computation rule out."""
    return TRAITS[settings.engine].ik is None and PROCESSORS not in work.operations


def _hops(work: StepWork, step: ForecastStep, devices: Devices) -> dict[str, float]:
    links = [card.link_gb_s for card in devices.cards.values() if card.link_gb_s is not None]
    carried = step.tokens * work.embedding * ACTIVATION_BYTES / min(links) / GIGA if links else 0.0
    host = 2 if step.streams else work.host_hops
    return {
        "hops to processors": host * (devices.host_hop_s + carried),
        "hops between cards": work.card_hops * (devices.card_hop_s + carried),
    }


def _card(devices: Devices, name: str) -> CardRates:
    if name not in devices.cards:
        raise Missing(devices.missing.get(name, f"the GPU model of {name}"))
    return devices.cards[name]


def decode_terms(
    work: StepWork,
    devices: Devices,
    settings: Settings,
    rates: RateConstants,
    *,
    depth: int,
    sequences: int,
    min_batch: int | None = None,
) -> list[Term]:
    """Terms of one decode step in which every sequence has `depth` tokens."""
    threshold = offload_threshold(work, settings, min_batch)
    streams = threshold is not None and sequences >= threshold
    step = ForecastStep(tokens=sequences, attended=depth, caches=sequences, streams=streams)
    if settings.total_cells is not None:
        step = replace(step, attended=scanned_cells(settings, depth), shares_reads=not settings.per_slot)
    return step_terms(step, work, devices, devices.decode, settings, rates)


def scanned_cells(settings: Settings, depth: int) -> int:
    """KV cells that the attention of one token scans in a wide batch, when every sequence has `depth` tokens.

    In a unified cache these are the cells of all sequences, with the shared beginning once.
    """
    if settings.per_slot:
        return -(-depth // PAD) * PAD
    return settings.shared_tokens + settings.sequences * max(0, depth - settings.shared_tokens)


def prefill_terms(
    work: StepWork,
    devices: Devices,
    settings: Settings,
    rates: RateConstants,
    *,
    depth: int,
    prompt: int,
    ubatch: int,
    min_batch: int | None = None,
) -> list[Term]:
    """Terms of the prefill of `prompt` tokens after `depth` existing ones."""
    whole, rest = divmod(prompt, ubatch)
    # the cost of attention grows linearly with depth, so the middle micro-batch is the average of all whole ones
    parts = [(whole, ubatch, depth + whole * ubatch / 2), (1, rest, depth + whole * ubatch + rest / 2)]
    seconds: defaultdict[str, float] = defaultdict(float)
    moved: defaultdict[str, float] = defaultdict(float)
    for count, tokens, attended in parts:
        if count == 0 or tokens == 0:
            continue
        threshold = offload_threshold(work, settings, min_batch)
        streams = threshold is not None and tokens >= threshold
        step = ForecastStep(tokens=tokens, attended=attended, caches=1, streams=streams, prefill=True)
        for term in step_terms(step, work, devices, devices.prefill, settings, rates):
            seconds[term.name] += count * term.seconds
            moved[term.name] += count * (term.bytes or 0.0)
    return [
        Term(name, value, moved[name] or None, moved[name] / value / 1e9 if moved[name] else None)
        for name, value in seconds.items()
    ]
