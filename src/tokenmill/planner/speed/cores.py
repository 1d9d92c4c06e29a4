"""What one CPU core computes: the width of its vector unit and its clock.

    baseline   AVX2, and AVX-512 without VNNI, whose lower clock takes what its width gives (Zen 2 and 3, Skylake-X)
    vnni       8-bit dot products at 256 bits, or at 512 with a lower clock (Alder Lake; Cascade Lake, Ice Lake)
    wide       8-bit dot products and BF16 at 512 bits (Zen 4 and 5, Sapphire Rapids and newer)

The flags decide, and the model's name where a machine file lists only some of them. Clock rates are not read from the
system, because what counts is the clock with all cores busy; a machine file can state it.
"""

import re
from typing import Literal

from tokenmill.hardware.machine import Cpu, Machine
from tokenmill.planner.speed.rates import RateConstants

CoreKind = Literal["baseline", "vnni", "wide"]
_ZEN5 = re.compile(r"EPYC \d{3}5|EPYC 9\d{2}5|Ryzen (?:AI|[3579] 9\d{3})|Threadripper(?: PRO)? 9")
_REFERENCE_CORES = 16  # a socket with as many cores runs them at about the reference clock
_REFERENCE_GHZ = 4.0
_TURBO = 1.2  # clock of all cores in vector code over the base clock that Intel's older server parts have in their name


def core_kind(cpu: Cpu) -> CoreKind:
    """The kind of core, from the flags and the model's name."""
    flags = set(cpu.isa)
    if is_zen5(cpu) or flags >= {"avx512_vnni", "avx512_bf16"}:
        return "wide"
    if flags & {"avx_vnni", "avx512_vnni", "i8mm"}:
        return "vnni"
    return "baseline"


def is_zen5(cpu: Cpu) -> bool:
    """Whether the model's name is one of AMD's fifth Zen generation."""
    return _ZEN5.search(cpu.model or "") is not None


def is_xeon(cpu: Cpu) -> bool:
    """Whether the cores share Intel's mesh, which answers one core more slowly than AMD's fabric."""
    return re.search(r"Xeon|Core\W.*X\b|i9-(7|9|10)9\d\d?X", cpu.model or "") is not None


def relative_clock(cpu: Cpu, rates: RateConstants) -> float:
    """The clock with all cores busy, where 1 is 4 GHz: CPUs with many cores clock lower."""
    if cpu.all_core_ghz is not None:
        return cpu.all_core_ghz / _REFERENCE_GHZ
    base = re.search(r"@ (\d\.\d+)\s?GHz", cpu.model or "")
    if base is not None:
        return min(1.0, float(base[1]) * _TURBO / _REFERENCE_GHZ)
    if cpu.cores is None:
        return 1.0
    per_socket = cpu.cores / (cpu.sockets or 1)
    return float(min(1.0, (_REFERENCE_CORES / per_socket) ** rates.crowding))


def core_value(machine: Machine, rates: RateConstants) -> float:
    """The part of a bare-metal core that one core of this machine is worth.

    A guest on a host of its own loses little. A cloud provider hides the model's name, and sells threads of shared
    cores as cores.
    """
    if machine.virtual is None:
        return 1.0
    return rates.shared_virtual_core if is_shared_guest(machine) else rates.virtual_core


def is_shared_guest(machine: Machine) -> bool:
    """Whether the machine is a cloud guest, which shows no model number."""
    return machine.virtual is not None and re.search(r"\d{3}", machine.cpu.model or "") is None
