"""What /proc says of one process: memory by kind, reads, faults, limits.

Parse functions take text. `status` is read and not `smaps`: the kernel keeps its figures as counters, while walking
the pages of a mapping of half a terabyte takes seconds and holds the process up.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from tokenmill.hardware.host import Host
from tokenmill.units import KIB

CAP_IPC_LOCK = 14


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Resident memory of a process, or of several together."""

    anon_bytes: int | None = None  # its own
    file_bytes: int | None = None  # pages of mapped files, which the system can drop
    shmem_bytes: int | None = None
    swap_bytes: int | None = None
    locked_bytes: int | None = None

    @property
    def rss_bytes(self) -> int | None:
        """All that is resident."""
        parts = (self.anon_bytes, self.file_bytes, self.shmem_bytes)
        return None if None in parts else sum(part for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class ProcessReads:
    """What a process has read since it started."""

    chars: int | None = None  # through read(), from the page cache as well
    disk_bytes: int | None = None  # what had to come from a disk for it, pages of mapped files included


_MEMORY = {
    "RssAnon": "anon_bytes",
    "RssFile": "file_bytes",
    "RssShmem": "shmem_bytes",
    "VmSwap": "swap_bytes",
    "VmLck": "locked_bytes",
}


def parse_status(text: str) -> ProcessMemory:
    """/proc/PID/status."""
    found = {
        _MEMORY[name]: int(size) * KIB
        for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
        if name in _MEMORY
    }
    return ProcessMemory(**found)


def parse_io(text: str) -> ProcessReads:
    """/proc/PID/io."""
    found = dict(re.findall(r"^(\w+): (\d+)$", text, re.MULTILINE))
    return ProcessReads(
        int(found["rchar"]) if "rchar" in found else None,
        int(found["read_bytes"]) if "read_bytes" in found else None,
    )


def parse_major_faults(stat: str) -> int | None:
    """/proc/PID/stat: pages that had to be waited for."""
    fields = stat.rpartition(")")[2].split()
    return int(fields[9]) if len(fields) > 9 and fields[9].isdigit() else None


def parse_memlock(limits: str, status: str) -> tuple[bool, int | None]:
    """/proc/PID/limits and status: (whether it is known, bytes that may be locked; None for all)."""
    capable = re.search(r"^CapEff:\s+([0-9a-f]+)$", status, re.MULTILINE)
    if capable and int(capable[1], 16) >> CAP_IPC_LOCK & 1:
        return True, None
    found = re.search(r"^Max locked memory\s+(\w+)", limits, re.MULTILINE)
    if found is None:
        return False, None
    return True, int(found[1]) if found[1].isdigit() else None


def maps_any(maps: str, files: frozenset[tuple[str, int]]) -> bool:
    """/proc/PID/maps: whether a file of this name and inode is mapped; in a container its folder has another name."""
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and (fields[5].rpartition("/")[2], int(fields[4])) in files:
            return True
    return False


def read_memory(host: Host, pids: tuple[int, ...]) -> ProcessMemory:
    """Memory of several processes together; what none of them shows is None."""
    found = [parse_status(host.text(f"/proc/{pid}/status") or "") for pid in pids]

    def total(name: str) -> int | None:
        sizes = [size for memory in found if (size := getattr(memory, name)) is not None]
        return sum(sizes) if sizes else None

    return ProcessMemory(**{name: total(name) for name in _MEMORY.values()})


def vram_by_gpu(nvml: Any, pids: Collection[int]) -> dict[int, int] | None:
    """Bytes on each card that these processes have memory on; None where the driver does not say."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        found: dict[int, int] = {}
        for index in range(nvml.nvmlDeviceGetCount()):
            for used in _used(nvml, index, pids).values():
                found[index] = found.get(index, 0) + used
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()
    return found or None


def _used(nvml: Any, index: int, pids: Collection[int]) -> dict[int, int]:
    """Bytes by process: one that computes and draws is listed twice with the same figure."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    used: dict[int, int] = {}
    for call in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        try:
            running = call(handle)
        except nvml.NVMLError:
            continue
        for process in running:
            if process.pid in pids and process.usedGpuMemory is not None:
                used[process.pid] = process.usedGpuMemory
    return used


def this_driver() -> Callable[[Collection[int]], dict[int, int] | None]:
    """`vram_by_gpu` on this machine."""
    import pynvml  # noqa: PLC0415  a large module that a machine without GPUs never needs

    return lambda pids: vram_by_gpu(pynvml, pids)
