"""`probe --measure`: what each memory of this machine really moves, in seconds.

Figures are the best tenth of a second (other work can only take away; STREAM reports its best too), with as many
threads as helped; the disk's is the mean. Reads count bytes read. Copies count each byte once, as mbw does; STREAM's
copy figure, which counts the read and the write, is twice as high. Only a card's own memory (`gpu0`), which is
measured by copying within it, counts both. What cannot be measured here is left out and the reason told.
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
"""Of the cores, from which on other work shows in the figures."""


def measure(
    machine: Machine, *, path: Path | None = None, seconds: float = 3.0, progress: OnMeasured | None = None
) -> Measurements:
    """Measure every memory of this machine, and the disk under `path` (else the one `machine` names).

    `seconds` is about what each kind of rate takes; one word on each goes to `progress` as it starts.
    """
    tell = progress or (lambda _text: None)
    if seconds <= 0:
        raise UsageError(f"cannot measure in {seconds:g} seconds", hint="give a time above zero; 3 is plenty")
    disk = path or (Path(machine.disk.path) if machine.disk else None)
    if disk is not None and not disk.exists():
        raise ProbeError(f"there is no {disk} to measure the disk of", hint="name an existing file or folder")
    cores = usable_cores(machine)
    total_bytes = working_set_bytes(machine.cpu.l3_bytes, free_bytes(machine), thread_counts(len(cores)))
    if machine.pmem is not None and machine.pmem.mode in ("memory", "mixed"):
        tell("dram: PMem is in Memory Mode; buffers this small stay in its DRAM cache, and what misses it is slower")
    if (load := os.getloadavg()[0]) > len(cores) * BUSY_SHARE:
        tell(f"this machine is busy (load {load:.1f} on {len(cores)} cores): all figures will be low")
    tell(f"dram: streaming through {format_bytes(total_bytes)} and more")
    rates = measure_memory(cores, total_bytes, seconds, tell)
    rates += _pmem(machine, cores, total_bytes, seconds, tell)
    if disk is not None and (rate := measure_disk(disk, seconds, tell)) is not None:
        rates.append(rate)
    rates += measure_gpus(machine, seconds, tell)
    return Measurements(when=datetime.now(UTC).isoformat(timespec="seconds"), rates=tuple(rates))


def usable_cores(machine: Machine, root: Path = Path("/sys/devices/system/cpu")) -> tuple[int, ...]:
    """One logical CPU of each physical core this process may run on, no more than a CPU quota pays for."""
    cpus = os.sched_getaffinity(0)
    if machine.limits.cpuset is not None:
        cpus = cpus & set(machine.limits.cpuset) or cpus
    cores = spread_cores(read_places(cpus, root))
    quota = machine.limits.cgroup_cpus
    # A thread beyond the quota would have all of them stopped for part of every period.
    return cores if quota is None else cores[: max(1, floor(quota))]


def free_bytes(machine: Machine) -> int:
    """Memory that can be touched without swapping or meeting a limit."""
    pmem = machine.pmem.available_bytes if machine.pmem else None
    known = machine.dram.available_bytes or pmem or parse_meminfo(Path("/proc/meminfo").read_text())["MemAvailable"]
    limit = machine.limits.cgroup_memory_bytes
    return known if limit is None else min(known, limit)


def on_dax(mountinfo: str, folder: str) -> bool:
    """Whether files there are mapped straight from persistent memory, past the page cache."""
    mount = mount_of(folder, parse_mountinfo(mountinfo))
    return mount is not None and any(word in ("dax", "dax=always") for word in mount.options)


def _pmem(
    machine: Machine, cores: tuple[int, ...], total_bytes: int, seconds: float, progress: OnMeasured
) -> list[Rate]:
    spaces = machine.pmem.namespaces if machine.pmem else ()
    mounts = Path("/proc/self/mountinfo").read_text()
    for space in spaces:
        if space.mount is None or not on_dax(mounts, space.mount):
            progress(f"pmem: {space.name} left out, it is not mounted with dax here")
        elif (file := largest_model(Path(space.mount), total_bytes)) is None:
            wanted = format_bytes(total_bytes)
            progress(f"pmem: {space.name} left out, {space.mount} holds no model file of {wanted} or more to read")
        else:
            progress(f"pmem: reading {file}")
            # One namespace stands for all: they are the same modules, and tiers count them as one.
            return measure_mapped(file, cores, total_bytes, seconds, progress)
    return []
