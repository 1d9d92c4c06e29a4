import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.hardware.disk import MountPoint
from tokenmill.hardware.dmi import Module
from tokenmill.hardware.host import Host
from tokenmill.hardware.machine import Dimm, Dram
from tokenmill.hardware.pmem import (
    Shares,
    as_cache,
    parse_dimms,
    parse_ndctl,
    parse_resources,
    read_pmem,
    shares_from_firmware,
)
from tokenmill.units import GIB, KIB

Made = Callable[..., Host]

MIXED = """ MemoryType   | DDR         | PMemModule   | Total
==========================================================
 Volatile     | 0.000 GiB   | 504.000 GiB  | 504.000 GiB
 AppDirect    | -           | 252.000 GiB  | 252.000 GiB
 Cache        | 192.000 GiB | -            | 192.000 GiB
 Inaccessible | 0.000 GiB   | 2.532 GiB    | 2.532 GiB
 Physical     | 192.000 GiB | 758.532 GiB  | 950.532 GiB
"""
# A machine whose firmware was left in one-level mode after a goal for Memory Mode.
NOTHING = """ MemoryType   | DDR         | PMemModule  | Total
========================================================
 Volatile     | 512.000 GiB | 0.000 GiB   | 512.000 GiB
 AppDirect    | -           | 0.000 GiB   | 0.000 GiB
 Cache        | 0.000 GiB   | -           | 0.000 GiB
 Inaccessible | 0.000 GiB   | 126.742 GiB | 126.742 GiB
 Physical     | 512.000 GiB | 126.742 GiB | 638.742 GiB
"""
VERSION_1 = """Capacity=125.7 GiB
MemoryCapacity=125.0 GiB
AppDirectCapacity=0.0 GiB
UnconfiguredCapacity=0.0 GiB
InaccessibleCapacity=0.0 GiB
ReservedCapacity=0.7 GiB
"""


@pytest.mark.parametrize(
    ("text", "mode", "cache_bytes"),
    [
        (MIXED, "mixed", 192 * GIB),
        (NOTHING, None, None),
        (VERSION_1, "memory", None),
        (MIXED.replace("GiB", "MiB"), "mixed", 192 * GIB // 1024),
    ],
)
def test_memory_resources(text: str, mode: str | None, cache_bytes: int | None) -> None:
    shares = parse_resources(text)
    assert shares is not None
    assert shares.mode == mode
    assert shares.cache_bytes == cache_bytes


@pytest.mark.parametrize("text", ["", "Error: Not enough privileges", "No PMem modules in the system.\n"])
def test_memory_resources_that_are_not_there(text: str) -> None:
    assert parse_resources(text) is None
    assert parse_dimms(text) == []


def optane(volatile: int, persistent: int) -> Module:
    return Module(
        "A2", None, 126 * GIB, "Logical non-volatile device", volatile_bytes=volatile, persistent_bytes=persistent
    )


@pytest.mark.parametrize(
    ("volatile", "persistent", "mode"),
    [(126 * GIB, 0, "memory"), (0, 126 * GIB, "app-direct"), (64 * GIB, 62 * GIB, "mixed")],
)
def test_the_mode_from_firmware(volatile: int, persistent: int, mode: str) -> None:
    cache = Module("A1", None, 16 * GIB, "DDR4", caches=volatile > 0)
    shares = shares_from_firmware([cache, optane(volatile, persistent)])
    assert shares is not None
    assert shares.mode == mode
    assert shares.cache_bytes == (16 * GIB if volatile else None)


def test_old_firmware_does_not_report_the_mode() -> None:
    assert shares_from_firmware([optane(0, 0)]) is None
    assert shares_from_firmware([Module("A1", None, GIB, "DDR4", volatile_bytes=GIB)]) is None


@pytest.mark.parametrize("text", ["", "[]", "not json", '"text"', "[1, 2]"])
def test_no_namespaces(text: str) -> None:
    assert parse_ndctl(text) == ()


@given(
    st.recursive(
        st.text() | st.integers() | st.none(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(["dev", "mode", "size", "blockdev", "daxregion", "devices", "namespaces"]), inner
            )
        ),
    )
)
def test_any_json_from_ndctl_is_survived(document: object) -> None:
    for space in parse_ndctl(json.dumps(document)):
        assert isinstance(space.size_bytes, int)


@given(st.text())
def test_any_text_from_ipmctl_is_survived(text: str) -> None:
    parse_resources(text)
    parse_resources(MIXED.replace("504.000 GiB", text))
    parse_dimms(text)


def test_one_namespace_and_the_older_nesting() -> None:
    text = """{"dev": "namespace1.0", "mode": "devdax", "size": 1024,
               "daxregion": {"id": 1, "devices": [{"chardev": "dax1.0", "size": 1024}]}}"""
    (space,) = parse_ndctl(text)
    assert (space.name, space.mode, space.size_bytes, space.device) == ("namespace1.0", "devdax", 1024, "/dev/dax1.0")


def test_a_partition_of_a_namespace_is_its_mount() -> None:
    text = '[{"dev": "namespace0.0", "mode": "fsdax", "size": 1024, "blockdev": "pmem0"}]'
    others = [
        MountPoint("259:8", "/", "/other", "ext4", "/dev/pmem01"),
        MountPoint("259:9", "/", "/p", "xfs", "/dev/pmem0p1"),
    ]
    assert parse_ndctl(text, others)[0].mount == "/p"


def test_namespaces_from_sysfs_when_ndctl_is_missing(captured: Callable[[str], Host]) -> None:
    host = captured("pmem-app-direct")
    del host.commands["ndctl list -N"]  # type: ignore[attr-defined]
    pmem, _, _ = read_pmem(host, None, (), {})
    assert pmem is not None
    assert [(space.name, space.mode, space.device) for space in pmem.namespaces] == [
        ("namespace0.0", "fsdax", "/dev/pmem0"),
        ("namespace1.0", "devdax", "/dev/dax1.0"),
    ]


def test_a_note_explains_how_to_read_an_unknown_mode(made: Made) -> None:
    host = made("-- /sys/bus/nd/devices/nmem0/state --\nidle\n-- /sys/bus/nd/devices/nmem1/state --\nidle\n")
    pmem, shares, notes = read_pmem(host, None, (), {"MemTotal": 512 * GIB})
    assert pmem is not None
    assert (pmem.mode, pmem.dimms, pmem.memory_mode_bytes, shares) == (None, 2, None, None)
    assert "sudo ipmctl show -memoryresources" in next(note.text for note in notes if note.about == "pmem.mode")


def test_mode_from_firmware_alone(made: Made) -> None:
    meminfo = {"MemTotal": 124 * GIB, "MemAvailable": 120 * GIB}
    pmem, shares, _ = read_pmem(made(), [optane(126 * GIB, 0)], (), meminfo)
    assert pmem is not None
    assert (pmem.mode, pmem.dimms, pmem.total_bytes) == ("memory", 1, 126 * GIB)
    assert (pmem.memory_mode_bytes, pmem.available_bytes) == (124 * GIB, 120 * GIB)
    assert shares is not None


@pytest.mark.parametrize(("resources", "about"), [(NOTHING, "pmem.mode"), (MIXED, "pmem.namespaces")])
def test_unprovisioned_capacity_is_noted(resources: str, about: str, made: Made) -> None:
    capture = f"-- run ipmctl show -memoryresources --\n{resources}-- /sys/bus/nd/devices/nmem0/state --\nidle\n"
    _, _, notes = read_pmem(made(capture), None, (), {})
    assert about in [note.about for note in notes]


def test_dram_without_persistent_memory(made: Made) -> None:
    assert read_pmem(made(), [Module("A1", None, GIB, "DDR4")], (), {}) == (None, None, [])


def test_cache_size_falls_back_to_the_modules() -> None:
    dram = Dram(750 * GIB, 700 * GIB, "DDR4", (Dimm("A1", 16 * GIB), Dimm("B1", 16 * GIB)), 4, 2, 2666, 42.7)
    cached = as_cache(dram, Shares(volatile_bytes=1, persistent_bytes=0))
    assert (cached.total_bytes, cached.available_bytes) == (32 * GIB, None)
    assert (cached.dimms, cached.slots, cached.channels, cached.nominal_gb_s) == (dram.dimms, 4, 2, 42.7)
    assert as_cache(dram, Shares(1, 0, cache_bytes=30 * KIB)).total_bytes == 30 * KIB
