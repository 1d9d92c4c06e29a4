"""Reads AMD GPUs from the amdgpu driver's files in sysfs.

The GPU of an APU is listed without VRAM: its "VRAM" is system memory that the firmware reserves, and plans would count
it twice.
"""

import re

from tokenmill.hardware.gpu import cards
from tokenmill.hardware.host import Host, number
from tokenmill.hardware.machine import Gpu, Note, PcieLink

_VENDOR = 0x1002
_BRIDGE_CLASS = 0x0604
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}  # by GT/s
_NAME_FILES = ("/usr/share/libdrm/amdgpu.ids", "/opt/amdgpu/share/libdrm/amdgpu.ids")
_PCI_FILES = ("/usr/share/hwdata/pci.ids", "/usr/share/misc/pci.ids")


def read_amd(host: Host, first_index: int) -> tuple[tuple[Gpu, ...], list[Note]]:
    """Return all AMD GPUs, numbered from `first_index`, and notes."""
    gpus: list[Gpu] = []
    notes: list[Note] = []
    for folder in host.glob("/sys/class/drm/card[0-9]*/device"):
        connector = "-" in folder.split("/")[4]  # card0-HDMI-A-1 is a connector of card0
        if connector or number(host.text(f"{folder}/vendor")) != _VENDOR:
            continue
        gpu, gpu_notes = _gpu(host, folder, first_index + len(gpus))
        gpus.append(gpu)
        notes += gpu_notes
    return tuple(gpus), notes


def _gpu(host: Host, folder: str, index: int) -> tuple[Gpu, list[Note]]:
    notes = []
    name, exact = _name(host, folder)
    if not exact:
        notes.append(Note(f"gpus[{index}].name", "the driver reports no product name; see lspci -nn"))
    total, used = (number(host.text(f"{folder}/mem_info_vram_{which}")) for which in ("total", "used"))
    apu = is_apu(host.data(f"{folder}/gpu_metrics") or b"")
    if apu:
        notes.append(Note(f"gpus[{index}].vram_bytes", "integrated GPU: its memory is part of the system's"))
    elif total is None:
        notes.append(Note(f"gpus[{index}].vram_bytes", "the amdgpu driver is not loaded for this GPU: see lspci -k"))
    listed = cards.nominal(name)
    if listed is None and not apu:
        text = "amdgpu reports no memory bus width, and tokenmill does not know this GPU: see its data sheet"
        notes.append(Note(f"gpus[{index}].nominal_gb_s", text))
    caps = [number(host.text(path)) for path in host.glob(f"{folder}/hwmon/hwmon*/power1_cap")]
    node = number(host.text(f"{folder}/numa_node"))
    gpu = Gpu(
        index=index,
        name=name,
        vendor="amd",
        vram_bytes=None if apu else total,
        free_bytes=None if apu or total is None or used is None else total - used,
        nominal_gb_s=None if apu or listed is None else listed[0],
        pcie=read_link(host, folder),
        power_limit_w=caps[0] / 1e6 if caps and caps[0] else None,
        numa_node=None if node is None or node < 0 else node,
        uuid=(host.text(f"{folder}/unique_id") or "").strip() or None,
    )
    return gpu, notes


def is_apu(metrics: bytes) -> bool:
    """Whether amdgpu's gpu_metrics describe an APU, which uses formats 2 and 3; graphics cards use format 1."""
    return len(metrics) >= 4 and metrics[2] in (2, 3)


def read_link(host: Host, folder: str) -> PcieLink:
    """Return the link to the slot, whose maximum is the lower one of both ends.

    Newer cards have a PCIe switch: the GPU's link then ends inside the card and always reports the card's maximum, and
    the upstream port, one or two folders up in sysfs, has the actual values.
    """
    port = folder
    while number(host.text(f"{port}/../vendor")) == _VENDOR and _class(host, f"{port}/..") == _BRIDGE_CLASS:
        port += "/.."
    now = _link(host, port, "current")
    ends = [_link(host, port, "max"), _link(host, f"{port}/..", "max")]
    best_generation = min((generation for generation, _ in ends if generation), default=None)
    best_width = min((width for _, width in ends if width), default=None)
    return PcieLink(*now, best_generation, best_width)


def parse_amdgpu_ids(text: str, device: int, revision: int) -> str | None:
    """Find a marketing name in libdrm's table of device, revision and name."""
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",", 2)]
        if len(parts) == 3 and parts[0].upper() == f"{device:04X}" and parts[1].upper() == f"{revision:02X}":
            return parts[2]
    return None


def parse_pci_ids(text: str, vendor: int, device: int) -> str | None:
    """Find the name of a chip, which several cards may share, in pci.ids."""
    section = re.search(rf"^{vendor:04x}  .*\n((?:[\t#].*\n|\n)*)", text, re.MULTILINE)
    match = re.search(rf"^\t{device:04x}  (.*)$", section[1], re.MULTILINE) if section else None
    return match[1] if match else None


def _name(host: Host, folder: str) -> tuple[str, bool]:
    """Return the name, and whether it is the name of the card rather than of its chip."""
    product = (host.text(f"{folder}/product_name") or "").strip()
    if product:
        return product, True
    device = number(host.text(f"{folder}/device")) or 0
    revision = number(host.text(f"{folder}/revision")) or 0
    for path in _NAME_FILES:
        if name := parse_amdgpu_ids(host.text(path) or "", device, revision):
            return name, True
    for path in _PCI_FILES:
        if name := parse_pci_ids(host.text(path) or "", _VENDOR, device):
            return f"AMD {name}", False
    return f"AMD {_VENDOR:04x}:{device:04x}", False


def _class(host: Host, folder: str) -> int:
    return (number(host.text(f"{folder}/class")) or 0) >> 8


def _link(host: Host, folder: str, which: str) -> tuple[int | None, int | None]:
    speed = re.match(r"(\d+(?:\.\d+)?) GT/s", host.text(f"{folder}/{which}_link_speed") or "")
    width = number(host.text(f"{folder}/{which}_link_width"))
    return _GENERATIONS.get(float(speed[1])) if speed else None, width or None
