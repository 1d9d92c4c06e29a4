"""Counters of the machine during a load: swapping, pressure, the model's disk, NUMA nodes, control group.

Counters are stored as the kernel reports them; the difference of two snapshots gives a rate.
"""

import mmap
import re
from dataclasses import dataclass, field
from pathlib import Path

from tokenmill.engine.loading.process import parse_memlock
from tokenmill.engine.process.exit_status import counter
from tokenmill.hardware.disk import block_name, mount_of, parse_mountinfo
from tokenmill.hardware.host import Host, number
from tokenmill.hardware.limits import cgroup_folder
from tokenmill.hardware.memory import parse_meminfo

_PAGE = mmap.PAGESIZE  # unit of swap counters
_SECTOR = 512  # unit of block statistics, for all disks
_NODES = "/sys/devices/system/node"


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
    cgroup_high_bytes: int | None = None  # the kernel throttles the group above it
    cgroup_throttled: int | None = None  # number of times
    memlock_known: bool = False
    memlock_bytes: int | None = None  # limit of the engine; None: unlimited, if known


def read_system(host: Host, time_s: float, *, pid: int, model: Path) -> System:
    """Take a snapshot of everything that can slow down a process that loads this file."""
    vmstat = host.text("/proc/vmstat") or ""
    swapped_in = counter(vmstat, "pswpin")
    swapped_out = counter(vmstat, "pswpout")
    disk = disk_of(host, model)
    read, busy = parse_block_stat(host.text(f"/sys/class/block/{disk}/stat") or "") if disk else (None, None)
    group = cgroup_folder(host, pid)
    known, memlock = parse_memlock(host.text(f"/proc/{pid}/limits") or "", host.text(f"/proc/{pid}/status") or "")
    return System(
        time_s=time_s,
        swapped_in_bytes=None if swapped_in is None else swapped_in * _PAGE,
        swapped_out_bytes=None if swapped_out is None else swapped_out * _PAGE,
        io=parse_pressure(host.text("/proc/pressure/io") or ""),
        memory=parse_pressure(host.text("/proc/pressure/memory") or ""),
        disk=disk,
        disk_read_bytes=read,
        disk_busy_s=busy,
        node_bytes=_nodes(host),
        available_bytes=parse_meminfo(host.text("/proc/meminfo") or "").get("MemAvailable"),
        cgroup=group,
        cgroup_high_bytes=number(host.text(f"{group}/memory.high")) if group else None,
        cgroup_throttled=counter(host.text(f"{group}/memory.events") or "", "high") if group else None,
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
