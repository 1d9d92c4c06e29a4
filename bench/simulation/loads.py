"""The recorded loads with as many jobs as one likes, and how they are cut into the work of one engine.

Tokens of heads and tails are those of the recorded job files; answers have the recorded mean and the spread of a public
trace. A *piece* is jobs of one group on one engine. It is cut into works of one job each, or, where there are too
many to follow, into works of several that one lane does one after the other: many at the beginning, single jobs at the
end, so that lanes end as they would. Heads with few jobs go into one work, whole.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from bench.batch_loads import Size
from bench.simulation.engine import Path, Work
from bench.simulation.recorded import GENERATED, Night

from tokenmill.jobs.assign import Assignment, Group, Runner, assign
from tokenmill.jobs.forest import Pending
from tokenmill.jobs.identity import head_key

SIZE = Size(
    jobs=48, alone_jobs=96, digest_tokens=1300, tail_tokens=32, alone_tokens=160, output_tokens=64, words_per_token=0.27
)
LOADS = ("one digest", "four digests", "four digests for each 48 jobs", "template table", "no sharing")
RECORDED = {"four digests": "four digests shuffled", "four digests for each 48 jobs": "four digests shuffled"}
_TABLE = (3, 4, 4, 3)  # values of its columns, the one that shares most first
_BYTES = 4  # of prompt for a token: what a scheduler assumes until it knows better
_SPREAD = tuple(len(GENERATED) * tokens / sum(GENERATED) for tokens in GENERATED)

Piece = tuple[int, int]
"""A group and how many of its jobs."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Jobs with one head."""

    path: Path
    jobs: int
    prompt_tokens: float  # of each, behind its path

    @property
    def group(self) -> Group:
        """As the assignment knows it."""
        key = b"".join(head.to_bytes(4, "big") for head, _ in self.path)
        return Group(key, self.jobs, sum(tokens for _, tokens in self.path), self.prompt_tokens, SIZE.output_tokens)


def kinds(load: str, jobs: int, nights: Sequence[Night]) -> list[Kind]:
    """A load with so many jobs."""
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
    """Heads in each other: the template, then one value after the other."""
    tokens = (SIZE.digest_tokens // 3, SIZE.digest_tokens // 6, 3 / SIZE.words_per_token, 2 / SIZE.words_per_token)
    paths: list[Path] = [((0, float(SIZE.tail_tokens)),)]
    numbers = iter(range(1, 1000))
    for values, length in zip(_TABLE, tokens, strict=True):
        paths = [(*path, (next(numbers), float(length))) for path in paths for _ in range(values)]
    own = max(1.0, prompt - sum(tokens for _, tokens in paths[0]))
    return [Kind(path, jobs * (at + 1) // len(paths) - jobs * at // len(paths), own) for at, path in enumerate(paths)]


def assigned(all_kinds: Sequence[Kind], runners: Sequence[Runner]) -> tuple[list[list[Piece]], Assignment]:
    """Pieces by engine, heads on as few as needed."""
    made = assign([kind.group for kind in all_kinds], runners)
    pieces: list[list[Piece]] = [[] for _ in runners]
    for share in made.shares:
        pieces[share.runner].append((share.group, share.jobs))
    return pieces, made


def scattered(all_kinds: Sequence[Kind], engines: int, seed: str) -> list[list[Piece]]:
    """Pieces by engine, every job anywhere."""
    draw = random.Random(f"scattered {seed}")
    pieces: list[list[Piece]] = [[] for _ in range(engines)]
    for group, kind in enumerate(all_kinds):
        for engine, jobs in sorted(Counter(draw.choices(range(engines), k=kind.jobs)).items()):
            pieces[engine].append((group, jobs))
    return pieces


def works(
    all_kinds: Sequence[Kind], pieces: Sequence[Piece], lanes: int, draw: random.Random | None, most_jobs: int
) -> Iterator[Work]:
    """The work of one engine, of no more jobs each than are allowed; a whole piece may add to it. Numbers from 0 on.

    Without a draw, every answer has the mean length.
    """
    left = sum(jobs for _, jobs in pieces)
    number, bundle, most = 0, list[Piece](), 1
    small = min(most_jobs, left // lanes)
    for group, count in sorted(pieces, key=lambda piece: (-piece[1] if piece[1] >= small else 0, piece[0])):
        jobs = count
        while jobs:
            if not bundle:
                most = max(1, min(most_jobs, left // lanes))
            if bundle or (jobs == count and jobs < most):  # a whole piece, beside others
                bundle.append((group, jobs))
                left, jobs = left - jobs, 0
                if sum(size for _, size in bundle) >= most:
                    yield _together(number, all_kinds, bundle, draw)
                    number, bundle = number + 1, []
            else:
                size = min(most, jobs)
                kind = all_kinds[group]
                yield Work(number, kind.path, size * kind.prompt_tokens, answers(size, draw), size)
                number, left, jobs = number + 1, left - size, jobs - size
    if bundle:
        yield _together(number, all_kinds, bundle, draw)


def _together(number: int, all_kinds: Sequence[Kind], bundle: Sequence[Piece], draw: random.Random | None) -> Work:
    """Whole pieces one after the other: behind what all of their paths begin with, each head once."""
    paths = [all_kinds[group].path for group, _ in bundle]
    shared = 0
    while all(len(path) > shared and path[shared] == paths[0][shared] for path in paths):
        shared += 1
    heads = {head: tokens for path in paths for head, tokens in path[shared:]}
    prompts = sum(jobs * all_kinds[group].prompt_tokens for group, jobs in bundle)
    jobs = sum(jobs for _, jobs in bundle)
    return Work(number, paths[0][:shared], prompts + sum(heads.values()), answers(jobs, draw), jobs)


def answers(jobs: int, draw: random.Random | None) -> float:
    """Tokens of so many answers; of many, their mean varies as it would."""
    mean = SIZE.output_tokens
    if draw is None:
        return float(mean * jobs)
    if jobs <= 64:
        return mean * sum(draw.choices(_SPREAD, k=jobs))
    deviation = (sum(each * each for each in _SPREAD) / len(_SPREAD) - 1) ** 0.5
    return mean * max(0.5 * jobs, draw.gauss(jobs, deviation * jobs**0.5))


class Texts:
    """Prompts that share what their paths do, as the scheduler's records have them."""

    def __init__(self) -> None:
        self._known: dict[Path, bytes] = {}

    def pending(self, work: Work, *, lengths: bool) -> Pending:
        """The record of a work; lengths: its answer's is known beforehand, which is so only where works are cut."""
        head = self._text(work.path)
        own = max(1, int(_BYTES * work.prompt_tokens / work.jobs))
        text = head + work.number.to_bytes(8, "big") * 8
        tokens = work.output_tokens if lengths else None
        return Pending(work.number, head_key(text[: len(head) + own]), len(head) + own, tokens, 0, None, None)

    def _text(self, path: Path) -> bytes:
        if path not in self._known:
            if len(self._known) > 1 << 16:
                self._known.clear()
            ends = list(accumulate((_BYTES * tokens for _, tokens in path), initial=0.0))
            self._known[path] = b"".join(
                random.Random(head).randbytes(int(end) - int(start))
                for (head, _), start, end in zip(path, ends, ends[1:], strict=False)
            )
        return self._known[path]
