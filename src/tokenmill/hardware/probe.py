"""Reads this machine into one `Machine` in less than a second.

The order of reading matters in two places: the firmware's module list comes before PMem, whose mode determines the
meaning of the kernel's memory sizes, and the hypervisor before DRAM and disk, whose facts it hides.
"""

from pathlib import Path

from tokenmill.hardware.cpu import read_cpu
from tokenmill.hardware.disk import parse_mountinfo, read_disk
from tokenmill.hardware.dmi import read_modules
from tokenmill.hardware.gpu.amd import read_amd
from tokenmill.hardware.gpu.nvidia import read_nvidia
from tokenmill.hardware.host import Host, LocalHost
from tokenmill.hardware.limits import read_container, read_limits
from tokenmill.hardware.machine import Machine
from tokenmill.hardware.memory import make_dram, parse_meminfo, read_huge_pages, read_numa, read_os, read_swap
from tokenmill.hardware.pmem import as_cache, read_pmem


def probe(path: Path | None = None, *, host: Host | None = None) -> Machine:
    """Read this machine and, with `path`, the disk that holds it. Unknown facts are None and explained in a note."""
    host = host or LocalHost()
    meminfo = parse_meminfo(host.text("/proc/meminfo") or "")
    mounts = parse_mountinfo(host.text("/proc/self/mountinfo") or "")
    cpu, virtual, cpu_notes = read_cpu(host)
    modules, module_notes = read_modules(host)
    dram, dram_notes = make_dram(meminfo.get("MemTotal"), meminfo.get("MemAvailable"), modules, virtual=bool(virtual))
    pmem, shares, pmem_notes = read_pmem(host, modules, mounts, meminfo)
    if pmem and shares and pmem.mode in ("memory", "mixed"):
        dram = as_cache(dram, shares)
    numa, numa_notes = read_numa(host, meminfo.get("MemTotal"))
    nvidia, nvlinks, nvidia_notes = read_nvidia(host)
    amd, amd_notes = read_amd(host, first_index=len(nvidia))
    swap, swap_notes = read_swap(host, meminfo)
    disk, disk_notes = read_disk(host, path.absolute(), mounts, virtual=bool(virtual)) if path else (None, [])
    huge_pages, huge_notes = read_huge_pages(host, meminfo)
    limits, limit_notes = read_limits(host, mounts, meminfo.get("MemTotal"))
    container, container_notes = read_container(host)
    return Machine(
        name=(host.text("/proc/sys/kernel/hostname") or "").strip() or "this",
        cpu=cpu,
        numa=numa,
        dram=dram,
        pmem=pmem,
        gpus=(*nvidia, *amd),
        nvlinks=nvlinks,
        swap=swap,
        disk=disk,
        huge_pages=huge_pages,
        limits=limits,
        container=container,
        virtual=virtual,
        os=read_os(host),
        notes=(
            *cpu_notes,
            *module_notes,
            *dram_notes,
            *pmem_notes,
            *numa_notes,
            *nvidia_notes,
            *amd_notes,
            *swap_notes,
            *disk_notes,
            *huge_notes,
            *limit_notes,
            *container_notes,
        ),
    )
