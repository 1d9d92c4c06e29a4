"""Fills the page cache with a model's files before an engine maps them; reads only missing pages, and only what fits.

Plain preads of 1 MiB from several threads, in the files' order. MADV_POPULATE_READ was a quarter slower and
posix_fadvise WILLNEED about half as fast where this was measured, and the kernel silently truncates the latter.
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
PARALLEL = 8  # an NVMe disk needs several requests in flight; more gained nothing
_TICK_S = 0.2  # between two reports of progress
_KEPT = 0.95  # of what was read and is still there afterwards; less means that it pushed itself out


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

    total_bytes: int  # of all files, holes left out
    cold_bytes: int  # not in memory before; where the kernel does not tell, all of it
    read_bytes: int
    seconds: float
    stopped: bool = False
    notes: tuple[str, ...] = ()

    @property
    def gb_s(self) -> float | None:
        """Bytes per second; None if nothing was read."""
        return self.read_bytes / self.seconds / 1e9 if self.read_bytes and self.seconds else None

    def as_words(self) -> str:
        """Return one sentence for the user."""
        if not self.read_bytes:
            return f"{format_bytes(self.total_bytes)} of files, nothing to read"
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
    """Read what is not resident, in the files' order, as far as the files fit into `available_bytes` together.

    That is memory as MemAvailable counts it, what is cached of the files included. `nodes` are the NUMA nodes that the
    pages are spread over; otherwise they come from the reader's own.
    """
    found = [resident(path) for path in paths]
    total = sum(one.total_bytes for one in found)
    cold = [(one.path, part) for one in found for part in one.ranges if part.resident_bytes != part.bytes]
    cold_bytes = sum(part.bytes - (part.resident_bytes or 0) for _, part in cold)
    notes = [one.why for one in found if one.why]
    room_bytes = None if available_bytes is None else max(0, available_bytes - sum(one.bytes or 0 for one in found))
    if room_bytes is not None and cold_bytes > room_bytes:
        notes.append(
            f"{format_bytes(cold_bytes)} are not in memory and only {format_bytes(room_bytes)} fit: "
            "the rest would push out what was read before it, and stays on the disk"
        )
    work = _Work(cold, room_bytes, stop or threading.Event(), nodes)
    began = perf_counter()
    if work.bytes_total:
        _run(work, min(parallel, -(-work.bytes_total // READ_BYTES)), progress)
    seconds = perf_counter() - began
    if work.error is not None:
        error = work.error
        raise ModelError(
            f"cannot read {error.filename or 'the model'}: {error.strerror}",
            hint="the disk or the network below it fails: see dmesg, and smartctl -a for a disk",
        ) from error
    notes += work.notes
    if not work.stop.is_set():
        notes += _lost(found, work.bytes_done)
    stopped = work.bytes_done < work.bytes_total
    return CacheFill(total, cold_bytes, work.bytes_done, seconds, stopped, tuple(dict.fromkeys(notes)))


class _Work:
    """The chunks that are left and what has become of the others, shared by the threads."""

    def __init__(
        self,
        cold: list[tuple[Path, Range]],
        room_bytes: int | None,
        stop: threading.Event,
        nodes: tuple[int, ...] | None,
    ) -> None:
        self.stop = stop
        self.nodes = nodes
        self.lock = threading.Lock()
        self.chunks = _chunks(cold, room_bytes)
        self.bytes_total = sum(size for _, _, size in _chunks(cold, room_bytes))
        self.bytes_done = 0
        self.error: OSError | None = None
        self.notes: list[str] = []

    def next(self) -> tuple[Path, int, int] | None:
        """Take one chunk; None when no chunk is left or the fill was stopped."""
        with self.lock:
            return None if self.stop.is_set() or self.error else next(self.chunks, None)

    def did(self, size: int) -> None:
        """Count bytes that were read."""
        with self.lock:
            self.bytes_done += size

    def failed(self, error: OSError) -> None:
        """Record the first failure, which stops the other threads."""
        with self.lock:
            self.error = self.error or error

    def say(self, note: str) -> None:
        """Add a note unless it exists."""
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
                thread.join(_TICK_S)
                if progress is not None:
                    progress(_progress(work.bytes_done, work.bytes_total, perf_counter() - began))
    finally:
        # an interrupt in this thread must not leave the others reading
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
    """Read chunks until none is left; each thread has a descriptor of its own, so that read-ahead is its own too."""
    if work.nodes:
        try:
            set_memory_nodes(work.nodes, interleave=True)
        except OSError as error:
            work.say(f"the pages were not spread over NUMA nodes ({error.strerror}): they lie near the reader")
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
            work.did(_pread(fd, buffer, offset, size))
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
            break  # the file has become shorter
        done += count
    return done


def _chunks(cold: list[tuple[Path, Range]], room_bytes: int | None) -> Iterator[tuple[Path, int, int]]:
    left = room_bytes
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
    """Add a note if pages that were read are not in the cache any more."""
    known = [one for one in before if one.bytes is not None and one.why is None]
    if len(known) < len(before) or not read_bytes:
        return []
    now = sum(resident(one.path).bytes or 0 for one in known)
    # Resident parts of a block were read again with it, and must not be counted twice.
    full = sum(part.bytes for one in known for part in one.ranges if part.resident_bytes == part.bytes)
    wanted = min(sum(one.total_bytes for one in known), full + read_bytes)
    if now >= _KEPT * wanted:
        return []
    return [
        f"{format_bytes(wanted - now)} of it are already gone again: memory is short, or the file system keeps a "
        "cache of its own (ZFS)"
    ]
