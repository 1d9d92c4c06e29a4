"""The request and the result of an expansion. Pure."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from tokenmill.errors import UsageError
from tokenmill.recipes.expansion.answers import MAX_SCORE, Why
from tokenmill.recipes.expansion.lines import ExpandPrompts
from tokenmill.recipes.expansion.prompts import PromptFile
from tokenmill.recipes.expansion.seeds import Seeds
from tokenmill.recipes.expansion.transforms import Variant
from tokenmill.recipes.runner import RecipeEnd

MIN_YIELD = 0.02  # minimum share of new rows of a round; below it no further round follows


@dataclass(frozen=True, slots=True)
class ExpandRequest:
    """What to expand, how, and where to write it."""

    seeds: Seeds
    prompts: ExpandPrompts
    variants: tuple[Variant, ...]
    output: Path
    judge: PromptFile | None = None  # None: no judging
    least_score: int = 3
    near: float = 0.8
    per_seed: int | None = None  # new examples per parent and round; None: one per variant
    target: int | None = None  # None: one round
    rounds: int | None = None  # maximum; None: one, or unlimited with a target
    least_yield: float = MIN_YIELD  # minimum share of new rows per round, or per several small ones
    evolve: bool = False  # later rounds use the previous round's rows as parents
    keep_seeds: bool = False
    rejected: Path | None = None

    def __post_init__(self) -> None:
        for name, value in (("--target", self.target), ("--rounds", self.rounds), ("--per-seed", self.per_seed)):
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1 (got {value})")
        if not 0 <= self.least_yield <= 1:
            raise UsageError(f"--least-yield must be 0 to 1 (got {self.least_yield:g})", hint="0.02 is 2 %")
        if not 1 <= self.least_score <= MAX_SCORE:
            raise UsageError(f"--least-score must be 1 to {MAX_SCORE} (got {self.least_score})")

    @property
    def max_rounds(self) -> float:
        """Maximum rounds; a low yield may end them earlier."""
        return self.rounds or (1 if self.target is None else inf)


@dataclass(slots=True)
class LineTally:
    """Line counts by outcome."""

    made: int = 0  # lines with an outcome
    kept: int = 0
    dropped: Counter[Why] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Expanded:
    """Result of an expansion."""

    output: Path
    rows: int  # in the file, including kept seeds
    kept: int
    ways: Mapping[str, LineTally]  # by variant, in order
    rounds: int  # started rounds
    end: RecipeEnd
    why: str  # reason for the end, as a sentence
    waiting: int = 0  # lines without an outcome or a score
    surplus: int = 0  # good rows beyond the target
    cut: int = 0  # answers cut at --max-tokens
    failures: Mapping[str, int] = field(default_factory=dict)  # count by message, most frequent first
    replaced: bool = True  # False: an earlier run's file was kept because it has more rows

    @property
    def total(self) -> LineTally:
        """The sum over all ways."""
        dropped: Counter[Why] = Counter()
        for tally in self.ways.values():
            dropped.update(tally.dropped)
        return LineTally(sum(one.made for one in self.ways.values()), self.kept, dropped)


def expand_summary(done: Expanded) -> dict[str, Any]:
    """The result as JSON."""
    total = done.total

    def counts(tally: LineTally) -> dict[str, int]:
        dropped = tally.dropped
        return {
            "made": tally.made,
            "kept": tally.kept,
            "near_duplicates": dropped["near-duplicate"],
            "invalid": dropped["invalid"],
            "judged_too_low": dropped["too low"],
            "failed": dropped["failed"],
        }

    return {
        "output": str(done.output),
        "rows": done.rows,
        "replaced": done.replaced,
        **counts(total),
        "beyond_the_target": done.surplus,
        "cut": done.cut,
        "waiting": done.waiting,
        "rounds": done.rounds,
        "end": done.end,
        "why": done.why,
        "failures": dict(done.failures),
        "ways": {name: counts(tally) for name, tally in done.ways.items()},
    }
