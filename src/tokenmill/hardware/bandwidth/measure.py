"""Measures the bandwidth of every memory of this machine in a few seconds (`probe --measure`).

Figures are those of the best tenth of a second, like STREAM's, because other work can only reduce them, at the best
number of threads; that of the disk is a mean. Reads count bytes read. Copies count each byte once, like mbw; STREAM
counts reads and writes, which gives twice the figure. Only GPU memory (`gpu0`), measured by copying within it, counts
both. Memories that cannot be measured are skipped, with the reason passed to `progress`.
"""

import os
from datetime import UTC, datetime
from math import floor
from pathlib import Path

from tokenmill.errors import ProbeError, UsageError
from tokenmill.hardware.bandwidth.disk import largest_model, measure_disk
from tokenmill.hardware.bandwidth.gpu import measure_gpus
from tokenmill.hardware.bandwidth.memory import measure_mapped, measure_memory, working_set_bytes
from tokenmill.hardware.bandwidth.threads import OnMeasured, read_places, spread_cores, thread_counts
from tokenmill.hardware.disk import mount_of, parse_mountinfo
from tokenmill.hardware.machine import Machine, Measurements, Rate
from tokenmill.hardware.memory import parse_meminfo
from tokenmill.units import format_bytes

BUSY_SHARE = 0.25
"""Load per core from which other work affects the figures."""


def measure(
    machine: Machine, *, path: Path | None = None, seconds: float = 3.0, progress: OnMeasured | None = None
) -> Measurements:
    """Measure all memories of this machine and the disk that holds `path` (default: the machine's disk).

    Each rate takes about `seconds`; `progress` receives one line at the start of each. Raises `UsageError` for a wrong
    time and `ProbeError` for a missing path or too little free memory.
    """
    report = progress or (lambda _text: None)
    if seconds <= 0:
        raise UsageError(f"cannot measure for {seconds:g} seconds", hint="use a time above zero; 3 is enough")
    disk = path or (Path(machine.disk.path) if machine.disk else None)
    if disk is not None and not disk.exists():
        raise ProbeError(
            f"cannot measure the disk of {disk}, which does not exist", hint="give an existing file or folder"
        )
    cores = usable_cores(machine)
    total_bytes = working_set_bytes(machine.cpu.l3_bytes, free_bytes(machine), thread_counts(len(cores)))
    if machine.pmem is not None and machine.pmem.mode in ("memory", "mixed"):
        report("dram: PMem is in Memory Mode; this measures its DRAM cache, and reads that miss the cache are slower")
    if (load := os.getloadavg()[0]) > len(cores) * BUSY_SHARE:
        report(f"this machine is busy (load {load:.1f} on {len(cores)} cores), so all figures will be too low")
    report(f"dram: reading and copying {format_bytes(total_bytes)} or more")
    rates = measure_memory(cores, total_bytes, seconds, report)
    rates += _pmem(machine, cores, total_bytes, seconds, report)
    if disk is not None and (rate := measure_disk(disk, seconds, report)) is not None:
        rates.append(rate)
    rates += measure_gpus(machine, seconds, report)
    return Measurements(when=datetime.now(UTC).isoformat(timespec="seconds"), rates=tuple(rates))


def usable_cores(machine: Machine, root: Path = Path("/sys/devices/system/cpu")) -> tuple[int, ...]:
    """One logical CPU of each physical core that this process can use, limited by its CPU quota."""
    cpus = os.sched_getaffinity(0)
    if machine.limits.cpuset is not None:
        cpus = cpus & set(machine.limits.cpuset) or cpus
    cores = spread_cores(read_places(cpus, root))
    quota = machine.limits.cgroup_cpus
    # with more threads than the quota, the kernel stops all of them for a part of every period
    return cores if quota is None else cores[: max(1, floor(quota))]


def free_bytes(machine: Machine) -> int:
    """Memory that can be used without swapping and within limits."""
    pmem = machine.pmem.available_bytes if machine.pmem else None
    known = machine.dram.available_bytes or pmem or parse_meminfo(Path("/proc/meminfo").read_text())["MemAvailable"]
    limit = machine.limits.cgroup_memory_bytes
    return known if limit is None else min(known, limit)


def on_dax(mountinfo: str, folder: str) -> bool:
    """Whether files in a folder are mapped directly from persistent memory, without the page cache."""
    mount = mount_of(folder, parse_mountinfo(mountinfo))
    return mount is not None and any(word in ("dax", "dax=always") for word in mount.options)


def _pmem(
    machine: Machine, cores: tuple[int, ...], total_bytes: int, seconds: float, progress: OnMeasured
) -> list[Rate]:
    spaces = machine.pmem.namespaces if machine.pmem else ()
    mounts = Path("/proc/self/mountinfo").read_text()
    for space in spaces:
        if space.mount is None or not on_dax(mounts, space.mount):
            progress(f"pmem: {space.name} skipped, it is not mounted with dax")
        elif (file := largest_model(Path(space.mount), total_bytes)) is None:
            wanted = format_bytes(total_bytes)
            progress(f"pmem: {space.name} skipped, {space.mount} has no model file of {wanted} or more")
        else:
            progress(f"pmem: reading {file}")
            # one namespace is enough: all are on the same modules and form one tier
            return measure_mapped(file, cores, total_bytes, seconds, progress)
    return []
