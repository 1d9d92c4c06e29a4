"""Read rate of the disk under a path, past the page cache.

Reads are O_DIRECT, 4 MiB each, by 1, 2, 4, ... threads, of the largest model file found there, or else of a
temporary file that has no name and so cannot outlive the process. Where the file system refuses O_DIRECT the
temporary file is dropped from the page cache first; a model file never is, because a running engine may want
it there. Caches below the file system (the drive's, a hypervisor's, ZFS's own) are not seen through.
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
from tokenmill.hardware.disk import mount_of, parse_mountinfo
from tokenmill.hardware.machine import Rate
from tokenmill.units import GIB, MIB, format_bytes

BLOCK_BYTES = 4 * MIB
DEPTHS = thread_counts(16)
LEAST_FILE_BYTES = 256 * MIB
MOST_TEMPORARY_BYTES = GIB
LEAST_TEMPORARY_BYTES = 64 * MIB
SHARE_OF_FREE = 10
MODEL_SUFFIXES = (".gguf", ".safetensors")
MOST_ENTRIES = 5000
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs")


def measure_disk(path: Path, seconds: float, progress: OnMeasured) -> Rate | None:
    """`disk`: the rate under `path` in about `seconds`, or None with the reason told."""
    mount = mount_of(str(path.resolve()), parse_mountinfo(Path("/proc/self/mountinfo").read_text()))
    if mount is not None and mount.filesystem in MEMORY_FILE_SYSTEMS:
        progress(f"disk: left out, {path} is on {mount.filesystem}, which is memory")
        return None
    try:
        found = path if path.is_file() else largest_model(path, LEAST_FILE_BYTES)
        if found is not None and is_solid(found.stat()):
            with found.open("rb", buffering=0) as opened:
                if _make_direct(opened.fileno()):
                    progress(f"disk: reading {found} with O_DIRECT")
                    return _climb(opened.fileno(), seconds, direct=True)
        return _read_temporary(path if path.is_dir() else path.parent, seconds, progress)
    except OSError as error:
        progress(f"disk: left out, {error.strerror or error} ({error.filename or path})")
        return None


def is_solid(status: os.stat_result) -> bool:
    """Whether the file is long enough and not a sparse one, whose holes never touch the disk."""
    return status.st_size >= LEAST_FILE_BYTES and status.st_blocks * 512 >= status.st_size * 0.95


def largest_model(folder: Path, least_bytes: int) -> Path | None:
    """The largest solid model file on the folder's own file system, among the first few thousand entries."""
    device = folder.stat().st_dev
    found: list[tuple[int, str]] = []
    for entry in itertools.islice(_entries(folder), MOST_ENTRIES):
        if entry.name.endswith(MODEL_SUFFIXES):
            with contextlib.suppress(OSError):  # gone since, or a link that leads nowhere
                status = entry.stat()
                if status.st_dev == device and status.st_size >= least_bytes and is_solid(status):
                    found.append((status.st_size, entry.path))
    return Path(max(found)[1]) if found else None


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Breadth first, so that a bound on the number keeps the nearest."""
    folders = [str(folder)]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop(0)) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                yield entry


def _read_temporary(folder: Path, seconds: float, progress: OnMeasured) -> Rate | None:
    status = os.statvfs(folder)
    size = min(MOST_TEMPORARY_BYTES, status.f_bavail * status.f_frsize // SHARE_OF_FREE)
    if size < LEAST_TEMPORARY_BYTES:
        needed = format_bytes(LEAST_TEMPORARY_BYTES * SHARE_OF_FREE)
        progress(f"disk: left out, {folder} has no model file to read and less than {needed} free for a temporary one")
        return None
    with tempfile.TemporaryFile(dir=folder, buffering=0) as opened:
        descriptor = opened.fileno()
        written = _fill(descriptor, size, seconds)
        if written < LEAST_TEMPORARY_BYTES:
            progress(f"disk: left out, only {format_bytes(written)} could be written there in time")
            return None
        direct = _make_direct(descriptor)
        way = "O_DIRECT" if direct else "buffered reads after dropping it from the page cache"
        progress(f"disk: reading a temporary file of {format_bytes(written)} in {folder} with {way}")
        return _climb(descriptor, seconds, direct=direct)


def _fill(descriptor: int, size_bytes: int, seconds: float) -> int:
    """Write random blocks, synced as they go, until the size or about the time is reached; returns the size written."""
    # Each block differs, or a file system that compresses or deduplicates would store almost nothing.
    noise = random.Random(0).randbytes(2 * BLOCK_BYTES)  # noqa: S311  filler, not a secret
    stop = perf_counter() + seconds
    written = 0
    while written + BLOCK_BYTES <= size_bytes and perf_counter() < stop:
        shift = (written // BLOCK_BYTES * 4099) % BLOCK_BYTES
        written += os.write(descriptor, noise[shift : shift + BLOCK_BYTES])
        if written % LEAST_TEMPORARY_BYTES == 0:
            os.fdatasync(descriptor)
    os.fdatasync(descriptor)
    return written


def _make_direct(descriptor: int) -> bool:
    """Whether reads now pass the page cache by."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
        # Some accept the flag and refuse the read.
        os.preadv(descriptor, [mmap.mmap(-1, mmap.PAGESIZE)], 0)
    except OSError:
        return False
    return True


def _climb(descriptor: int, seconds: float, *, direct: bool) -> Rate:
    blocks = os.fstat(descriptor).st_size // BLOCK_BYTES
    turn = itertools.count()  # goes on from depth to depth, so that a large file is never read twice

    def prepare(_index: int) -> PassStep:
        buffer = mmap.mmap(-1, BLOCK_BYTES)  # page-aligned, as O_DIRECT wants it

        def step() -> int:
            block = next(turn) % blocks
            if not direct and block == 0:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            return os.preadv(descriptor, [buffer], block * BLOCK_BYTES)

        return step

    def rate_at(depth: int) -> float:
        return whole_gb_s(stream([None] * depth, prepare, seconds / len(DEPTHS)))

    return as_rate("disk", climb(DEPTHS, rate_at))
