"""Estimates a recipe before it starts: tokens from its lines, hours from speeds, cost from hours.

Every shared prefix counts once, as in `jobs`. Answers have their maximum length, and an expected length if earlier
answers are known. Pure: speeds and stored results are arguments.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tokenmill.api.engines.speeds import EngineSpeeds
from tokenmill.jobs.lint.report import BYTES_PER_TOKEN, Report
from tokenmill.jobs.lint.run import Lint
from tokenmill.jobs.lint.tokens import TokenCount
from tokenmill.jobs.scheduler.estimates import RemainingWork, eta_s
from tokenmill.recipes.history import Lengths
from tokenmill.recipes.runner import Budget, Line, Prospect, StageProspect

_SAMPLE = 64  # lines on which bytes per token are counted if no job remains
_BLOCKS, _BLOCK = 64, 64  # sample of a long stage: blocks of adjacent lines, which share most


@dataclass(frozen=True, slots=True)
class StageForecast:
    """One stage, without existing answers."""

    stage: str
    jobs: int  # remaining jobs
    answered: int  # existing answers
    prompt_tokens: int
    computed_tokens: int  # prompt tokens of the remaining jobs with every shared prefix computed once
    output_tokens: int  # at most
    expected_output_tokens: int | None  # None: unknown
    seconds: float | None = None  # maximum; None: speed unknown
    expected_s: float | None = None
    lengths: Lengths | None = None  # basis of the expectation
    assumed: str | None = None


@dataclass(frozen=True, slots=True)
class RecipeForecast:
    """The estimate of a whole recipe."""

    stages: tuple[StageForecast, ...]
    total: StageForecast
    rows: int | None
    bytes_per_token: float
    counted: bool  # counted with the model's tokenizer; else estimated
    speeds: EngineSpeeds | None
    seconds: float | None  # maximum, load included
    expected_s: float | None
    cost: float | None  # maximum; None: no price or unknown time
    expected_cost: float | None
    runs: int | None  # maximum number of runs under a budget; None: no budget, or unknown
    assumed: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KnownCosts:
    """Facts that an estimate uses in addition to the recipe."""

    count: TokenCount | None = None
    context: int | None = None  # tokens per sequence
    lengths: Mapping[str, Lengths] | None = None  # by stage
    settled: Mapping[str, frozenset[int]] | None = None  # lines of a stage with an outcome
    per_hour: float | None = None
    budget: Budget = field(default_factory=Budget)


def forecast(prospect: Prospect, speeds: Callable[[int], EngineSpeeds | None], known: KnownCosts) -> RecipeForecast:
    """Estimate tokens, hours and cost; `speeds` is called with the mean tokens per sequence during an answer."""
    summaries = [_summarize(stage, known) for stage in prospect.stages]
    size = next((one.bytes_per_token for one in summaries if one.bytes_per_token is not None), None)
    counted = [_stage(stage, one, size, known) for stage, one in zip(prospect.stages, summaries, strict=True)]
    at = speeds(_depth(counted))
    stages = tuple(_timed(stage, at) for stage in counted)
    total = _total(stages)
    load_s = at.load_s or 0.0 if at is not None and total.jobs else 0.0
    max_s, expected_s = (None if work_s is None else work_s + load_s for work_s in (total.seconds, total.expected_s))
    assumed = [f"{stage.stage}: {stage.assumed}" for stage in stages if stage.assumed]
    notes = [note for one in summaries for note in one.notes]
    return RecipeForecast(
        stages,
        total,
        prospect.rows,
        size or BYTES_PER_TOKEN,
        size is not None,
        at,
        max_s,
        expected_s,
        _cost(max_s, known.per_hour),
        _cost(expected_s, known.per_hour),
        _runs(total, at, known.budget),
        tuple(assumed),
        (*prospect.notes, *notes),
    )


def _cost(seconds: float | None, per_hour: float | None) -> float | None:
    return None if seconds is None or per_hour is None else seconds / 3600 * per_hour


@dataclass(frozen=True, slots=True)
class _StageSummary:
    """Summary of a stage's lines."""

    jobs: int  # remaining jobs
    answered: int
    report: Report | None  # None: no lines, or all have an outcome
    bytes_per_token: float | None  # counted; None: not counted
    compute_bytes: int = 0  # total of all jobs
    output_tokens: int | None = None  # maximum total of all jobs
    notes: tuple[str, ...] = ()


def _summarize(stage: StageProspect, known: KnownCosts) -> _StageSummary:
    settled = (known.settled or {}).get(stage.stage, frozenset())
    lines = [line for number, line in enumerate(stage.lines) if number not in settled]
    notes = list[str]()
    answered = len(settled)
    if settled and len(stage.lines) != stage.jobs:
        answered = round(stage.jobs * len(settled) / len(stage.lines))
        notes.append(f"{stage.stage}: the number of answered jobs is estimated from {len(stage.lines):,} lines")
    jobs = stage.jobs - answered
    if not lines or not jobs:
        sample = Lint(count=known.count)
        for number, line in enumerate(stage.lines[:_SAMPLE], 1):
            sample.add(number, json.dumps(line))
        return _StageSummary(jobs, answered, None, _counted(sample.report()), notes=tuple(notes))
    written = sum(_max_tokens(line, stage.output_tokens) for line in lines) / len(lines)
    lines = _some(lines[:jobs])  # `jobs` may be an estimate and smaller
    lint = Lint(context=known.context, count=known.count)
    half = len(lines) // 2
    first_half = 0
    for number, line in enumerate(lines, 1):
        lint.add(number, json.dumps(line))
        if number == half:
            first_half = lint.report().compute_bytes
    report = lint.report()
    compute = report.compute_bytes
    if jobs > len(lines):  # extrapolate from the second half of the sample
        compute += round((compute - first_half) / (len(lines) - half) * (jobs - len(lines)))
    notes += [f"{stage.stage}: {finding.title}; {finding.detail}" for finding in report.findings if finding.fatal]
    return _StageSummary(jobs, answered, report, _counted(report), compute, round(written * jobs), tuple(notes))


def _some(lines: list[Line]) -> list[Line]:
    """All lines, or evenly spaced blocks of a long stage."""
    if len(lines) <= _BLOCKS * _BLOCK:
        return lines
    starts = (index * (len(lines) - _BLOCK) // (_BLOCKS - 1) for index in range(_BLOCKS))
    return [line for start in starts for line in lines[start : start + _BLOCK]]


def _counted(report: Report) -> float | None:
    return report.bytes_per_token if report.counted else None


def _max_tokens(line: Line, otherwise: int) -> int:
    body: Mapping[str, Any] = line.get("body") or line
    maximum = body.get("max_completion_tokens") or body.get("max_tokens")
    return maximum if isinstance(maximum, int) else otherwise


def _stage(stage: StageProspect, summary: _StageSummary, size: float | None, known: KnownCosts) -> StageForecast:
    """Tokens of a stage; `size`: bytes per token, None: not counted."""
    per_token = size or BYTES_PER_TOKEN
    if summary.report is not None:
        per_token = summary.report.bytes_per_token
        scale = summary.jobs / summary.report.jobs if summary.report.jobs else 0.0
        prompt = summary.report.prompt_bytes * scale
        compute = summary.compute_bytes
    else:
        left = summary.jobs / stage.jobs if stage.jobs else 0.0
        prompt = (stage.prompt_bytes or 0) * left
        compute = round(max(0.0, prompt - stage.shared_bytes * max(0, summary.jobs - 1)))
    output = summary.jobs * stage.output_tokens if summary.output_tokens is None else summary.output_tokens
    lengths = (known.lengths or {}).get(stage.stage)
    return StageForecast(
        stage.stage,
        summary.jobs,
        summary.answered,
        round(prompt / per_token),
        round(compute / per_token),
        output,
        None if lengths is None else round(output * lengths.share),
        lengths=lengths,
        assumed=stage.assumed,
    )


def _depth(stages: Sequence[StageForecast]) -> int:
    """Tokens of a sequence in the middle of a mean answer."""
    jobs = sum(stage.jobs for stage in stages)
    tokens = sum(stage.prompt_tokens + stage.output_tokens / 2 for stage in stages)
    return round(tokens / jobs) if jobs else 0


def _timed(stage: StageForecast, speeds: EngineSpeeds | None) -> StageForecast:
    if not stage.jobs:
        return replace(stage, seconds=0.0, expected_s=0.0)
    if speeds is None:
        return stage
    slots = max(1, min(speeds.width, stage.jobs))

    def duration_s(output: float | None) -> float | None:
        return None if output is None else eta_s(RemainingWork(stage.computed_tokens, output), speeds.rates, slots)

    return replace(stage, seconds=duration_s(stage.output_tokens), expected_s=duration_s(stage.expected_output_tokens))


def _total(stages: Sequence[StageForecast]) -> StageForecast:
    return StageForecast(
        "all",
        sum(stage.jobs for stage in stages),
        sum(stage.answered for stage in stages),
        sum(stage.prompt_tokens for stage in stages),
        sum(stage.computed_tokens for stage in stages),
        sum(stage.output_tokens for stage in stages),
        _whole([stage.expected_output_tokens for stage in stages]),
        _sum([stage.seconds for stage in stages]),
        _sum([stage.expected_s for stage in stages]),
    )


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _whole(values: Sequence[int | None]) -> int | None:
    found = _sum(values)
    return None if found is None else round(found)


def _runs(total: StageForecast, speeds: EngineSpeeds | None, budget: Budget) -> int | None:
    """Number of runs under a budget; every run loads the model again."""
    runs = 1
    if budget.tokens is None and budget.seconds is None:
        return None
    if budget.tokens is not None:
        runs = max(runs, math.ceil((total.computed_tokens + total.output_tokens) / budget.tokens))
    if budget.seconds is not None:
        room_s = budget.seconds - (speeds.load_s or 0.0 if speeds is not None else 0.0)
        if total.seconds is None or room_s <= 0:
            return None
        runs = max(runs, math.ceil(total.seconds / room_s))
    return runs
