"""What the worker tells while it works and when it is done."""

from dataclasses import dataclass
from typing import Literal

from tokenmill.jobs.models import Counts, Failure
from tokenmill.jobs.scheduler.estimates import MeasuredRates
from tokenmill.jobs.worker.reuse import Misses
from tokenmill.jobs.worker.throughput import RunTokens

RunEnd = Literal["finished", "stopped", "cancelled"]


@dataclass(frozen=True, slots=True)
class Failed:
    """A job without an answer, for a person."""

    number: int  # of its line
    failure: Failure
    again: bool  # it is tried once more


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run as it is now."""

    elapsed_s: float
    counts: Counts  # of the batches, what was there before the run included
    tokens: RunTokens  # of this run
    prompt_tokens_live: int  # computed by the engine so far, for unfinished answers too where it says so
    busy: int  # lanes at work
    width: int  # lanes to be used
    retrying: int  # jobs that wait out a failure
    eta_s: float | None
    engine: str | None  # why it cannot be used now; None: it can
    engine_says: str | None  # of itself while it can: that it has been silent for long, say
    failed: Failed | None  # the last one
    output: str | None  # what is wrong with the output file; None: nothing


@dataclass(frozen=True, slots=True)
class Least:
    """What the prompts of a run had to cost at least when every shared head is computed once."""

    tokens: int
    exact: bool  # counted in tokens; else reckoned from bytes


@dataclass(frozen=True, slots=True)
class RunReport:
    """A run that is over."""

    end: RunEnd
    seconds: float
    busy_s: float  # with jobs in the engine
    counts: Counts  # of the batches
    answers: int  # computed in this run
    tokens: RunTokens
    rates: MeasuredRates
    lanes: float  # at work on average
    misses: Misses
    least: Least | None  # None: nothing was computed, or it could not be reckoned
    deaths: int  # of the engine
    notes: tuple[str, ...]
    head_tok_s: float | None = None  # how fast long prompts were computed; None: none was
