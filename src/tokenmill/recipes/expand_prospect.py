"""What an expansion will take, before anything has run. Pure."""

from itertools import islice
from math import ceil, inf
from typing import TypeVar

from tokenmill.recipes.expand_lines import Job, jobs_of
from tokenmill.recipes.expand_order import Order
from tokenmill.recipes.judge import MAX_TOKENS, judge_line
from tokenmill.recipes.mill import Line, Prospect, StageProspect

ASSUMED_YIELD = 0.7
_SAMPLE = 1000  # lines that are made to be counted

T = TypeVar("T")


def prospect_of(order: Order) -> Prospect:
    """All rounds as one stage, and the judging of what they write as another."""
    round_one = list(jobs_of(order.seeds.parents, order.variants, order.per_seed, 0))
    most = None if order.most_rounds == inf else len(round_one) * int(order.most_rounds)
    jobs, rows, notes = most or 0, None, tuple[str, ...]()
    if order.target is not None and round_one:
        needed, rows = ceil(order.target / ASSUMED_YIELD), order.target
        jobs = needed if most is None else min(most, needed)
        if most is not None and needed > most:
            notes = (f"{order.rounds} rounds of {len(round_one):,} lines may not come to {order.target:,} rows",)
            rows = None
    sample = _spread(round_one, _SAMPLE)
    assumed = None if order.target is None else f"{ASSUMED_YIELD:.0%} of what is written passes the filters"
    stages = [
        StageProspect(
            "write", jobs, tuple(order.desk.line(job) for job in sample),
            output_tokens=order.desk.drawing.max_tokens, assumed=assumed,
        )
    ]  # fmt: skip
    if order.judge is not None:
        stages.append(
            StageProspect(
                "judge", jobs, tuple(_judged(order, job) for job in sample), output_tokens=MAX_TOKENS,
                assumed="every row is judged, and new rows are as long as their seeds",
            )
        )  # fmt: skip
    return Prospect(tuple(stages), rows, notes)


def _judged(order: Order, job: Job) -> Line:
    """The judging of a row that is what it was made of, for want of a better one."""
    if order.judge is None:
        raise AssertionError("nothing is judged")
    example = job.parent.example
    name = str(order.desk.line(job)["custom_id"])
    return judge_line(name, example, example, job.variant, order.judge, order.seeds.shape)


def _spread(items: list[T], most: int) -> list[T]:
    """Some of all, at even distances."""
    return items if len(items) <= most else list(islice(items, 0, None, ceil(len(items) / most)))
