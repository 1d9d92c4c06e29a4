"""Predicts how fast the CPU reads each host memory: measured rates, or nominal ones times a fitted fraction.

Covers chiplets, sockets and PMem with a DRAM cache. Unknown rates are None; assumptions are reported in notes.
"""

import re
from bisect import bisect_left
from dataclasses import dataclass, field

from tokenmill.hardware.machine import Machine, Rate
from tokenmill.planner.speed.cores import is_zen5
from tokenmill.planner.speed.rates import RateConstants
from tokenmill.units import MIB

CHIPLET_L3 = 32 * MIB
STACKED_CHIPLET_L3 = 96 * MIB  # EPYC models whose names end in X
FABRIC_DDR4_GHZ = 1.6  # the fabric runs at half the memory's transfer rate, up to this
FEW_CHIPLETS = 4
BYTES_PER_TRANSFER = 8
KNEE = 4.0  # sharpness of the transition between the threads' demand and the memory's limit


@dataclass(frozen=True, slots=True)
class MemoryRate:
    """Read rate of one memory as a function of the number of threads."""

    peak_gb_s: float
    by_threads: dict[int, float] = field(default_factory=dict)  # measured rates; empty: not measured
    pmem_gb_s: float | None = None  # Memory Mode: rate of reads that miss the DRAM cache
    hits: float = 1.0  # share of reads served by the DRAM cache

    def at(self, threads: int, core_gb_s: float) -> float:
        """GB/s with `threads` threads, each of which reads at most `core_gb_s` alone."""
        dram = self._curve(threads) if self.by_threads else smooth_min(self.peak_gb_s, threads * core_gb_s)
        if self.pmem_gb_s is None or self.hits >= 1.0:
            return dram
        return 1.0 / (self.hits / dram + (1.0 - self.hits) / self.pmem_gb_s)

    def _curve(self, threads: int) -> float:
        counts = sorted(self.by_threads)
        if threads >= counts[-1]:
            return self.by_threads[counts[-1]]
        if threads <= counts[0]:
            return self.by_threads[counts[0]] * threads / counts[0]
        upper = bisect_left(counts, threads)
        low = counts[upper - 1]
        high = counts[upper]
        part = (threads - low) / (high - low)
        return self.by_threads[low] * (1 - part) + self.by_threads[high] * part


def smooth_min(first: float, second: float) -> float:
    """A smooth minimum of two rates."""
    return float((first**-KNEE + second**-KNEE) ** (-1 / KNEE))


def memory_rate(
    machine: Machine, tier: str, resident_bytes: float, rates: RateConstants, notes: list[str]
) -> MemoryRate | None:
    """Read rate of one host tier; None if neither a nominal nor a measured rate is known.

    `resident_bytes` of the model live there; in Memory Mode the DRAM caches a share of them.
    """
    found = next((item for item in machine.tiers() if item.name == tier), None)
    if found is None:
        return None
    if found.cached_by is not None:
        return _cached(machine, resident_bytes, rates, notes)
    measured = _measured(machine, tier)
    if measured is not None:
        return _scaled(measured, rates.measured_fraction * _measured_share(machine, rates, notes))
    if found.nominal_gb_s is None:
        return None
    if found.kind == "dram":
        return MemoryRate(_dram_peak(machine, found.nominal_gb_s, rates, notes))
    return MemoryRate(found.nominal_gb_s * (rates.pmem_fraction if found.kind == "pmem" else 1.0))


def _dram_peak(machine: Machine, nominal_gb_s: float, rates: RateConstants, notes: list[str]) -> float:
    peak = nominal_gb_s * (rates.ddr4_fraction if _is_ddr4(machine) else rates.ddr5_fraction)
    links = _chiplet_gb_s(machine, rates)
    if links is not None and links < peak:
        notes.append(f"the links between the CPU's chiplets and memory limit reads to {links:.0f} of {peak:.0f} GB/s")
        peak = links
    return peak * _sockets_share(machine, rates, notes)


def _sockets_share(machine: Machine, rates: RateConstants, notes: list[str]) -> float:
    """Share of all sockets' rate that one pool of threads reads: most of its reads cross to another socket."""
    if (machine.cpu.sockets or 1) == 1:
        return 1.0
    notes.append(
        "two sockets: the forecast assumes one pool of threads with memory interleaved over both; one engine per "
        "socket, each with its own copy of the model, decodes a batch faster"
    )
    return rates.numa_fraction


def _measured_share(machine: Machine, rates: RateConstants, notes: list[str]) -> float:
    """The same for a measured rate, which one NUMA node over both sockets already reduces."""
    return 1.0 if len(machine.numa) == 1 else _sockets_share(machine, rates, notes)


def _chiplet_gb_s(machine: Machine, rates: RateConstants) -> float | None:
    """Total read rate of an AMD CPU's chiplets, counted by the size of the L3 cache; None for other CPUs."""
    cpu = machine.cpu
    dram = machine.dram
    model = cpu.model or ""
    if cpu.l3_bytes is None or dram.mts is None or not re.search(r"AMD|EPYC|Ryzen|Threadripper", model):
        return None
    stacked = re.search(r"EPYC \d{4}X\b", model) is not None
    count = max(1, round(cpu.l3_bytes / (STACKED_CHIPLET_L3 if stacked else CHIPLET_L3)))
    if _is_ddr4(machine):
        clock_ghz = min(dram.mts / 2000, FABRIC_DDR4_GHZ)
    else:
        clock_ghz = rates.chiplet_clock_zen5_ghz if is_zen5(cpu) else rates.chiplet_clock_zen4_ghz
    # EPYC 9004 and 9005 give each chiplet two links if there are four or fewer
    links = 2 if re.search(r"EPYC 9\d{2}[45]", model) and count <= FEW_CHIPLETS * (cpu.sockets or 1) else 1
    return count * links * rates.chiplet_bytes_per_clock * clock_ghz


def _cached(machine: Machine, resident_bytes: float, rates: RateConstants, notes: list[str]) -> MemoryRate | None:
    """Memory Mode: DRAM caches a share of the model; its hit rate is higher than that share."""
    pmem = machine.pmem
    dram = _dram_cache(machine, rates, notes)
    if pmem is None or pmem.nominal_gb_s is None or dram is None:
        return None
    size = machine.dram.total_bytes
    if size is None:
        size = round((pmem.memory_mode_bytes or pmem.total_bytes or 0) * rates.memory_mode_ratio)
        notes.append(f"the size of the DRAM cache is unknown: assumed {rates.memory_mode_ratio:.0%} of the PMem")
    held = min(1.0, size / resident_bytes) if resident_bytes else 1.0
    return MemoryRate(dram.peak_gb_s, dram.by_threads, pmem.nominal_gb_s * rates.pmem_fraction, held**rates.cache_reuse)


def _dram_cache(machine: Machine, rates: RateConstants, notes: list[str]) -> MemoryRate | None:
    """The rate of the DRAM cache."""
    measured = _measured(machine, "dram")
    if measured is not None:
        return _scaled(measured, rates.measured_fraction)
    nominal = machine.dram.nominal_gb_s
    if nominal is None and machine.pmem is not None and machine.pmem.dimms is not None:
        nominal = machine.pmem.dimms * rates.memory_mode_mts * BYTES_PER_TRANSFER / 1000
        notes.append(
            f"the bandwidth of the DRAM cache is unknown: assumed {nominal:.0f} GB/s, because in Memory Mode it uses "
            f"the {machine.pmem.dimms} channels of the PMem"
        )
    return None if nominal is None else MemoryRate(nominal * rates.ddr4_fraction)


def _is_ddr4(machine: Machine) -> bool:
    return (machine.dram.kind or "").upper().startswith(("DDR4", "DDR3", "LPDDR4"))


def _measured(machine: Machine, path: str) -> Rate | None:
    if machine.measured is None:
        return None
    return next((rate for rate in machine.measured.rates if rate.path == path), None)


def _scaled(rate: Rate, part: float) -> MemoryRate:
    return MemoryRate(rate.gb_s * part, {threads: gb_s * part for threads, gb_s in rate.by_threads.items()})
