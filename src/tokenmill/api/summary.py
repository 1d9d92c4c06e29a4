"""Results of `run` and `work`: `Summary` and `WorkSummary`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tokenmill.api.stores import BatchStore
from tokenmill.engine.engine import Identity
from tokenmill.jobs.models import Batch
from tokenmill.jobs.openai.answers import text_of
from tokenmill.jobs.store.address import Address
from tokenmill.jobs.worker.answer_checks import AnswerChecks
from tokenmill.jobs.worker.pool_summary import consecutive_report
from tokenmill.jobs.worker.progress import RunReport
from tokenmill.units import format_seconds, number_of

End = Literal["finished", "stopped", "cancelled", "hours"]
"""Why a run ended; hours: its time limit was reached."""


@dataclass(frozen=True, slots=True)
class NodeSummary:
    """The work of one node of a cluster."""

    name: str
    report: RunReport | None = None  # None: it did no work
    lost: str | None = None  # why it was lost
    left_out: str | None = None  # why it was not used


@dataclass(frozen=True, slots=True, repr=False)
class Summary:
    """The result of a run. Counts are for the whole batch; tokens and seconds are for this run only."""

    batch: Batch
    store: Address
    seconds: float
    report: RunReport | None = None  # None: nothing had to be computed, or the run ended before the engine was ready
    load_s: float | None = None  # None: no engine was started
    failed_by_code: Mapping[str, int] = field(default_factory=dict)
    output_written: bool = True  # False: another process on the same store writes it, or the batch has no output
    nodes: tuple[NodeSummary, ...] = ()
    engine: Identity | None = None  # None: no engine was used, or several
    energy_j: float | None = None  # of the whole machine; None: unknown, or no engine was used
    per_hour: float | None = None  # configured price of the machine; None: none is configured
    currency: str = ""
    forecast_s: float | None = None  # of the run, with answers of their maximum length; None: unknown
    untuned: str | None = None  # the model, if its settings were not measured by `tokenmill tune`
    time_up: bool = False  # a time limit ended the run before the batch was finished

    @property
    def jobs(self) -> int:
        """Jobs of the batch."""
        return self.batch.counts.total

    @property
    def succeeded(self) -> int:
        """Jobs with an answer."""
        return self.batch.counts.done

    @property
    def failed(self) -> int:
        """Jobs that ended without an answer: failed, quarantined or cancelled."""
        return self.batch.counts.final - self.batch.counts.done

    @property
    def pending(self) -> int:
        """Jobs that are left; the same call continues them."""
        return self.batch.counts.pending + self.batch.counts.running

    @property
    def computed(self) -> int:
        """Answers that this run computed; the others were in the store."""
        return self.report.answers if self.report is not None else 0

    @property
    def finish_reasons(self) -> Mapping[str, int]:
        """Answers of this run by OpenAI's finish reason, such as stop and length."""
        return self.report.finish_reasons if self.report is not None else {}

    @property
    def checks(self) -> AnswerChecks:
        """Answers of this run that are cut off, or not the JSON that their job asked for."""
        return self.report.checks if self.report is not None else AnswerChecks()

    @property
    def tok_s(self) -> float | None:
        """Generated tokens per second while jobs were in flight; None if this run computed nothing."""
        report = self.report
        return report.tokens.generated / report.busy_s if report is not None and report.busy_s > 0 else None

    @property
    def jobs_per_hour(self) -> float | None:
        """Answers of this run per hour, without loading; None if it computed nothing."""
        report = self.report
        if report is None or not report.answers or report.seconds <= 0:
            return None
        return 3600 * report.answers / report.seconds

    @property
    def generated_tokens(self) -> int:
        """Tokens that this run generated."""
        return self.report.tokens.generated if self.report is not None else 0

    @property
    def computed_prompt_tokens(self) -> int:
        """Prompt tokens that this run computed."""
        return self.report.tokens.computed if self.report is not None else 0

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens that this run found in the prefix cache."""
        return self.report.tokens.cached if self.report is not None else 0

    @property
    def cost(self) -> float | None:
        """Cost of this run at the configured price; None: no price is configured."""
        return None if self.per_hour is None else self.seconds / 3600 * self.per_hour

    @property
    def end(self) -> End:
        """Why the run ended."""
        if self.time_up:
            return "hours"
        if self.report is not None:
            return self.report.end
        return "finished" if self.batch.finished else "stopped"

    def results(self) -> Iterator[dict[str, Any]]:
        """The result lines in the order of the jobs, in OpenAI's batch output format, read from the store."""
        with BatchStore(self.store) as store:
            yield from store.results(self.batch.name)

    def texts(self) -> Iterator[str | None]:
        """The generated text of each finished job, in the order of the jobs; None for a job that failed."""
        for line in self.results():
            yield _text(line)

    def __repr__(self) -> str:
        parts = [f"{self.batch.name}: {self.succeeded:,} of {number_of(self.jobs, 'job')} answered"]
        if self.failed:
            parts.append(f"{self.failed:,} failed")
        if self.pending:
            parts.append(f"{self.pending:,} pending")
        parts.append(f"{self.generated_tokens:,} tokens generated in {format_seconds(self.seconds)}")
        return f"<Summary {', '.join(parts)}>"


def joined(before: Summary, after: Summary) -> Summary:
    """The summary of two consecutive parts of a run."""
    reports = [each.report for each in (before, after) if each.report is not None]
    return replace(
        after,
        report=consecutive_report(reports) if reports else None,
        load_s=_sum(before.load_s, after.load_s),
        energy_j=_sum(before.energy_j, after.energy_j),
        seconds=before.seconds + after.seconds,
        forecast_s=before.forecast_s,
        engine=after.engine or before.engine,
    )


def _sum(one: float | None, other: float | None) -> float | None:
    return one if other is None else other if one is None else one + other


@dataclass(frozen=True, slots=True, repr=False)
class WorkSummary:
    """The work of one worker on the batches of a store."""

    batches: tuple[str, ...]  # their names
    reports: tuple[RunReport, ...]
    seconds: float

    @property
    def computed(self) -> int:
        """Answers that this worker computed."""
        return sum(report.answers for report in self.reports)

    @property
    def generated_tokens(self) -> int:
        """Tokens that this worker generated."""
        return sum(report.tokens.generated for report in self.reports)

    @property
    def computed_prompt_tokens(self) -> int:
        """Prompt tokens that this worker computed."""
        return sum(report.tokens.computed for report in self.reports)

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens that this worker found in the prefix cache."""
        return sum(report.tokens.cached for report in self.reports)

    @property
    def engine_deaths(self) -> int:
        """How often the engine died and was restarted."""
        return sum(report.crashes for report in self.reports)

    @property
    def end(self) -> End:
        """Why the last round of work ended."""
        return self.reports[-1].end if self.reports else "finished"

    def __repr__(self) -> str:
        batches = number_of(len(self.batches), "batch", "batches")
        answers = number_of(self.computed, "answer")
        tokens = f"{self.generated_tokens:,} tokens generated in {format_seconds(self.seconds)}"
        return f"<WorkSummary {batches}: {answers} computed, {tokens}>"


def _text(line: Mapping[str, Any]) -> str | None:
    response = line.get("response") or {}
    return text_of(response.get("body") or {})
