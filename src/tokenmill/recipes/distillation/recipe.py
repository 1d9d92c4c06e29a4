"""A teacher's answers to a file of prompts, written as one table.

One stage: every prompt as many times as samples are wanted. The lines depend on the prompts and the settings alone, so
the same command finds every answer that exists. The table is made anew from all answers at the end of each run, whole
or not at all; after a run that a limit ended it has the rows that are there so far.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenmill.recipes.distillation.prompts import DistillOptions, DistillPrompts, TeacherPrompt, bodies, checked_lines
from tokenmill.recipes.distillation.rows import (
    COLUMNS,
    Thinking,
    opened_by,
    parted_of,
    row_of,
    templates_that_open,
    tokens_of,
)
from tokenmill.recipes.history import MOST_LINES
from tokenmill.recipes.runner import (
    Answered,
    AnswerOrigin,
    BatchRunner,
    FinishedStage,
    Line,
    Prospect,
    RecipeEnd,
    StageProspect,
)
from tokenmill.storage.rows import write_rows
from tokenmill.units import format_bytes, number_of

STAGE = "teach"
PARQUET_BYTES, STORED_BYTES = 4, 95  # of a probability with its token, about; measured, see docs/distill.md
_SAMPLED_PROMPTS = 500  # of a large file, for a forecast
_MOST_CHARACTERS = 256 * 1024**2  # of lines that are held for one
_MOST_TOLD = 3  # failures that are told one by one


@dataclass(frozen=True, slots=True)
class Distilled:
    """What became of the prompts."""

    output: Path
    end: RecipeEnd
    asked: int  # answers that were wanted
    rows: int
    failed: int
    waiting: int  # neither answered nor failed: for the next run
    cut: int  # rows whose answer ended at the limit of tokens
    reasoned: int  # rows with reasoning
    without_ids: int  # rows whose engine gave probabilities without token numbers
    failures: Mapping[str, int] = field(default_factory=dict)  # code -> how many
    told: tuple[str, ...] = ()  # some of the failures in words


async def distill(
    runner: BatchRunner,
    prompts: DistillPrompts,
    ask: DistillOptions,
    output: Path,
    *,
    thinking: Thinking = "auto",
    tell: Callable[[str], None] = lambda _: None,
) -> Distilled:
    """Have all prompts answered, and write what is there."""
    ran = await runner.run(STAGE, (line for _, _, line in lines_of(prompts, ask)))
    tell(f"writing {output.name}")
    tally = _Tally()
    opened = templates_that_open(_with_lines(ran, prompts, ask)) if thinking == "auto" else frozenset[str]()
    rows = _rows(ran, prompts, ask, runner.origin, thinking, opened, tally)
    count = write_rows(output, rows, COLUMNS, metadata=_metadata(runner.origin, ask))
    return Distilled(
        output,
        ran.end,
        ran.total,
        count,
        tally.failed,
        ran.total - count - tally.failed,
        tally.cut,
        tally.reasoned,
        tally.without_ids,
        dict(sorted(tally.failures.items())),
        tuple(tally.told),
    )


def prospect_of(prompts: DistillPrompts, ask: DistillOptions) -> Prospect:
    """What it will take, before anything runs; reads the prompts and refuses what could not be answered."""
    jobs = checked_lines(prompts, ask)
    sample = _sample(prompts, ask, jobs)
    ceilings = [line["body"].get("max_completion_tokens") or line["body"]["max_tokens"] for line in sample]
    most = round(sum(ceilings) * jobs / len(ceilings))
    notes = [
        f"{number_of(jobs // ask.samples, 'prompt')}, {number_of(ask.samples, 'sample')} of each "
        f"at temperature {ask.drawn_at:g}"
    ]
    if ask.top_logprobs:
        tops = most * (ask.top_logprobs + 1)
        notes.append(
            f"the top {ask.top_logprobs} of each token take {format_bytes(tops * PARQUET_BYTES)} in Parquet and "
            f"{format_bytes(tops * STORED_BYTES)} in the store of batches, if every answer is as long as it may be"
        )
    own = any(ceiling != ask.max_tokens for ceiling in ceilings)
    each = f"what its line allows, else {ask.max_tokens:,} tokens" if own else f"{ask.max_tokens:,} tokens"
    assumed = f"every answer has {each}, the most it may have"
    stage = StageProspect(STAGE, jobs, sample, output_tokens=ask.max_tokens, assumed=assumed)
    return Prospect((stage,), rows=jobs, notes=tuple(notes))


def _sample(prompts: DistillPrompts, ask: DistillOptions, jobs: int) -> tuple[Line, ...]:
    """Every line where memory has room for them, else those of some prompts at even distances."""
    if jobs <= MOST_LINES:
        lines = list[Line]()
        characters = 0
        for prompt, _, line in lines_of(prompts, ask):
            characters += sum(len(message["content"]) for message in prompt.messages)
            if characters > _MOST_CHARACTERS:
                break
            lines.append(line)
        else:
            return tuple(lines)
    every = max(1, jobs // ask.samples // _SAMPLED_PROMPTS)
    chosen = (prompt for number, prompt in enumerate(prompts) if number % every == 0)
    return tuple(line for prompt in chosen for line in bodies(prompt, ask))


def lines_of(prompts: DistillPrompts, ask: DistillOptions) -> Iterator[tuple[TeacherPrompt, int, Line]]:
    """Every line with its prompt and the number of its sample; samples of one prompt are neighbours."""
    for prompt in prompts:
        for sample, line in enumerate(bodies(prompt, ask)):
            yield prompt, sample, line


@dataclass(slots=True)
class _Tally:
    failed: int = 0
    cut: int = 0
    reasoned: int = 0
    without_ids: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    told: list[str] = field(default_factory=list)

    def fail(self, name: str, code: str | None, message: str | None) -> None:
        self.failed += 1
        self.failures[code or "unknown"] += 1
        if len(self.told) < _MOST_TOLD:
            self.told.append(f"{name}: {message or code or 'no reason was given'}")


def _rows(
    ran: FinishedStage,
    prompts: DistillPrompts,
    ask: DistillOptions,
    origin: AnswerOrigin,
    thinking: Thinking,
    opened: frozenset[str],
    tally: _Tally,
) -> Iterator[dict[str, Any]]:
    for prompt, sample, line, answered in _matched(ran, prompts, ask):
        if answered.body is None:
            tally.fail(answered.custom_id, answered.code, answered.message)
            continue
        tokens = tokens_of(answered.body)
        parted = parted_of(
            answered.body, tokens, thinking=thinking, opened=bool(opened) and opened_by(line["body"]) in opened
        )
        if parted is None:
            tally.fail(answered.custom_id, "no_text", "the answer is no text")
            continue
        row = row_of(prompt, sample, line, answered, origin, parted=parted, tokens=tokens)
        tally.cut += row["finish_reason"] == "length"
        tally.reasoned += parted.reasoning is not None
        tally.without_ids += tokens.logprobs is not None and tokens.ids is None
        yield row


def _matched(
    ran: FinishedStage, prompts: DistillPrompts, ask: DistillOptions
) -> Iterator[tuple[TeacherPrompt, int, Line, Answered]]:
    """Answers with what they answer; both are in the order of the lines, and not every line has one."""
    answers = ran.answers()
    answered = next(answers, None)
    for prompt, sample, line in lines_of(prompts, ask):
        if answered is None:
            return
        if answered.custom_id == line["custom_id"]:
            yield prompt, sample, line, answered
            answered = next(answers, None)


def _with_lines(ran: FinishedStage, prompts: DistillPrompts, ask: DistillOptions) -> Iterator[tuple[Line, Answered]]:
    return ((line, answered) for _, _, line, answered in _matched(ran, prompts, ask))


def _metadata(origin: AnswerOrigin, ask: DistillOptions) -> dict[str, str]:
    """For whoever finds the file; nothing of when or how it was made, so that the same answers are the same bytes."""
    return {
        "tokenmill.recipe": "distill",
        "tokenmill.model": origin.model,
        "tokenmill.model_id": origin.model_id,
        "tokenmill.engine": f"{origin.engine} {origin.build}",
        "tokenmill.samples": str(ask.samples),
    }
