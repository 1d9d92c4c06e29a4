"""Measures the read rate of the disk that holds a path, bypassing the page cache.

1, 2, 4, ... threads read blocks of 4 MiB with O_DIRECT from the largest model file found, else from a temporary file
without a name, which disappears with the process. If the file system refuses O_DIRECT, the temporary file is dropped
from the page cache first; a model file never is, because a running engine may use it. Caches below the file system (of
the drive, a hypervisor, or ZFS) are not bypassed.
"""

import contextlib
import fcntl
import itertools
import mmap
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

from tokenmill.hardware.bandwidth.threads import OnMeasured, PassStep, as_rate, climb, stream, thread_counts, whole_gb_s
from tokenmill.hardware.disk import MEMORY_FILE_SYSTEMS, mount_of, parse_mountinfo
from tokenmill.hardware.machine import Rate
from tokenmill.units import GIB, MIB, format_bytes

BLOCK_BYTES = 4 * MIB
DEPTHS = thread_counts(16)
MIN_FILE_BYTES = 256 * MIB
MAX_TEMPORARY_BYTES = GIB
MIN_TEMPORARY_BYTES = 64 * MIB
SHARE_OF_FREE = 10
MODEL_SUFFIXES = (".gguf", ".safetensors")
MAX_ENTRIES = 5000


def measure_disk(path: Path, seconds: float, progress: OnMeasured) -> Rate | None:
    """Measure `disk`, in about `seconds`; None if it is impossible, with the reason passed to `progress`."""
    mount = mount_of(str(path.resolve()), parse_mountinfo(Path("/proc/self/mountinfo").read_text()))
    if mount is not None and mount.filesystem in MEMORY_FILE_SYSTEMS:
        progress(f"disk: skipped, {path} is on {mount.filesystem}, which is memory")
        return None
    try:
        found = path if path.is_file() else largest_model(path, MIN_FILE_BYTES)
        if found is not None and (rate := measure_file(found, seconds, progress)) is not None:
            return rate
        return _read_temporary(path if path.is_dir() else path.parent, seconds, progress)
    except OSError as error:
        progress(f"disk: skipped, {error.strerror or error} ({error.filename or path})")
        return None


def measure_file(path: Path, seconds: float, progress: OnMeasured = lambda _text: None) -> Rate | None:
    """Measure `disk` by reading one file; None if it is small or sparse, or its file system refuses O_DIRECT."""
    if not is_solid(path.stat()):
        return None
    with path.open("rb", buffering=0) as opened:
        if not _make_direct(opened.fileno()):
            return None
        progress(f"disk: reading {path} with O_DIRECT")
        return _climb(opened.fileno(), seconds, direct=True)


def is_solid(status: os.stat_result) -> bool:
    """Whether a file is large enough and not sparse, because holes are not read from disk."""
    return status.st_size >= MIN_FILE_BYTES and status.st_blocks * 512 >= status.st_size * 0.95


def largest_model(folder: Path, min_bytes: int) -> Path | None:
    """The largest suitable model file on the folder's file system, among the first `MAX_ENTRIES` entries."""
    device = folder.stat().st_dev
    found: list[tuple[int, str]] = []
    for entry in itertools.islice(_entries(folder), MAX_ENTRIES):
        if entry.name.endswith(MODEL_SUFFIXES):
            with contextlib.suppress(OSError):  # deleted meanwhile, or a broken link
                status = entry.stat()
                if status.st_dev == device and status.st_size >= min_bytes and is_solid(status):
                    found.append((status.st_size, entry.path))
    return Path(max(found)[1]) if found else None


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield entries breadth first, so that limiting their number keeps those nearest to the folder."""
    folders = [str(folder)]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop(0)) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                yield entry


def _read_temporary(folder: Path, seconds: float, progress: OnMeasured) -> Rate | None:
    status = os.statvfs(folder)
    size = min(MAX_TEMPORARY_BYTES, status.f_bavail * status.f_frsize // SHARE_OF_FREE)
    if size < MIN_TEMPORARY_BYTES:
        needed = format_bytes(MIN_TEMPORARY_BYTES * SHARE_OF_FREE)
        progress(f"disk: skipped, {folder} has no model file, and less than {needed} free for a temporary one")
        return None
    with tempfile.TemporaryFile(dir=folder, buffering=0) as opened:
        descriptor = opened.fileno()
        written = _fill(descriptor, size, seconds)
        if written < MIN_TEMPORARY_BYTES:
            progress(f"disk: skipped, only {format_bytes(written)} could be written in time")
            return None
        direct = _make_direct(descriptor)
        method = "O_DIRECT" if direct else "buffered reads after dropping it from the page cache"
        progress(f"disk: reading a temporary file of {format_bytes(written)} in {folder} with {method}")
        return _climb(descriptor, seconds, direct=direct)


def _fill(descriptor: int, size_bytes: int, seconds: float) -> int:
    """Write and sync random blocks up to a size or for about `seconds`; return the number of bytes written."""
    # blocks differ, because a file system that compresses or deduplicates would store equal ones only once
    noise = random.Random(0).randbytes(2 * BLOCK_BYTES)  # noqa: S311  filler, not a secret
    stop = perf_counter() + seconds
    written = 0
    while written + BLOCK_BYTES <= size_bytes and perf_counter() < stop:
        shift = (written // BLOCK_BYTES * 4099) % BLOCK_BYTES
        written += os.write(descriptor, noise[shift : shift + BLOCK_BYTES])
        if written % MIN_TEMPORARY_BYTES == 0:
            os.fdatasync(descriptor)
    os.fdatasync(descriptor)
    return written


def _make_direct(descriptor: int) -> bool:
    """Switch the file to O_DIRECT; return whether that works."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
        # some file systems accept the flag but refuse to read
        os.preadv(descriptor, [mmap.mmap(-1, mmap.PAGESIZE)], 0)
    except OSError:
        return False
    return True


def _climb(descriptor: int, seconds: float, *, direct: bool) -> Rate:
    blocks = os.fstat(descriptor).st_size // BLOCK_BYTES
    turn = itertools.count()  # shared by all depths, so that no block of a large file is read twice

    def prepare(_index: int) -> PassStep:
        buffer = mmap.mmap(-1, BLOCK_BYTES)  # page-aligned, as O_DIRECT requires

        def step() -> int:
            block = next(turn) % blocks
            if not direct and block == 0:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            return os.preadv(descriptor, [buffer], block * BLOCK_BYTES)

        return step

    def rate_at(depth: int) -> float:
        return whole_gb_s(stream([None] * depth, prepare, seconds / len(DEPTHS)))

    return as_rate("disk", climb(DEPTHS, rate_at))
