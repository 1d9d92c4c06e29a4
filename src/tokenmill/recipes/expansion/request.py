"""What an expansion is asked to do, and what is told of it afterwards. Pure."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from tokenmill.errors import UsageError
from tokenmill.recipes.expansion.answers import HIGHEST, Why
from tokenmill.recipes.expansion.lines import ExpandPrompts
from tokenmill.recipes.expansion.prompts import PromptFile
from tokenmill.recipes.expansion.seeds import Seeds
from tokenmill.recipes.expansion.transforms import Variant
from tokenmill.recipes.runner import RecipeEnd

LEAST_YIELD = 0.02  # rounds that bring less of what they wrote are the last


@dataclass(frozen=True, slots=True)
class ExpandRequest:
    """What is to be grown of what, and where it goes."""

    seeds: Seeds
    prompts: ExpandPrompts
    variants: tuple[Variant, ...]
    output: Path
    judge: PromptFile | None = None  # None: no second pass
    least_score: int = 3
    near: float = 0.8
    per_seed: int | None = None  # new examples of each parent in a round; None: one of each variant
    target: int | None = None  # None: one round
    rounds: int | None = None  # at most; None: one, or as many as the target takes
    least_yield: float = LEAST_YIELD  # of the lines of a round, or of some small ones, or it is the last
    evolve: bool = False  # later rounds begin with what the one before brought
    keep_seeds: bool = False
    rejected: Path | None = None

    def __post_init__(self) -> None:
        for name, value in (("--target", self.target), ("--rounds", self.rounds), ("--per-seed", self.per_seed)):
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, not {value}")
        if not 0 <= self.least_yield <= 1:
            raise UsageError(f"--least-yield must be from 0 to 1, not {self.least_yield:g}", hint="0.02 is 2 %")
        if not 1 <= self.least_score <= HIGHEST:
            raise UsageError(f"--least-score must be from 1 to {HIGHEST}, not {self.least_score}")

    @property
    def most_rounds(self) -> float:
        """How many there may be; a round that brings too little ends them as well."""
        return self.rounds or (1 if self.target is None else inf)


@dataclass(slots=True)
class LineTally:
    """What became of lines."""

    made: int = 0  # lines with an outcome
    kept: int = 0
    dropped: Counter[Why] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Expanded:
    """What came of it."""

    output: Path
    rows: int  # in the file, kept seeds among them
    kept: int
    ways: Mapping[str, LineTally]  # by variant, in order
    rounds: int  # that were begun
    end: RecipeEnd
    why: str  # it ended, in a sentence
    waiting: int = 0  # lines without an outcome, or without a verdict
    surplus: int = 0  # good rows beyond the target
    cut: int = 0  # answers that --max-tokens was too low for
    failures: Mapping[str, int] = field(default_factory=dict)  # messages, the most frequent first
    replaced: bool = True  # False: the file is that of a run before, for it has more rows than this one so far

    @property
    def total(self) -> LineTally:
        """All ways together."""
        dropped: Counter[Why] = Counter()
        for tally in self.ways.values():
            dropped.update(tally.dropped)
        return LineTally(sum(one.made for one in self.ways.values()), self.kept, dropped)


def summary_document(done: Expanded) -> dict[str, Any]:
    """What came of it as JSON has it."""
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
