"""What of a file the kernel keeps in memory. Asking touches no data.

cachestat(2) answers where the kernel has it (6.5), in a second for half a terabyte; elsewhere mincore(2), which takes
twenty times as long and is asked by several threads. Both tell the truth only to who owns or may write the file: to
others cachestat says nothing and mincore calls every page resident, so the answer is then "unknown". Holes of sparse
files are no data and are left out.
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
from tokenmill.hardware.disk import mount_of, parse_mountinfo
from tokenmill.units import MIB

BLOCK_BYTES = 16 * MIB  # granularity of residency
_ASKERS, _BATCH = 8, 64  # threads, and blocks for one of them at a time
_CACHESTAT = 451  # the same system call number on every architecture
_STATX_ATTR_DAX = 0x0020_0000
_AT_FDCWD = -100
_STATX_BYTES = 256
_NOBODY = 65534  # who owns a file whose owner has no number in this user namespace
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")

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
    resident_bytes: int | None  # None: the kernel does not tell


@dataclass(frozen=True, slots=True)
class Residency:
    """Resident bytes and ranges of one file."""

    path: Path
    bytes: int | None  # resident; None: the kernel does not tell
    total_bytes: int  # data, holes left out
    ranges: tuple[Range, ...] = ()  # in file order, holes left out
    why: str | None = None  # why it is unknown, or why there is nothing to cache

    @property
    def cold_bytes(self) -> int | None:
        """What a reader would wait for."""
        return None if self.bytes is None else self.total_bytes - self.bytes


def resident(path: Path) -> Residency:
    """Measure the resident part of a file without reading its data."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}", hint="check the path and its rights") from error
    try:
        data = list(_data(fd, os.fstat(fd).st_size))
        total = sum(end - start for start, end in data)
        if medium := _no_cache(path):
            whole = tuple(Range(start, end - start, end - start) for start, end in data)
            return Residency(path, total, total, whole, medium)
        if _cachestat(fd, 0, mmap.PAGESIZE) is None and not _owned(fd, path):
            untold = tuple(Range(start, end - start, None) for start, end in data)
            return Residency(path, None, total, untold, f"the kernel tells only who owns or may write {path}")
        ranges = tuple(_joined(_blocks(fd, data)))
    finally:
        os.close(fd)
    return Residency(path, sum(part.resident_bytes or 0 for part in ranges), total, ranges)


def _data(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Where the file has data, as (start, end)."""
    at = 0
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
            at = os.lseek(fd, start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno != errno.ENXIO:  # a file system that knows no holes
                yield at, size
            return
        yield start, min(at, size)


def _no_cache(path: Path) -> str | None:
    """Why the page cache has no part in reading this file; None: it has."""
    mount = mount_of(os.path.realpath(path), parse_mountinfo(Path("/proc/self/mountinfo").read_text()))
    if mount is not None and mount.filesystem in _MEMORY_FILE_SYSTEMS:
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
    """The kernel's own rule for mincore (can_do_mincore), as far as it can be known from here."""
    owner = os.fstat(fd).st_uid
    if owner == os.geteuid() or (os.geteuid() == 0 and owner != _NOBODY):
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
    with ThreadPoolExecutor(min(_ASKERS, os.cpu_count() or 1)) as pool:
        for batch in pool.map(lambda batch: [_block(at, size, _mincore(fd, at, size)) for at, size in batch], batches):
            yield from batch


def _block(offset: int, size: int, pages: int) -> Range:
    return Range(offset, size, min(size, pages * mmap.PAGESIZE))


def _joined(blocks: Iterator[Range]) -> Iterator[Range]:
    """Neighbours that are both full or both empty become one."""
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
    """Pages in the cache; None where the kernel has no such call or refuses it."""
    asked = (ctypes.c_uint64 * 2)(offset, size)
    answer = (ctypes.c_uint64 * 5)()
    if _libc.syscall(ctypes.c_long(_CACHESTAT), fd, asked, answer, 0) != 0:
        return None
    return int(answer[0])


def _mincore(fd: int, offset: int, size: int) -> int:
    """Pages in the cache, by a mapping that is never read through."""
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
