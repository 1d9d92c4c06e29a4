from collections.abc import Callable

import pytest

from tokenmill.hardware.gpu.amd import is_apu, parse_amdgpu_ids, parse_pci_ids, read_amd, read_link
from tokenmill.hardware.host import Host
from tokenmill.hardware.machine import PcieLink

DEVICE = "/sys/class/drm/card0/device"


def test_a_card_and_an_apu(captured: Callable[[str], Host]) -> None:
    (card, apu), notes = read_amd(captured("desktop"), first_index=2)
    assert (card.index, card.name, card.vendor) == (2, "AMD Radeon RX 7900 XTX", "amd")
    assert card.vram_bytes == 25753026560
    assert card.free_bytes == 25753026560 - 1234567168
    assert (card.nominal_gb_s, card.power_limit_w, card.uuid) == (960.0, 339.0, "0123456789abcdef")
    assert card.numa_node is None  # the firmware said -1
    assert (apu.index, apu.name, apu.vram_bytes, apu.free_bytes) == (3, "AMD Raphael", None, None)
    assert "part of the system's" in next(note.text for note in notes if note.about == "gpus[3].vram_bytes")


def test_the_slots_link_not_the_one_inside_the_card(captured: Callable[[str], Host]) -> None:
    host = captured("desktop")
    assert read_link(host, "/sys/class/drm/card1/device") == PcieLink(4, 8, 4, 8)
    assert read_link(host, "/sys/class/drm/card2/device") == PcieLink(4, 16, 4, 16)


def test_a_card_without_its_driver_or_name(made: Callable[..., Host]) -> None:
    (card,), notes = read_amd(made(f"-- {DEVICE}/vendor --\n0x1002\n-- {DEVICE}/device --\n0x66a1\n"), first_index=0)
    assert (card.name, card.vram_bytes, card.nominal_gb_s) == ("AMD 1002:66a1", None, None)
    assert card.pcie == PcieLink()
    assert {note.about for note in notes} == {"gpus[0].name", "gpus[0].vram_bytes", "gpus[0].nominal_gb_s"}


def test_the_drivers_product_name_wins(made: Callable[..., Host]) -> None:
    host = made(f"-- {DEVICE}/vendor --\n0x1002\n-- {DEVICE}/product_name --\nInstinct MI100\n")
    (card,), _ = read_amd(host, first_index=0)
    assert (card.name, card.nominal_gb_s) == ("Instinct MI100", 1229.0)


def test_gpus_of_other_vendors_are_ignored(made: Callable[..., Host]) -> None:
    assert read_amd(made(f"-- {DEVICE}/vendor --\n0x8086\n"), first_index=0) == ((), [])


@pytest.mark.parametrize(
    ("metrics", "apu"), [(b"", False), (b"\x78\0\x01\x03", False), (b"\x80\0\x02\x04", True), (b"\x80\0\x03\0", True)]
)
def test_apus_by_the_format_of_their_metrics(metrics: bytes, apu: bool) -> None:
    assert is_apu(metrics) is apu


@pytest.mark.parametrize(
    ("revision", "name"), [(0xC8, "AMD Radeon RX 7900 XTX"), (0xCC, "AMD Radeon RX 7900 XT"), (0x00, None)]
)
def test_marketing_names(revision: int, name: str | None, captured: Callable[[str], Host]) -> None:
    text = captured("desktop").text("/usr/share/libdrm/amdgpu.ids") or ""
    assert parse_amdgpu_ids(text, 0x744C, revision) == name


@pytest.mark.parametrize(
    ("vendor", "device", "name"),
    [
        (0x1002, 0x744C, "Navi 31 [Radeon RX 7900 XT/7900 XTX/7900 GRE/7900M]"),
        (0x1002, 0x164E, "Raphael"),
        (0x1022, 0x164E, "Not this one"),
        (0x1002, 0x1DA2, None),  # a subsystem line, not a device
        (0x1234, 0x0000, None),
    ],
)
def test_chip_names(vendor: int, device: int, name: str | None, captured: Callable[[str], Host]) -> None:
    text = captured("desktop").text("/usr/share/hwdata/pci.ids") or ""
    assert parse_pci_ids(text, vendor, device) == name
