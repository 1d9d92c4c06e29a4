"""Results as rows: one per point, with the median and the spread of its runs.

All figures are measured, except the fields that begin with `predicted`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from tokenmill.tuner.bench.served import Served

What = Literal["first", "cold", "again", "tail", "sweep", "threads", "sequences"]


@dataclass(frozen=True, slots=True)
class Stat:
    """Median and range of several runs."""

    median: float
    low: float
    high: float
    runs: int

    @property
    def spread(self) -> float:
        """Largest distance from the median, as a share of it."""
        return max(self.high - self.median, self.median - self.low) / self.median if self.median else 0.0


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One point. PP and TG: computed prompt tokens and generated tokens of all sequences. N_KV: cached tokens of one
    sequence before."""

    what: What
    pp: int
    tg: int
    n_kv: int | None  # None: the engine does not report it
    prompt_tokens: int  # of one sequence
    t_pp_s: Stat | None  # to the first token
    s_pp_tok_s: Stat | None
    t_tg_s: Stat | None
    s_tg_tok_s: Stat | None
    total_s: Stat | None
    threads: int | None = None
    threads_batch: int | None = None
    sequences: int = 1
    engine_t_pp_s: float | None = None  # by the engine's own clock
    engine_t_tg_s: float | None = None
    predicted_pp_tok_s: float | None = None
    predicted_tg_tok_s: float | None = None
    disturbed: str | None = None  # the last disturbance, if all runs were disturbed
    repeated: int = 0  # disturbed runs that were repeated

    @property
    def depth(self) -> int:
        """Tokens of a sequence when decoding began."""
        return self.prompt_tokens


@dataclass(frozen=True, slots=True)
class Runs:
    """The valid runs of one point."""

    served: tuple[Served, ...]
    disturbed: str | None = None
    repeated: int = 0


def stat(values: Sequence[float | None]) -> Stat | None:
    """Median and range of the known values; None if all are unknown."""
    known = [value for value in values if value is not None]
    return Stat(median(known), min(known), max(known), len(known)) if known else None


def row_of(what: What, runs: Runs) -> BenchRow:
    """The row of a point with one sequence."""
    served = runs.served

    def stat_of(figure: Callable[[Served], float | None]) -> Stat | None:
        return stat([figure(each) for each in served])

    cached = [each.cached_tokens for each in served]
    engine_pp = stat_of(lambda each: each.engine_prefill_s)
    engine_tg = stat_of(lambda each: each.engine_decode_s)
    return BenchRow(
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
