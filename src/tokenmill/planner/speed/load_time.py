"""Predicts load times: the slower of reading from disk and copying, with a cold or warm page cache."""

from dataclasses import dataclass

from tokenmill.hardware.machine import Machine
from tokenmill.model.profile import Profile
from tokenmill.planner.plan import Placement, Settings
from tokenmill.planner.speed.rates import RateConstants
from tokenmill.units import format_bytes, format_seconds

HDD_GB_S, SATA_GB_S, NVME_GB_S = 0.15, 0.5, 3.0  # common rates, used to show a range when the disk is unknown
SLOW_S = 600


@dataclass(frozen=True, slots=True)
class Load:
    """Seconds from start to ready; None if the disk's rate is unknown."""

    cold_s: float | None
    warm_s: float | None
    bound_by: str | None  # disk or copying
    notes: tuple[str, ...] = ()


def load_time(
    machine: Machine, profile: Profile, settings: Settings, placement: Placement, rates: RateConstants
) -> Load:
    """Load time with an empty page cache (cold) and, if the page cache can hold all files, with them in it (warm)."""
    on_cards = sum(
        tensor.bytes for tensor, home in zip(profile.tensors, placement.homes, strict=True) if home.startswith("gpu")
    )
    on_disk = sum(tensor.bytes for tensor, home in zip(profile.tensors, placement.homes, strict=True) if home == "disk")
    read = profile.bytes - on_disk
    in_memory = read - on_cards
    # a mapped file is used in place; GPU weights, and all of an unmapped file, are copied by one thread
    kept_gb = 0 if settings.mmap else in_memory / 1e9
    copy_s = on_cards / 1e9 / rates.read_copy_gb_s
    copy_s += kept_gb / (rates.read_pinned_gb_s if placement.gpus else rates.read_copy_gb_s)
    copy_s += rates.gpu_start_s if placement.gpus else 0.0
    notes = []
    warm_s: float | None = copy_s
    memory = _memory_bytes(machine)
    cached = read + (0 if settings.mmap else in_memory)
    if memory is not None and cached > memory:
        warm_s = None
        extra = "" if settings.mmap else " in addition to the loaded copy"
        notes.append(f"every load is cold: the page cache cannot hold {format_bytes(read)} of files{extra}")
    rate = _disk_gb_s(machine)
    if rate is None:
        times = ", ".join(
            f"{format_seconds(max(read / gb_s / 1e9, copy_s))} from {name} at {gb_s:g} GB/s"
            for name, gb_s in (("a hard disk", HDD_GB_S), ("SATA", SATA_GB_S), ("NVMe", NVME_GB_S))
        )
        notes.append(f"the disk's rate is unknown: a cold load takes {times}; tokenmill probe --measure measures it")
        return Load(None, warm_s, None, tuple(notes))
    disk_s = read / rate / 1e9
    cold_s = max(disk_s, copy_s)
    bound = "disk" if disk_s >= copy_s else "copying"
    if cold_s > SLOW_S:
        notes.append(
            f"a cold load takes {format_seconds(cold_s)}: {format_bytes(read)} at {read / cold_s / 1e9:.2g} GB/s"
        )
    return Load(cold_s, cold_s if warm_s is None else warm_s, bound, tuple(notes))


def _memory_bytes(machine: Machine) -> int | None:
    """Size of system memory, page cache included."""
    pmem = machine.pmem
    if pmem is not None and pmem.mode in ("memory", "mixed"):
        return pmem.memory_mode_bytes
    return machine.dram.total_bytes


def _disk_gb_s(machine: Machine) -> float | None:
    measured = machine.measured.gb_s("disk") if machine.measured else None
    return measured if measured is not None else machine.disk.nominal_gb_s if machine.disk else None
