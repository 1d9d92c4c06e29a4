"""Collects a teacher's answers to a file of prompts in one table: `distill`.

The only stage asks every prompt once per sample. Lines depend only on prompts and options, so the same command finds
all existing answers. The table is replaced atomically at the end of each run, with the rows available so far.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenmill.recipes.distillation.prompts import DistillOptions, DistillPrompts, TeacherPrompt, bodies, check_prompts
from tokenmill.recipes.distillation.rows import (
    COLUMNS,
    Thinking,
    opened_by,
    row_of,
    split_answer,
    templates_that_open,
    tokens_of,
)
from tokenmill.recipes.history import MAX_LINES
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
PARQUET_BYTES, STORED_BYTES = 4, 95  # approximate bytes per probability with its token; measured, see docs/distill.md
_SAMPLED_PROMPTS = 500  # prompts sampled from a large file for a forecast
_MAX_CHARACTERS = 256 * 1024**2  # maximum total size of sampled lines
_MAX_MESSAGES = 3  # failures reported individually


@dataclass(frozen=True, slots=True)
class Distilled:
    """Result of a distillation."""

    output: Path
    end: RecipeEnd
    asked: int  # requested answers
    rows: int
    failed: int
    waiting: int  # lines without an outcome, left for the next run
    cut: int  # rows whose answer ended at max_tokens
    reasoned: int  # rows with reasoning
    without_ids: int  # rows with probabilities but without token ids
    failures: Mapping[str, int] = field(default_factory=dict)  # count by code
    messages: tuple[str, ...] = ()  # descriptions of the first failures


async def distill(
    runner: BatchRunner,
    prompts: DistillPrompts,
    ask: DistillOptions,
    output: Path,
    *,
    thinking: Thinking = "auto",
    tell: Callable[[str], None] = lambda _: None,
) -> Distilled:
    """Answer all prompts and write the table; `tell` logs messages."""
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
        tuple(tally.messages),
    )


def prospect_of(prompts: DistillPrompts, ask: DistillOptions) -> Prospect:
    """The stage for a forecast; raises UsageError if a prompt is invalid."""
    jobs = check_prompts(prompts, ask)
    sample = _sample(prompts, ask, jobs)
    limits = [line["body"].get("max_completion_tokens") or line["body"]["max_tokens"] for line in sample]
    output_tokens = round(sum(limits) * jobs / len(limits))
    notes = [
        f"{number_of(jobs // ask.samples, 'prompt')}, {number_of(ask.samples, 'sample')} of each "
        f"at temperature {ask.effective_temperature:g}"
    ]
    if ask.top_logprobs:
        tops = output_tokens * (ask.top_logprobs + 1)
        notes.append(
            f"the top {ask.top_logprobs} tokens at each position take up to {format_bytes(tops * PARQUET_BYTES)} in "
            f"Parquet and {format_bytes(tops * STORED_BYTES)} in the batch store"
        )
    own = any(limit != ask.max_tokens for limit in limits)
    each = f"the maximum of its line, else {ask.max_tokens:,} tokens" if own else f"{ask.max_tokens:,} tokens"
    assumed = f"every answer has the maximum length: {each}"
    stage = StageProspect(STAGE, jobs, sample, output_tokens=ask.max_tokens, assumed=assumed)
    return Prospect((stage,), rows=jobs, notes=tuple(notes))


def _sample(prompts: DistillPrompts, ask: DistillOptions, jobs: int) -> tuple[Line, ...]:
    """All lines if they fit in memory, else those of evenly spaced prompts."""
    if jobs <= MAX_LINES:
        lines = list[Line]()
        characters = 0
        for prompt, _, line in lines_of(prompts, ask):
            characters += sum(len(message["content"]) for message in prompt.messages)
            if characters > _MAX_CHARACTERS:
                break
            lines.append(line)
        else:
            return tuple(lines)
    every = max(1, jobs // ask.samples // _SAMPLED_PROMPTS)
    chosen = (prompt for number, prompt in enumerate(prompts) if number % every == 0)
    return tuple(line for prompt in chosen for line in bodies(prompt, ask))


def lines_of(prompts: DistillPrompts, ask: DistillOptions) -> Iterator[tuple[TeacherPrompt, int, Line]]:
    """Every line with its prompt and sample number; samples of one prompt are adjacent."""
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
    messages: list[str] = field(default_factory=list)

    def fail(self, name: str, code: str | None, message: str | None) -> None:
        self.failed += 1
        self.failures[code or "unknown"] += 1
        if len(self.messages) < _MAX_MESSAGES:
            self.messages.append(f"{name}: {message or code or 'no reason given'}")


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
        split = split_answer(
            answered.body, tokens, thinking=thinking, opened=bool(opened) and opened_by(line["body"]) in opened
        )
        if split is None:
            tally.fail(answered.custom_id, "no_text", "the answer has no text")
            continue
        row = row_of(prompt, sample, line, answered, origin, split=split, tokens=tokens)
        tally.cut += row["finish_reason"] == "length"
        tally.reasoned += split.reasoning is not None
        tally.without_ids += tokens.logprobs is not None and tokens.ids is None
        yield row


def _matched(
    ran: FinishedStage, prompts: DistillPrompts, ask: DistillOptions
) -> Iterator[tuple[TeacherPrompt, int, Line, Answered]]:
    """Pair answers with their lines; both are in line order, but lines may lack an answer."""
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
    """Metadata of the file, without time or host, so that equal answers give equal bytes."""
    return {
        "tokenmill.recipe": "distill",
        "tokenmill.model": origin.model,
        "tokenmill.model_id": origin.model_id,
        "tokenmill.engine": f"{origin.engine} {origin.build}",
        "tokenmill.samples": str(ask.samples),
    }
