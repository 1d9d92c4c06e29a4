"""Stages of an expansion for a forecast. Pure."""

from itertools import count, islice
from math import ceil
from typing import TypeVar

from tokenmill.recipes.expansion.answers import MAX_TOKENS, judge_line
from tokenmill.recipes.expansion.lines import ExpansionJob, jobs_of, part_lines
from tokenmill.recipes.expansion.request import ExpandRequest
from tokenmill.recipes.runner import Line, Prospect, StageProspect

ASSUMED_YIELD = 0.7
_ALL = 20_000  # up to this number all lines are generated, to find those with an answer
_SAMPLE = 1000  # sample size beyond that

T = TypeVar("T")


def prospect_of(request: ExpandRequest) -> Prospect:
    """The stages: writing in all rounds, and judging."""
    round_one = list(jobs_of(request.seeds.parents, request.variants, request.per_seed, 0))
    jobs = _lines(request, len(round_one))
    rows = request.target
    notes = tuple[str, ...]()
    if not jobs:
        rows = None
    elif request.target is not None and jobs < _needed(request.target):
        notes = (f"{request.rounds} rounds of {len(round_one):,} lines may give fewer than {request.target:,} rows",)
        rows = None
    sample = _sample(request, round_one, jobs)
    assumed = None if request.target is None else f"{ASSUMED_YIELD:.0%} of the new examples pass the filters"
    stages = [
        StageProspect(
            "write",
            jobs,
            tuple(request.prompts.line(job) for job in sample),
            output_tokens=request.prompts.sampling.max_tokens,
            assumed=assumed,
        )
    ]
    if request.judge is not None:
        stages.append(
            StageProspect(
                "judge",
                jobs,
                tuple(_judged(request, job) for job in _spread(sample, _SAMPLE)),
                output_tokens=MAX_TOKENS,
                assumed="every new example is judged and as long as its seed",
            )
        )
    return Prospect(tuple(stages), rows, notes)


def _needed(target: int) -> int:
    return ceil(target / ASSUMED_YIELD)


def _lines(request: ExpandRequest, of_round: int) -> int:
    """Lines until the target is likely reached, in whole parts as in the run."""
    if not of_round:
        return 0
    if request.target is None:
        return of_round * int(request.max_rounds)
    needed = _needed(request.target)
    lines = 0
    rounds = 0
    while lines < needed and rounds < request.max_rounds:
        if part_lines(lines, of_round) == of_round:  # all later parts are whole rounds, because parts grow
            return lines + of_round * int(min(ceil((needed - lines) / of_round), request.max_rounds - rounds))
        left = of_round
        while left and lines < needed:
            part = part_lines(lines, left)
            lines = lines + part
            left = left - part
        rounds += 1
    return lines


def _sample(request: ExpandRequest, round_one: list[ExpansionJob], jobs: int) -> list[ExpansionJob]:
    """All jobs in run order if they can be generated, else a sample of the first round."""
    if jobs <= len(round_one):
        return round_one[:jobs] if jobs <= _ALL else _spread(round_one[:jobs], _SAMPLE)
    if jobs > _ALL or request.evolve:  # later rounds of an evolution depend on answers
        return _spread(round_one, _SAMPLE)
    rounds = (jobs_of(request.seeds.parents, request.variants, request.per_seed, before) for before in count())
    return list(islice((job for one in rounds for job in one), jobs))


def _judged(request: ExpandRequest, job: ExpansionJob) -> Line:
    """A judge line for the parent, in place of the unknown new row."""
    if request.judge is None:
        raise AssertionError("the request has no judge")
    example = job.parent.example
    name = str(request.prompts.line(job)["custom_id"])
    return judge_line(name, example, example, job.variant, request.judge, request.seeds.shape)


def _spread(items: list[T], maximum: int) -> list[T]:
    """Evenly spaced items."""
    return items if len(items) <= maximum else list(islice(items, 0, None, ceil(len(items) / maximum)))
