"""Progress snapshots and the final report of a run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tokenmill.jobs.models import Counts, Failure
from tokenmill.jobs.scheduler.estimates import MeasuredRates, RemainingWork
from tokenmill.jobs.worker.answer_checks import AnswerChecks
from tokenmill.jobs.worker.reuse import Misses
from tokenmill.jobs.worker.slot_use import SlotUse
from tokenmill.jobs.worker.throughput import RunTokens

RunEnd = Literal["finished", "stopped", "cancelled"]


@dataclass(frozen=True, slots=True)
class Failed:
    """A failed job, for display."""

    number: int  # line number
    failure: Failure
    again: bool  # whether it will be retried


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Current progress of a run."""

    elapsed_s: float
    counts: Counts  # of the batches, including earlier runs
    tokens: RunTokens  # of this run
    prompt_tokens_live: int  # computed so far, including those of unfinished answers if the engine reports them
    busy: int  # busy slots
    width: int  # usable slots
    retrying: int  # jobs waiting for a retry
    eta_s: float | None
    engine: str | None  # why the engine cannot be used; None if it can
    engine_detail: str | None  # status detail of a usable engine, for example that it has been silent for long
    failed: Failed | None  # the last one
    output: str | None  # error of the output file, if any
    left: RemainingWork | None = None  # of all unfinished jobs; None: unknown
    share: float | None = None  # of the expected tokens of all jobs that are done; None: unknown
    forecast: bool = False  # the estimates come from a forecast, because no job has finished


@dataclass(frozen=True, slots=True)
class MinimumTokens:
    """Prompt tokens of a run if every shared prefix were computed once."""

    tokens: int
    exact: bool  # counted in tokens; otherwise estimated from bytes


@dataclass(frozen=True, slots=True)
class RunReport:
    """Result of a run."""

    end: RunEnd
    seconds: float
    busy_s: float  # seconds with jobs in flight
    counts: Counts  # of the batches
    answers: int  # computed in this run
    tokens: RunTokens
    rates: MeasuredRates
    busy_slots: float  # average number of busy slots
    misses: Misses
    minimum: MinimumTokens | None  # None: nothing was computed, or the minimum is unknown
    crashes: int  # engine crashes
    notes: tuple[str, ...]
    long_prefill_tok_s: float | None = None  # prefill rate of long prompts; None if there were none
    slots: int | None = None  # usable slots; None: unknown
    finish_reasons: Mapping[str, int] = field(default_factory=dict)  # answers of this run by OpenAI finish reason
    slot_use: SlotUse | None = None  # None: the engine does not count
    checks: AnswerChecks = field(default_factory=AnswerChecks)
