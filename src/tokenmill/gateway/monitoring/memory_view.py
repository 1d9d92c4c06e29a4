"""The machine's memories: predicted use, measured use and free bytes.

`host` is all memory except that of GPUs. The system counts pages of a mapped model file as available; here they are not
free, because the engines need them.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tokenmill.engine.reconcile.reconcile import HOST, ReconciledItem
from tokenmill.gateway.schemas import MemoryObject, MemoryPart
from tokenmill.hardware.disk import parse_mountinfo
from tokenmill.hardware.gpu.nvidia import read_nvidia
from tokenmill.hardware.host import Host, LocalHost
from tokenmill.hardware.limits import read_limits
from tokenmill.hardware.memory import parse_meminfo
from tokenmill.native.launching import ReadyEngine

ITEMS = ("weights", "repack", "kv", "compute", "output", "prompt_cache", "runtime")
"""Components that are displayed as bars. Other items (mapped, own, total) are totals reported by the system."""


@dataclass(frozen=True, slots=True)
class MemorySize:
    """Capacity and free bytes of a memory; None: unknown."""

    capacity_bytes: int | None
    free_bytes: int | None


def measure_memories(tiers: Collection[str], host: Host | None = None) -> dict[str, MemorySize]:
    """Measure the memories of these tiers; blocks for a few milliseconds."""
    here = host or LocalHost()
    found = {HOST: _host_size(here)}
    if any(tier.startswith("gpu") for tier in tiers):
        found |= {f"gpu{gpu.index}": MemorySize(gpu.vram_bytes, gpu.free_bytes) for gpu in read_nvidia(here)[0]}
    return found


def _host_size(host: Host) -> MemorySize:
    meminfo = parse_meminfo(host.text("/proc/meminfo") or "")
    total = meminfo.get("MemTotal")
    free = meminfo.get("MemAvailable")
    limits, _ = read_limits(host, parse_mountinfo(host.text("/proc/self/mountinfo") or ""), total)
    limit = limits.cgroup_memory_bytes
    if limit is not None:
        total = limit if total is None else min(total, limit)
        free = None if free is None else min(free, limit)
    return MemorySize(total, free)


def memory_view(engines: Mapping[str, ReadyEngine], sizes: Mapping[str, MemorySize]) -> list[MemoryObject]:
    """The memories that the gateway's engines use, GPUs first."""
    rows = [(name, row) for name, engine in engines.items() for row in engine.held.rows]
    tiers = sorted({row.tier for _, row in rows}, key=lambda tier: (tier == HOST, tier))
    return [_tier(tier, [(name, row) for name, row in rows if row.tier == tier], sizes.get(tier)) for tier in tiers]


def _tier(tier: str, rows: list[tuple[str, ReconciledItem]], size: MemorySize | None) -> MemoryObject:
    parts = [_part(name, row) for name, row in rows if row.item in ITEMS and _is_part(row)]
    parts.sort(key=lambda part: ITEMS.index(part["item"]))
    ours = sum(part["measured_bytes"] or 0 for part in parts)
    capacity, free = (size.capacity_bytes, size.free_bytes) if size is not None else (None, None)
    if free is not None:
        mapped = sum(row.measured_bytes or 0 for _, row in rows if row.item == "mapped")
        free = max(0, free - mapped)
        if capacity is not None:
            free = min(free, max(0, capacity - ours))
    other = None if capacity is None or free is None else max(0, capacity - free - ours)
    sums = [_part(name, row) for name, row in rows if row.item not in ITEMS]
    return {
        "tier": tier,
        "capacity_bytes": capacity,
        "free_bytes": free,
        "other_bytes": other,
        "parts": [part for part in parts if part["predicted_bytes"] or part["measured_bytes"]],
        "sums": sums,
    }


def _is_part(row: ReconciledItem) -> bool:
    return row.source == "engine" or row.item in ("prompt_cache", "runtime")


def _part(name: str, row: ReconciledItem) -> MemoryPart:
    return {
        "engine": name,
        "item": row.item,
        "predicted_bytes": row.predicted_bytes,
        "measured_bytes": row.measured_bytes,
        "source": row.source,
        "explanation": row.explanation,
    }
