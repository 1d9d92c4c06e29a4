"""Reads NVIDIA's management library (NVML) into plain values, without interpreting them.

The module (`pynvml`) is an argument, so that tests can pass a recorded one. NVML may refuse any call for any card; a
refused value is None, and reading continues.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NvmlLink:
    """One active NVLink of a card."""

    remote_bus_id: str | None = None
    remote_is_switch: bool = False


@dataclass(frozen=True, slots=True)
class NvmlCard:
    """One GPU as NVML reports it; None: not supported."""

    index: int
    name: str | None = None
    uuid: str | None = None
    bus_id: str | None = None
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    memory_bus_bits: int | None = None
    memory_clock_mhz: int | None = None  # maximum
    pcie_generation: int | None = None
    pcie_width: int | None = None
    pcie_max_generation: int | None = None  # that GPU and slot both support
    pcie_max_width: int | None = None
    compute_capability: str | None = None
    power_limit_mw: int | None = None
    mig: bool = False
    nvlink_mb_s: int | None = None  # one link, one direction
    links: tuple[NvmlLink, ...] = ()


@dataclass(frozen=True, slots=True)
class NvmlReading:
    """All GPUs, or the reason why NVML cannot be read."""

    cards: tuple[NvmlCard, ...] = ()
    error: str | None = None
    library: bool = True  # False: libnvidia-ml.so.1 is not installed, so there is no driver


def read(nvml: Any) -> NvmlReading:
    """Read all GPUs through a pynvml-like module; never raises NVMLError."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound:
        return NvmlReading(library=False)
    except nvml.NVMLError as error:
        return NvmlReading(error=str(error))
    try:
        cards = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = _ask(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
            # a GPU that fell off the bus keeps its number and answers no calls
            cards.append(NvmlCard(index) if handle is None else _card(nvml, index, handle))
        return NvmlReading(tuple(cards))
    except nvml.NVMLError as error:
        return NvmlReading(error=str(error))
    finally:
        nvml.nvmlShutdown()


def _card(nvml: Any, index: int, handle: Any) -> NvmlCard:
    def ask(call: Callable[..., T], *arguments: Any) -> T | None:
        return _ask(nvml, call, handle, *arguments)

    # version 2 excludes memory reserved by the driver; older drivers have only version 1
    memory = ask(nvml.nvmlDeviceGetMemoryInfo, nvml.nvmlMemory_v2) or ask(nvml.nvmlDeviceGetMemoryInfo)
    pci = ask(nvml.nvmlDeviceGetPciInfo)
    capability = ask(nvml.nvmlDeviceGetCudaComputeCapability)
    return NvmlCard(
        index=index,
        name=_text(ask(nvml.nvmlDeviceGetName)),
        uuid=_text(ask(nvml.nvmlDeviceGetUUID)),
        bus_id=bus_id(pci.busId) if pci else None,
        memory_total_bytes=memory.total if memory else None,
        memory_free_bytes=memory.free if memory else None,
        memory_bus_bits=ask(nvml.nvmlDeviceGetMemoryBusWidth),
        memory_clock_mhz=ask(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_MEM),
        pcie_generation=ask(nvml.nvmlDeviceGetCurrPcieLinkGeneration),
        pcie_width=ask(nvml.nvmlDeviceGetCurrPcieLinkWidth),
        pcie_max_generation=ask(nvml.nvmlDeviceGetMaxPcieLinkGeneration),
        pcie_max_width=ask(nvml.nvmlDeviceGetMaxPcieLinkWidth),
        compute_capability=f"{capability[0]}.{capability[1]}" if capability else None,
        power_limit_mw=ask(nvml.nvmlDeviceGetEnforcedPowerLimit),
        mig=bool((ask(nvml.nvmlDeviceGetMigMode) or (0,))[0]),
        nvlink_mb_s=_link_speed(nvml, handle),
        links=_links(nvml, handle),
    )


def _links(nvml: Any, handle: Any) -> tuple[NvmlLink, ...]:
    links = []
    for number in range(nvml.NVML_NVLINK_MAX_LINKS):
        state = _ask(nvml, nvml.nvmlDeviceGetNvLinkState, handle, number)
        if state is None:
            break  # links are numbered without gaps, and GPUs without NVLink refuse the first
        if state != nvml.NVML_FEATURE_ENABLED:
            continue
        remote = _ask(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, number)
        kind = _ask(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, number)
        links.append(NvmlLink(bus_id(remote.busId) if remote else None, kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH))
    return tuple(links)


def _link_speed(nvml: Any, handle: Any) -> int | None:
    answer = _ask(nvml, nvml.nvmlDeviceGetFieldValues, handle, [nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON])
    if not answer or answer[0].nvmlReturn != nvml.NVML_SUCCESS:
        return None
    return answer[0].value.uiVal or None


def _ask(nvml: Any, call: Callable[..., T], *arguments: Any) -> T | None:
    try:
        return call(*arguments)
    except nvml.NVMLError:
        return None


def bus_id(raw: bytes | str) -> str:
    """Convert NVML's `00000000:C1:00.0` to the format of sysfs, `0000:c1:00.0`."""
    text = _text(raw) or ""
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _text(raw: bytes | str | None) -> str | None:
    return raw.decode(errors="replace") if isinstance(raw, bytes) else raw
