"""Memory and placement of an RPC worker: a host that computes layers for the head host.

The head host treats every device of a worker, including its CPU, as a GPU that holds weights, cache and compute buffers
of its layers: nothing is mapped, repacked or copied for large batches. A worker with GPUs keeps the experts that do
not fit there in host memory; each such layer costs extra network round trips.
"""

from dataclasses import replace
from itertools import pairwise

from tokenmill.hardware.fleet import FleetHost
from tokenmill.model.profile import Profile, TensorClass
from tokenmill.planner.draft import capacity
from tokenmill.planner.goal import Goal
from tokenmill.planner.memory.costs import MemoryCosts, costs_of
from tokenmill.planner.memory.ledger import LedgerRows
from tokenmill.planner.multi_host.forecast import graph_tensors
from tokenmill.planner.multi_host.hosts import HostShare, part_of
from tokenmill.planner.placement import assemble, host_tier, os_reserve, usable_gpus
from tokenmill.planner.plan import Ledger, LedgerRow, Placement, Settings
from tokenmill.planner.settings import choose_settings
from tokenmill.planner.split import Layer, split
from tokenmill.units import MIB

PROCESS_BYTES = 16 * MIB  # ggml-rpc-server: 6 MiB measured, plus allocator overhead, see docs/hosts.md
GRAPHS_KEPT = 1024  # the server caches every graph it receives and clears the cache at this number
KEPT_BYTES = 663  # bytes per tensor of a cached graph: measured
DRIVER_BYTES = 256 * MIB  # host memory per GPU in use: estimated


def worker_share(host: FleetHost, profile: Profile, goal: Goal, first: int, count: int) -> HostShare:
    """The share of a worker with these layers; it may exceed the worker's memory, as its ledger then shows."""
    gpus = usable_gpus(host.machine, goal)
    settings = worker_settings(host, profile, goal)
    part = part_of(profile, first, count)
    costs = costs_of(part, settings)
    tier = host_tier(host.machine)
    layers = [tier] * count
    resident = frozenset[int]()
    if gpus and count:
        layers, resident = _on_gpus(host, costs, goal, gpus, tier)
    placement = assemble(part, tier, layers, layers[-1] if layers else tier, resident)
    return HostShare(
        host, first, count, part, settings, placement, _ledger(host, costs, placement, goal), _hops(part, placement)
    )


def worker_settings(host: FleetHost, profile: Profile, goal: Goal) -> Settings:
    """The engine settings of a worker: those of the goal, with this host's number of threads."""
    own = replace(goal, mmap=False, mlock=False, repack=False, cache_ram_bytes=0, moe_cache_bytes=0)
    settings, _ = choose_settings(host.machine, profile, own, with_gpu=bool(usable_gpus(host.machine, goal)))
    return settings


def _on_gpus(
    host: FleetHost, costs: MemoryCosts, goal: Goal, gpus: tuple[str, ...], tier: str
) -> tuple[list[str], frozenset[int]]:
    """Devices of the layers, and the layers with resident experts: GPUs first, first layers on the CPU if needed."""
    count = costs.profile.layers
    layers = [Layer(costs.base(index), costs.experts(index)) for index in range(count)]
    runtime = max(costs.runtime(len(gpus), host.machine.capability(gpu)) for gpu in gpus)
    overhead = runtime + costs.compute(range(count), head=False)
    available = [max(0, capacity(host.machine, gpu) - goal.gpu_margin_bytes) for gpu in gpus]
    found = split(layers, available, lambda _card, _head, _staged: overhead, even=False)
    devices = [tier] * found.first
    for gpu, share in zip(gpus, found.shares, strict=True):
        devices += [gpu] * (share.stop - share.start)
    return devices, frozenset(layer for share in found.shares for layer in share.experts)


def _ledger(host: FleetHost, costs: MemoryCosts, placement: Placement, goal: Goal) -> Ledger:
    tier = host_tier(host.machine)
    rows: LedgerRows = []
    for tensor, home in zip(costs.profile.tensors, placement.homes, strict=True):
        rows.append((home, "weights", tensor.bytes))
    for index, device in enumerate(placement.layers):
        rows.append((device, "kv", costs.kv[index]))
    for device in dict.fromkeys((*placement.layers, *placement.homes)):
        own = [index for index, where in enumerate(placement.layers) if where == device]
        # a device with only experts computes their products: the buffer of a whole layer is an upper bound
        rows.append((device, "compute", costs.compute(own or range(costs.profile.layers), head=False)))
        if device.startswith("gpu"):
            rows.append((device, "runtime", costs.runtime(1, host.machine.capability(device))))
            rows.append((device, "reserve", goal.gpu_margin_bytes))
    rows += [
        (tier, "runtime", PROCESS_BYTES + DRIVER_BYTES * len(placement.gpus)),
        (tier, "reserve", os_reserve(host.machine) + goal.reserve_ram_bytes),
    ]
    loaded = _joined(rows)
    graphs = GRAPHS_KEPT * KEPT_BYTES * graph_tensors(costs.profile)
    # a tensor arrives as one message before it is copied into place
    largest = max((tensor.bytes for tensor in costs.profile.tensors), default=0)
    return Ledger(_joined([*rows, (tier, "staging", largest)]), loaded, _joined([*rows, (tier, "runtime", graphs)]))


def _joined(rows: LedgerRows) -> tuple[LedgerRow, ...]:
    sums: dict[tuple[str, str], LedgerRow] = {}
    for tier, item, size in rows:
        before = sums[tier, item].bytes if (tier, item) in sums else 0
        sums[tier, item] = LedgerRow(tier, item, before + size)
    return tuple(row for row in sums.values() if row.bytes)


def _hops(part: Profile, placement: Placement) -> int:
    """Number of transfers of a token's state between devices of one worker."""
    away = {
        tensor.layer
        for tensor, home in zip(part.tensors, placement.homes, strict=True)
        if tensor.cls is TensorClass.ROUTED_EXPERTS and home != placement.device_of(tensor)
    }
    return 2 * len(away) + sum(before != after for before, after in pairwise(placement.layers))
