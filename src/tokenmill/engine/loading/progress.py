"""Load progress: bytes in memory, bytes of the model, a rate and the remaining time.

Pure arithmetic over samples, which `loading_watch` takes. What counts as loaded is the most that any sign shows:

  sign                           shows                                     counted from
  pages of mapped files          a file that is used where it lies         the last look at which it was not mapped
  bytes read                     a file that is copied                     the last look before the weights
  hundredths, shards in the log  either                                    nothing
  memory of its own, of GPUs     a copy, where /proc shows no reads        the first look

Bytes copied from a mapped file, repacked for the CPU or sent to a GPU, are added to its pages. The sum never decreases
and never exceeds the total, which it reaches when the log shows a step after the weights.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tokenmill.engine.logs.parsed import Hint, Phase

TIME_CONSTANT_S = 10.0  # of the rate: what happened so long ago weighs a third
_AFTER_WEIGHTS: tuple[Phase, ...] = ("context", "compiling", "warming", "ready")


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Progress of a load at one moment; None: unknown."""

    phase: Phase
    bytes_loaded: int | None = None
    bytes_total: int | None = None
    rate_bytes_s: float | None = None
    eta_s: float | None = None  # until the weights are there
    detail: str | None = None  # what the engine last said of it, in words

    @property
    def share(self) -> float | None:
        """Loaded share, 0 to 1."""
        if self.bytes_loaded is None or not self.bytes_total:
            return None
        return min(1.0, self.bytes_loaded / self.bytes_total)


@dataclass(frozen=True, slots=True)
class Sample:
    """What the system shows of an engine's processes at one moment; None where it shows nothing."""

    time_s: float
    file_bytes: int | None = None  # resident pages of files, in the process that has most
    mapped: bool | None = None  # whether one of them has a file of the model mapped
    anon_bytes: int | None = None  # memory of their own, all together
    read_bytes: int | None = None  # through read(), in the process that has read most
    disk_bytes: int | None = None  # of all that, what came from a disk
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
    copied_bytes: int = 0  # out of mapped pages: rewritten, or sent to cards

    @property
    def total_bytes(self) -> int | None:
        """All of it."""
        return None if self.file_bytes is None else self.file_bytes + self.copied_bytes


def progress(samples: Sequence[Sample], work: LoadWork) -> LoadProgress:
    """What all looks together say of a load, the last of them at its end."""
    total = work.total_bytes
    if not samples:
        return LoadProgress("starting", None, total)
    hint = samples[-1].hint
    phase = _phase(samples[-1])
    line = list(points(samples, work))
    if not line:
        return LoadProgress(phase, None, total, detail=_detail(hint))
    done = line[-1].bytes
    if done == total:  # what came after the load does not slow it down
        line = [point for point in line if point.bytes < done] + [point for point in line if point.bytes == done][:1]
    rate = smoothed_rate(line)
    return LoadProgress(phase, done, total, rate, _eta(done, total, rate), _detail(hint))


def points(samples: Sequence[Sample], work: LoadWork) -> Iterator[Point]:
    """Bytes loaded at every look that shows any sign of them."""
    bases = _Bases(work)
    total = work.total_bytes
    most = 0
    for sample in samples:
        shown = bases.shown(sample)
        if sample.hint is not None and sample.hint.phase in _AFTER_WEIGHTS and total is not None:
            shown = total
        if shown is None:
            continue
        most = max(most, shown if total is None else min(shown, total))
        yield Point(sample.time_s, most)


def smoothed_rate(line: Sequence[Point], time_constant_s: float = TIME_CONSTANT_S) -> float | None:
    """Bytes a second, recent ones weighing more; None for fewer than two moments."""
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
    """Seconds since bytes last came."""
    return next((line[-1].time_s - point.time_s for point in line if point.bytes == line[-1].bytes), 0.0)


class _Bases:
    """What was there before the weights; fed with samples in order."""

    def __init__(self, work: LoadWork) -> None:
        self.work = work
        self.file = 0
        self.read: int | None = None
        self.own: int | None = None

    def shown(self, sample: Sample) -> int | None:
        """Bytes of the load that one sample shows; changes the bases."""
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
        """Memory of its own and of GPUs, beyond what it began with."""
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
