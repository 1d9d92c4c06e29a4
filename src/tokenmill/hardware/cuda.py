"""The few calls of NVIDIA's driver library that measuring copies takes; no toolkit, no wheel.

The driver installs `libcuda.so.1`; where it is missing there is nothing to measure. Sizes are bytes, device
pointers plain integers. Every call that fails becomes a ProbeError in the driver's own words.
"""

import ctypes
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from tokenmill.errors import ProbeError

NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_size = ctypes.c_size_t
_pointer = ctypes.c_uint64


class Cuda:
    """The driver library, initialised."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.has_devices = self._call("cuInit", ctypes.c_uint(0), allowed=NO_DEVICE) == 0

    def devices(self) -> dict[str, int]:
        """Ordinal of each visible device by its UUID, written as nvidia-smi writes it."""
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
        """Work on this device, in this thread, inside the block."""
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
        """Host memory the card reaches by itself; copies from pageable memory go through such a buffer anyway."""
        address = ctypes.c_void_p()
        self._call("cuMemHostAlloc", ctypes.byref(address), _size(size_bytes), ctypes.c_uint(0))
        try:
            yield address.value or 0
        finally:
            self._call("cuMemFreeHost", address)

    def copy_within(self, target: int, source: int, size_bytes: int) -> None:
        """Start a copy on the card; `wait` for it."""
        self._call("cuMemcpyDtoD_v2", _pointer(target), _pointer(source), _size(size_bytes))

    def copy_in(self, target: int, source: int, size_bytes: int) -> None:
        """Copy host memory to the card."""
        self._call("cuMemcpyHtoD_v2", _pointer(target), ctypes.c_void_p(source), _size(size_bytes))

    def copy_out(self, target: int, source: int, size_bytes: int) -> None:
        """Copy the card's memory to the host."""
        self._call("cuMemcpyDtoH_v2", ctypes.c_void_p(target), _pointer(source), _size(size_bytes))

    def wait(self) -> None:
        """Until the card has done everything asked of it."""
        self._call("cuCtxSynchronize")

    def _device(self, ordinal: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
        return device

    def _call(self, name: str, *arguments: object, allowed: int = 0) -> int:
        function = getattr(self._library, name, None)
        if function is None:
            raise ProbeError(f"the NVIDIA driver here is too old: it has no {name}", hint="update the driver")
        status = int(function(*arguments))
        if status not in (0, allowed):
            raise ProbeError(
                f"the NVIDIA driver refused {name}: {self._words(status)}",
                hint="nvidia-smi says whether the card is well and who holds its memory",
            )
        return status

    def _words(self, status: int) -> str:
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
        return (text.value or b"error").decode(errors="replace") + f" ({status})"


def load(name: str = "libcuda.so.1") -> Cuda | None:
    """The driver, or None where it is not installed."""
    try:
        library = ctypes.CDLL(name)
    except OSError:
        return None
    return Cuda(library)
