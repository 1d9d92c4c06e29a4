"""Measures the bandwidth of NVIDIA GPUs: of their memory, and in both directions of the link to the host.

Uses the driver library only. GPUs of other vendors are skipped, because their drivers have no such library.
"""

import contextlib
import ctypes
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from time import perf_counter

from tokenmill.errors import ProbeError
from tokenmill.hardware.bandwidth.threads import OnMeasured
from tokenmill.hardware.machine import Gpu, Machine, Rate
from tokenmill.units import MIB, format_bytes

NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_size = ctypes.c_size_t
_pointer = ctypes.c_uint64


class Cuda:
    """The initialized driver library. Methods raise `ProbeError` if the driver reports an error."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.has_devices = self._call("cuInit", ctypes.c_uint(0), allowed=NO_DEVICE) == 0

    def devices(self) -> dict[str, int]:
        """Ordinals of all visible devices by UUID, in nvidia-smi's format."""
        count = ctypes.c_int()
        if self.has_devices:
            self._call("cuDeviceGetCount", ctypes.byref(count))
        found = {}
        for ordinal in range(count.value):
            raw = (ctypes.c_ubyte * 16)()
            self._call("cuDeviceGetUuid", ctypes.byref(raw), self._device(ordinal))
            found[f"GPU-{uuid.UUID(bytes=bytes(raw))}"] = ordinal
        return found

    @contextmanager
    def current(self, ordinal: int) -> Iterator[None]:
        """Make a device current in this thread, inside the block."""
        device = self._device(ordinal)
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        try:
            self._call("cuCtxSetCurrent", context)
            yield
        finally:
            self._call("cuDevicePrimaryCtxRelease_v2", device)

    def free_bytes(self) -> int:
        """Free memory of the current device."""
        free = _size()
        total = _size()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    @contextmanager
    def device_memory(self, size_bytes: int) -> Iterator[int]:
        """Memory on the current device."""
        address = _pointer()
        self._call("cuMemAlloc_v2", ctypes.byref(address), _size(size_bytes))
        try:
            yield address.value
        finally:
            self._call("cuMemFree_v2", address)

    @contextmanager
    def pinned_memory(self, size_bytes: int) -> Iterator[int]:
        """Host memory that the GPU can access directly; the driver copies pageable memory through such a buffer."""
        address = ctypes.c_void_p()
        self._call("cuMemHostAlloc", ctypes.byref(address), _size(size_bytes), ctypes.c_uint(0))
        try:
            yield address.value or 0
        finally:
            self._call("cuMemFreeHost", address)

    def copy_within(self, target: int, source: int, size_bytes: int) -> None:
        """Start a copy within the GPU; `wait` waits for its end."""
        self._call("cuMemcpyDtoD_v2", _pointer(target), _pointer(source), _size(size_bytes))

    def copy_in(self, target: int, source: int, size_bytes: int) -> None:
        """Copy host memory to the GPU."""
        self._call("cuMemcpyHtoD_v2", _pointer(target), ctypes.c_void_p(source), _size(size_bytes))

    def copy_out(self, target: int, source: int, size_bytes: int) -> None:
        """Copy GPU memory to the host."""
        self._call("cuMemcpyDtoH_v2", ctypes.c_void_p(target), _pointer(source), _size(size_bytes))

    def wait(self) -> None:
        """Wait until the GPU has finished all work."""
        self._call("cuCtxSynchronize")

    def _device(self, ordinal: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
        return device

    def _call(self, name: str, *arguments: object, allowed: int = 0) -> int:
        function = getattr(self._library, name, None)
        if function is None:
            raise ProbeError(f"the NVIDIA driver is too old: it has no {name}", hint="update the driver")
        status = int(function(*arguments))
        if status not in (0, allowed):
            raise ProbeError(
                f"the NVIDIA driver refused {name}: {self._describe(status)}",
                hint="see nvidia-smi for the state of the GPU and the processes that use its memory",
            )
        return status

    def _describe(self, status: int) -> str:
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
        return (text.value or b"error").decode(errors="replace") + f" ({status})"


def load(name: str = "libcuda.so.1") -> Cuda | None:
    """Load the driver library; None if it is not installed."""
    try:
        library = ctypes.CDLL(name)
    except OSError:
        return None
    return Cuda(library)


WANTED_BYTES = 1024 * MIB
MIN_BYTES = 64 * MIB
"""Minimum size of each buffer; the largest L2 cache of a GPU so far is 126 MB."""
LINK_BYTES = 256 * MIB
SHARE_OF_FREE = 4
COPIES_PER_WAIT = 8


def measure_gpus(machine: Machine, seconds: float, progress: OnMeasured) -> list[Rate]:
    """Measure `gpuN`, `dram->gpuN` and `gpuN->dram` in about `seconds` per GPU; empty without a driver."""
    if not machine.gpus:
        return []
    try:
        cuda = load()
        if cuda is None:
            progress("gpus: skipped, the NVIDIA driver library is not installed")
            return []
        ordinals = cuda.devices()
    except ProbeError as error:
        progress(f"gpus: skipped, {error.message}")
        return []
    rates: list[Rate] = []
    for gpu, ordinal in matched(machine.gpus, ordinals, progress):
        cpus = next((node.cpus for node in machine.numa if node.index == gpu.numa_node), ())
        try:
            # a thread pinned near the GPU, because host memory is allocated on the node of the allocating thread
            with ThreadPoolExecutor(1, initializer=_pin, initargs=(cpus,)) as pool:
                rates += pool.submit(_copies, cuda, gpu, ordinal, seconds / 3, progress).result()
        except ProbeError as error:
            progress(f"gpu{gpu.index}: skipped, {error.message}")
    return rates


def matched(gpus: Sequence[Gpu], ordinals: dict[str, int], progress: OnMeasured) -> Iterator[tuple[Gpu, int]]:
    """Yield each GPU with its CUDA ordinal, which may differ from its index: CUDA can sort by speed or hide GPUs."""
    for gpu in gpus:
        ordinal = ordinals.get(gpu.uuid or "")
        if ordinal is None and gpu.uuid is None and len(gpus) == len(ordinals) == 1:
            ordinal = 0
        if ordinal is None:
            progress(f"gpu{gpu.index}: skipped, the NVIDIA driver does not list {gpu.name}")
        else:
            yield gpu, ordinal


def buffer_bytes(free_bytes: int) -> int | None:
    """Size of each of two buffers on a GPU; None if too little memory is free."""
    size = min(WANTED_BYTES, free_bytes // SHARE_OF_FREE)
    return size if size >= MIN_BYTES else None


def _pin(cpus: Sequence[int]) -> None:
    if cpus:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cpus)


def _copies(cuda: Cuda, gpu: Gpu, ordinal: int, seconds: float, progress: OnMeasured) -> list[Rate]:
    name = f"gpu{gpu.index}"
    with ExitStack() as held:
        held.enter_context(cuda.current(ordinal))
        free = cuda.free_bytes()
        size = buffer_bytes(free)
        if size is None:
            progress(f"{name}: skipped, only {format_bytes(free)} of its memory is free")
            return []
        progress(f"{name}: copying {format_bytes(size)} within {gpu.name}, and to and from the host")
        link_size = min(size, LINK_BYTES)
        one, two = (held.enter_context(cuda.device_memory(size)) for _ in range(2))
        host = held.enter_context(cuda.pinned_memory(link_size))

        def within() -> int:
            for _ in range(COPIES_PER_WAIT):
                cuda.copy_within(two, one, size)
            return COPIES_PER_WAIT * size * 2  # each byte is read and written

        def inward() -> int:
            cuda.copy_in(one, host, link_size)
            return link_size

        def outward() -> int:
            cuda.copy_out(host, one, link_size)
            return link_size

        copies = ((name, within), (f"dram->{name}", inward), (f"{name}->dram", outward))
        return [Rate(path, _best_gb_s(cuda, copy, seconds)) for path, copy in copies]


def _best_gb_s(cuda: Cuda, copy: Callable[[], int], seconds: float) -> float:
    copy()
    cuda.wait()
    best = 0.0
    stop = perf_counter() + seconds
    while (start := perf_counter()) < stop or best == 0.0:
        moved_bytes = copy()
        cuda.wait()
        best = max(best, moved_bytes / (perf_counter() - start) / 1e9)
    return float(f"{best:.4g}")
