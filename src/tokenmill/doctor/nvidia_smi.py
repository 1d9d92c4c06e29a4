"""Parses `nvidia-smi -q -x`: utilization, power, throttling and processes of each GPU, which the probe does not read.

Element names differ between drivers (throttle reasons became event reasons with 535); both are read. The value "N/A"
becomes None.
"""

import re
from xml.etree import ElementTree

from tokenmill.doctor.facts import GpuState, MemoryHolder
from tokenmill.units import MIB

COMMAND = ("nvidia-smi", "-q", "-x")
_REASON = re.compile(r"clocks_(?:event|throttle)_reason_(\w+)")
_COUNTER = re.compile(r"clocks_event_reasons_counters_(\w+)")


def parse(text: str) -> tuple[GpuState, ...] | None:
    """The state of every GPU in NVML's order; None if the text is not a document of nvidia-smi."""
    try:
        log = ElementTree.fromstring(text)  # noqa: S314  written by the driver's tool on this machine
    except ElementTree.ParseError:
        return None
    if log.tag != "nvidia_smi_log":
        return None
    return tuple(_gpu(index, gpu) for index, gpu in enumerate(log.iterfind("gpu")))


def _gpu(index: int, gpu: ElementTree.Element) -> GpuState:
    power = gpu.find("gpu_power_readings")
    if power is None:
        power = gpu.find("power_readings")  # drivers before 535
    generation = _number(gpu.findtext("pci/pci_gpu_link_info/pcie_gen/max_device_link_gen"))
    busy = _number(gpu.findtext("utilization/gpu_util"))
    return GpuState(
        index=index,
        persistent={"Enabled": True, "Disabled": False}.get(gpu.findtext("persistence_mode") or ""),
        utilization=None if busy is None else busy / 100,
        temperature_c=_number(gpu.findtext("temperature/gpu_temp")),
        power_limit_w=_power(power, "current_power_limit", "enforced_power_limit", "power_limit"),
        default_power_limit_w=_power(power, "default_power_limit"),
        slowed_by=tuple(
            match[1]
            for element in gpu.iter()
            if (match := _REASON.fullmatch(element.tag)) and (element.text or "").strip() == "Active"
        ),
        slowed_s={
            match[1]: micros / 1e6
            for element in gpu.iter()
            if (match := _COUNTER.fullmatch(element.tag)) and (micros := _number(element.text))
        },
        device_generation=None if generation is None else int(generation),
        holders=tuple(_holders(gpu)),
    )


def _holders(gpu: ElementTree.Element) -> list[MemoryHolder]:
    found = []
    for process in gpu.iterfind("processes/process_info"):
        pid = _number(process.findtext("pid"))
        used = _number(process.findtext("used_memory"))
        if pid is not None:
            words = (process.findtext("process_name") or "").split()  # some drivers report the whole command line
            name = words[0].rpartition("/")[2] if words else "a process"
            found.append(MemoryHolder(name, int(pid), None if used is None else round(used * MIB)))
    return sorted(found, key=lambda holder: -(holder.bytes or 0))


def _power(readings: ElementTree.Element | None, *names: str) -> float | None:
    found = (_number(readings.findtext(name)) for name in names) if readings is not None else iter(())
    return next((value for value in found if value is not None), None)


def _number(text: str | None) -> float | None:
    match = re.match(r"\s*(-?\d+(?:\.\d+)?)", text or "")
    return float(match[1]) if match else None
