"""Reads persistent memory: modules, mode and namespaces.

The mode is read from ipmctl, else from the firmware's module list, both of which need root. sysfs shows modules and
namespaces to all users, but not Memory Mode. The bandwidth is only known if `probe --measure` measures it.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.hardware.disk import MountPoint
from tokenmill.hardware.dmi import Module
from tokenmill.hardware.host import Host, number
from tokenmill.hardware.machine import Dram, Note, Pmem, PmemMode, PmemNamespace
from tokenmill.units import parse_bytes

_DEVICES = "/sys/bus/nd/devices"
_SYSFS_MODES = {"memory": "fsdax", "dax": "devdax", "safe": "sector", "raw": "raw"}


@dataclass(frozen=True, slots=True)
class Shares:
    """Volatile and persistent capacity, as reported by ipmctl or the firmware."""

    volatile_bytes: int
    persistent_bytes: int
    total_bytes: int | None = None
    cache_bytes: int | None = None  # DRAM that caches the volatile part

    @property
    def mode(self) -> PmemMode | None:
        """The mode that the capacities imply; None if nothing is provisioned."""
        if self.volatile_bytes and self.persistent_bytes:
            return "mixed"
        if self.volatile_bytes:
            return "memory"
        return "app-direct" if self.persistent_bytes else None


def read_pmem(
    host: Host, modules: Sequence[Module] | None, mounts: Sequence[MountPoint], meminfo: dict[str, int]
) -> tuple[Pmem | None, Shares | None, list[Note]]:
    """Return persistent memory and its capacities (None if there is none or they are unknown), and notes."""
    listed = [module for module in modules or () if module.is_pmem and module.size_bytes]
    seen = host.glob(f"{_DEVICES}/nmem[0-9]*")
    namespaces = _namespaces(host, mounts)
    if not (listed or seen or namespaces):
        return None, None, []
    resources = host.run("ipmctl", "show", "-memoryresources")
    shares = parse_resources(resources.out) if resources and resources.code == 0 else None
    shares = shares or shares_from_firmware(modules or ())
    dimms = host.run("ipmctl", "show", "-dimm")
    sizes = parse_dimms(dimms.out) if dimms and dimms.code == 0 else []
    mode, stated = (shares.mode, shares.total_bytes) if shares else (None, None)
    is_memory = mode in ("memory", "mixed")
    pmem = Pmem(
        mode=mode,
        dimms=len(sizes) or len(listed) or len(seen) or None,
        total_bytes=sum(sizes) or sum(module.size_bytes or 0 for module in listed) or stated,
        memory_mode_bytes=meminfo.get("MemTotal") if is_memory else None,
        available_bytes=meminfo.get("MemAvailable") if is_memory else None,
        namespaces=namespaces,
    )
    return pmem, shares, _notes(shares, namespaces)


def as_cache(dram: Dram, shares: Shares) -> Dram:
    """The DRAM as cache of Memory Mode, with the cache's size and no available memory."""
    size = shares.cache_bytes or sum(dimm.size_bytes for dimm in dram.dimms) or None
    return replace(dram, total_bytes=size, available_bytes=None)


def parse_resources(text: str) -> Shares | None:
    """Parse `ipmctl show -memoryresources`: the table of versions 2 and 3, or the lines of version 1."""
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 4:
            rows[cells[0]] = cells[1:]
    if {"Volatile", "AppDirect"} <= rows.keys():
        ddr = 0
        pmem = 1
        return Shares(
            volatile_bytes=_capacity(rows["Volatile"][pmem]) or 0,
            persistent_bytes=_capacity(rows["AppDirect"][pmem]) or 0,
            total_bytes=_capacity(rows["Physical"][pmem]) if "Physical" in rows else None,
            cache_bytes=_capacity(rows["Cache"][ddr]) or None if "Cache" in rows else None,
        )
    lines = dict(re.findall(r"^\s*(\w*Capacity)=(.+?)\s*$", text, re.MULTILINE))
    if {"MemoryCapacity", "AppDirectCapacity"} <= lines.keys():
        return Shares(
            volatile_bytes=_capacity(lines["MemoryCapacity"]) or 0,
            persistent_bytes=_capacity(lines["AppDirectCapacity"]) or 0,
            total_bytes=_capacity(lines.get("Capacity", "")),
        )
    return None


def parse_dimms(text: str) -> list[int]:
    """Parse the capacity of each module, in bytes, from `ipmctl show -dimm`."""
    rows = re.findall(r"^\s*0x[0-9a-f]+\s*\|\s*([\d.]+ [KMGT]i?B)\s*\|", text, re.MULTILINE | re.IGNORECASE)
    return [size for row in rows if (size := _capacity(row))]


def shares_from_firmware(modules: Iterable[Module]) -> Shares | None:
    """Add up the capacities of all modules, which SMBIOS lists since version 3.2."""
    modules = list(modules)
    pmem = [module for module in modules if module.is_pmem]
    cache = sum(module.size_bytes or 0 for module in modules if module.caches)
    volatile, persistent = (
        sum(sizes)
        for sizes in (
            [module.volatile_bytes or 0 for module in pmem],
            [module.persistent_bytes or 0 for module in pmem],
        )
    )
    if not pmem or not (volatile or persistent):
        return None
    return Shares(volatile, persistent, sum(module.size_bytes or 0 for module in pmem), cache or None)


def parse_ndctl(text: str, mounts: Sequence[MountPoint] = ()) -> tuple[PmemNamespace, ...]:
    """Parse `ndctl list -N`: one object or a list; older versions nest devdax devices."""
    try:
        document = json.loads(text or "[]")
    except ValueError:
        return ()
    if isinstance(document, dict):
        document = document.get("namespaces", [document])
    spaces = []
    for entry in document if isinstance(document, list) else []:
        match entry:
            case {"dev": str(name), "mode": str(mode), "size": int(size)}:
                device = _device(entry)
                spaces.append(
                    PmemNamespace(name, mode, size, f"/dev/{device}" if device else None, _mount_point(device, mounts))
                )
    return tuple(spaces)


def _namespaces(host: Host, mounts: Sequence[MountPoint]) -> tuple[PmemNamespace, ...]:
    listed = host.run("ndctl", "list", "-N")
    if listed and listed.code == 0 and listed.out.strip():
        return parse_ndctl(listed.out, mounts)
    holders = {}  # block device of each namespace, found through the pfn, btt or dax device that claims it
    for folder in host.glob(f"{_DEVICES}/*"):
        claimed = (host.text(f"{folder}/namespace") or "").strip() or folder.rpartition("/")[2]
        for block in host.glob(f"{folder}/block/*") + host.glob(f"{folder}/dax/*"):
            holders[claimed] = block.rpartition("/")[2]
    spaces = []
    for folder in host.glob(f"{_DEVICES}/namespace[0-9]*"):
        name = folder.rpartition("/")[2]
        size = number(host.text(f"{folder}/size"))
        mode = _SYSFS_MODES.get((host.text(f"{folder}/mode") or "").strip())
        if size and mode:  # every region has one empty namespace, from which new ones are created
            device = holders.get(name)
            spaces.append(
                PmemNamespace(name, mode, size, f"/dev/{device}" if device else None, _mount_point(device, mounts))
            )
    return tuple(spaces)


def _device(entry: dict[str, Any]) -> str | None:
    match entry:
        case {"blockdev": str(name)} | {"chardev": str(name)}:
            return name
        case {"daxregion": {"devices": [{"chardev": str(name)}, *_]}}:
            return name
    return None


def _mount_point(device: str | None, mounts: Sequence[MountPoint]) -> str | None:
    wanted = re.compile(rf"/dev/{re.escape(device)}(p\d+)?") if device else None
    return next((mount.point for mount in mounts if wanted and wanted.fullmatch(mount.source)), None)


def _capacity(text: str) -> int | None:
    try:
        return parse_bytes(text)
    except ValueError:
        return None


def _notes(shares: Shares | None, namespaces: tuple[PmemNamespace, ...]) -> list[Note]:
    notes = [Note("pmem.nominal_gb_s", "not reported by any tool: measure it with tokenmill probe --measure")]
    if shares is None:
        unknown = "the mode of the capacity without namespaces" if namespaces else "the mode"
        notes.append(
            Note(
                "pmem.mode",
                f"only root can read {unknown}: sudo ipmctl show -memoryresources "
                "(apt-get install ipmctl), or sudo tokenmill probe",
            )
        )
    elif shares.mode is None:
        notes.append(
            Note(
                "pmem.mode",
                "neither Memory Mode nor App Direct is provisioned; "
                "ipmctl show -goal shows whether a restart changes that",
            )
        )
    elif shares.mode != "memory" and not namespaces:
        text = "the App Direct capacity has no namespace: sudo ndctl create-namespace --mode fsdax"
        notes.append(Note("pmem.namespaces", text))
    elif shares.mode == "mixed":
        notes.append(
            Note(
                "pmem.mode",
                "mixed: the volatile part, cached by DRAM, is the system's RAM; the namespaces are storage",
            )
        )
    return notes
