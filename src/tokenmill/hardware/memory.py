"""Reads ordinary memory (size, modules, channels, speed), NUMA nodes, swap, huge pages and the operating system.

Channels are counted only if the slot names contain them; if a board just numbers its slots, they are unknown.
"""

import re
from collections import Counter
from collections.abc import Sequence

from tokenmill.hardware.dmi import Module
from tokenmill.hardware.host import Host, number
from tokenmill.hardware.machine import Dimm, Dram, HugePages, Note, NumaNode, Swap
from tokenmill.units import KIB, format_bytes, parse_ranges

# channel names of board makers: the channel in group c, the socket or controller in group s
_NAMINGS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(?P<s>(?:P|CPU|PROC)\d+)[-_ ](?:MC\d[-_ ])?(?:DIMM[-_ ]?)?(?P<c>[A-Z])\d?",  # P1-DIMMA1, CPU1_DIMM_A1
        r"DIMM[-_ ](?P<s>P\d+)[-_ ](?P<c>[A-Z])\d?",  # DIMM_P0_A0
        r"(?P<s>CPU\d+)[-_ ]C(?P<c>\d+)D\d+",  # CPU0_C1D0
        r"(?:DIMM|DDR\d)[-_ ]?(?P<c>[A-Z])\d?",  # DIMMA1, DIMM_A1, DDR4_A1
        r"(?P<s>.*?)CHANNEL[-_ ]?(?P<c>[A-Z](?:/[A-Z])?|\d+)(?:[-_ ].*)?",  # P0 CHANNEL A, P0_Node0_Channel1_Dimm0
    )
)
_CHANNEL_BITS = 64  # data bits; firmware counts narrower devices (LPDDR) in different ways


def make_dram(
    total_bytes: int | None, available_bytes: int | None, slots: Sequence[Module] | None, *, virtual: bool = False
) -> tuple[Dram, list[Note]]:
    """Combine the facts of kernel and firmware; `slots` is None if the module list cannot be read."""
    if slots is None:
        return Dram(total_bytes, available_bytes), []
    modules = [slot for slot in slots if slot.size_bytes and not slot.is_pmem]
    kinds = {module.kind for module in modules}
    kind = kinds.pop() if len(kinds) == 1 else None
    channels, channel_notes = count_channels(modules)
    mts, speed_notes = _speed(modules)
    if virtual:
        note = "the hypervisor reports virtual modules; run sudo dmidecode -t 17 on its host for channels and speed"
        channels = None
        channel_notes = [Note("dram.nominal_gb_s", note)]
        mts = None
        speed_notes = []
    dram = Dram(
        total_bytes=total_bytes,
        available_bytes=available_bytes,
        kind=kind,
        dimms=tuple(
            Dimm(
                module.locator,
                module.size_bytes or 0,
                module.kind,
                module.rated_mts,
                module.configured_mts,
                module.bank,
            )
            for module in modules
        ),
        slots=len(slots),
        channels=channels,
        mts=mts,
        nominal_gb_s=round(channels * mts * 8 / 1000, 1) if channels and mts else None,
    )
    return dram, [*channel_notes, *speed_notes]


def count_channels(modules: Sequence[Module]) -> tuple[int | None, list[Note]]:
    """Count populated channels over all sockets by the names of modules or banks; None with a note if unknown."""
    if not modules:
        return None, []
    odd = sorted({module.width_bits for module in modules if module.width_bits not in (None, _CHANNEL_BITS)}, key=str)
    if odd:
        return None, [
            Note(
                "dram.channels",
                f"modules of {odd[0]} data bits are not one channel each; see the CPU's data sheet for the bandwidth",
            )
        ]
    places = [(module.locator, module.bank or "") for module in modules]
    named = _named([locator for locator, _ in places], places=[locator for locator, _ in places])
    named = named or _named([bank for _, bank in places], places=places)
    if named is None:
        example = ", ".join(sorted({f"{locator} ({bank})" if bank else locator for locator, bank in places})[:2])
        text = f"the slot names ({example}) do not contain channels; see the board's manual"
        return None, [Note("dram.channels", text)]
    return len(named), []


def _named(names: list[str], *, places: Sequence[object]) -> set[tuple[str, str]] | None:
    """Return the channels if one naming matches all modules and all places are distinct."""
    if len(set(places)) < len(places):
        return None
    for naming in _NAMINGS:
        matches = [naming.fullmatch(name.strip()) for name in names]
        if all(matches):
            groups = [match.groupdict() for match in matches if match]
            return {((group.get("s") or "").upper(), group["c"].upper()) for group in groups}
    return None


def _speed(modules: Sequence[Module]) -> tuple[int | None, list[Note]]:
    """Return the speed of the slowest module, which limits all others, and notes on unused speed."""
    configured = Counter(module.configured_mts for module in modules if module.configured_mts)
    rated = [module.rated_mts for module in modules if module.rated_mts]
    if not configured:
        text = (
            f"the firmware reports a rating of {min(rated)} MT/s, but not the speed in use"
            if rated
            else "the firmware reports no memory speed"
        )
        return None, [Note("dram.mts", f"{text}; see the BIOS setup")] if modules else []
    slowest = min(configured)
    notes = []
    if len(configured) > 1:
        spread = ", ".join(f"{count} at {mts} MT/s" for mts, count in sorted(configured.items()))
        notes.append(Note("dram.mts", f"mixed speeds ({spread}); the lowest counts"))
    if rated and min(rated) > slowest:
        why = "two modules per channel, the CPU's limit, or a profile (XMP, EXPO) that is not set in the BIOS"
        notes.append(Note("dram.mts", f"the modules are rated for {min(rated)} MT/s but run at {slowest}: {why}"))
    return slowest, notes


_NODES = "/sys/devices/system/node"
_MM = "/sys/kernel/mm"


def parse_meminfo(text: str) -> dict[str, int]:
    """Parse /proc/meminfo, or that of a node, into bytes by field; fields without a unit are counts."""
    found = {}
    for line in text.splitlines():
        match = re.fullmatch(r"(?:Node \d+ )?([\w()]+):\s+(\d+)( kB)?\s*", line)
        if match:
            found[match[1]] = int(match[2]) * (KIB if match[3] else 1)
    return found


def read_numa(host: Host, total_bytes: int | None) -> tuple[tuple[NumaNode, ...], list[Note]]:
    """Return all online nodes, and notes on nodes without CPUs or with unexpected sizes."""
    nodes = []
    for folder in host.glob(f"{_NODES}/node[0-9]*"):
        memory = parse_meminfo(host.text(f"{folder}/meminfo") or "")
        nodes.append(
            NumaNode(
                index=int(folder.rpartition("node")[2]),
                cpus=parse_ranges(host.text(f"{folder}/cpulist") or ""),
                memory_bytes=memory.get("MemTotal"),
                free_bytes=memory.get("MemFree"),
                distances=tuple(int(part) for part in (host.text(f"{folder}/distance") or "").split()),
            )
        )
    notes = [
        Note(
            f"numa[{node.index}]",
            f"{format_bytes(node.memory_bytes)} without CPUs (CXL, PMem as system RAM, or HBM), counted as ordinary "
            "memory although its speed differs",
        )
        for node in nodes
        if not node.cpus and node.memory_bytes
    ]
    shown = sum(node.memory_bytes or 0 for node in nodes)
    if shown and total_bytes and abs(shown - total_bytes) > total_bytes // 10:
        notes.append(
            Note(
                "numa",
                f"the nodes have {format_bytes(shown)}, the system {format_bytes(total_bytes)}: the hypervisor assigns "
                "memory to nodes when it is used",
            )
        )
    if not nodes:
        notes.append(Note("numa", f"the kernel shows no nodes in {_NODES}; numactl --hardware may show them"))
    return tuple(nodes), notes


def read_swap(host: Host, meminfo: dict[str, int]) -> tuple[Swap | None, list[Note]]:
    """Return swap, and a note if it is in compressed memory."""
    total = meminfo.get("SwapTotal")
    if total is None:
        return None, []
    used = total - meminfo["SwapFree"] if "SwapFree" in meminfo else None
    lines = (host.text("/proc/swaps") or "").splitlines()[1:]
    zram = [line.split()[0] for line in lines if "zram" in line]
    notes = (
        [Note("swap", f"{', '.join(zram)} is compressed memory, not a disk, and weights are incompressible")]
        if zram
        else []
    )
    return Swap(total, used), notes


def read_huge_pages(host: Host, meminfo: dict[str, int]) -> tuple[HugePages | None, list[Note]]:
    """Return the default huge page pool, the transparent setting, and notes on other pools."""
    chosen = re.search(r"\[(\w+)]", host.text(f"{_MM}/transparent_hugepage/enabled") or "")
    pages = HugePages(
        transparent=chosen[1] if chosen else None,
        page_bytes=meminfo.get("Hugepagesize"),
        total=meminfo.get("HugePages_Total"),
        free=meminfo.get("HugePages_Free"),
    )
    notes = []
    for folder in host.glob(f"{_MM}/hugepages/hugepages-*kB"):
        size = int(folder.rpartition("-")[2].removesuffix("kB")) * KIB
        count = number(host.text(f"{folder}/nr_hugepages"))
        if count and size != pages.page_bytes:
            notes.append(
                Note(
                    "huge_pages",
                    f"{count} more pages of {format_bytes(size)} are reserved, which only programs that request them "
                    "can use",
                )
            )
    return (None if pages == HugePages() else pages), notes


def read_os(host: Host) -> str | None:
    """Return `Debian GNU/Linux 12 (bookworm), Linux 6.1.0-26-amd64`."""
    name = re.search(r'^PRETTY_NAME="?(.*?)"?$', host.text("/etc/os-release") or "", re.MULTILINE)
    release = (host.text("/proc/sys/kernel/osrelease") or "").strip()
    return ", ".join([*([name[1]] if name else []), *([f"Linux {release}"] if release else [])]) or None
