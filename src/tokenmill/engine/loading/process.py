"""Memory, reads, page faults and limits of processes, from /proc, and GPU memory from the driver.

Parse functions take text. Memory is read from `status`, not `smaps`, which would walk the page tables and block the
process for seconds on a mapping of half a terabyte.
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

    anon_bytes: int | None = None
    file_bytes: int | None = None  # pages of mapped files, which the kernel can evict
    shmem_bytes: int | None = None
    swap_bytes: int | None = None
    locked_bytes: int | None = None

    @property
    def rss_bytes(self) -> int | None:
        """All resident memory; None if a part is unknown."""
        parts = (self.anon_bytes, self.file_bytes, self.shmem_bytes)
        return None if None in parts else sum(part for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class ProcessReads:
    """Bytes that a process has read since it started."""

    chars: int | None = None  # by read(), including from the page cache
    disk_bytes: int | None = None  # from disk, including pages of mapped files


_MEMORY = {
    "RssAnon": "anon_bytes",
    "RssFile": "file_bytes",
    "RssShmem": "shmem_bytes",
    "VmSwap": "swap_bytes",
    "VmLck": "locked_bytes",
}


def parse_status(text: str) -> ProcessMemory:
    """Parse /proc/PID/status."""
    found = {
        _MEMORY[name]: int(size) * KIB
        for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
        if name in _MEMORY
    }
    return ProcessMemory(**found)


def parse_io(text: str) -> ProcessReads:
    """Parse /proc/PID/io."""
    found = dict(re.findall(r"^(\w+): (\d+)$", text, re.MULTILINE))
    return ProcessReads(
        int(found["rchar"]) if "rchar" in found else None,
        int(found["read_bytes"]) if "read_bytes" in found else None,
    )


def parse_major_faults(stat: str) -> int | None:
    """Parse the number of major page faults in /proc/PID/stat."""
    fields = stat.rpartition(")")[2].split()
    return int(fields[9]) if len(fields) > 9 and fields[9].isdigit() else None


def parse_memlock(limits: str, status: str) -> tuple[bool, int | None]:
    """Parse /proc/PID/limits and status: whether the memlock limit is known, and the limit; None: unlimited."""
    capable = re.search(r"^CapEff:\s+([0-9a-f]+)$", status, re.MULTILINE)
    if capable and int(capable[1], 16) >> CAP_IPC_LOCK & 1:
        return True, None
    found = re.search(r"^Max locked memory\s+(\w+)", limits, re.MULTILINE)
    if found is None:
        return False, None
    return True, int(found[1]) if found[1].isdigit() else None


def maps_any(maps: str, files: frozenset[tuple[str, int]]) -> bool:
    """Whether one of the files, given by name and inode, is in /proc/PID/maps; folders differ in containers."""
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and (fields[5].rpartition("/")[2], int(fields[4])) in files:
            return True
    return False


def read_memory(host: Host, pids: tuple[int, ...]) -> ProcessMemory:
    """Total memory of several processes."""
    found = [parse_status(host.text(f"/proc/{pid}/status") or "") for pid in pids]

    def total(name: str) -> int | None:
        sizes = [size for memory in found if (size := getattr(memory, name)) is not None]
        return sum(sizes) if sizes else None

    return ProcessMemory(**{name: total(name) for name in _MEMORY.values()})


def vram_by_gpu(nvml: Any, pids: Collection[int]) -> dict[int, int] | None:
    """GPU memory of these processes by GPU index; None if the driver reports none."""
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
    """GPU memory by pid; a process in both lists has the same value in both."""
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


def local_vram() -> Callable[[Collection[int]], dict[int, int] | None]:
    """`vram_by_gpu` on this machine."""
    import pynvml  # noqa: PLC0415  large, and not needed without GPUs

    return lambda pids: vram_by_gpu(pynvml, pids)
