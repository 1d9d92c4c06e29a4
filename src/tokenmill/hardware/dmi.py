"""Reads the firmware's list of memory modules: SMBIOS type 17, from the raw table or from dmidecode.

Only root can read the table (DMTF DSP0134, section 7.18) or run dmidecode, which prints the same records. The format of
locators differs between board makers; `memory` interprets them.
"""

import re
from dataclasses import dataclass
from struct import unpack_from

from tokenmill.hardware.host import Host
from tokenmill.hardware.machine import Note
from tokenmill.units import GIB, KIB, MIB, TIB

TABLE = "/sys/firmware/dmi/tables/DMI"

_KINDS = {
    0x03: "DRAM",
    0x07: "RAM",
    0x08: "ROM",
    0x09: "Flash",
    0x0F: "SDRAM",
    0x12: "DDR",
    0x13: "DDR2",
    0x18: "DDR3",
    0x1A: "DDR4",
    0x1B: "LPDDR",
    0x1C: "LPDDR2",
    0x1D: "LPDDR3",
    0x1E: "LPDDR4",
    0x1F: "Logical non-volatile device",
    0x20: "HBM",
    0x21: "HBM2",
    0x22: "DDR5",
    0x23: "LPDDR5",
    0x24: "HBM3",
}
_TECHNOLOGIES = {
    0x03: "DRAM",
    0x04: "NVDIMM-N",
    0x05: "NVDIMM-F",
    0x06: "NVDIMM-P",
    0x07: "Intel Optane persistent memory",
    0x08: "MRDIMM",
}
_NOT_MEMORY = {"ROM", "Flash", "EEPROM", "FEPROM", "EPROM", "CDRAM", "VRAM"}  # old boards list their BIOS chip
_CACHE_DRAM = 1 << 11  # bit of "type detail": DRAM that caches persistent memory
_SIZES = {"bytes": 1, "kB": KIB, "MB": MIB, "GB": GIB, "TB": TIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}


@dataclass(frozen=True, slots=True)
class Module:
    """One memory slot and the module in it."""

    locator: str
    bank: str | None = None
    size_bytes: int | None = None  # 0: empty slot; None: not reported
    kind: str | None = None
    technology: str | None = None
    width_bits: int | None = None  # data bits, without ECC
    rated_mts: int | None = None
    configured_mts: int | None = None
    volatile_bytes: int | None = None
    persistent_bytes: int | None = None
    caches: bool = False  # DRAM that caches persistent memory

    @property
    def is_pmem(self) -> bool:
        """Whether this is persistent memory; it never counts as DRAM."""
        words = f"{self.kind} {self.technology}"
        return any(word in words for word in ("non-volatile", "persistent memory", "Optane", "NVDIMM"))


def read_modules(host: Host) -> tuple[tuple[Module, ...] | None, list[Note]]:
    """Return all slots, or None and a note with the way to list them."""
    table = host.data(TABLE)
    if table:
        return parse_table(table), []
    answer = host.run("dmidecode", "-t", "17")
    modules = parse_dmidecode(answer.out) if answer and answer.code == 0 else ()
    if modules:
        return modules, []
    if host.exists(TABLE) or (answer and "ermission denied" in f"{answer.out}{answer.err}"):
        text = f"only root can read the module list ({TABLE}): run sudo dmidecode -t 17, or sudo tokenmill probe"
    elif answer is None:
        text = (
            f"{TABLE} does not exist, and dmidecode is not installed: apt-get install dmidecode, then "
            "sudo dmidecode -t 17 (a virtual machine may have no list)"
        )
    else:
        text = "sudo dmidecode -t 17 lists no modules: the firmware or the hypervisor does not report them"
    return None, [Note("dram.dimms", text)]


def parse_dmidecode(text: str) -> tuple[Module, ...]:
    """Parse the output of `dmidecode -t 17` (or of all types)."""
    modules = []
    for record in re.split(r"\n(?=Handle 0x)", text):
        if not re.search(r"^\s*Memory Device\s*$", record, re.MULTILINE):
            continue
        fields = dict(re.findall(r"^\s+([^:\n]+): *(.*?)\s*$", record, re.MULTILINE))
        kind = _known(fields.get("Type"))
        technology = _known(fields.get("Memory Technology"))
        if kind in _NOT_MEMORY:
            continue
        modules.append(
            Module(
                locator=fields.get("Locator", ""),
                bank=_known(fields.get("Bank Locator")),
                size_bytes=0 if fields.get("Size") == "No Module Installed" else _size(fields.get("Size")),
                kind=kind,
                technology=technology,
                width_bits=_leading(fields.get("Data Width")),
                rated_mts=_leading(fields.get("Speed")),
                # dmidecode before 3.2 calls it a clock and writes MHz, but prints the same number
                configured_mts=_leading(fields.get("Configured Memory Speed") or fields.get("Configured Clock Speed")),
                volatile_bytes=_size(fields.get("Volatile Size")),
                persistent_bytes=_size(fields.get("Non-Volatile Size")),
                caches="Cache DRAM" in fields.get("Type Detail", ""),
            )
        )
    return tuple(modules)


def parse_table(table: bytes) -> tuple[Module, ...]:
    """Parse the raw structure table up to its end or to a damaged entry."""
    modules = []
    at = 0
    while at + 4 <= len(table):
        kind = table[at]
        length = table[at + 1]
        end = table.find(b"\0\0", at + length)
        if length < 4 or end < 0 or kind == 127:
            break
        if kind == 17 and length >= 0x15:
            # fields that this SMBIOS version lacks become zero, which means "not given" in all of them
            body = table[at : at + length].ljust(0x60, b"\0")
            module = _module(body, table[at + length : end].split(b"\0"))
            if module.kind not in _NOT_MEMORY:
                modules.append(module)
        at = end + 2
    return tuple(modules)


def _module(body: bytes, strings: list[bytes]) -> Module:
    def string(offset: int) -> str | None:
        index = body[offset]
        return strings[index - 1].decode(errors="replace").strip() if 0 < index <= len(strings) else None

    def word(offset: int) -> int:
        return int(unpack_from("<H", body, offset)[0])

    def speed(offset: int, extended: int) -> int | None:
        value = word(offset)
        return (int(unpack_from("<I", body, extended)[0]) if value == 0xFFFF else value) or None

    def share(offset: int) -> int | None:
        value = int(unpack_from("<Q", body, offset)[0])
        return None if value in (0, (1 << 64) - 1) else value

    return Module(
        locator=string(0x10) or "",
        bank=_known(string(0x11)),
        size_bytes=_table_size(word(0x0C), int(unpack_from("<I", body, 0x1C)[0])),
        kind=_KINDS.get(body[0x12]),
        technology=_TECHNOLOGIES.get(body[0x28]),
        width_bits=None if word(0x0A) in (0, 0xFFFF) else word(0x0A),
        rated_mts=speed(0x15, 0x54),
        configured_mts=speed(0x20, 0x58),
        volatile_bytes=share(0x3C),
        persistent_bytes=share(0x34),
        caches=bool(word(0x13) & _CACHE_DRAM),
    )


def _table_size(size: int, extended_mib: int) -> int | None:
    if size == 0xFFFF:
        return None
    if size == 0x7FFF:
        return (extended_mib & 0x7FFFFFFF) * MIB
    return (size & 0x7FFF) * (KIB if size & 0x8000 else MIB)


def _size(text: str | None) -> int | None:
    """Parse `64 GB` or `65536 MB`; all units of dmidecode are binary."""
    match = re.fullmatch(r"(\d+) (\w+)", text or "")
    return int(match[1]) * _SIZES[match[2]] if match and match[2] in _SIZES else None


def _leading(text: str | None) -> int | None:
    """Parse the number of `3200 MT/s` or `64 bits`; None for `Unknown`."""
    match = re.match(r"(\d+) ", text or "")
    return int(match[1]) or None if match else None


def _known(text: str | None) -> str | None:
    return None if text in (None, "", "Unknown", "Not Specified", "Other", "<OUT OF SPEC>", "None") else text
