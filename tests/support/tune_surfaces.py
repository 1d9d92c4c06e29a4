"""Response surfaces for the search: recorded curves as grids, and synthetic machines with cliffs, plateaus and
noise.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import exp, log
from pathlib import Path
from random import Random
from typing import Any

from tokenmill.tuner.point import Aim, Figures, Trial, TrialOutcome, TrialSettings
from tokenmill.tuner.search.search import Search
from tokenmill.tuner.search.space import Space

FOLDER = Path(__file__).parent.parent / "data" / "surfaces"
Surface = Callable[[TrialSettings], Figures | TrialOutcome]


@cache
def recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def along(curve: Mapping[str, float], value: float) -> float:
    """A recorded curve at any value: straight on logarithmic axes between two measured points, flat beyond."""
    points = sorted((int(at), rate) for at, rate in curve.items())
    for (low, first), (high, second) in pairwise(points):
        if low <= value <= high:
            share = log(value / low) / log(high / low)
            return exp((1 - share) * log(first) + share * log(second))
    return points[0][1] if value < points[0][0] else points[-1][1]


@dataclass(frozen=True)
class Ran:
    """One search to its end."""

    search: Search
    trials: tuple[Trial, ...]
    best: Trial | None

    @property
    def runs(self) -> int:
        return len(self.trials)


def run(
    space: Space,
    surface: Surface,
    start: TrialSettings,
    aim: Aim | None = None,
    *,
    noise: float = 0.0,
    seed: int = 0,
    forecast: Callable[[TrialSettings], float | None] | None = None,
    told: tuple[Trial, ...] = (),
    max_trials: int | None = None,
    stop_after: int | None = None,
) -> Ran:
    """Search a surface, measuring with noise; `told` are trials of before."""
    draw = Random(seed)
    search = Search(space, aim or Aim(), start, forecast=forecast, max_trials=max_trials)
    trials: list[Trial] = []
    for trial in told:
        search.tell(trial)
    while (dials := search.ask()) is not None and (stop_after is None or len(trials) < stop_after):
        trial = tried(surface, dials, draw, noise)
        trials.append(trial)
        search.tell(trial)
    return Ran(search, tuple(trials), search.best())


def tried(surface: Surface, dials: TrialSettings, draw: Random, noise: float = 0.0) -> Trial:
    found = surface(dials)
    if not isinstance(found, Figures):
        return Trial(dials, found, detail="made to fail")
    factor = max(0.5, 1 + draw.gauss(0, noise)) if noise else 1.0
    return Trial(
        dials,
        "measured",
        Figures(
            decode_tok_s=None if found.decode_tok_s is None else found.decode_tok_s * factor,
            prefill_tok_s=found.prefill_tok_s,
            jobs_tok_s=None if found.jobs_tok_s is None else found.jobs_tok_s * factor,
            first_token_s=None if found.first_token_s is None else found.first_token_s / factor,
            joules_per_token=None if found.joules_per_token is None else found.joules_per_token / factor,
        ),
    )


def tok_s(surface: Surface, dials: TrialSettings) -> float:
    """The true throughput, without noise; 0 where it does not run."""
    found = surface(dials)
    return (found.jobs_tok_s or found.decode_tok_s or 0.0) if isinstance(found, Figures) else 0.0


def exhaustive(space: Space, surface: Surface) -> float:
    """The best of the whole grid, measured without noise."""
    return max(tok_s(surface, dials) for dials in space.combinations())


# recorded surfaces as grids

SEQUENCES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
THREADS = tuple(range(4, 17))


def experts_on_cpu(dials: TrialSettings) -> float:
    """Decode on the H200 with experts on the host: sequences times threads, the GPU alone from the threshold on."""
    data = recorded("h200-experts-on-cpu")
    own = dials.offload_min_batch is None
    if own and dials.sequences >= data["offload_from_sequences"]:
        return along(data["by_sequences"], dials.sequences)
    curve = data["by_sequences"] if own else data["by_sequences_offload_128"]
    if own:  # up to the cliff nothing says that it falls
        curve = {at: rate for at, rate in curve.items() if int(at) < data["offload_from_sequences"]}
    at = data["threads_of_by_sequences" if own else "threads_of_by_sequences_offload_128"]
    return along(curve, dials.sequences) * along(data["by_threads"], dials.threads) / along(data["by_threads"], at)


def _decoding(dials: TrialSettings) -> Figures:
    return Figures(decode_tok_s=experts_on_cpu(dials))


def _jobs(dials: TrialSettings) -> Figures:
    write, read = experts_on_cpu(dials), along(recorded("h200-experts-on-cpu")["prefill_by_ubatch"], dials.ubatch)
    return Figures(decode_tok_s=write, prefill_tok_s=read, jobs_tok_s=64 / (64 / read + 64 / write))


def _on_gpu(dials: TrialSettings) -> Figures:
    return Figures(decode_tok_s=along(recorded("h200-all-on-gpu")["by_sequences"], dials.sequences))


def kimi_threads(dials: TrialSettings) -> Figures:
    data = recorded("epyc-9175f-kimi-threads")
    read, write = along(data["prefill_by_threads"], dials.threads), along(data["by_threads"], dials.threads)
    return Figures(decode_tok_s=write, prefill_tok_s=read, jobs_tok_s=64 / (64 / read + 64 / write))


RECORDED: dict[str, tuple[Space, Surface]] = {
    "experts on cpu": (Space(THREADS, SEQUENCES, (512,), (8192,)), _decoding),
    "experts on cpu, offload threshold": (
        Space(THREADS, SEQUENCES, (512,), (8192,), offload_min_batch=(None, 128)),
        _decoding,
    ),
    "experts on cpu, jobs by ubatch": (Space(THREADS, SEQUENCES, (128, 256, 512, 1024, 2048), (8192,)), _jobs),
    "all on gpu": (Space(THREADS, SEQUENCES, (512,), (8192,)), _on_gpu),
}


# synthetic machines


@dataclass(frozen=True)
class MadeUp:
    """A machine's response: bandwidth that saturates, threads that get in each other's way, sequences that share reads.

    A cliff divides the speed from some sequences on (up to `cliff_until`), a thread cliff from some threads on.
    """

    cores: int = 16
    ubatches: tuple[int, ...] = (512,)
    knee: float = 0.7  # share of the cores from which bandwidth saturates
    sharp: float = 3.0
    peak: float = 0.9  # share of the cores beyond which more of them disturb
    drop: float = 0.3
    shift: float = 0.0  # how the peak moves with sequences
    fixed: float = 0.6  # of a step
    shared: float = 0.1  # of each sequence
    alone: float = 0.2  # of each sequence, by threads
    tired: int = 16  # sequences from which they slow each other down
    cliff_at: int | None = None
    cliff_by: float = 3.0
    cliff_until: int | None = None
    thread_cliff_at: int | None = None
    thread_cliff_by: float = 1.5
    cap: float | None = None  # a plateau, in tok/s
    half_ubatch: float = 500.0
    ubatch_drop: float = 0.1

    @property
    def space(self) -> Space:
        return Space(tuple(range(1, self.cores + 1)), SEQUENCES, self.ubatches, (8192,))

    def start(self, sequences: int = 8) -> TrialSettings:
        """One core left to feed the rest, as a plan has it."""
        return TrialSettings(self.cores - 1, self.cores - 1, sequences, 512, 8192)

    def decode(self, threads: int, sequences: int) -> float:
        width = self.knee * self.cores
        pull = threads / (1 + (threads / width) ** self.sharp) ** (1 / self.sharp)
        over = threads - self.peak * self.cores * (sequences / 8) ** self.shift
        if over > 0:
            pull *= max(0.2, 1 - self.drop * over / self.cores)
        step = 6 * self.fixed / pull + self.shared * sequences / pull**0.3 + self.alone * sequences / threads
        rate: float = 100 * sequences / step / (1 + 0.6 * (max(0, sequences - self.tired) / 60) ** 2)
        if self.cliff_at is not None and self.cliff_at <= sequences < (self.cliff_until or 1000):
            rate /= self.cliff_by
        if self.thread_cliff_at is not None and threads >= self.thread_cliff_at:
            rate /= self.thread_cliff_by
        return rate if self.cap is None else min(rate, self.cap)

    def __call__(self, dials: TrialSettings) -> Figures:
        write = self.decode(dials.threads, dials.sequences)
        read = 8000 * dials.ubatch / (dials.ubatch + self.half_ubatch) * (1 - self.ubatch_drop * dials.ubatch / 2048)
        read *= 0.3 + 0.7 * dials.threads / self.cores
        return Figures(decode_tok_s=write, prefill_tok_s=read, jobs_tok_s=64 / (64 / read + 64 / write))


def made_up(
    seed: int, *, cliff: bool = False, thread_cliff: bool = False, valley: bool = False, plateau: bool = False
) -> MadeUp:
    """One of many, the same for the same seed."""
    draw = Random(seed)
    cores = draw.choice((8, 12, 16, 24, 32))
    plain = MadeUp(
        cores=cores,
        ubatches=(128, 256, 512, 1024, 2048)[: draw.choice((1, 3, 5))],
        knee=draw.uniform(0.3, 1.2),
        sharp=draw.uniform(2, 6),
        peak=draw.uniform(0.5, 1.1),
        drop=draw.uniform(0, 0.6),
        shift=draw.uniform(-0.3, 0.3),
        fixed=draw.uniform(0.2, 1),
        shared=draw.uniform(0, 0.2),
        alone=draw.uniform(0, 0.4),
        tired=draw.choice((8, 16, 32, 64)),
        half_ubatch=draw.uniform(100, 1500),
        ubatch_drop=draw.uniform(0, 0.3),
    )
    if cliff or valley:
        at = draw.choice(SEQUENCES[2:])
        plain = replace(plain, cliff_at=at, cliff_by=draw.uniform(1.3, 6), cliff_until=3 * at if valley else None)
    if thread_cliff:
        plain = replace(plain, thread_cliff_at=draw.randrange(2, cores + 1), thread_cliff_by=draw.uniform(1.1, 2))
    if plateau:
        most = max(plain.decode(t, s) for t in plain.space.threads for s in SEQUENCES)
        plain = replace(plain, cap=draw.uniform(0.5, 0.95) * most)
    return plain
