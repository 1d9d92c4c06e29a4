"""Reads a model's files into the page cache before an engine maps them: only missing pages, and only as many as fit.

Several threads read 1 MiB at a time, in file order. On the machine where this was measured, MADV_POPULATE_READ was 25 %
slower and posix_fadvise(WILLNEED) half as fast, and the kernel silently truncates the latter.
"""

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from tokenmill.engine.process.preparation import set_memory_nodes
from tokenmill.engine.residency import Range, Residency, resident
from tokenmill.errors import ModelError
from tokenmill.units import MIB, format_bytes, format_gb_s, format_seconds

__all__ = ["CacheFill", "FillProgress", "Range", "Residency", "fill", "resident"]

READ_BYTES = MIB
PARALLEL = 8  # NVMe disks need several requests in flight; more did not help
_PROGRESS_S = 0.2  # interval of progress reports
_MIN_KEPT = 0.95  # share of the read bytes that must still be cached afterwards


@dataclass(frozen=True, slots=True)
class FillProgress:
    """Progress of a fill."""

    bytes_done: int
    bytes_total: int
    rate_bytes_s: float | None
    eta_s: float | None


@dataclass(frozen=True, slots=True)
class CacheFill:
    """Result of a fill."""

    total_bytes: int  # of all files, without holes
    cold_bytes: int  # not cached before; all bytes if that is unknown
    read_bytes: int
    seconds: float
    stopped: bool = False
    notes: tuple[str, ...] = ()

    @property
    def gb_s(self) -> float | None:
        """Read rate in GB/s; None if nothing was read."""
        return self.read_bytes / self.seconds / 1e9 if self.read_bytes and self.seconds else None

    def describe(self) -> str:
        """Return one sentence for the user."""
        if not self.read_bytes:
            return f"all {format_bytes(self.total_bytes)} cached already"
        return (
            f"{format_bytes(self.read_bytes)} of {format_bytes(self.total_bytes)} read in "
            f"{format_seconds(self.seconds)}, {format_gb_s(self.gb_s or 0)}"
        )


OnFillProgress = Callable[[FillProgress], None]


def fill(
    paths: Sequence[Path],
    *,
    parallel: int = PARALLEL,
    available_bytes: int | None = None,
    nodes: tuple[int, ...] | None = None,
    progress: OnFillProgress | None = None,
    stop: threading.Event | None = None,
) -> CacheFill:
    """Read the parts of files that are not cached, in file order, up to the available memory.

    available_bytes: memory for the files, as MemAvailable counts it: includes what is already cached of them.
    nodes: NUMA nodes to spread the pages over; default: the nodes of the reading threads.
    """
    found = [resident(path) for path in paths]
    total = sum(one.total_bytes for one in found)
    cold = [(one.path, part) for one in found for part in one.ranges if part.resident_bytes != part.bytes]
    cold_bytes = sum(part.bytes - (part.resident_bytes or 0) for _, part in cold)
    notes = [one.why for one in found if one.why]
    free_bytes = None if available_bytes is None else max(0, available_bytes - sum(one.bytes or 0 for one in found))
    if free_bytes is not None and cold_bytes > free_bytes:
        notes.append(
            f"{format_bytes(cold_bytes)} are not cached and only {format_bytes(free_bytes)} fit in memory: "
            "the rest was not read, because it would evict the pages read before it"
        )
    work = _Work(cold, free_bytes, stop or threading.Event(), nodes)
    began = perf_counter()
    if work.bytes_total:
        _run(work, min(parallel, -(-work.bytes_total // READ_BYTES)), progress)
    seconds = perf_counter() - began
    if work.error is not None:
        error = work.error
        raise ModelError(
            f"cannot read {error.filename or 'the model'}: {error.strerror}",
            hint="the disk or network file system reports errors: see dmesg and smartctl -a",
        ) from error
    notes += work.notes
    if not work.stop.is_set():
        notes += _lost(found, work.bytes_done)
    stopped = work.bytes_done < work.bytes_total
    return CacheFill(total, cold_bytes, work.bytes_done, seconds, stopped, tuple(dict.fromkeys(notes)))


class _Work:
    """Remaining chunks and results, shared by the threads."""

    def __init__(
        self,
        cold: list[tuple[Path, Range]],
        free_bytes: int | None,
        stop: threading.Event,
        nodes: tuple[int, ...] | None,
    ) -> None:
        self.stop = stop
        self.nodes = nodes
        self.lock = threading.Lock()
        self.chunks = _chunks(cold, free_bytes)
        self.bytes_total = sum(size for _, _, size in _chunks(cold, free_bytes))
        self.bytes_done = 0
        self.error: OSError | None = None
        self.notes: list[str] = []

    def next(self) -> tuple[Path, int, int] | None:
        """Take the next chunk; None if none is left or the fill was stopped."""
        with self.lock:
            return None if self.stop.is_set() or self.error else next(self.chunks, None)

    def add_read(self, size: int) -> None:
        """Count bytes that were read."""
        with self.lock:
            self.bytes_done += size

    def failed(self, error: OSError) -> None:
        """Record the first error, which stops the other threads."""
        with self.lock:
            self.error = self.error or error

    def add_note(self, note: str) -> None:
        """Add a note once."""
        with self.lock:
            if note not in self.notes:
                self.notes.append(note)


def _run(work: _Work, parallel: int, progress: OnFillProgress | None) -> None:
    threads = [threading.Thread(target=_read, args=(work,), name=f"fill-{number}") for number in range(parallel)]
    began = perf_counter()
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(_PROGRESS_S)
                if progress is not None:
                    progress(_progress(work.bytes_done, work.bytes_total, perf_counter() - began))
    finally:
        # KeyboardInterrupt here must not leave the readers running
        if any(thread.is_alive() for thread in threads):
            work.stop.set()
        for thread in threads:
            thread.join()
    if progress is not None:
        progress(_progress(work.bytes_done, work.bytes_total, perf_counter() - began))


def _progress(done: int, total: int, seconds: float) -> FillProgress:
    rate = done / seconds if done and seconds else None
    return FillProgress(done, total, rate, (total - done) / rate if rate else None)


def _read(work: _Work) -> None:
    """Read chunks until none is left, through a descriptor per thread so that each has its own read-ahead state."""
    if work.nodes:
        try:
            set_memory_nodes(work.nodes, interleave=True)
        except OSError as error:
            work.add_note(f"the page cache was not spread over NUMA nodes: {error.strerror}")
    buffer = mmap.mmap(-1, READ_BYTES)
    opened: Path | None = None
    fd = -1
    try:
        while (chunk := work.next()) is not None:
            path, offset, size = chunk
            if path != opened:
                if opened is not None:
                    os.close(fd)
                    opened = None
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                opened = path
            work.add_read(_pread(fd, buffer, offset, size))
    except OSError as error:
        error.filename = error.filename or str(opened)
        work.failed(error)
    finally:
        if opened is not None:
            os.close(fd)
        buffer.close()


def _pread(fd: int, buffer: mmap.mmap, offset: int, size: int) -> int:
    done = 0
    while done < size:
        with memoryview(buffer)[: size - done] as view:
            count = os.preadv(fd, [view], offset + done)
        if count == 0:
            break  # the file was truncated
        done += count
    return done


def _chunks(cold: list[tuple[Path, Range]], free_bytes: int | None) -> Iterator[tuple[Path, int, int]]:
    left = free_bytes
    for path, part in cold:
        end = part.offset_bytes + part.bytes
        for offset in range(part.offset_bytes, end, READ_BYTES):
            size = min(READ_BYTES, end - offset)
            if left is not None:
                if size > left:
                    return
                left -= size
            yield path, offset, size


def _lost(before: list[Residency], read_bytes: int) -> list[str]:
    """Return a note if pages that were read are no longer cached."""
    known = [one for one in before if one.bytes is not None and one.why is None]
    if len(known) < len(before) or not read_bytes:
        return []
    now = sum(resident(one.path).bytes or 0 for one in known)
    # Partly resident blocks were read whole; do not count their resident part twice.
    full = sum(part.bytes for one in known for part in one.ranges if part.resident_bytes == part.bytes)
    wanted = min(sum(one.total_bytes for one in known), full + read_bytes)
    if now >= _MIN_KEPT * wanted:
        return []
    return [
        f"{format_bytes(wanted - now)} were evicted again: memory is short, or the file system has its own cache (ZFS)"
    ]
