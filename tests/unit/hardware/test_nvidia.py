from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import pynvml
import pytest

from tokenmill.hardware.gpu import cards as known_cards
from tokenmill.hardware.gpu.nvidia import make_gpu, make_links, nominal_gb_s, read_nvidia
from tokenmill.hardware.gpu.nvml import NvmlCard, NvmlLink, NvmlReading, bus_id, read
from tokenmill.hardware.host import Host
from tokenmill.hardware.machine import NvLink

Made = Callable[..., Host]
T = TypeVar("T")


class RecordedNvml:
    """pynvml's functions over recorded cards; constants and errors are pynvml's own."""

    def __init__(self, cards: tuple[NvmlCard, ...]) -> None:
        self.cards = cards
        self.open = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> NvmlCard:
        if self.cards[index] == NvmlCard(index):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return self.cards[index]

    def nvmlDeviceGetName(self, card: NvmlCard) -> str:
        return _or_refuse(card.name)

    def nvmlDeviceGetUUID(self, card: NvmlCard) -> str:
        return _or_refuse(card.uuid)

    def nvmlDeviceGetPciInfo(self, card: NvmlCard) -> SimpleNamespace:
        return SimpleNamespace(busId=f"0000{_or_refuse(card.bus_id).upper()}".encode())

    def nvmlDeviceGetMemoryInfo(self, card: NvmlCard, version: int | None = None) -> SimpleNamespace:
        if version is not None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)  # an older driver
        return SimpleNamespace(total=_or_refuse(card.memory_total_bytes), free=card.memory_free_bytes)

    def nvmlDeviceGetMemoryBusWidth(self, card: NvmlCard) -> int:
        return _or_refuse(card.memory_bus_bits)

    def nvmlDeviceGetMaxClockInfo(self, card: NvmlCard, kind: int) -> int:
        assert kind == pynvml.NVML_CLOCK_MEM
        return _or_refuse(card.memory_clock_mhz)

    def nvmlDeviceGetCurrPcieLinkGeneration(self, card: NvmlCard) -> int:
        return _or_refuse(card.pcie_generation)

    def nvmlDeviceGetCurrPcieLinkWidth(self, card: NvmlCard) -> int:
        return _or_refuse(card.pcie_width)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, card: NvmlCard) -> int:
        return _or_refuse(card.pcie_max_generation)

    def nvmlDeviceGetMaxPcieLinkWidth(self, card: NvmlCard) -> int:
        return _or_refuse(card.pcie_max_width)

    def nvmlDeviceGetCudaComputeCapability(self, card: NvmlCard) -> tuple[int, ...]:
        return tuple(int(part) for part in _or_refuse(card.compute_capability).split("."))

    def nvmlDeviceGetEnforcedPowerLimit(self, card: NvmlCard) -> int:
        return _or_refuse(card.power_limit_mw)

    def nvmlDeviceGetMigMode(self, card: NvmlCard) -> list[int]:
        return [int(card.mig), 0]

    def nvmlDeviceGetNvLinkState(self, card: NvmlCard, link: int) -> int:
        if link >= 4 or not card.links:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return int(link < len(card.links))

    def nvmlDeviceGetNvLinkRemotePciInfo(self, card: NvmlCard, link: int) -> SimpleNamespace:
        return SimpleNamespace(busId=_or_refuse(card.links[link].remote_bus_id).encode())

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, card: NvmlCard, link: int) -> int:
        switch = card.links[link].remote_is_switch
        return int(pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH if switch else pynvml.NVML_NVLINK_DEVICE_TYPE_GPU)

    def nvmlDeviceGetFieldValues(self, card: NvmlCard, fields: list[int]) -> list[SimpleNamespace]:
        assert fields == [pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON]
        known = card.nvlink_mb_s is not None
        code = pynvml.NVML_SUCCESS if known else pynvml.NVML_ERROR_NOT_SUPPORTED
        return [SimpleNamespace(nvmlReturn=code, value=SimpleNamespace(uiVal=card.nvlink_mb_s or 0))]


def _or_refuse(value: T | None) -> T:
    if value is None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return value


@pytest.mark.parametrize("machine", ["eight-3090", "optane-memory-mode", "h200-vm"])
def test_recorded_cards_read_back(machine: str, captured: Callable[[str], Host]) -> None:
    recorded = captured(machine).nvml()
    nvml = RecordedNvml(recorded.cards)
    assert read(nvml) == recorded
    assert nvml.open == 0


def test_refused_values_are_none() -> None:
    silent = NvmlCard(0, bus_id="0000:01:00.0")
    assert read(RecordedNvml((silent, NvmlCard(1)))) == NvmlReading((silent, NvmlCard(1)))


def test_a_broken_driver_is_reported() -> None:
    class Broken(RecordedNvml):
        def nvmlInit(self) -> None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    assert "version mismatch" in (read(Broken(())).error or "")


def test_no_driver_at_all() -> None:
    class Missing(RecordedNvml):
        def nvmlInit(self) -> None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    assert read(Missing(())) == NvmlReading(library=False)


@pytest.mark.parametrize(
    ("name", "bits", "mhz", "gb_s"),
    [
        # Bus width and highest memory clock as the drivers report them; bandwidth as the makers state it.
        ("NVIDIA GeForce RTX 3090", 384, 9751, 936),
        ("NVIDIA GeForce RTX 3060", 192, 7501, 360),
        ("NVIDIA GeForce RTX 4090", 384, 10501, 1008),
        ("NVIDIA GeForce RTX 5090", 512, 14001, 1792),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 512, 14001, 1792),
        ("NVIDIA A100-SXM4-40GB", 5120, 1215, 1555),
        ("NVIDIA A100-SXM4-80GB", 5120, 1593, 2039),
        ("NVIDIA H100 80GB HBM3", 5120, 2619, 3350),
        ("NVIDIA H200", 6016, 3201, 4800),
        ("NVIDIA B200", 7680, 3996, 7672),
        ("Tesla V100-SXM2-32GB", 4096, 877, 900),
        ("Tesla P40", 384, 3615, 346),
    ],
)
def test_bandwidth_follows_from_bus_and_clock(name: str, bits: int, mhz: int, gb_s: float) -> None:
    assert nominal_gb_s(NvmlCard(0, name, memory_bus_bits=bits, memory_clock_mhz=mhz)) == pytest.approx(gb_s, rel=0.005)


@pytest.mark.parametrize(
    ("name", "gb_s"),
    [
        ("NVIDIA GeForce RTX 3090", 936),
        ("NVIDIA GeForce RTX 3090 Ti", 1008),
        ("NVIDIA GeForce RTX 3090 Laptop GPU", None),
        ("AMD Radeon RX 7900 XTX", 960),
        ("radeon rx 7900 xtx", 960),
        ("", None),
    ],
)
def test_known_cards_by_exact_name(name: str, gb_s: float | None) -> None:
    assert nominal_gb_s(NvmlCard(0, name)) == gb_s


def test_every_known_card_has_a_figure_and_a_source() -> None:
    for name in ("GeForce RTX 5090", "RTX PRO 6000 Blackwell Max-Q Workstation Edition", "Instinct MI300X"):
        gb_s, source = known_cards.nominal(name) or (0, "")
        assert gb_s > 100
        assert len(source) > 10


def test_zeros_of_a_hidden_link_are_unknown() -> None:
    link = make_gpu(NvmlCard(0, pcie_generation=0, pcie_width=0, pcie_max_generation=4, pcie_max_width=16)).pcie
    assert (link.generation, link.width, link.max_generation, link.max_width) == (None, None, 4, 16)


@pytest.mark.parametrize(("raw", "text"), [(b"00000000:C1:00.0", "0000:c1:00.0"), ("0000:01:00.0", "0000:01:00.0")])
def test_bus_ids_have_the_format_of_sysfs(raw: bytes | str, text: str) -> None:
    assert bus_id(raw) == text


def test_switched_cards_are_all_pairs() -> None:
    links = tuple(NvmlLink("0000:c5:00.0", remote_is_switch=True) for _ in range(18))
    cards = [NvmlCard(index, bus_id=f"0000:{index}b:00.0", nvlink_mb_s=26562, links=links) for index in range(4)]
    pairs, notes = make_links(cards)
    assert [pair.gpus for pair in pairs] == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert pairs[0] == NvLink((0, 1), 18, 478.1)
    assert notes == []


def test_links_without_a_speed_are_noted() -> None:
    cards = [
        NvmlCard(0, bus_id="0000:01:00.0", links=(NvmlLink("0000:02:00.0"),)),
        NvmlCard(1, bus_id="0000:02:00.0", links=(NvmlLink("0000:01:00.0"),)),
        NvmlCard(
            2, bus_id="0000:03:00.0", links=(NvmlLink(None), NvmlLink("0000:99:00.0"))
        ),  # to another GPU that is not listed
    ]
    pairs, (note,) = make_links(cards)
    assert pairs == (NvLink((0, 1), 1, None),)
    assert "nvidia-smi nvlink --status" in note.text


DEVICES = """-- /sys/bus/pci/devices/0000:01:00.0/vendor --
0x10de
-- /sys/bus/pci/devices/0000:01:00.0/class --
0x030000
-- /sys/bus/pci/devices/0000:01:00.1/vendor --
0x10de
-- /sys/bus/pci/devices/0000:01:00.1/class --
0x040300
"""


@pytest.mark.parametrize(
    ("reading", "words"),
    [
        (NvmlReading(library=False), "libnvidia-ml.so.1"),
        (NvmlReading(error="Driver/library version mismatch"), "Driver/library version mismatch"),
        (NvmlReading(), "NVML lists none"),
    ],
)
def test_a_card_without_a_working_driver_is_noted(reading: NvmlReading, words: str, made: Made) -> None:
    gpus, links, (note,) = read_nvidia(made(DEVICES, nvml=reading))
    assert (gpus, links) == ((), ())
    assert words in note.text
    assert note.text.startswith("1 NVIDIA device(s)")  # its audio function is not another card


def test_no_card_no_note(made: Made) -> None:
    assert read_nvidia(made()) == ((), (), [])


def test_numbering_and_hidden_cards_are_noted(made: Made) -> None:
    reading = NvmlReading(
        (NvmlCard(0, "NVIDIA GeForce RTX 3090", memory_total_bytes=1, mig=True), NvmlCard(1, "NVIDIA GeForce RTX 3060"))
    )
    host = made("-- /proc/self/environ --\nHOME=/root\0CUDA_VISIBLE_DEVICES=1\0\n", nvml=reading)
    notes: dict[str, list[str]] = {}
    for note in read_nvidia(host)[2]:
        notes.setdefault(note.about, []).append(note.text)
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in notes["gpus.index"][0]
    assert "CUDA_VISIBLE_DEVICES=1" in notes["gpus"][0]
    assert any("data sheet" in text for text in notes["gpus[0].nominal_gb_s"])
    # 12 GB or 8 GB, with different buses
    assert any("probe --measure" in text for text in notes["gpus[1].nominal_gb_s"])
    assert any("MIG is on" in text for text in notes["gpus[0].vram_bytes"])


def test_cuda_in_bus_order_needs_no_note(made: Made) -> None:
    reading = NvmlReading((NvmlCard(0, "NVIDIA GeForce RTX 3090"), NvmlCard(1, "NVIDIA GeForce RTX 3060")))
    host = made("-- /proc/self/environ --\nCUDA_DEVICE_ORDER=PCI_BUS_ID\0\n", nvml=reading)
    assert "gpus.index" not in [note.about for note in read_nvidia(host)[2]]
