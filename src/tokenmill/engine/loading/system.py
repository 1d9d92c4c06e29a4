"""Counters of the machine during a load: swapping, pressure, the model's disk, NUMA nodes, control group.

Counters are stored as the kernel reports them; the difference of two snapshots gives a rate.
"""

import mmap
import re
from dataclasses import dataclass, field
from pathlib import Path

from tokenmill.engine.loading.process import parse_memlock
from tokenmill.hardware.disk import block_name, mount_of, parse_mountinfo
from tokenmill.hardware.host import Host, number
from tokenmill.hardware.limits import parse_cgroup
from tokenmill.hardware.memory import parse_meminfo

_PAGE = mmap.PAGESIZE  # unit of swap counters
_SECTOR = 512  # unit of block statistics, for all disks
_NODES = "/sys/devices/system/node"
_CGROUPS = "/sys/fs/cgroup"


@dataclass(frozen=True, slots=True)
class Pressure:
    """Pressure stall information: shares of the last ten seconds in which some or all tasks waited."""

    some: float | None = None
    full: float | None = None


@dataclass(frozen=True, slots=True)
class System:
    """A snapshot of the machine's counters; None: unknown."""

    time_s: float
    swapped_in_bytes: int | None = None
    swapped_out_bytes: int | None = None
    io: Pressure = field(default_factory=Pressure)
    memory: Pressure = field(default_factory=Pressure)
    disk: str | None = None  # the block device of the model
    disk_read_bytes: int | None = None  # by all processes
    disk_busy_s: float | None = None
    node_bytes: dict[int, int] = field(default_factory=dict)  # used memory by NUMA node
    available_bytes: int | None = None
    cgroup: str | None = None  # folder of the engine's control group
    cgroup_bytes: int | None = None
    cgroup_high_bytes: int | None = None  # the kernel throttles the group above it
    cgroup_throttled: int | None = None  # number of times
    memlock_known: bool = False
    memlock_bytes: int | None = None  # limit of the engine; None: unlimited, if known


def read_system(host: Host, time_s: float, *, pid: int, model: Path) -> System:
    """Take a snapshot of everything that can slow down a process that loads this file."""
    vmstat = dict(re.findall(r"^(\w+) (\d+)$", host.text("/proc/vmstat") or "", re.MULTILINE))
    disk = disk_of(host, model)
    read, busy = parse_block_stat(host.text(f"/sys/class/block/{disk}/stat") or "") if disk else (None, None)
    group = _group(host, pid)
    known, memlock = parse_memlock(host.text(f"/proc/{pid}/limits") or "", host.text(f"/proc/{pid}/status") or "")
    return System(
        time_s=time_s,
        swapped_in_bytes=int(vmstat["pswpin"]) * _PAGE if "pswpin" in vmstat else None,
        swapped_out_bytes=int(vmstat["pswpout"]) * _PAGE if "pswpout" in vmstat else None,
        io=parse_pressure(host.text("/proc/pressure/io") or ""),
        memory=parse_pressure(host.text("/proc/pressure/memory") or ""),
        disk=disk,
        disk_read_bytes=read,
        disk_busy_s=busy,
        node_bytes=_nodes(host),
        available_bytes=parse_meminfo(host.text("/proc/meminfo") or "").get("MemAvailable"),
        cgroup=group,
        cgroup_bytes=number(host.text(f"{group}/memory.current")) if group else None,
        cgroup_high_bytes=number(host.text(f"{group}/memory.high")) if group else None,
        cgroup_throttled=_throttled(host.text(f"{group}/memory.events") or "") if group else None,
        memlock_known=known,
        memlock_bytes=memlock,
    )


def parse_pressure(text: str) -> Pressure:
    """Parse /proc/pressure/io or /proc/pressure/memory, which older kernels lack."""
    found = {kind: float(share) / 100 for kind, share in re.findall(r"^(some|full) avg10=([\d.]+)", text, re.MULTILINE)}
    return Pressure(found.get("some"), found.get("full"))


def parse_block_stat(text: str) -> tuple[int | None, float | None]:
    """Parse /sys/block/DISK/stat: bytes read and seconds busy since boot."""
    fields = text.split()
    if len(fields) < 10 or not all(field.isdigit() for field in fields[:10]):
        return None, None
    return int(fields[2]) * _SECTOR, int(fields[9]) / 1000


def disk_of(host: Host, path: Path) -> str | None:
    """The block device of a file; None for network file systems and memory."""
    mount = mount_of(host.real(str(path)), parse_mountinfo(host.text("/proc/self/mountinfo") or ""))
    return block_name(host, mount) if mount else None


def _nodes(host: Host) -> dict[int, int]:
    nodes = {}
    for folder in host.glob(f"{_NODES}/node[0-9]*"):
        memory = parse_meminfo(host.text(f"{folder}/meminfo") or "")
        if "MemTotal" in memory and "MemFree" in memory:
            nodes[int(folder.rpartition("node")[2])] = memory["MemTotal"] - memory["MemFree"]
    return nodes


def _group(host: Host, pid: int) -> str | None:
    """The folder of a process's cgroup v2; None if it has none."""
    for controllers, path in parse_cgroup(host.text(f"/proc/{pid}/cgroup") or ""):
        folder = f"{_CGROUPS}{path}".rstrip("/")
        if not controllers and host.exists(f"{folder}/memory.events"):
            return folder
    return None


def _throttled(events: str) -> int | None:
    found = re.search(r"^high (\d+)$", events, re.MULTILINE)
    return int(found[1]) if found else None
