"""The jobs of an expansion: which parent is rewritten with which variant, and their batch lines.

A job is named by a hash of everything that determines its answer. Its sampling seed comes from the parent's content,
the variant and the number of earlier uses: equal parents, prompts and options give equal lines in every run. Pure.
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

MIN_PART = 32  # lines of the first part of a round, after which the target is checked
_GROWTH = 4  # size of a part relative to all previous lines, which bounds surplus work and the number of parts
_SEED_BITS = 31  # accepted by every engine


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How answers are sampled; None: the engine's default."""

    temperature: float | None = 0.8
    top_p: float | None = 0.95
    max_tokens: int = 512
    seed: int = 0  # base of the sampling seeds of all jobs


class ExpansionJob(NamedTuple):
    """One new example to write."""

    parent: Parent
    variant: Variant
    turn: int  # number of earlier uses of this variant with this parent


@dataclass(frozen=True, slots=True)
class ExpandPrompts:
    """Prompts and options shared by all lines."""

    shape: Shape
    prompts: Mapping[str, PromptFile]
    sampling: SamplingOptions
    schema: dict[str, Any] | None = None

    def line(self, job: ExpansionJob) -> Line:
        """The line of a job."""
        way = job.variant.way
        sampling = self.sampling
        fields = fields_of(way, self.shape, self.schema)
        values = {**values_of(job.parent.example, self.shape), "fields": fields, **job.variant.words}
        wanted = None if way == INSTRUCTION else answer_schema(self.shape, self.schema)
        line = chat_line(
            "",
            self.prompts[way].messages(values),
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=self.seed(job),
            response_format=response_format("example", wanted),
        )
        return {**line, "custom_id": f"{way}-{_digest(compact_json(line['body']), job.parent.id, str(job.turn))[:16]}"}

    def seed(self, job: ExpansionJob) -> int:
        """The sampling seed of a job, from its content rather than file order."""
        example = job.parent.example
        content = compact_json([example.task, example.input, example.answer, [dict(turn) for turn in example.before]])
        digest = _digest(str(self.sampling.seed), content, job.variant.way, job.variant.detail or "", str(job.turn))
        return int(digest[:16], 16) >> (64 - _SEED_BITS)


def jobs_of(
    parents: Sequence[Parent], variants: Sequence[Variant], per_parent: int | None, before: int
) -> Iterator[ExpansionJob]:
    """One round: the first variant of every parent, then the second of every parent, and so on.

    `per_parent`: number of variants per parent; None: every variant once. `before`: earlier rounds with these parents.
    Parents start with different variants, so that an incomplete round still has all of them.
    """
    each = len(variants) if per_parent is None else per_parent
    for step in range(each):
        for place, parent in enumerate(parents):
            fit = [variant for variant in variants if variant.takes(parent.example)]
            if fit and (per_parent is not None or step < len(fit)):
                turn, at = divmod(before * (len(fit) if per_parent is None else each) + step, len(fit))
                yield ExpansionJob(parent, fit[(at + place) % len(fit)], turn)


def part_lines(before: int, left: int) -> int:
    """Size of the next part of a round with `left` lines, after `before` lines in total.

    Independent of the target, so that a run with another target has the same parts and reuses their answers.
    """
    part = max(MIN_PART, before // _GROWTH)
    return left if left <= part + part // 2 else part


def _digest(*parts: str) -> str:
    return sha256("\0".join(parts).encode()).hexdigest()
