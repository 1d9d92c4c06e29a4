"""The recorded loads with any number of jobs.

Tokens of prefixes and tails are those of the recorded job files; answers have the recorded mean and the spread of a
public trace.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bench.batch_loads import Size
from bench.simulation.engine import Path
from bench.simulation.recorded import GENERATED, Night

SIZE = Size(
    jobs=48, alone_jobs=96, digest_tokens=1300, tail_tokens=32, alone_tokens=160, output_tokens=64, words_per_token=0.27
)
LOADS = ("one digest", "four digests", "four digests for each 48 jobs", "template table", "no sharing")
RECORDED = {"four digests": "four digests shuffled", "four digests for each 48 jobs": "four digests shuffled"}
_TABLE = (3, 4, 4, 3)  # values of its columns, in the order that shares most
SPREAD = tuple(len(GENERATED) * tokens / sum(GENERATED) for tokens in GENERATED)

Piece = tuple[int, int]
"""A group and its number of jobs."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Jobs with the same prefix."""

    path: Path
    jobs: int
    prompt_tokens: float  # tokens of each job after its path


def kinds(load: str, jobs: int, nights: Sequence[Night]) -> list[Kind]:
    """A load with a number of jobs."""
    night = next(night for night in nights if night.load == RECORDED.get(load, load))
    prompt = night.prompt_tokens / night.jobs
    if load == "no sharing":
        return [Kind((), jobs, prompt)]
    if load == "template table":
        return _table(jobs, prompt)
    recorded = 1 if load == "one digest" else 4
    own = (night.least_tokens - recorded * prompt) / (night.jobs - recorded)
    count = recorded if "for each" not in load else max(1, recorded * jobs // night.jobs)
    return [
        Kind(((head, prompt - own),), jobs * (head + 1) // count - jobs * head // count, own) for head in range(count)
    ]


def _table(jobs: int, prompt: float) -> list[Kind]:
    """Nested prefixes: the template, then one value after the other."""
    tokens = (SIZE.digest_tokens // 3, SIZE.digest_tokens // 6, 3 / SIZE.words_per_token, 2 / SIZE.words_per_token)
    paths: list[Path] = [((0, float(SIZE.tail_tokens)),)]
    numbers = iter(range(1, 1000))
    for values, length in zip(_TABLE, tokens, strict=True):
        paths = [(*path, (next(numbers), float(length))) for path in paths for _ in range(values)]
    own = max(1.0, prompt - sum(tokens for _, tokens in paths[0]))
    return [Kind(path, jobs * (at + 1) // len(paths) - jobs * at // len(paths), own) for at, path in enumerate(paths)]


def scattered(all_kinds: Sequence[Kind], engines: int, seed: str) -> list[list[Piece]]:
    """Works by engine, for jobs that may run anywhere."""
    draw = random.Random(f"scattered {seed}")
    pieces: list[list[Piece]] = [[] for _ in range(engines)]
    for group, kind in enumerate(all_kinds):
        for engine, jobs in sorted(Counter(draw.choices(range(engines), k=kind.jobs)).items()):
            pieces[engine].append((group, jobs))
    return pieces
