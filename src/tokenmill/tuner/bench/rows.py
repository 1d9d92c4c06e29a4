"""What was measured, as rows: one for each point, with the median of its runs and how far they lay apart. Values only.

Every figure here is measured; what the forecast said for the same point is in fields of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from tokenmill.tuner.bench.served import Served

What = Literal["first", "cold", "again", "tail", "sweep", "threads", "sequences"]


@dataclass(frozen=True, slots=True)
class Stat:
    """The median of some runs, and their range."""

    median: float
    low: float
    high: float
    runs: int

    @property
    def spread(self) -> float:
        """The run furthest from the median, as a share of it."""
        return max(self.high - self.median, self.median - self.low) / self.median if self.median else 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """One point. PP and TG are tokens of the prompt that were computed and tokens that were written, of all sequences
    together; N_KV is what was in the cache before, of one sequence."""

    what: What
    pp: int
    tg: int
    n_kv: int | None  # None: the engine does not say
    prompt_tokens: int  # of one sequence
    t_pp_s: Stat | None  # to the first token
    s_pp_tok_s: Stat | None
    t_tg_s: Stat | None
    s_tg_tok_s: Stat | None
    total_s: Stat | None
    threads: int | None = None
    threads_batch: int | None = None
    sequences: int = 1
    engine_t_pp_s: float | None = None  # the engine's own clock, where it tells
    engine_t_tg_s: float | None = None
    predicted_pp_tok_s: float | None = None
    predicted_tg_tok_s: float | None = None
    disturbed: str | None = None  # what else used the machine in every run: compare with care
    repeated: int = 0  # runs that were disturbed and do not count

    @property
    def depth(self) -> int:
        """Tokens of a sequence when it began to write."""
        return self.prompt_tokens


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of one point that count."""

    served: tuple[Served, ...]
    disturbed: str | None = None
    repeated: int = 0


def stat(values: Sequence[float | None]) -> Stat | None:
    """The median of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return Stat(median(known), min(known), max(known), len(known)) if known else None


def row_of(what: What, runs: Runs) -> Row:
    """A point of one sequence."""
    served = runs.served

    def stat_of(figure: Callable[[Served], float | None]) -> Stat | None:
        return stat([figure(each) for each in served])

    cached = [each.cached_tokens for each in served]
    engine_pp = stat_of(lambda each: each.engine_prefill_s)
    engine_tg = stat_of(lambda each: each.engine_decode_s)
    return Row(
        what,
        pp=round(median(each.computed_tokens for each in served)),
        tg=round(median(each.written_tokens for each in served)),
        n_kv=None if None in cached else round(median(each or 0 for each in cached)),
        prompt_tokens=round(median(each.prompt_tokens for each in served)),
        t_pp_s=stat_of(lambda each: each.first_s),
        s_pp_tok_s=stat_of(lambda each: each.prefill_tok_s),
        t_tg_s=stat_of(lambda each: each.write_s),
        s_tg_tok_s=stat_of(lambda each: each.decode_tok_s),
        total_s=stat_of(lambda each: each.total_s),
        engine_t_pp_s=engine_pp.median if engine_pp else None,
        engine_t_tg_s=engine_tg.median if engine_tg else None,
        disturbed=runs.disturbed,
        repeated=runs.repeated,
    )
