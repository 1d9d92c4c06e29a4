"""Energy counters: sums, wraps, and counters that cannot be read."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.written_host import WrittenHost
from tokenmill.tuner.energy import Joules, Meter, Zone, read_rapl, used_j

ROOT = "/sys/class/powercap"
RANGE = 262_143_328_850


class Refused(Exception):
    """NVML's own error."""


class NoLibrary(Refused):
    """NVML without a driver."""


def zones(**values: int) -> WrittenHost:
    """Two packages, the memory and cores of the first, and a second view of a package."""
    names = {
        "intel-rapl:0": "package-0",
        "intel-rapl:0:0": "core",
        "intel-rapl:0:1": "dram",
        "intel-rapl:1": "package-1",
        "intel-rapl:2": "psys",
        "intel-rapl-mmio:0": "package-0",
    }
    files: dict[str, str] = {}
    for zone, name in names.items():
        files |= {
            f"{ROOT}/{zone}/name": f"{name}\n",
            f"{ROOT}/{zone}/max_energy_range_uj": f"{RANGE}\n",
            f"{ROOT}/{zone}/energy_uj": f"{values.get(name.replace('-', '_'), 0)}\n",
        }
    return WrittenHost(files)


def driver(*readings: int | None, library: bool = True) -> Any:
    """Cards whose counters answer one after another; None: the card does not count."""
    left = list(readings)

    def init() -> None:
        if not library:
            raise NoLibrary

    def energy(_handle: int) -> int:
        value = left.pop(0)
        if value is None:
            raise Refused("Not Supported")
        return value

    return SimpleNamespace(
        NVMLError=Refused,
        NVMLError_LibraryNotFound=NoLibrary,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetTotalEnergyConsumption=energy,
    )


def metered(host: WrittenHost, later: WrittenHost, nvml: Any) -> Joules:
    meter = Meter(host, lambda: nvml)
    meter.start()
    host.files.update(later.files)
    return meter.stop()


def test_packages_and_memory_are_added_and_what_lies_inside_them_is_not() -> None:
    found, why = read_rapl(zones(package_0=5, package_1=7, core=100, dram=11, psys=1000))
    assert why is None
    assert sorted(zone.value_uj for zone in found.values()) == [5, 7, 11]
    used = metered(zones(), zones(package_0=3_000_000, dram=500_000, core=9_000_000), driver(library=False))
    assert used == Joules(3.5, None, None)
    assert used.total == 3.5


def test_a_counter_that_starts_again() -> None:
    before, after = zones(package_0=RANGE - 1_000_000), zones(package_0=2_000_000)
    assert metered(before, after, driver(library=False)).cpu == pytest.approx(3.0)


@given(st.integers(0, RANGE - 1), st.integers(0, RANGE - 1))
def test_what_was_used_is_never_negative_and_below_the_range(start: int, used: int) -> None:
    zone = {"a": Zone(start, RANGE)}
    found = used_j(zone, {"a": Zone((start + used) % RANGE, RANGE)})
    assert found == pytest.approx(used * 1e-6)


def test_counters_that_are_lost_or_of_unknown_range_give_no_figure() -> None:
    assert used_j({}, {}) is None
    assert used_j({"a": Zone(1, RANGE)}, {}) is None
    assert used_j({"a": Zone(5, None)}, {"a": Zone(4, None)}) is None
    host = zones()
    meter = Meter(host, lambda: driver(library=False))
    meter.start()
    host.files.clear()
    used = meter.stop()
    assert used.cpu is None
    assert used.why_not is not None
    assert used.total is None


def test_looks_in_between_count_several_turns_of_a_counter() -> None:
    host = zones(package_0=RANGE - 10)
    meter = Meter(host, lambda: driver(library=False))
    meter.start()
    for value in (RANGE // 2, 5, RANGE // 2):
        host.files.update(zones(package_0=value).files)
        meter.update()
    assert meter.stop().cpu == pytest.approx((10 + RANGE + RANGE // 2) * 1e-6)


@pytest.mark.parametrize(("gone", "words"), [("all", "no RAPL"), ("energy", "only root may read")])
def test_what_cannot_be_read_is_none_with_the_reason(gone: str, words: str) -> None:
    host = WrittenHost() if gone == "all" else zones()
    for path in [path for path in host.files if path.endswith("energy_uj")]:
        del host.files[path]
    used = metered(host, WrittenHost(), driver(1000, 4000))
    assert (used.cpu, used.gpu) == (None, 3.0)
    assert used.why_not is not None
    assert words in used.why_not
    assert used.total is None, "a part alone would mislead"


def test_cards_that_count_and_cards_that_do_not() -> None:
    whole = metered(zones(), zones(package_0=1_000_000), driver(2_000, 4_500))
    assert whole == Joules(1.0, 2.5, None)
    assert whole.total == 3.5
    old = metered(zones(), zones(package_0=1_000_000), driver(None))
    assert (old.cpu, old.gpu) == (1.0, None)
    assert old.why_not is not None
    assert "Not Supported" in old.why_not
    assert old.total is None
    lost = metered(zones(), zones(), driver(2_000, None))
    assert lost.gpu is None
    assert lost.why_not is not None
