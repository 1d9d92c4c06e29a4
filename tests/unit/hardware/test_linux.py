from collections.abc import Callable

import pytest

from tokenmill.hardware.host import Host, natural, number
from tokenmill.hardware.machine import HugePages, Swap
from tokenmill.hardware.memory import parse_meminfo, read_huge_pages, read_numa, read_os, read_swap
from tokenmill.units import GIB, KIB

Made = Callable[..., Host]


def test_meminfo_units() -> None:
    text = (
        "MemTotal:       1024 kB\nHugePages_Total:       8\nActive(anon):    4 kB\nNode 0 MemFree:   2 kB\nnonsense\n"
    )
    assert parse_meminfo(text) == {
        "MemTotal": 1024 * KIB,
        "HugePages_Total": 8,
        "Active(anon)": 4 * KIB,
        "MemFree": 2 * KIB,
    }


def test_memory_without_processors_is_noted(made: Made) -> None:
    capture = """-- /sys/devices/system/node/node0/cpulist --
0-7
-- /sys/devices/system/node/node0/meminfo --
Node 0 MemTotal: 1048576 kB
-- /sys/devices/system/node/node1/cpulist --

-- /sys/devices/system/node/node1/meminfo --
Node 1 MemTotal: 2097152 kB
"""
    nodes, (note,) = read_numa(made(capture), 3 * GIB)
    assert [(node.index, node.cpus) for node in nodes] == [(0, tuple(range(8))), (1, ())]
    assert note.about == "numa[1]"
    assert "2.0 GiB" in note.text


@pytest.mark.parametrize(
    ("meminfo", "swap"),
    [
        ({}, None),
        ({"SwapTotal": 0, "SwapFree": 0}, Swap(0, 0)),
        ({"SwapTotal": 10, "SwapFree": 4}, Swap(10, 6)),
        ({"SwapTotal": 10}, Swap(10, None)),
    ],
)
def test_swap(meminfo: dict[str, int], swap: Swap | None, made: Made) -> None:
    assert read_swap(made(), meminfo) == (swap, [])


def test_huge_pages_unknown_is_not_zero(made: Made) -> None:
    assert read_huge_pages(made(), {}) == (None, [])
    enabled = "-- /sys/kernel/mm/transparent_hugepage/enabled --\nalways madvise [never]\n"
    assert read_huge_pages(made(enabled), {}) == (HugePages(transparent="never"), [])


@pytest.mark.parametrize(
    ("capture", "name"),
    [
        ("", None),
        ('-- /etc/os-release --\nNAME=x\nPRETTY_NAME="Ubuntu 24.04 LTS"\n', "Ubuntu 24.04 LTS"),
        ("-- /etc/os-release --\nPRETTY_NAME=Alpine\n-- /proc/sys/kernel/osrelease --\n6.6\n", "Alpine, Linux 6.6"),
        ("-- /proc/sys/kernel/osrelease --\n6.6\n", "Linux 6.6"),
    ],
)
def test_operating_system(capture: str, name: str | None, made: Made) -> None:
    assert read_os(made(capture)) == name


@pytest.mark.parametrize(
    ("text", "value"), [("12\n", 12), ("0x10de\n", 0x10DE), ("-1\n", -1), ("", None), ("x", None), (None, None)]
)
def test_number(text: str | None, value: int | None) -> None:
    assert number(text) == value


def test_natural_order() -> None:
    assert sorted(["cpu10", "cpu9", "cpu1", "online"], key=natural) == ["cpu1", "cpu9", "cpu10", "online"]
