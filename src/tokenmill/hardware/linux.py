"""What the kernel says of memory, NUMA nodes, swap, huge pages and itself, from /proc and /sys.

Nothing here needs root; nothing here knows which modules the memory is made of (see dmi and dram).
"""

import re

from tokenmill.hardware.cpu import parse_numbers
from tokenmill.hardware.host import Host, number
from tokenmill.hardware.machine import HugePages, Note, NumaNode, Swap
from tokenmill.units import KIB, format_bytes

_NODES = "/sys/devices/system/node"
_MM = "/sys/kernel/mm"


def parse_meminfo(text: str) -> dict[str, int]:
    """Field to bytes, or to a count where the kernel gives no unit; a node's own file has a prefix."""
    found = {}
    for line in text.splitlines():
        match = re.fullmatch(r"(?:Node \d+ )?([\w()]+):\s+(\d+)( kB)?\s*", line)
        if match:
            found[match[1]] = int(match[2]) * (KIB if match[3] else 1)
    return found


def read_numa(host: Host, total_bytes: int | None) -> tuple[tuple[NumaNode, ...], list[Note]]:
    """Return every node that is online, and what is odd about them beside the system's total."""
    nodes = []
    for folder in host.glob(f"{_NODES}/node[0-9]*"):
        memory = parse_meminfo(host.text(f"{folder}/meminfo") or "")
        nodes.append(
            NumaNode(
                index=int(folder.rpartition("node")[2]),
                cpus=parse_numbers(host.text(f"{folder}/cpulist") or ""),
                memory_bytes=memory.get("MemTotal"),
                free_bytes=memory.get("MemFree"),
                distances=tuple(int(part) for part in (host.text(f"{folder}/distance") or "").split()),
            )
        )
    notes = [
        Note(
            f"numa[{node.index}]",
            f"{format_bytes(node.memory_bytes)} without processors of its own (CXL, PMem as "
            "system RAM, or HBM): its speed is not that of the other memory, and it is counted in with it",
        )
        for node in nodes
        if not node.cpus and node.memory_bytes
    ]
    shown = sum(node.memory_bytes or 0 for node in nodes)
    if shown and total_bytes and abs(shown - total_bytes) > total_bytes // 10:
        notes.append(
            Note(
                "numa",
                f"the nodes show {format_bytes(shown)}, the system {format_bytes(total_bytes)}: a "
                "hypervisor hands out memory as it is used, so the nodes grow",
            )
        )
    if not nodes:
        notes.append(Note("numa", f"the kernel shows no nodes under {_NODES}: numactl --hardware may"))
    return tuple(nodes), notes


def read_swap(host: Host, meminfo: dict[str, int]) -> tuple[Swap | None, list[Note]]:
    """Return swap, and say where it is not on a disk at all."""
    total = meminfo.get("SwapTotal")
    if total is None:
        return None, []
    used = total - meminfo["SwapFree"] if "SwapFree" in meminfo else None
    lines = (host.text("/proc/swaps") or "").splitlines()[1:]
    zram = [line.split()[0] for line in lines if "zram" in line]
    notes = [Note("swap", f"{', '.join(zram)} is compressed memory, not disk: weights do not compress")] if zram else []
    return Swap(total, used), notes


def read_huge_pages(host: Host, meminfo: dict[str, int]) -> tuple[HugePages | None, list[Note]]:
    """Return the default huge page pool and the transparent setting; other pools become notes."""
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
                    f"{count} more pages of {format_bytes(size)} are set aside: memory that "
                    "only programs asking for them can use",
                )
            )
    return (None if pages == HugePages() else pages), notes


def read_os(host: Host) -> str | None:
    """Return `Debian GNU/Linux 12 (bookworm), Linux 6.1.0-26-amd64`."""
    name = re.search(r'^PRETTY_NAME="?(.*?)"?$', host.text("/etc/os-release") or "", re.MULTILINE)
    release = (host.text("/proc/sys/kernel/osrelease") or "").strip()
    return ", ".join([*([name[1]] if name else []), *([f"Linux {release}"] if release else [])]) or None
