"""Bytes per tier and item of a placement: at the load peak, after loading, and with a full context.

Weights are sums over the tensor table; the other items come from `costs`. `runtime` is the estimated memory of driver
contexts and the process (`EngineTraits`); `reserve` is memory kept free.
"""

from tokenmill.hardware.machine import Machine
from tokenmill.model.profile import TensorClass
from tokenmill.planner.goal import Goal
from tokenmill.planner.memory.costs import MemoryCosts
from tokenmill.planner.memory.drafting import draft_bytes, drafter, loads_prediction
from tokenmill.planner.memory.weights import WHEEL_ISA, is_repacked
from tokenmill.planner.placement import host_tier, os_reserve
from tokenmill.planner.plan import Item, Ledger, LedgerRow, Placement
from tokenmill.units import MIB

FIRST_PROMPT_TOKENS = 8192  # `after_load` includes a first request, after which users compare it with nvidia-smi
UPLOAD_BYTES = 4 * 64 * MIB  # pinned buffers for uploading unmapped weights to a GPU
LedgerRows = list[tuple[str, Item, int]]


def ledger(machine: Machine, costs: MemoryCosts, placement: Placement, goal: Goal) -> Ledger:
    """Count the bytes of one placement."""
    host = host_tier(machine)
    rows = _weights(costs, placement)
    growth: LedgerRows = []
    away = _staged(costs, placement)
    for gpu in placement.gpus:
        rows += _card(costs, placement, gpu, goal, away, machine.capability(gpu))
        layers = _layers_on(placement, gpu)
        rows.append((gpu, "compute", costs.growth(layers, FIRST_PROMPT_TOKENS)))
        growth.append((gpu, "compute", costs.growth(layers) - costs.growth(layers, FIRST_PROMPT_TOKENS)))
    rows.append((drafter(placement, host), "draft", draft_bytes(costs.profile, costs.settings, goal.speculation)))
    repack = _repacked(machine, costs, placement, host)
    rows += _host(costs, placement, host, os_reserve(machine) + goal.reserve_ram_bytes, repack)
    loaded = _joined(rows)
    # the mapped pages of repacked weights are not needed again before the next start
    dropped = [LedgerRow(host, "weights", repack)] if repack and costs.settings.mmap else []
    peak = _load_peak(costs, placement, host, loaded, repack)
    return Ledger(peak, loaded, _joined([*rows, *growth]), tuple(dropped))


def _weights(costs: MemoryCosts, placement: Placement) -> LedgerRows:
    rows: LedgerRows = []
    for tensor, home in zip(costs.profile.tensors, placement.homes, strict=True):
        if tensor.cls is not TensorClass.MTP or loads_prediction(costs.settings):
            rows.append((home, "weights", tensor.bytes))
    if costs.profile.tied_output and placement.head.startswith("gpu"):
        table = sum(t.bytes for t in costs.profile.of(TensorClass.EMBEDDING))
        rows.append((placement.head, "weights", table))  # copy of the tied embedding
    return rows


def _layers_on(placement: Placement, gpu: str) -> list[int]:
    return [index for index, tier in enumerate(placement.layers) if tier == gpu]


def _host_layers(placement: Placement) -> list[int]:
    return [index for index, tier in enumerate(placement.layers) if not tier.startswith("gpu")]


def _card(
    costs: MemoryCosts, placement: Placement, gpu: str, goal: Goal, away: frozenset[int], capability: str | None
) -> LedgerRows:
    layers = _layers_on(placement, gpu)
    head = placement.head == gpu
    lent = _host_layers(placement) if costs.lends_host_layers and gpu == placement.gpus[0] else []
    computed = sorted([*layers, *lent])
    staged = [layer for layer in computed if layer in away or layer in lent]
    return [
        (gpu, "weights", sum(costs.derived(layer) for layer in layers)),
        (gpu, "kv", sum(costs.kv[layer] for layer in layers)),
        (gpu, "compute", costs.compute(computed, head=head)),
        (gpu, "staging", costs.staging(computed, head=head, staged=staged) + costs.lent(lent)),
        (gpu, "staging", costs.expert_cache(len(layers))),
        (gpu, "runtime", costs.runtime(len(placement.gpus), capability)),
        (gpu, "reserve", goal.gpu_margin_bytes),
    ]


def _staged(costs: MemoryCosts, placement: Placement) -> frozenset[int]:
    """Layers whose experts live on another device than the one that computes the layer."""
    return frozenset(
        tensor.layer
        for tensor, home in zip(costs.profile.tensors, placement.homes, strict=True)
        if tensor.cls is TensorClass.ROUTED_EXPERTS and tensor.layer is not None and home != placement.device_of(tensor)
    )


def _host(costs: MemoryCosts, placement: Placement, host: str, reserve: int, repack: int) -> LedgerRows:
    layers = _host_layers(placement)
    settings = costs.settings
    elsewhere = bool(placement.gpus) and costs.lends_host_layers
    computed = [] if elsewhere else layers
    return [
        (host, "kv", sum(costs.kv[layer] for layer in layers)),
        (host, "compute", costs.host_compute(computed, head=not placement.head.startswith("gpu"))),
        # with mmap the file's pages stay in memory in addition to the repacked copy; without, each tensor is freed
        (host, "repack", repack if settings.mmap else 0),
        (host, "prompt_cache", settings.cache_ram_bytes),
        (host, "runtime", costs.process),
        (host, "reserve", reserve),
    ]


def _repacked(machine: Machine, costs: MemoryCosts, placement: Placement, host: str) -> int:
    """Bytes of host weights that are repacked."""
    settings = costs.settings
    if not (settings.repack and costs.traits.repacks):
        return 0
    isa = machine.cpu.isa or tuple(WHEEL_ISA)
    return sum(
        tensor.bytes
        for tensor, home in zip(costs.profile.tensors, placement.homes, strict=True)
        # experts of a GPU's layer that an override keeps on the host are not repacked
        if home == host and placement.device_of(tensor) == host and is_repacked(tensor, isa, mtp=settings.mtp)
    )


def _load_peak(
    costs: MemoryCosts, placement: Placement, host: str, loaded: tuple[LedgerRow, ...], repack: int
) -> tuple[LedgerRow, ...]:
    """Rows at the load peak: those after loading, plus weights that wait in host memory to be copied."""
    settings = costs.settings
    waiting = costs.load_extra
    if not settings.mmap:
        on_host = placement.on(host, costs.profile)
        largest = max((tensor.bytes for tensor in on_host), default=0)
        waiting += (largest if repack else 0) + (UPLOAD_BYTES if placement.gpus else 0)
    return _joined([*((row.tier, row.item, row.bytes) for row in loaded), (host, "staging", waiting)])


def _joined(rows: LedgerRows) -> tuple[LedgerRow, ...]:
    """One row per tier and item, in order of first appearance, without empty rows."""
    sums: dict[tuple[str, Item], int] = {}
    for tier, item, size in rows:
        sums[tier, item] = sums.get((tier, item), 0) + size
    return tuple(LedgerRow(tier, item, size) for (tier, item), size in sums.items() if size)
