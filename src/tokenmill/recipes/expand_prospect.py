"""What an expansion will take, before anything has run. Pure."""

from itertools import count, islice
from math import ceil
from typing import TypeVar

from tokenmill.recipes.expand_lines import Job, jobs_of, part_lines
from tokenmill.recipes.expand_order import ExpandRequest
from tokenmill.recipes.judge import MAX_TOKENS, judge_line
from tokenmill.recipes.runner import Line, Prospect, StageProspect

ASSUMED_YIELD = 0.7
_ALL = 20_000  # lines that are made, all of them, so that those with an answer are known
_SAMPLE = 1000  # of more

T = TypeVar("T")


def prospect_of(order: ExpandRequest) -> Prospect:
    """All rounds as one stage, and the judging of what they write as another."""
    round_one = list(jobs_of(order.seeds.parents, order.variants, order.per_seed, 0))
    jobs = _lines(order, len(round_one))
    rows = order.target
    notes = tuple[str, ...]()
    if not jobs:
        rows = None
    elif order.target is not None and jobs < _needed(order.target):
        notes = (f"{order.rounds} rounds of {len(round_one):,} lines may not come to {order.target:,} rows",)
        rows = None
    sample = _sample(order, round_one, jobs)
    assumed = None if order.target is None else f"{ASSUMED_YIELD:.0%} of what is written passes the filters"
    stages = [
        StageProspect(
            "write",
            jobs,
            tuple(order.desk.line(job) for job in sample),
            output_tokens=order.desk.drawing.max_tokens,
            assumed=assumed,
        )
    ]
    if order.judge is not None:
        stages.append(
            StageProspect(
                "judge",
                jobs,
                tuple(_judged(order, job) for job in _spread(sample, _SAMPLE)),
                output_tokens=MAX_TOKENS,
                assumed="every row is judged, and new rows are as long as their seeds",
            )
        )
    return Prospect(tuple(stages), rows, notes)


def _needed(target: int) -> int:
    return ceil(target / ASSUMED_YIELD)


def _lines(order: ExpandRequest, of_round: int) -> int:
    """Lines that are written: whole parts, as the run cuts them, until the target is likely to be reached."""
    if not of_round:
        return 0
    if order.target is None:
        return of_round * int(order.most_rounds)
    needed = _needed(order.target)
    asked = 0
    rounds = 0
    while asked < needed and rounds < order.most_rounds:
        if part_lines(asked, of_round) == of_round:  # and so are all that follow: parts only grow
            return asked + of_round * int(min(ceil((needed - asked) / of_round), order.most_rounds - rounds))
        left = of_round
        while left and asked < needed:
            part = part_lines(asked, left)
            asked = asked + part
            left = left - part
        rounds += 1
    return asked


def _sample(order: ExpandRequest, round_one: list[Job], jobs: int) -> list[Job]:
    """All jobs, in the order of the run, where that many can be made and are known; else some of the first round."""
    if jobs <= len(round_one):
        return round_one[:jobs] if jobs <= _ALL else _spread(round_one[:jobs], _SAMPLE)
    if jobs > _ALL or order.evolve:  # what later rounds of an evolution begin with is not written yet
        return _spread(round_one, _SAMPLE)
    rounds = (jobs_of(order.seeds.parents, order.variants, order.per_seed, before) for before in count())
    return list(islice((job for one in rounds for job in one), jobs))


def _judged(order: ExpandRequest, job: Job) -> Line:
    """The judging of a row that is what it was made of, for want of a better one."""
    if order.judge is None:
        raise AssertionError("nothing is judged")
    example = job.parent.example
    name = str(order.desk.line(job)["custom_id"])
    return judge_line(name, example, example, job.variant, order.judge, order.seeds.shape)


def _spread(items: list[T], most: int) -> list[T]:
    """Some of all, at even distances."""
    return items if len(items) <= most else list(islice(items, 0, None, ceil(len(items) / most)))
