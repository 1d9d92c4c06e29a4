"""Machines of published runs, made from what a record states and from the specification of its parts.

A record states the processor, the memory and the cards. The tables below add what every specimen of a part has: the
instruction sets and the L3 cache of a processor, the bandwidth, the memory and the link of a card.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill.hardware.machine import Cpu, Dram, Gpu, Machine, Measurements, NumaNode, PcieLink, Rate
from tokenmill.units import GIB, MIB

_AVX2 = ("avx2", "fma", "f16c")
_SKYLAKE = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
_CASCADE = (*_SKYLAKE, "avx512_vnni")
_ZEN4 = (*_CASCADE, "avx512_vbmi", "avx512_bf16")
_ZEN5 = (*_ZEN4, "avx_vnni")
_SAPPHIRE = (*_ZEN5, "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16")
_ALDER = (*_AVX2, "avx_vnni")
_ARM = ("neon", "dotprod", "i8mm", "bf16")


@dataclass(frozen=True, slots=True)
class _Processor:
    pattern: str
    isa: tuple[str, ...]
    l3_mib_per_core: float  # of a specimen with the usual number of cores; only AMD's matters
    cores: int | None = None  # of one socket, where the name determines it
    memory: tuple[int, int] | None = None  # channels of one socket and MT/s, if the record states neither

    @property
    def pcie(self) -> int:
        """Generation of its PCIe links."""
        if self.isa == _AVX2:
            return 4 if re.search("EPYC|WX|Ryzen", self.pattern) else 3
        return 3 if self.isa in (_SKYLAKE, _CASCADE) else 4 if "avx_vnni" not in self.isa else 5


# Servers whose record states no memory are taken to have all channels of the platform populated.
_PROCESSORS = (
    _Processor(r"7773X", _AVX2, 12, 64, (8, 3200)),
    _Processor(r"9115", _ZEN5, 4, 16, (12, 5600)),
    _Processor(r"5975WX", _AVX2, 4, 32, (8, 3200)),
    _Processor(r"6226R", _CASCADE, 1.375, 16, (6, 2933)),
    _Processor(r"8480\+", _SAPPHIRE, 2, 56, (8, 4800)),
    _Processor(r"E5-26\d\d\w* ?v3", _AVX2, 2.5, None, (4, 2133)),
    _Processor(r"E5-26\d\d\w* ?v4", _AVX2, 2.5, None, (4, 2400)),
    _Processor(r"9175F", _ZEN5, 32, 16),
    _Processor(r"9135", _ZEN5, 4, 16),
    _Processor(r"9355", _ZEN5, 8, 32),
    _Processor(r"9965", _ZEN5, 2, 192),
    _Processor(r"9575F|9555|9535", _ZEN5, 4, 64),
    _Processor(r"EPYC\D*9\d\d5|Threadripper\D*99\d5WX|Ryzen\D*9[5679]\d0|9950X|9900X", _ZEN5, 4),
    _Processor(r"Ryzen AI Max|AI Max\+|Strix Halo", _ZEN5, 4, 16),
    _Processor(r"EPYC\D*9\d\d4X", _ZEN4, 12),
    _Processor(r"9334|9374F|9354|9274F", _ZEN4, 8),
    _Processor(r"EPYC\D*[89]\d\d4|Threadripper\D*79\d[05]|Ryzen\D*[78][5679]\d0|7950X|7900X|8700G", _ZEN4, 4),
    _Processor(r"7[0-9][0-9]3X", _AVX2, 12),
    _Processor(r"7F\d2|72F3|73F3|74F3|75F3", _AVX2, 16),
    _Processor(r"3945WX|3955WX|7302|7282", _AVX2, 5.33),
    _Processor(r"EPYC\D*7\d\d[123]|EPYC|Threadripper|Ryzen", _AVX2, 4),
    _Processor(r"6980P|6972P|6960P|6944P|67\d\dP|65\d\dP|Granite", _SAPPHIRE, 4),
    _Processor(
        r"[w]\d-[23]4\d\d|[w]\d-[23]5\d\d|84\d\d|85\d\d|64\d\d|65\d\d|54\d\d|Max 94|QYFS|Q03|Sapphire|Emerald",
        _SAPPHIRE,
        2,
    ),
    _Processor(r"83\d\d|63\d\d|53\d\d|w\d-33\d\d|W-33\d\d|Ice ?Lake", (*_CASCADE, "avx512_vbmi"), 1.5),
    _Processor(r"82\d\d|62\d\d|52\d\d|42\d\d|W-32\d\d|W-22\d\d|109\d\dX|1[09]980XE|Cascade|QQ89", _CASCADE, 1.375),
    _Processor(r"81\d\d|61\d\d|51\d\d|W-31\d\d|W-21\d\d|79\d0X|7980XE|Skylake", _SKYLAKE, 1.375),
    _Processor(r"Ultra|i\d-1[234]\d\d\d", _ALDER, 1.5),
    _Processor(r"i\d-11\d\d\d", _CASCADE, 2),
    _Processor(r"Grace|GB10|Ampere|Altra|Apple|M[1234] ", _ARM, 1),
    _Processor(r".", _AVX2, 2),
)


@dataclass(frozen=True, slots=True)
class _Card:
    pattern: str
    name: str
    gb_s: float
    gib: float
    generation: int
    capability: str | None
    width: int = 16


_CARDS = (
    _Card(r"PRO 6000.*Max-?Q", "RTX PRO 6000 Blackwell Max-Q", 1792, 95.6, 5, "12.0"),
    _Card(r"PRO 6000", "RTX PRO 6000 Blackwell", 1792, 95.6, 5, "12.0"),
    _Card(r"PRO 5000", "RTX PRO 5000 Blackwell", 1344, 47.8, 5, "12.0"),
    _Card(r"5090", "RTX 5090", 1792, 31.8, 5, "12.0"),
    _Card(r"5080", "RTX 5080", 960, 15.9, 5, "12.0"),
    _Card(r"5070 Ti", "RTX 5070 Ti", 896, 15.9, 5, "12.0"),
    _Card(r"5070", "RTX 5070", 672, 11.9, 5, "12.0"),
    _Card(r"5060 Ti", "RTX 5060 Ti", 448, 15.9, 5, "12.0", 8),
    _Card(r"6000 Ada", "RTX 6000 Ada", 960, 47.9, 4, "8.9"),
    _Card(r"4090", "RTX 4090", 1008, 24, 4, "8.9"),
    _Card(r"4080", "RTX 4080", 717, 16, 4, "8.9"),
    _Card(r"4070 Ti Super|4070 TiS", "RTX 4070 Ti Super", 672, 16, 4, "8.9"),
    _Card(r"4070", "RTX 4070", 504, 12, 4, "8.9"),
    _Card(r"4060 Ti", "RTX 4060 Ti", 288, 16, 4, "8.9", 8),
    _Card(r"4060", "RTX 4060", 272, 8, 4, "8.9", 8),
    _Card(r"L40S", "L40S", 864, 48, 4, "8.9"),
    _Card(r"\bL4\b", "L4", 300, 24, 4, "8.9"),
    _Card(r"A6000", "RTX A6000", 768, 48, 4, "8.6"),
    _Card(r"A5000", "RTX A5000", 768, 24, 4, "8.6"),
    _Card(r"A4000", "RTX A4000", 448, 16, 4, "8.6"),
    _Card(r"\bA40\b", "A40", 696, 48, 4, "8.6"),
    _Card(r"3090 Ti", "RTX 3090 Ti", 1008, 24, 4, "8.6"),
    _Card(r"3090", "RTX 3090", 936, 24, 4, "8.6"),
    _Card(r"3080 Ti", "RTX 3080 Ti", 912, 12, 4, "8.6"),
    _Card(r"3080", "RTX 3080", 760, 10, 4, "8.6"),
    _Card(r"3070", "RTX 3070", 448, 8, 4, "8.6"),
    _Card(r"3060", "RTX 3060", 360, 12, 4, "8.6"),
    _Card(r"2080 Ti", "RTX 2080 Ti", 616, 11, 3, "7.5"),
    _Card(r"2080", "RTX 2080", 448, 8, 3, "7.5"),
    _Card(r"\bT4\b", "Tesla T4", 320, 16, 3, "7.5"),
    _Card(r"V100", "V100", 900, 32, 3, "7.0"),
    _Card(r"P100", "P100", 732, 16, 3, "6.0"),
    _Card(r"P40", "P40", 346, 24, 3, "6.1"),
    _Card(r"A100", "A100", 2039, 80, 4, "8.0"),
    _Card(r"H200|GH200", "H200", 4800, 140, 5, "9.0"),
    _Card(r"H100 PCIe", "H100", 2039, 80, 5, "9.0"),
    _Card(r"H100", "H100", 3350, 80, 5, "9.0"),
    _Card(r"B200", "B200", 8000, 180, 5, "10.0"),
    _Card(r"MI50|MI60", "MI50", 1024, 32, 4, None),
    _Card(r"MI100", "MI100", 1229, 32, 4, None),
    _Card(r"MI300X", "MI300X", 5300, 192, 5, None),
    _Card(r"7900 XTX", "7900 XTX", 960, 24, 4, None),
    _Card(r"R9700", "Radeon AI PRO R9700", 640, 32, 5, None),
)

_READS = re.compile(r"mlc|likwid|OCCT|AIDA|read|sysbench|PassMark", re.IGNORECASE)
# STREAM and numbers without a named tool are no read rate; the one of a bus counter while decoding even less
_NO_READS = re.compile(r"triad|STREAM|during decode", re.IGNORECASE)


def machine_of(run: Mapping[str, Any]) -> Machine | None:
    """The machine of a record; None if it does not even name the processor's memory or a card."""
    facts = run["machine"]
    text = facts["cpu"] or ""
    known = next(item for item in _PROCESSORS if re.search(item.pattern, text or "none", re.IGNORECASE))
    gpus = _gpus(facts["gpus"], known.pcie if text else 4)
    if gpus is None or not (text or gpus):
        return None
    sockets = facts["sockets"] or 1
    cores = facts["cores_physical_total"] or (known.cores and known.cores * sockets) or _threads(facts)
    nominal = facts["mem_bw_theoretical_gbs"]
    channels, mts = facts["channels_total"], facts["mem_mts"]
    if nominal is None and known.memory:
        channels, mts = channels or known.memory[0] * sockets, mts or known.memory[1]
    if nominal is None and channels and mts:
        nominal = channels * mts * 8 / 1000
    how = facts.get("mem_bw_measured_how") or ""
    measured = facts["mem_bw_measured_gbs"]
    is_read = measured is not None and (not _NO_READS.search(how) or nominal is None)
    note = f"{facts.get('machine_note') or ''} {facts.get('numa') or ''}"
    return Machine(
        run["machine_group"],
        Cpu(
            _name(text),
            sockets,
            cores,
            2 if cores and "no SMT" not in note else 1,
            known.isa if text else (),
            round(known.l3_mib_per_core * cores * MIB) if cores and text else None,
            _overclock(text),
        ),
        dram=Dram(
            total_bytes=facts["ram_gb"] and round(facts["ram_gb"] * GIB),
            kind=facts["mem_type"] and str(facts["mem_type"]).split()[0],
            channels=channels,
            mts=mts,
            nominal_gb_s=nominal,
        ),
        numa=(NumaNode(0),) if "node interleaving" in note else (),
        gpus=gpus,
        virtual="KVM" if re.search(r"\bVM\b|virtual|guest|KVM|Proxmox", note) else None,
        measured=Measurements(run["source"]["date"], (Rate("dram", measured),)) if is_read else None,
    )


def _name(text: str) -> str | None:
    """The processor as lscpu names it: Intel's server parts with their base clock."""
    clock = re.search(r"(\d\.\d+) GHz", text)
    name = re.sub(r"\s*\(.*", "", text)
    return (f"{name} CPU @ {clock[1]}GHz" if clock and "Xeon" in text else name) or None


def _overclock(text: str) -> float | None:
    clock = re.search(r"(\d\.\d+) GHz", text)
    return float(clock[1]) if clock and "Xeon" not in text else None


def _threads(facts: Mapping[str, Any]) -> int | None:
    threads = facts.get("threads_tg")
    return threads if isinstance(threads, int) else None


def _gpus(stated: list[Mapping[str, Any]], host_generation: int) -> tuple[Gpu, ...] | None:
    found: list[Gpu] = []
    for row in stated:
        card = next((item for item in _CARDS if re.search(item.pattern, row["model"], re.IGNORECASE)), None)
        if card is None:
            return None
        link = re.search(r"(?:PCIe|Gen)\s*(\d)(?:\.0)?\s*x(\d+)", row["model"], re.IGNORECASE)
        pcie = PcieLink(
            max_generation=int(link[1]) if link else min(card.generation, host_generation),
            max_width=int(link[2]) if link else card.width,
        )
        for _ in range(row["count"] or 1):
            found.append(
                Gpu(
                    len(found),
                    card.name,
                    "amd" if card.capability is None else "nvidia",
                    round((row.get("vram_gb_each") or card.gib) * GIB),
                    nominal_gb_s=card.gb_s,
                    pcie=pcie,
                    compute_capability=card.capability,
                )
            )
    return tuple(found)
