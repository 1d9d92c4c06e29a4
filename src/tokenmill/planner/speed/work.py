"""Sums up the work of one step: weights by memory and type, operations and transfers, caches by device.

The sums of routed experts cover all experts; `StepWork.touched_share` is the share that a step uses. `step_time`
divides the work by the devices' rates.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise

from tokenmill.model.profile import TOKEN_EMBEDDINGS, Experts, LayerCache, Profile, Tensor, TensorClass
from tokenmill.planner.plan import Placement, Settings
from tokenmill.planner.speed.rates import QuantFamily, family, is_cpu_only

PROCESSORS = "dram"
"""The device that computes with weights in host memory, as `Placement.layers` names it."""

# Operations that llama.cpp's graph launches for one layer of each kind, without views: counted in its graphs.
_ATTENTION_OPS = {
    "full": 14,
    "window": 14,
    "chunked": 14,
    "latent": 24,
    "compressed": 24,  # not counted: at least that of latent attention
    "recurrent": 36,
    "none": 4,
}
_DENSE_OPS = 6
_ROUTER_OPS = 8
_EXPERT_OPS = 8
_SHARED_OPS = 5
_HEAD_OPS = 4


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Weights of one kind in one memory, summed over all layers."""

    tier: str
    routed: bool
    family: QuantFamily
    bytes: float
    elements: float
    cpu_only: bool = False  # in a layout that no GPU kernel reads, so it is never copied to one


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Equal caches of several layers on one device."""

    device: str
    cache: LayerCache
    layers: int
    pairs: int  # query-key products per token, cell and layer: one for each attention head
    flops: float  # per token, cell and layer
    flops_expanded: float  # the same for engines that first expand a latent cache into attention heads, in prefill


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one step under one placement."""

    weights: tuple[WeightGroup, ...]
    caches: tuple[CacheGroup, ...]
    operations: dict[str, int]  # per step, by device
    host_hops: int  # transfers between CPU and GPU per step
    card_hops: int  # transfers between two GPUs per step
    experts: Experts | None
    embedding: int
    streams_to: dict[str, float]  # bytes of host weights by the GPU that would compute them in large batches
    vocabulary: int = 0  # size of the vocabulary
    experts_used: int | None = None  # fewer experts per token than the model's (-ser); None: the model's number

    def resident_bytes(self) -> dict[str, float]:
        """Bytes of weights in each tier."""
        totals: defaultdict[str, float] = defaultdict(float)
        for group in self.weights:
            totals[group.tier] += group.bytes
        return dict(totals)

    def touched_share(self, tokens: int) -> float:
        """Share of the routed experts that `tokens` tokens touch."""
        return 1.0 - (1.0 - self.used_share()) ** tokens if self.experts else 1.0

    def used_share(self) -> float:
        """Share of the routed experts that one token uses."""
        return (self.experts_used or self.experts.used) / self.experts.count if self.experts else 1.0

    def routed_share(self) -> float:
        """The same by the model's own number, which the engines' thresholds use."""
        return self.experts.used / self.experts.count if self.experts else 1.0


def device_of(tier: str) -> str:
    """The device that computes with weights in a tier."""
    return tier if tier.startswith("gpu") else PROCESSORS


def work(profile: Profile, placement: Placement, settings: Settings | None = None) -> StepWork:
    """Sum up the work of one step; of `settings`, only the number of experts per token counts."""
    # The CPU computes from any host memory: pmem, if DRAM is only its cache.
    devices = tuple(device_of(tier) for tier in placement.layers)
    placement = replace(placement, layers=devices, head=device_of(placement.head))
    sums: dict[tuple[str, bool, QuantFamily, bool], list[float]] = {}
    streams: Counter[str] = Counter()
    homes: list[dict[TensorClass, str]] = [{} for _ in placement.layers]
    cards = placement.gpus
    tied = profile.tied_output
    split_kv_b = any("attn_k_b" in tensor.name for tensor in profile.tensors)
    for tensor, home in zip(profile.tensors, placement.homes, strict=True):
        if tensor.layer is not None and tensor.layer < len(homes):
            homes[tensor.layer].setdefault(tensor.cls, home)
        if split_kv_b and "attn_kv_b" in tensor.name:
            continue  # a second copy, for engines without latent attention
        tier = _tier_read(tensor, home, placement.head if tied else None)
        if tier is None:
            continue
        routed = tensor.cls is TensorClass.ROUTED_EXPERTS
        cpu_only = is_cpu_only(tensor.type)
        total = sums.setdefault((tier, routed, family(tensor.type), cpu_only), [0.0, 0.0])
        total[0] += tensor.bytes
        total[1] += tensor.elements
        if device_of(tier) == PROCESSORS and cards and not cpu_only:
            card = placement.device_of(tensor)
            streams[card if card.startswith("gpu") else cards[0]] += tensor.bytes
    operations, host_hops, card_hops = _path(profile, placement, homes)
    caches = Counter(zip(placement.layers, profile.cache, strict=False))
    return StepWork(
        weights=tuple(
            WeightGroup(tier, routed, kind, total[0], total[1], cpu_only)
            for (tier, routed, kind, cpu_only), total in sums.items()
        ),
        caches=tuple(_caches(profile, device, cache, count) for (device, cache), count in caches.items()),
        operations=operations,
        host_hops=host_hops,
        card_hops=card_hops,
        experts=profile.experts,
        embedding=profile.embedding_length or 0,
        streams_to=dict(streams),
        vocabulary=profile.vocabulary or 0,
        experts_used=settings.ik.experts_used if settings is not None and settings.ik is not None else None,
    )


def _caches(profile: Profile, device: str, cache: LayerCache, layers: int) -> CacheGroup:
    """Equal caches of one device. Each attention head has a key and a value; in a latent cache all share one pair."""
    heads = profile.heads or 1
    width = cache.k_elements + cache.v_elements
    if cache.kind != "latent":
        flops = 2.0 * heads * width / (profile.kv_heads or 1)
        return CacheGroup(device, cache, layers, heads if width else 0, flops, flops)
    expanded = next(
        (_head_width(profile, tensor, cache) for tensor in profile.tensors if "attn_v_b" in tensor.name), width
    )
    return CacheGroup(device, cache, layers, heads, 2.0 * heads * width, 2.0 * heads * expanded)


def _head_width(profile: Profile, v_b: Tensor, cache: LayerCache) -> int:
    """Elements of one attention head's key and value, from the matrix that expands values."""
    value = v_b.elements // (v_b.shape[0] * (profile.heads or 1))
    return 2 * value + cache.k_elements - cache.v_elements  # keys are as wide as values plus the rotated elements


def _tier_read(tensor: Tensor, home: str, tied_head: str | None) -> str | None:
    """The tier from which every step reads a tensor; None if it reads nothing of it or only one row.

    Embeddings that double as the output matrix are read from `tied_head` if that is a GPU, which has its own copy.
    """
    if tensor.cls is TensorClass.MTP:
        return None
    if tensor.cls is not TensorClass.EMBEDDING:
        return home
    if tied_head is None or tensor.name not in TOKEN_EMBEDDINGS:
        return None
    return tied_head if tied_head.startswith("gpu") else home


def _path(
    profile: Profile, placement: Placement, homes: list[dict[TensorClass, str]]
) -> tuple[dict[str, int], int, int]:
    """Operations by device, and the number of transfers of a token's state between devices."""
    operations: Counter[str] = Counter()
    visited = [PROCESSORS]  # the CPU looks up the embedding
    for index, device in enumerate(placement.layers):
        kinds = homes[index]
        operations[device] += _ATTENTION_OPS[profile.cache[index].kind if index < len(profile.cache) else "none"]
        visited.append(device)
        if TensorClass.ROUTED_EXPERTS in kinds:
            at = device_of(kinds[TensorClass.ROUTED_EXPERTS])
            operations[device] += _ROUTER_OPS
            operations[at] += _EXPERT_OPS
            if TensorClass.SHARED_EXPERTS in kinds:
                operations[device] += _SHARED_OPS
            visited += [at, device]
        else:
            operations[device] += _DENSE_OPS
    operations[placement.head] += _HEAD_OPS
    visited += [placement.head, PROCESSORS]  # the CPU reads the logits
    crossings = [pair for pair in pairwise(visited) if pair[0] != pair[1]]
    host = sum(PROCESSORS in pair for pair in crossings)
    return dict(operations), host, len(crossings) - host
