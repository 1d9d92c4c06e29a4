"""Converts NVML's values into `Gpu` and `NvLink`, with notes on missing values.

Memory bandwidth is bus width x highest memory clock x 2, because NVML's memory clock is half the data rate for GDDR5,
GDDR6, GDDR6X, GDDR7 and HBM. Idle GPUs use a lower PCIe generation than busy ones.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations

from tokenmill.hardware.gpu import cards as known_cards
from tokenmill.hardware.gpu.nvml import NvmlCard, NvmlReading
from tokenmill.hardware.host import Host, number
from tokenmill.hardware.machine import Gpu, Note, NvLink, PcieLink
from tokenmill.units import format_ranges

_VENDOR = 0x10DE
_DISPLAY_CLASS = 0x03  # first byte of the PCI class; a card's audio function is 0x04


def read_nvidia(host: Host) -> tuple[tuple[Gpu, ...], tuple[NvLink, ...], list[Note]]:
    """Return GPUs, the pairs connected by NVLink, and notes."""
    reading = host.nvml()
    if not reading.cards:
        return (), (), _driver_notes(host, reading)
    gpus = tuple(make_gpu(card, _numa_node(host, card)) for card in reading.cards)
    notes = [*_gpu_notes(gpus, reading.cards), *_numbering_notes(gpus, host.text("/proc/self/environ") or "")]
    links, link_notes = make_links(reading.cards)
    return gpus, links, [*notes, *link_notes]


def make_gpu(card: NvmlCard, numa_node: int | None = None) -> Gpu:
    """Convert one card."""
    return Gpu(
        index=card.index,
        name=card.name or "NVIDIA GPU that does not answer",
        vendor="nvidia",
        vram_bytes=card.memory_total_bytes,
        free_bytes=card.memory_free_bytes,
        nominal_gb_s=nominal_gb_s(card),
        pcie=make_pcie(card),
        compute_capability=card.compute_capability,
        power_limit_w=None if card.power_limit_mw is None else card.power_limit_mw / 1000,
        numa_node=numa_node,
        uuid=card.uuid,
    )


def make_pcie(card: NvmlCard) -> PcieLink:
    """Convert the PCIe link; zeros, which hypervisors report, become None."""
    return PcieLink(
        card.pcie_generation or None,
        card.pcie_width or None,
        card.pcie_max_generation or None,
        card.pcie_max_width or None,
    )


def nominal_gb_s(card: NvmlCard) -> float | None:
    """Memory bandwidth from NVML's values, else from the table of known GPUs."""
    if card.memory_bus_bits and card.memory_clock_mhz:
        return round(card.memory_bus_bits * card.memory_clock_mhz * 2 / 8 / 1000, 1)
    listed = known_cards.nominal(card.name or "")
    return listed[0] if listed else None


def make_links(cards: Sequence[NvmlCard]) -> tuple[tuple[NvLink, ...], list[Note]]:
    """Return connected pairs: GPUs with a direct link, and any two GPUs with links to switches."""
    by_bus = {card.bus_id: card.index for card in cards}
    speed = {card.index: card.nvlink_mb_s for card in cards}
    counts: Counter[tuple[int, int]] = Counter()
    for card in cards:
        for link in card.links:
            remote = by_bus.get(link.remote_bus_id) if link.remote_bus_id else None
            if remote is not None and card.index < remote:
                counts[card.index, remote] += 1
    switched = {card.index: sum(link.remote_is_switch for link in card.links) for card in cards}
    for first, second in combinations([index for index, links in switched.items() if links], 2):
        counts[first, second] += min(switched[first], switched[second])
    pairs = tuple(NvLink(pair, links, _pair_gb_s(links, speed[pair[0]])) for pair, links in sorted(counts.items()))
    unknown = any(pair.nominal_gb_s is None for pair in pairs)
    note = Note(
        "nvlinks.nominal_gb_s", "the driver does not report the speed of the links: see nvidia-smi nvlink --status"
    )
    return pairs, [note] if unknown else []


def _pair_gb_s(links: int, mb_s: int | None) -> float | None:
    return None if mb_s is None else round(links * mb_s / 1000, 1)


def _numa_node(host: Host, card: NvmlCard) -> int | None:
    node = number(host.text(f"/sys/bus/pci/devices/{card.bus_id}/numa_node")) if card.bus_id else None
    return None if node is None or node < 0 else node  # -1: unknown


def _driver_notes(host: Host, reading: NvmlReading) -> list[Note]:
    """A note if there are NVIDIA GPUs on the PCI bus but the driver is missing or broken."""
    present = [
        folder
        for folder in host.glob("/sys/bus/pci/devices/*")
        if number(host.text(f"{folder}/vendor")) == _VENDOR
        and (number(host.text(f"{folder}/class")) or 0) >> 16 == _DISPLAY_CLASS
    ]
    if not present:
        return []
    why = (
        f"NVML reports: {reading.error}"
        if reading.error
        else ("the driver library (libnvidia-ml.so.1) is missing" if not reading.library else "NVML lists none")
    )
    return [
        Note(
            "gpus",
            f"{len(present)} NVIDIA device(s) on the PCI bus cannot be used, {why}; install a driver with which "
            "nvidia-smi works (in a container: run it with --gpus all)",
        )
    ]


def _gpu_notes(gpus: Sequence[Gpu], cards: Sequence[NvmlCard]) -> list[Note]:
    def some(about: str, test: Callable[[Gpu], bool], text: str) -> list[Note]:
        matching = [gpu.index for gpu in gpus if test(gpu)]
        return [Note(f"gpus[{format_ranges(matching)}].{about}", text)] if matching else []

    tabled = {card.index for card in cards if not (card.memory_bus_bits and card.memory_clock_mhz)}
    mig = {card.index for card in cards if card.mig}
    return [
        *some(
            "vram_bytes",
            lambda gpu: gpu.vram_bytes is None,
            "not reported by the driver: the GPU shares the system's memory or does not answer (see nvidia-smi)",
        ),
        *some(
            "vram_bytes",
            lambda gpu: gpu.index in mig,
            "MIG is on: programs see one slice of the GPU; nvidia-smi -L lists the slices",
        ),
        *some(
            "nominal_gb_s",
            lambda gpu: gpu.nominal_gb_s is None,
            "the driver reports no memory clock or bus width, and tokenmill does not know this GPU: measure it with "
            "tokenmill probe --measure",
        ),
        *some(
            "nominal_gb_s",
            lambda gpu: gpu.index in tabled and gpu.nominal_gb_s is not None,
            "from the data sheet, because the driver reports no memory clock or bus width",
        ),
        *some(
            "pcie.generation",
            lambda gpu: gpu.pcie.slow,
            "below the link's maximum, as usual for idle GPUs; check it again under load",
        ),
        *some(
            "pcie.width",
            lambda gpu: gpu.pcie.narrow,
            "fewer lanes than GPU and slot support, because of a riser, bifurcation or the slot's wiring",
        ),
    ]


def _numbering_notes(gpus: Sequence[Gpu], environment: str) -> list[Note]:
    settings = dict(part.partition("=")[::2] for part in environment.split("\0"))
    notes = []
    if len({gpu.name for gpu in gpus}) > 1 and settings.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        notes.append(
            Note(
                "gpus.index",
                "GPUs of different models: CUDA numbers them fastest first, unlike here, unless "
                "CUDA_DEVICE_ORDER=PCI_BUS_ID is set",
            )
        )
    if "CUDA_VISIBLE_DEVICES" in settings:
        notes.append(
            Note(
                "gpus",
                f"CUDA_VISIBLE_DEVICES={settings['CUDA_VISIBLE_DEVICES']} hides GPUs from engines; this list has all",
            )
        )
    return notes
