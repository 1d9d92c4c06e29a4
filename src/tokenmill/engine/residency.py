"""Measures which parts of a file are in the page cache, without reading the file.

Uses cachestat(2) on Linux 6.5 and later, which takes a second for half a terabyte, and mincore(2) from several threads
on older kernels, which takes 20 times as long. The kernel answers truthfully only to owners and writers of the file:
for other users cachestat fails and mincore reports every page as resident, so the result is then unknown. Holes of
sparse files are not counted.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tokenmill.errors import ModelError
from tokenmill.hardware.disk import MEMORY_FILE_SYSTEMS, mount_of, parse_mountinfo
from tokenmill.units import MIB

BLOCK_BYTES = 16 * MIB  # granularity of residency
_THREADS, _BATCH = 8, 64  # threads, and blocks per task
_CACHESTAT = 451  # the same system call number on every architecture
_STATX_ATTR_DAX = 0x0020_0000
_AT_FDCWD = -100
_STATX_BYTES = 256
_OVERFLOW_UID = 65534  # owner of files whose owner is not mapped in this user namespace

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_MAP_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True, slots=True)
class Range:
    """A range of a file whose blocks have the same state: resident, not resident, or partly resident."""

    offset_bytes: int
    bytes: int
    resident_bytes: int | None  # None: unknown


@dataclass(frozen=True, slots=True)
class Residency:
    """Resident bytes and ranges of one file."""

    path: Path
    bytes: int | None  # resident; None: unknown
    total_bytes: int  # without holes
    ranges: tuple[Range, ...] = ()  # in file order, without holes
    why: str | None = None  # why it is unknown, or why caching has no effect

    @property
    def cold_bytes(self) -> int | None:
        """Bytes that a reader would have to wait for."""
        return None if self.bytes is None else self.total_bytes - self.bytes


def resident(path: Path) -> Residency:
    """Measure the resident part of a file without reading its data."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}", hint="check the path and its permissions") from error
    try:
        data = list(_data(fd, os.fstat(fd).st_size))
        total = sum(end - start for start, end in data)
        if medium := _no_cache(path):
            whole = tuple(Range(start, end - start, end - start) for start, end in data)
            return Residency(path, total, total, whole, medium)
        if _cachestat(fd, 0, mmap.PAGESIZE) is None and not _owned(fd, path):
            unknown = tuple(Range(start, end - start, None) for start, end in data)
            return Residency(path, None, total, unknown, f"only the owner or a writer of {path} can see what is cached")
        ranges = tuple(_joined(_blocks(fd, data)))
    finally:
        os.close(fd)
    return Residency(path, sum(part.resident_bytes or 0 for part in ranges), total, ranges)


def _data(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) of each range with data."""
    at = 0
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
            at = os.lseek(fd, start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno != errno.ENXIO:  # the file system does not support holes
                yield at, size
            return
        yield start, min(at, size)


def _no_cache(path: Path) -> str | None:
    """Return why reads of this file bypass the page cache; None if they do not."""
    mount = mount_of(os.path.realpath(path), parse_mountinfo(Path("/proc/self/mountinfo").read_text()))
    if mount is not None and mount.filesystem in MEMORY_FILE_SYSTEMS:
        return f"{path} is on {mount.filesystem}, which is memory already"
    if _is_dax(path):
        return f"{path} is on persistent memory (DAX), which is read in place"
    return None


def _is_dax(path: Path) -> bool:
    if not hasattr(_libc, "statx"):
        return False
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if _libc.statx(_AT_FDCWD, os.fsencode(path), 0, 0, answer) != 0:
        return False
    return bool(int.from_bytes(answer.raw[8:16], "little") & _STATX_ATTR_DAX)  # stx_attributes


def _owned(fd: int, path: Path) -> bool:
    """Whether mincore is truthful: the kernel's rule (can_do_mincore), as far as a process can check it."""
    owner = os.fstat(fd).st_uid
    if owner == os.geteuid() or (os.geteuid() == 0 and owner != _OVERFLOW_UID):
        return True
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def _blocks(fd: int, data: list[tuple[int, int]]) -> Iterator[Range]:
    blocks = [
        (max(start, at), min(end, at + BLOCK_BYTES) - max(start, at))
        for start, end in data
        for at in range(start // BLOCK_BYTES * BLOCK_BYTES, end, BLOCK_BYTES)
    ]
    if _cachestat(fd, 0, mmap.PAGESIZE) is not None:
        yield from (_block(at, size, _cachestat(fd, at, size) or 0) for at, size in blocks)
        return
    batches = [blocks[first : first + _BATCH] for first in range(0, len(blocks), _BATCH)]
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        for batch in pool.map(lambda batch: [_block(at, size, _mincore(fd, at, size)) for at, size in batch], batches):
            yield from batch


def _block(offset: int, size: int, pages: int) -> Range:
    return Range(offset, size, min(size, pages * mmap.PAGESIZE))


def _joined(blocks: Iterator[Range]) -> Iterator[Range]:
    """Merge adjacent ranges that are both fully resident or both not resident."""
    last: Range | None = None
    for block in blocks:
        if last is not None and _alike(last, block):
            last = Range(
                last.offset_bytes, last.bytes + block.bytes, (last.resident_bytes or 0) + (block.resident_bytes or 0)
            )
            continue
        if last is not None:
            yield last
        last = block
    if last is not None:
        yield last


def _alike(first: Range, second: Range) -> bool:
    touching = first.offset_bytes + first.bytes == second.offset_bytes
    full = first.resident_bytes == first.bytes and second.resident_bytes == second.bytes
    return touching and (full or (first.resident_bytes == 0 and second.resident_bytes == 0))


def _cachestat(fd: int, offset: int, size: int) -> int | None:
    """Number of cached pages; None if the kernel lacks the call or refuses it."""
    query = (ctypes.c_uint64 * 2)(offset, size)
    answer = (ctypes.c_uint64 * 5)()
    if _libc.syscall(ctypes.c_long(_CACHESTAT), fd, query, answer, 0) != 0:
        return None
    return int(answer[0])


def _mincore(fd: int, offset: int, size: int) -> int:
    """Number of cached pages, from a mapping that is never accessed."""
    start = offset // mmap.PAGESIZE * mmap.PAGESIZE
    length = offset + size - start
    address = _libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, start)
    if address == _MAP_FAILED:
        raise _last_error()
    try:
        vector = ctypes.create_string_buffer(-(-length // mmap.PAGESIZE))
        if _libc.mincore(address, length, vector) != 0:
            raise _last_error()
    finally:
        _libc.munmap(address, length)
    return vector.raw.count(1)


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
