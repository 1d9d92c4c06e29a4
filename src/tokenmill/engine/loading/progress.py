"""Load progress: bytes loaded, bytes of the model, rate and remaining time.

Pure functions of samples, which `LoadWatch` takes. The bytes loaded are the maximum of these measurements:

  measurement                    used for                                  counted from
  resident pages of the files    mapped files                              the last sample in which they were not mapped
  bytes read                     copied files                              the last sample before the weights
  percentages in the log         all                                       zero
  anonymous and GPU memory       copied files if reads are not visible     the first sample

Bytes that are copied out of mapped files (repacked for the CPU, sent to a GPU) are added to the resident pages. The
result never decreases or exceeds the total, which it reaches when the log shows a phase after the weights.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tokenmill.engine.logs.parsed import Hint, Phase

TIME_CONSTANT_S = 10.0  # of the exponentially weighted rate
_AFTER_WEIGHTS: tuple[Phase, ...] = ("context", "compiling", "warming", "ready")


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Progress of a load at one moment; None: unknown."""

    phase: Phase
    bytes_loaded: int | None = None
    bytes_total: int | None = None
    rate_bytes_s: float | None = None
    eta_s: float | None = None  # until the weights are loaded
    detail: str | None = None  # from the engine's log

    @property
    def share(self) -> float | None:
        """Loaded share, 0 to 1."""
        if self.bytes_loaded is None or not self.bytes_total:
            return None
        return min(1.0, self.bytes_loaded / self.bytes_total)


@dataclass(frozen=True, slots=True)
class Sample:
    """Measurements of an engine's processes at one moment; None: unknown."""

    time_s: float
    file_bytes: int | None = None  # resident pages of mapped files; maximum of the processes
    mapped: bool | None = None  # whether a process maps a file of the model
    anon_bytes: int | None = None  # sum of the processes
    read_bytes: int | None = None  # by read(); maximum of the processes
    disk_bytes: int | None = None  # read from disk; sum of the processes
    vram_bytes: int | None = None
    major_faults: int | None = None
    hint: Hint | None = None  # the latest


@dataclass(frozen=True, slots=True)
class Point:
    """Bytes loaded at a moment."""

    time_s: float
    bytes: int


@dataclass(frozen=True, slots=True)
class LoadWork:
    """Bytes that a load has to read and copy."""

    file_bytes: int | None  # of the model's files
    copied_bytes: int = 0  # copied out of mapped files: repacked, or sent to GPUs

    @property
    def total_bytes(self) -> int | None:
        """All bytes; None if the size of the files is unknown."""
        return None if self.file_bytes is None else self.file_bytes + self.copied_bytes


def progress(samples: Sequence[Sample], work: LoadWork) -> LoadProgress:
    """Compute the progress at the last sample."""
    total = work.total_bytes
    if not samples:
        return LoadProgress("starting", None, total)
    hint = samples[-1].hint
    phase = _phase(samples[-1])
    line = list(points(samples, work))
    if not line:
        return LoadProgress(phase, None, total, detail=_detail(hint))
    done = line[-1].bytes
    if done == total:  # the time after the load does not lower its rate
        line = [point for point in line if point.bytes < done] + [point for point in line if point.bytes == done][:1]
    rate = smoothed_rate(line)
    return LoadProgress(phase, done, total, rate, _eta(done, total, rate), _detail(hint))


def points(samples: Sequence[Sample], work: LoadWork) -> Iterator[Point]:
    """Bytes loaded at each sample that has a measurement of them."""
    baselines = _Baselines(work)
    total = work.total_bytes
    maximum = 0
    for sample in samples:
        loaded = baselines.loaded(sample)
        if sample.hint is not None and sample.hint.phase in _AFTER_WEIGHTS and total is not None:
            loaded = total
        if loaded is None:
            continue
        maximum = max(maximum, loaded if total is None else min(loaded, total))
        yield Point(sample.time_s, maximum)


def smoothed_rate(line: Sequence[Point], time_constant_s: float = TIME_CONSTANT_S) -> float | None:
    """Exponentially weighted bytes per second; None if there are fewer than two points."""
    end = line[-1].time_s if line else 0.0
    weighted_bytes = weighted_s = 0.0
    for before, after in pairwise(line):
        span = after.time_s - before.time_s
        if span <= 0:
            continue
        weight = math.exp(-(end - after.time_s) / time_constant_s)
        weighted_bytes += weight * max(0, after.bytes - before.bytes)
        weighted_s += weight * span
    return weighted_bytes / weighted_s if weighted_s > 0 else None


def since_growth(line: Sequence[Point]) -> float:
    """Seconds since the last increase."""
    return next((line[-1].time_s - point.time_s for point in line if point.bytes == line[-1].bytes), 0.0)


class _Baselines:
    """Values of the measurements before the weights. Samples must be passed in order."""

    def __init__(self, work: LoadWork) -> None:
        self.work = work
        self.file = 0
        self.read: int | None = None
        self.own: int | None = None

    def loaded(self, sample: Sample) -> int | None:
        """Bytes loaded according to one sample; updates the baselines."""
        hint = sample.hint
        whole = self.work.file_bytes
        signs: list[int] = []
        grown = self._grown(sample)
        if sample.mapped and sample.file_bytes is not None:
            pages = max(0, sample.file_bytes - self.file)
            signs.append((pages if whole is None else min(pages, whole)) + min(grown or 0, self.work.copied_bytes))
        elif sample.file_bytes is not None:
            self.file = sample.file_bytes
        if sample.read_bytes is not None:
            if self.read is None or (hint is not None and hint.phase == "starting"):
                self.read = sample.read_bytes
            signs.append(max(0, sample.read_bytes - self.read))
        elif grown is not None and not sample.mapped:
            signs.append(grown)
        if hint is not None and hint.phase == "reading" and hint.share is not None and whole is not None:
            signs.append(int(hint.share * whole))
        return max(signs, default=None)

    def _grown(self, sample: Sample) -> int | None:
        """Growth of anonymous and GPU memory since the first sample."""
        sizes = [size for size in (sample.anon_bytes, sample.vram_bytes) if size is not None]
        if not sizes:
            return None
        self.own = sum(sizes) if self.own is None else self.own
        return max(0, sum(sizes) - self.own)


def _phase(sample: Sample) -> Phase:
    if sample.hint is not None and sample.hint.phase != "starting":
        return sample.hint.phase
    return "reading" if sample.mapped else "starting"


def _eta(done: int, total_bytes: int | None, rate: float | None) -> float | None:
    if total_bytes is None:
        return None
    if done >= total_bytes:
        return 0.0
    return (total_bytes - done) / rate if rate else None


def _detail(hint: Hint | None) -> str | None:
    if hint is None or hint.detail is None:
        return None
    return hint.detail if hint.share is None else f"{hint.detail}, {hint.share:.0%}"
