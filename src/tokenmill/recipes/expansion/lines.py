"""Jobs of the recipe: which parents are rewritten how, and the batch lines for it.

A job is named by a hash of all that decides its answer, and its seed for drawing is made of the parent's content, the
way and how often that way was taken with it: the same parents, prompts and options give the same lines in every run.
Pure.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple

from tokenmill.recipes.expansion.prompts import PromptFile, fields_of, values_of
from tokenmill.recipes.expansion.schema import answer_schema, response_format
from tokenmill.recipes.expansion.seeds import Parent, Shape
from tokenmill.recipes.expansion.transforms import INSTRUCTION, Variant
from tokenmill.recipes.runner import Line, chat_line
from tokenmill.storage.json_text import compact_json

LEAST_PART = 32  # lines that are written, and judged, before it is asked whether there is enough
_GROWTH = 4  # a part is so much of all lines before it: as much may be written in vain, and large runs have few parts
_SEED_BITS = 31  # what every engine takes


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How answers are drawn."""

    temperature: float | None = 0.8
    top_p: float | None = 0.95
    max_tokens: int = 512
    seed: int = 0  # another one gives other answers


class ExpansionJob(NamedTuple):
    """One new example to be written."""

    parent: Parent
    variant: Variant
    turn: int  # how often this variant was taken with this parent before


@dataclass(frozen=True, slots=True)
class ExpandPrompts:
    """What lines are written with, the same for all."""

    shape: Shape
    prompts: Mapping[str, PromptFile]
    drawing: SamplingOptions
    schema: dict[str, Any] | None = None

    def line(self, job: ExpansionJob) -> Line:
        """The line of a job."""
        way = job.variant.way
        drawing = self.drawing
        fields = fields_of(way, self.shape, self.schema)
        values = {**values_of(job.parent.example, self.shape), "fields": fields, **job.variant.words}
        wanted = None if way == INSTRUCTION else answer_schema(self.shape, self.schema)
        line = chat_line(
            "",
            self.prompts[way].messages(values),
            max_tokens=drawing.max_tokens,
            temperature=drawing.temperature,
            top_p=drawing.top_p,
            seed=self.seed(job),
            response_format=response_format("example", wanted),
        )
        return {**line, "custom_id": f"{way}-{_digest(compact_json(line['body']), job.parent.id, str(job.turn))[:16]}"}

    def seed(self, job: ExpansionJob) -> int:
        """For the draws of a job: of the content, not of the file's order or the run."""
        example = job.parent.example
        content = compact_json([example.task, example.input, example.answer, [dict(turn) for turn in example.before]])
        digest = _digest(str(self.drawing.seed), content, job.variant.way, job.variant.detail or "", str(job.turn))
        return int(digest[:16], 16) >> (64 - _SEED_BITS)


def jobs_of(
    parents: Sequence[Parent], variants: Sequence[Variant], per_parent: int | None, before: int
) -> Iterator[ExpansionJob]:
    """One round: of every parent the first, then of every parent the second, and so on.

    `per_parent`: how many of each parent, its variants in turn; None: every variant once. `before`: rounds that these
    parents have been through. Parents begin with different variants, so that a round that is cut short has all of them.
    """
    each = len(variants) if per_parent is None else per_parent
    for step in range(each):
        for place, parent in enumerate(parents):
            fit = [variant for variant in variants if variant.takes(parent.example)]
            if fit and (per_parent is not None or step < len(fit)):
                turn, at = divmod(before * (len(fit) if per_parent is None else each) + step, len(fit))
                yield ExpansionJob(parent, fit[(at + place) % len(fit)], turn)


def part_lines(before: int, left: int) -> int:
    """Lines of the next part of a round that has `left` more, after `before` lines of all rounds.

    Not of the target: a run for another one makes the same parts, whose answers and verdicts are there.
    """
    part = max(LEAST_PART, before // _GROWTH)
    return left if left <= part + part // 2 else part


def _digest(*parts: str) -> str:
    return sha256("\0".join(parts).encode()).hexdigest()
