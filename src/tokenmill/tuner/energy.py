"""Measures energy between two moments: RAPL counters for CPUs and memory, NVML for GPUs.

Counters cover the whole machine, including other programs. Energy is None, with a reason, if a counter cannot be read:
since 2020 only root may read RAPL, and virtual machines have none.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill.hardware.host import Host, LocalHost, number

# AMD uses the name intel-rapl as well; intel-rapl-mmio shows the same packages again
_ZONES = ("/sys/class/powercap/intel-rapl:*", "/sys/class/powercap/intel-rapl:*:*")
_OUTSIDE = ("package", "dram")  # cores and uncore are part of the package, psys covers everything
_UJ = 1e-6
_MJ = 1e-3


@dataclass(frozen=True, slots=True)
class Joules:
    """Energy used; None: unknown."""

    cpu: float | None = None  # CPUs, and their memory if it has a counter
    gpu: float | None = None  # all GPUs; None also without GPUs
    why_not: str | None = None  # reason for a counter that exists but cannot be read

    @property
    def total(self) -> float | None:
        """Sum of all parts; None if one is unknown."""
        return None if self.why_not is not None or self.cpu is None else self.cpu + (self.gpu or 0.0)


@dataclass(frozen=True, slots=True)
class Zone:
    """A reading of a RAPL counter."""

    value_uj: int
    range_uj: int | None  # value at which it wraps to 0


def used_j(before: Mapping[str, Zone], after: Mapping[str, Zone]) -> float | None:
    """Joules between two readings, assuming at most one wrap per counter; None if a counter is missing."""
    total = 0
    for name, zone in before.items():
        then = after.get(name)
        if then is None:
            return None
        delta = then.value_uj - zone.value_uj
        if delta < 0:
            if zone.range_uj is None:
                return None
            delta += zone.range_uj
        total += delta
    return total * _UJ if before else None


def read_rapl(host: Host) -> tuple[dict[str, Zone], str | None]:
    """RAPL counters of packages and memory by path, or the reason why they cannot be read."""
    found: dict[str, Zone] = {}
    for path in [path for pattern in _ZONES for path in host.glob(pattern)]:
        if path in found or not (host.text(f"{path}/name") or "").startswith(_OUTSIDE):
            continue
        value = number(host.text(f"{path}/energy_uj"))
        if value is None:
            return {}, f"CPU energy: only root may read {path}/energy_uj"
        found[path] = Zone(value, number(host.text(f"{path}/max_energy_range_uj")))
    return found, None if found else "CPU energy: this machine has no RAPL counters"


def read_cards(nvml: Any) -> tuple[dict[int, int] | None, str | None]:
    """Millijoules of each GPU since its driver was loaded, by index; None with a reason if one has no counter."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound:
        return {}, None
    except nvml.NVMLError as error:
        return None, f"GPU energy: {error}"
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return {at: int(nvml.nvmlDeviceGetTotalEnergyConsumption(each)) for at, each in enumerate(handles)}, None
    except nvml.NVMLError as error:
        return None, f"GPU energy: {error}"
    finally:
        nvml.nvmlShutdown()


class Meter:
    """Measures from `start` to `stop`. RAPL counters wrap after minutes, so call `update` regularly in between."""

    def __init__(self, host: Host | None = None, nvml: Callable[[], Any] | None = None) -> None:
        """Measure this machine; `host` and `nvml` replace its sources."""
        self._host = host or LocalHost()
        self._nvml = nvml or pynvml
        self._cpu_j: float | None = 0.0
        self._zones: dict[str, Zone] = {}
        self._cards: dict[int, int] | None = None
        self._reasons: tuple[str, ...] = ()

    def start(self) -> None:
        """Start measuring."""
        self._cards, card = read_cards(self._nvml())
        self._zones, rapl = read_rapl(self._host)
        self._cpu_j = 0.0
        self._reasons = tuple(filter(None, (rapl, card)))

    def update(self) -> None:
        """Add the energy used since the last update."""
        zones, why = read_rapl(self._host)
        used = None if why else used_j(self._zones, zones)
        self._cpu_j = None if used is None or self._cpu_j is None else self._cpu_j + used
        self._zones = zones

    def stop(self) -> Joules:
        """Energy used since `start`."""
        self.update()
        cards = read_cards(self._nvml())[0] if self._cards else None
        gpu = None
        if self._cards and cards is not None and cards.keys() >= self._cards.keys():
            gpu = sum(cards[at] - then for at, then in self._cards.items()) * _MJ
        reasons = self._reasons
        if self._cpu_j is None and not any("CPU energy" in reason for reason in reasons):
            reasons += ("CPU energy: a RAPL counter disappeared during the measurement",)
        if self._cards and gpu is None:
            reasons += ("GPU energy: a GPU could not be read at the end",)
        return Joules(self._cpu_j, gpu, "; ".join(reasons) or None)


def pynvml() -> Any:
    """The module pynvml."""
    import pynvml  # noqa: PLC0415  a large module that most commands never need

    return pynvml
