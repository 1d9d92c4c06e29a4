"""Read and copy bandwidth of memory, without a compiler.

Reading is numpy's maximum over bytes: it releases the interpreter's lock, is vectorised by numpy's own run-time
dispatch whatever the C library, and goes through cached data at 70 to 90 GB/s a core, over twice what a core drew
from memory on the machine it was chosen on. memchr, integer sums and xor read memory as fast within noise; memcmp,
dot products and float sums slower. Copying is numpy's copyto, which for plain blocks is one memmove of the C library,
the routine mbw calls; its choice of streaming stores for large blocks is part of the result.

Pages come as the system hands them out, with huge pages only where it gives them unasked: so do STREAM's,
mbw's and an engine's. Advising huge pages reads up to a fifth faster on one core and no faster on all.
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
LEAST_BYTES = 128 * MIB
UNKNOWN_CACHE_BYTES = 256 * MIB
READ_PASS_BYTES = 64 * MIB
COPY_PASS_BYTES = 512 * MIB  # the C library copies large blocks with streaming stores, from up to 240 MiB on
LEAST_SLICE_BYTES = 32 * MIB
CACHE_LINE_BYTES = 64
SHARE_OF_FREE = 4
"""Maximum share of free memory to use."""


def slice_bytes(total_bytes: int, threads: int) -> int:
    """Memory of each of `threads` threads: together `total_bytes`, but no pass so short that starting it shows."""
    return max(total_bytes // threads, LEAST_SLICE_BYTES) // (2 * mmap.PAGESIZE) * (2 * mmap.PAGESIZE)


def peak_bytes(total_bytes: int, counts: Sequence[int]) -> int:
    """All that is touched over the ladder: a thread keeps the slice it was given when it first ran."""
    first_runs = zip((0, *counts), counts, strict=False)
    return sum((count - fewer) * slice_bytes(total_bytes, count) for fewer, count in first_runs)


def working_set_bytes(cache_bytes: int | None, free_bytes: int, counts: Sequence[int]) -> int:
    """Bytes to stream through: four times the last-level caches, at least twice, limited by free memory.

    Unknown caches are assumed to be large.
    """
    cache = UNKNOWN_CACHE_BYTES if cache_bytes is None else cache_bytes
    total = max(WANTED_BYTES, 4 * cache)
    least = max(LEAST_BYTES, 2 * cache)
    while peak_bytes(total, counts) > free_bytes // SHARE_OF_FREE and total > least:
        total = max(least, total // 2)
    if (needed := SHARE_OF_FREE * peak_bytes(total, counts)) > free_bytes:
        raise ProbeError(
            f"{format_bytes(free_bytes)} of memory is free; measuring its bandwidth wants {format_bytes(needed)} free",
            hint="stop what holds the memory, or raise the container's limit, and measure again",
        )
    return total


class StreamBuffers:
    """Memory touched by the threads that stream through it, one block each, kept from step to step.

    Blocks only ever need to shrink, because slices do as threads are added.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._blocks: dict[int, Block] = {}

    def block(self, index: int, threads: int) -> Block:
        """The slice of thread `index` of `threads`; made and touched by the calling thread the first time."""
        size = slice_bytes(self.total_bytes, threads)
        if index not in self._blocks:
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._blocks[index] = np.frombuffer(pages, np.uint8)
            self._blocks[index].fill(1)
        return self._blocks[index][:size]


def measure_memory(cores: Sequence[int], total_bytes: int, seconds: float, progress: OnMeasured) -> list[Rate]:
    """`dram` and `dram->dram`, each for about `seconds`, with 1, 2, 4, ... threads on `cores` in their order."""
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
    """`pmem` and `pmem->dram` over a file mapped from persistent memory; the file has at least `total_bytes`."""
    memory = StreamBuffers(total_bytes)
    with file.open("rb") as opened:
        # Left to the last view to close: a mapping cannot be closed before its views are gone.
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
    """A step that copies the next stretch of `source` into `target`; each byte counts once.

    Both start on a page. The copy lands a cache line off: where source and target agree in their low twelve bits
    the processor takes loads for dependent on stores, and that is no property of the memory (12.4 against 14.5 GB/s).
    """
    outs = _parts(source[:-CACHE_LINE_BYTES], COPY_PASS_BYTES)
    pairs = cycle(list(zip(_parts(target[CACHE_LINE_BYTES:], COPY_PASS_BYTES), outs, strict=True)))

    def step() -> int:
        into, out = next(pairs)
        np.copyto(into, out)
        return out.nbytes

    return step


def _parts(block: Block, most_bytes: int) -> list[Block]:
    # Cut at whole cache lines: unaligned passes copy a third slower.
    return [block[start : start + most_bytes] for start in range(0, block.size, most_bytes)]


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
