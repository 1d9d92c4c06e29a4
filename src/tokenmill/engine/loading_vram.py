"""GPU memory of processes, by NVIDIA's management library.

The driver counts processes as the machine numbers them: in a container of its own numbering nothing is found, and the
answer is None, not 0.
"""

from collections.abc import Callable, Collection
from typing import Any


def vram_by_gpu(nvml: Any, pids: Collection[int]) -> dict[int, int] | None:
    """Bytes on each card that these processes have memory on; None where the driver does not say."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        found: dict[int, int] = {}
        for index in range(nvml.nvmlDeviceGetCount()):
            for used in _used(nvml, index, pids).values():
                found[index] = found.get(index, 0) + used
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()
    return found or None


def _used(nvml: Any, index: int, pids: Collection[int]) -> dict[int, int]:
    """Bytes by process: one that computes and draws is listed twice with the same figure."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    used: dict[int, int] = {}
    for call in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        try:
            running = call(handle)
        except nvml.NVMLError:
            continue
        for process in running:
            if process.pid in pids and process.usedGpuMemory is not None:
                used[process.pid] = process.usedGpuMemory
    return used


def this_driver() -> Callable[[Collection[int]], dict[int, int] | None]:
    """`vram_by_gpu` on this machine."""
    import pynvml  # noqa: PLC0415  a large module that a machine without GPUs never needs

    return lambda pids: vram_by_gpu(pynvml, pids)
