"""Runs concurrent streaming threads and computes their total rate.

Each thread is pinned to one physical core and repeats short passes independently; a pass holds the GIL only for a small
part of its time. Consecutive cores are on different last-level caches, because a few cores of one chiplet saturate its
link long before the machine's memory.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

from tokenmill.hardware.machine import Rate

RISE = 1.03
"""Minimum improvement over the best rate that counts as a rise."""
STEPS_WITHOUT_RISE = 2
WINDOW_S = 0.1  # long enough to average out bursts, short enough to fit between other work
PASSES_PER_WINDOW = 2


class Pass(NamedTuple):
    """One pass of one thread."""

    start_s: float
    end_s: float
    size_bytes: int


OnMeasured = Callable[[str], None]
PassStep = Callable[[], int]
"""Performs one pass; returns the number of bytes."""


@dataclass(frozen=True, slots=True)
class CpuPlace:
    """Position of a logical CPU; siblings share `core`."""

    package: str
    last_cache: str
    core: str


def thread_counts(maximum: int) -> tuple[int, ...]:
    """1, 2, 4, ... and `maximum` itself."""
    counts = [1]
    while counts[-1] * 2 < maximum:
        counts.append(counts[-1] * 2)
    return tuple(counts) if maximum <= 1 else (*counts, maximum)


def climb(counts: Iterable[int], rate_at: Callable[[int], float]) -> dict[int, float]:
    """Measure at increasing counts until two in a row fail to improve the best rate by 3 %."""
    seen: dict[int, float] = {}
    best = 0.0
    flat = 0
    for count in counts:
        rate = seen[count] = rate_at(count)
        flat = 0 if rate > best * RISE else flat + 1
        best = max(best, rate)
        if flat == STEPS_WITHOUT_RISE:
            break
    return seen


def as_rate(path: str, by_threads: Mapping[int, float]) -> Rate:
    """The best rate, the smallest number of threads that reached it, and the rates at all numbers."""
    rounded = {count: float(f"{rate:.4g}") for count, rate in by_threads.items()}
    threads = max(rounded, key=lambda count: rounded[count])
    return Rate(path=path, gb_s=rounded[threads], threads=threads, by_threads=rounded)


def best_window_gb_s(threads: Sequence[Sequence[Pass]]) -> float:
    """Total rate of all threads in the best window during which all of them were running.

    The best counts, as in STREAM, because other work on the machine can only reduce it. A pass that crosses the edge of
    a window counts in proportion.
    """
    start = max(passes[0].start_s for passes in threads)
    end = min(passes[-1].end_s for passes in threads)
    every = [each for passes in threads for each in passes]
    typical_s = median(each.end_s - each.start_s for each in every)
    windows = int((end - start) / max(WINDOW_S, PASSES_PER_WINDOW * typical_s))
    if windows < 1:
        return whole_gb_s(threads)  # too few passes for windows
    length = (end - start) / windows
    moved = [0.0] * windows
    for each in every:
        per_s = each.size_bytes / (each.end_s - each.start_s)
        first = max(0, int((each.start_s - start) / length))
        for index in range(first, min(windows, int((each.end_s - start) / length) + 1)):
            low = start + index * length
            high = start + (index + 1) * length
            moved[index] += per_s * max(0.0, min(high, each.end_s) - max(low, each.start_s))
    return max(moved) / length / 1e9


def whole_gb_s(threads: Sequence[Sequence[Pass]]) -> float:
    """Mean rate from first start to last end, for cases in which caches could speed up single windows."""
    every = [each for passes in threads for each in passes]
    whole_s = max(each.end_s for each in every) - min(each.start_s for each in every)
    return sum(each.size_bytes for each in every) / whole_s / 1e9


def read_places(cpus: Iterable[int], root: Path = Path("/sys/devices/system/cpu")) -> dict[int, CpuPlace]:
    """Package, last-level cache and core of each logical CPU; unknown relations count as separate."""
    places = {}
    for cpu in cpus:
        folder = root / f"cpu{cpu}"
        caches = [_text(index / "shared_cpu_list") for index in sorted(folder.glob("cache/index*"))]
        package = _text(folder / "topology/physical_package_id") or "0"
        siblings = _text(folder / "topology/thread_siblings_list") or str(cpu)
        places[cpu] = CpuPlace(package, (caches[-1] if caches else None) or package, siblings)
    return places


def spread_cores(places: Mapping[int, CpuPlace]) -> tuple[int, ...]:
    """One logical CPU per physical core, alternating between packages and their caches."""
    packages: dict[str, dict[str, list[int]]] = {}
    cores_seen = set()
    for cpu, place in sorted(places.items()):
        if place.core not in cores_seen:
            cores_seen.add(place.core)
            packages.setdefault(place.package, {}).setdefault(place.last_cache, []).append(cpu)
    return tuple(_interleave([_interleave(list(caches.values())) for caches in packages.values()]))


def stream(cpus: Sequence[int | None], prepare: Callable[[int], PassStep], seconds: float) -> list[list[Pass]]:
    """Run one thread per entry of `cpus`, pinned unless None, for `seconds` after all are ready.

    `prepare(index)` runs in its thread after pinning, so that the memory it allocates is local to that core.
    """
    ready = threading.Barrier(len(cpus))

    def work(index: int) -> list[Pass]:
        passes: list[Pass] = []
        try:
            _pin(cpus[index])
            step = prepare(index)
            step()  # untimed warm-up: page table walks and frequency ramps
            ready.wait()
        except threading.BrokenBarrierError:
            return passes  # another thread failed and reports its error
        except BaseException:
            ready.abort()
            raise
        start = perf_counter()
        stop = start + seconds
        while start < stop:
            size_bytes = step()
            end = perf_counter()
            passes.append(Pass(start, end, size_bytes))
            start = perf_counter()
        return passes

    with ThreadPoolExecutor(len(cpus), thread_name_prefix="bandwidth") as pool:
        return list(pool.map(work, range(len(cpus))))


def _pin(cpu: int | None) -> None:
    if cpu is not None:
        with contextlib.suppress(OSError):  # if a sandbox refuses, the scheduler places the thread
            os.sched_setaffinity(0, {cpu})


def _interleave(groups: Sequence[Sequence[int]]) -> list[int]:
    return [cpu for row in zip_longest(*groups) for cpu in row if cpu is not None]


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:
        return None
