"""Measures the read and copy bandwidth of memory without a compiler.

Reading is numpy's maximum over bytes, which releases the GIL, is vectorised by numpy's run-time dispatch, and reads
cached data at 70 to 90 GB/s per core, over twice the rate from memory on the machine where it was chosen. memchr,
integer sums and xor are equally fast, memcmp, dot products and float sums slower. Copying is numpy's copyto, which for
plain blocks is one memmove of the C library, like in mbw; its use of streaming stores for large blocks affects the
result.

Huge pages are not requested, as in STREAM, mbw and engines. With them, reads are up to 20 % faster on one core and no
faster on all cores.
"""

import mmap
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tokenmill.errors import ProbeError
from tokenmill.hardware.bandwidth.threads import (
    OnMeasured,
    PassStep,
    as_rate,
    best_window_gb_s,
    climb,
    stream,
    thread_counts,
)
from tokenmill.hardware.machine import Rate
from tokenmill.units import MIB, format_bytes

Block = NDArray[np.uint8]

WANTED_BYTES = 512 * MIB
MIN_BYTES = 128 * MIB
UNKNOWN_CACHE_BYTES = 256 * MIB
READ_PASS_BYTES = 64 * MIB
COPY_PASS_BYTES = 512 * MIB  # the C library copies large blocks with streaming stores, from up to 240 MiB on
MIN_SLICE_BYTES = 32 * MIB
CACHE_LINE_BYTES = 64
SHARE_OF_FREE = 4
"""Maximum share of free memory to use."""


def slice_bytes(total_bytes: int, threads: int) -> int:
    """Memory of each thread: together `total_bytes`, but large enough that starting a pass takes no measurable time."""
    return max(total_bytes // threads, MIN_SLICE_BYTES) // (2 * mmap.PAGESIZE) * (2 * mmap.PAGESIZE)


def peak_bytes(total_bytes: int, counts: Sequence[int]) -> int:
    """Memory used by all numbers of threads; a thread keeps the slice of its first run."""
    first_runs = zip((0, *counts), counts, strict=False)
    return sum((count - fewer) * slice_bytes(total_bytes, count) for fewer, count in first_runs)


def working_set_bytes(cache_bytes: int | None, free_bytes: int, counts: Sequence[int]) -> int:
    """Size of the buffers: four times the last-level caches, or at least twice if little memory is free.

    Unknown caches are assumed to be large. Raises `ProbeError` if too little memory is free.
    """
    cache = UNKNOWN_CACHE_BYTES if cache_bytes is None else cache_bytes
    total = max(WANTED_BYTES, 4 * cache)
    minimum = max(MIN_BYTES, 2 * cache)
    while peak_bytes(total, counts) > free_bytes // SHARE_OF_FREE and total > minimum:
        total = max(minimum, total // 2)
    if (needed := SHARE_OF_FREE * peak_bytes(total, counts)) > free_bytes:
        raise ProbeError(
            f"measuring the memory needs {format_bytes(needed)} free, but only {format_bytes(free_bytes)} is",
            hint="stop other programs or raise the container's limit, then measure again",
        )
    return total


class StreamBuffers:
    """One block of memory per thread, reused with increasing numbers of threads.

    Blocks never need to grow, because slices shrink when threads are added.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._blocks: dict[int, Block] = {}

    def block(self, index: int, threads: int) -> Block:
        """The slice of thread `index` of `threads`, allocated by the calling thread at its first call."""
        size = slice_bytes(self.total_bytes, threads)
        if index not in self._blocks:
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._blocks[index] = np.frombuffer(pages, np.uint8)
            self._blocks[index].fill(1)
        return self._blocks[index][:size]


def measure_memory(cores: Sequence[int], total_bytes: int, seconds: float, progress: OnMeasured) -> list[Rate]:
    """Measure `dram` and `dram->dram`, each for about `seconds`, with 1, 2, 4, ... threads on `cores` in order."""
    memory = StreamBuffers(total_bytes)

    def reader(index: int, threads: int) -> PassStep:
        return reading(memory.block(index, threads))

    def copier(index: int, threads: int) -> PassStep:
        return copying(*np.split(memory.block(index, threads), 2))

    return [
        _climb("dram", reader, cores, seconds, progress),
        _climb("dram->dram", copier, cores, seconds, progress),
    ]


def measure_mapped(
    file: Path, cores: Sequence[int], total_bytes: int, seconds: float, progress: OnMeasured
) -> list[Rate]:
    """Measure `pmem` and `pmem->dram` on a file of at least `total_bytes`, mapped from persistent memory."""
    memory = StreamBuffers(total_bytes)
    with file.open("rb") as opened:
        # not closed here: a mapping cannot be closed while it has views
        whole = np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)

    def part(index: int, threads: int) -> Block:
        size = min(whole.size // threads // mmap.PAGESIZE * mmap.PAGESIZE, slice_bytes(total_bytes, threads))
        return whole[index * size : (index + 1) * size]

    def reader(index: int, threads: int) -> PassStep:
        return reading(part(index, threads))

    def copier(index: int, threads: int) -> PassStep:
        source = part(index, threads)
        return copying(source, memory.block(index, threads)[: source.size])

    return [
        _climb("pmem", reader, cores, seconds, progress),
        _climb("pmem->dram", copier, cores, seconds, progress),
    ]


def reading(block: Block) -> PassStep:
    """A step that reads the next part of `block`, cyclically."""
    parts = cycle(_parts(block, READ_PASS_BYTES))

    def step() -> int:
        part = next(parts)
        np.maximum.reduce(part)
        return part.nbytes

    return step


def copying(source: Block, target: Block) -> PassStep:
    """A step that copies the next part of `source` into `target`, cyclically; each byte counts once.

    Both start on a page, and the copy is shifted by one cache line: if the low twelve bits of both addresses are equal,
    the CPU assumes that loads depend on stores, which reduces the rate (12.4 instead of 14.5 GB/s).
    """
    outs = _parts(source[:-CACHE_LINE_BYTES], COPY_PASS_BYTES)
    pairs = cycle(list(zip(_parts(target[CACHE_LINE_BYTES:], COPY_PASS_BYTES), outs, strict=True)))

    def step() -> int:
        into, out = next(pairs)
        np.copyto(into, out)
        return out.nbytes

    return step


def _parts(block: Block, max_bytes: int) -> list[Block]:
    # divided at cache lines, because unaligned passes copy a third slower
    return [block[start : start + max_bytes] for start in range(0, block.size, max_bytes)]


def _climb(
    path: str,
    stepper: Callable[[int, int], PassStep],
    cores: Sequence[int],
    seconds: float,
    progress: OnMeasured,
) -> Rate:
    counts = thread_counts(len(cores))

    def rate_at(threads: int) -> float:
        progress(f"{path}: {threads} of {len(cores)} cores")
        return best_window_gb_s(stream(cores[:threads], lambda index: stepper(index, threads), seconds / len(counts)))

    return as_rate(path, climb(counts, rate_at))
