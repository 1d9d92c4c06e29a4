"""Used and free memory per device while an engine works, counted as in the ledger.

Host memory does not include pages that the system can drop at no cost, which are those of the model file that the
engine has copied. Pages of mapped weights in use are needed, although the system counts them as available. Free memory
is the minimum over the machine, the control groups, and a given limit on the engine's own use.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from tokenmill.engine.loading.process import ProcessMemory, local_vram, read_memory
from tokenmill.hardware.disk import parse_mountinfo
from tokenmill.hardware.host import Host, LocalHost, number
from tokenmill.hardware.limits import parse_cgroup
from tokenmill.hardware.memory import parse_meminfo
from tokenmill.launch.binding import HOST_TIERS
from tokenmill.planner.memory.ledger import FIRST_PROMPT_TOKENS
from tokenmill.planner.placement import host_tier
from tokenmill.planner.plan import LedgerRow, Plan
from tokenmill.tuner.soak.judge import MemoryReading

_NO_LIMIT = 1 << 60  # cgroup v1 reports "unlimited" as the largest number of whole pages


@dataclass(frozen=True, slots=True)
class Group:
    """A control group with a limit, at one moment."""

    limit_bytes: int
    used_bytes: int
    file_bytes: int  # included in used_bytes: file pages, which the kernel can reclaim


def predicted_bytes(plan: Plan, tier: str, depth: int) -> int:
    """Bytes in a tier according to the ledger with `depth` tokens per sequence, without reserves and reclaimable pages.

    Interpolated between the ledger's values after a first prompt and with a full context.
    """

    def total(rows: tuple[LedgerRow, ...]) -> int:
        return sum(row.bytes for row in rows if row.tier == tier and row.item != "reserve")

    after = total(plan.ledger.after_load)
    full = total(plan.ledger.full_context)
    first = min(FIRST_PROMPT_TOKENS, plan.settings.context)
    context = plan.settings.context
    share = 0.0 if context <= first else min(1.0, max(0.0, (depth - first) / (context - first)))
    return round(after + share * (full - after)) - total(plan.ledger.page_cache)


def host_reading(
    tier: str,
    memory: ProcessMemory,
    *,
    available_bytes: int | None,
    droppable_bytes: int,
    groups: Collection[Group] = (),
    limit_bytes: int | None = None,
    predicted: int | None = None,
) -> MemoryReading:
    """The reading of host memory from its parts."""
    parts = [memory.anon_bytes, memory.shmem_bytes, memory.swap_bytes]
    own = None if memory.anon_bytes is None else sum(part or 0 for part in parts)
    mapped = memory.file_bytes or 0
    needed = max(0, mapped - droppable_bytes)
    used = None if own is None else own + needed
    free = [] if available_bytes is None else [available_bytes - needed]
    free += [group.limit_bytes - (group.used_bytes - group.file_bytes) - needed for group in groups]
    if limit_bytes is not None and used is not None:
        free.append(limit_bytes - used)
    return MemoryReading(tier, predicted, used, min(free, default=None), memory.file_bytes)


def read_groups(host: Host, pid: int) -> tuple[Group, ...]:
    """The control groups (v1 or v2) of a process that have a memory limit."""
    mounts = parse_mountinfo(host.text("/proc/self/mountinfo") or "")
    found = []
    for controllers, path in parse_cgroup(host.text(f"/proc/{pid}/cgroup") or ""):
        if controllers and "memory" not in controllers:
            continue
        kind = "cgroup" if controllers else "cgroup2"
        for mount in mounts:
            if mount.filesystem == kind and (not controllers or "memory" in mount.options):
                names = (
                    ("memory.max", "memory.current", "file")
                    if kind == "cgroup2"
                    else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache")
                )
                found += [group for folder in _upward(mount.point, path) if (group := _group(host, folder, *names))]
    return tuple(found)


def _upward(point: str, path: str) -> Iterator[str]:
    inside = PurePosixPath(path.lstrip("/"))
    if ".." not in inside.parts:
        yield from (str(PurePosixPath(point) / part) for part in (inside, *inside.parents))


def _group(host: Host, folder: str, limit: str, used: str, cache: str) -> Group | None:
    maximum = number(host.text(f"{folder}/{limit}"))
    now = number(host.text(f"{folder}/{used}"))
    if maximum is None or now is None or maximum >= _NO_LIMIT:
        return None
    pages = re.search(rf"^{cache} (\d+)$", host.text(f"{folder}/memory.stat") or "", re.MULTILINE)
    return Group(maximum, now, int(pages[1]) if pages else 0)


class Gauge:
    """Reads the memory that an engine on this machine uses."""

    def __init__(
        self,
        pids: Callable[[], tuple[int, ...]],
        plan: Plan | None,
        *,
        limit_bytes: int | None = None,
        host: Host | None = None,
        vram: Callable[[Collection[int]], Mapping[int, int] | None] | None = None,
    ) -> None:
        """`pids` is called for each reading; GPUs are read only if the plan uses them."""
        self._pids = pids
        self._plan = plan
        self._limit_bytes = limit_bytes
        self._host = host or LocalHost()
        self._gpus = plan.placement.gpus if plan is not None else ()
        self._vram = vram or (local_vram() if self._gpus else None)
        self.tier = host_tier(plan.machine) if plan is not None else HOST_TIERS[0]
        self._droppable = sum(row.bytes for row in plan.ledger.page_cache if row.tier in HOST_TIERS) if plan else 0

    def read(self, depth: int) -> tuple[MemoryReading, ...]:
        """Read all memories, with the ledger's prediction at `depth`; empty for an engine on another machine."""
        pids = self._pids()
        if not pids:
            return ()
        host = host_reading(
            self.tier,
            read_memory(self._host, pids),
            available_bytes=parse_meminfo(self._host.text("/proc/meminfo") or "").get("MemAvailable"),
            droppable_bytes=self._droppable,
            groups=read_groups(self._host, pids[0]),
            limit_bytes=self._limit_bytes,
            predicted=self._predicted(self.tier, depth),
        )
        return (host, *self._cards(pids, depth))

    def _cards(self, pids: tuple[int, ...], depth: int) -> Iterator[MemoryReading]:
        if not self._gpus or self._vram is None:
            return
        used = self._vram(pids) or {}
        free = {card.index: card.memory_free_bytes for card in self._host.nvml().cards}
        for tier in self._gpus:
            index = int(tier[3:])
            yield MemoryReading(tier, self._predicted(tier, depth), used.get(index), free.get(index))

    def _predicted(self, tier: str, depth: int) -> int | None:
        return None if self._plan is None else predicted_bytes(self._plan, tier, depth)
