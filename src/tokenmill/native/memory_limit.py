"""The worker's memory limit: a request that allocates without bound ends only the worker.

RLIMIT_DATA counts private writable memory: heaps, thread stacks, weights that are not mapped from the file, host
caches and compute buffers. It does not count a model file mapped read-only or the address space that GPU drivers
reserve, which RLIMIT_AS would. Measured on an H200 with driver 580 (2026-11-16): a CUDA context counts 37 MB, and
device, pinned, managed and reserved memory count nothing.

The limit is the usage after the model and the context are allocated, plus headroom, because a limit computed in advance
would depend on what each GPU driver allocates.
"""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenmill.units import GIB

HEADROOM_BYTES = 4 * GIB
GPU_HEADROOM_BYTES = 4 * GIB
"""Per GPU: drivers load kernels and allocate pinned staging buffers at first use."""


def set_limit(gpus: int) -> int | None:
    """Limit this process to its current memory plus headroom; returns the limit, None if /proc is not readable."""
    held = held_bytes()
    if held is None:
        return None
    limit = held + HEADROOM_BYTES + gpus * GPU_HEADROOM_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    return limit


@contextmanager
def lifted(gpus: int) -> Iterator[None]:
    """Lift the limit for allocations that an operator requested, and set a new one afterwards."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    try:
        yield
    finally:
        set_limit(gpus)


def held_bytes(status: Path = Path("/proc/self/status")) -> int | None:
    """The bytes that count towards RLIMIT_DATA now."""
    try:
        lines = status.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "VmData":
            return int(value.split()[0]) * 1024
    return None
