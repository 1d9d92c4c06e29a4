"""Statistics of a run for progress and the final report: tokens, throughput, cache misses, failures. Pure."""

from collections import Counter
from collections.abc import Callable, Sequence

from tokenmill.engine.engine import Answer, Counters, EngineKind, EngineStatus
from tokenmill.jobs.models import Counts
from tokenmill.jobs.scheduler.decisions import Dispatch
from tokenmill.jobs.scheduler.estimates import AnswerLengths, ExpectedJobs, RemainingWork, eta_s
from tokenmill.jobs.scheduler.shape import EngineShape
from tokenmill.jobs.worker.answer_checks import AnswerChecks, checked
from tokenmill.jobs.worker.attempts import Attempt
from tokenmill.jobs.worker.progress import Failed, MinimumTokens, RunEnd, RunReport, Snapshot
from tokenmill.jobs.worker.reuse import (
    MAX_COUNTED_JOBS,
    MAX_COUNTED_TOKENS,
    SLOT_SIMILARITY,
    Evidence,
    MinimumEstimate,
    Misses,
)
from tokenmill.jobs.worker.slot_use import SlotUse
from tokenmill.jobs.worker.throughput import Throughput


class RunStats:
    """Statistics of one run."""

    def __init__(self, shape: EngineShape, kind: EngineKind, expected: ExpectedJobs | None = None) -> None:
        self.throughput = Throughput()
        self.misses = Misses()
        self.failed: Failed | None = None  # the last one
        self.crashes = 0  # of the engine
        self.consecutive_failures = 0  # engine failures since the last answer
        self._shape = shape
        self._kind = kind
        self._expected = expected
        self._minimum = MinimumEstimate()
        self._finish_reasons = Counter[str]()
        self._checks = AnswerChecks()
        self._sample: list[int] = []  # the first answered jobs, up to the limits of counting
        self._sample_minimum = 0.0  # minimum tokens estimated for them
        self._status: EngineStatus | None = None
        self._slot_use = SlotUse()
        self._live_prompt = 0

    @property
    def counters(self) -> Counters:
        """The engine's latest counters."""
        return self._status.counters if self._status is not None else Counters()

    @property
    def sample(self) -> list[int]:
        """The first answered jobs, up to a number that can be tokenized again in a short time."""
        return self._sample

    def seen(self, status: EngineStatus) -> None:
        """Update the engine's counters and state."""
        before = self.counters.prompt_tokens_computed
        now = status.counters.prompt_tokens_computed
        if now is not None and self._status is not None:
            self._live_prompt += now - before if before is not None and before <= now else now
        if self._status is not None:
            self._slot_use = self._slot_use.plus(status.counters, self.counters)
        self._status = status

    def answered(self, attempt: Attempt, answer: Answer, prompt: bytes) -> None:
        """Count the answer of a job."""
        self.consecutive_failures = 0
        self.throughput.answered(answer, attempt.tokens, attempt.since)
        self._minimum.add(prompt, answer.usage)
        self._finish_reasons[answer.finish_reason] += 1
        self._checks += checked(attempt.call, answer)
        if len(self._sample) < MAX_COUNTED_JOBS and self.throughput.tokens.prompt <= MAX_COUNTED_TOKENS:
            self._sample.append(attempt.id)
            self._sample_minimum = self._minimum.tokens

    def evidence(self, sent: Dispatch, attempt: Attempt, answer: Answer) -> Evidence:
        """Observations that explain a cache miss, without the prompts."""
        evicted = self.counters.evicted_tokens
        before = attempt.evicted_tokens
        chooses = self._kind in ("llama-server", "ik_llama") and sent.slot is None
        return Evidence(
            self._shape.reuse,
            slot=answer.slot,
            notes=answer.notes,
            cells_total=self.counters.cells_total,
            evicted_tokens=evicted - before if evicted is not None and before is not None else None,
            similarity=SLOT_SIMILARITY if chooses else None,
        )

    def minimum(self, exact: int | None) -> MinimumTokens | None:
        """Minimum prompt tokens of the run; None if there were no answers.

        `exact` is the exact count for the sample. If the sample does not cover all answers, the estimate is scaled by
        its error on the sample: it spreads the chat template's tokens evenly over the prompt, and without scaling it
        would be far off for short suffixes.
        """
        if not self.throughput.answers:
            return None
        if exact is None or not self._sample_minimum:
            return MinimumTokens(round(self._minimum.tokens), exact=False)
        if len(self._sample) == self.throughput.answers:
            return MinimumTokens(exact, exact=True)
        return MinimumTokens(round(self._minimum.tokens * exact / self._sample_minimum), exact=False)

    def snapshot(
        self,
        elapsed_s: float,
        counts: Counts,
        *,
        in_flight: Sequence[int],
        retrying: int,
        lengths: AnswerLengths,
        down: str | None,
        output: str | None,
    ) -> Snapshot:
        """The current progress; `in_flight` is the number of tokens received so far by each running job."""
        tokens = self.throughput.tokens
        width = self._shape.width
        status = self._status
        if down is None and status is not None and status.state != "ready":
            down = f"is {status.state}" + (f": {status.detail}" if status.detail else "")
        detail = status.detail if status is not None and down is None else None
        mean = self._mean(lengths)
        left = None if mean is None else self._left(mean, counts, in_flight)
        return Snapshot(
            elapsed_s,
            counts,
            tokens,
            max(self._live_prompt, tokens.computed),
            min(len(in_flight), width),
            width,
            retrying,
            None if left is None else self._eta_s(left),
            down,
            detail,
            self.failed,
            output,
            left,
            None if mean is None or left is None else _share(mean, left, counts),
            forecast=left is not None and not self.throughput.answers,
        )

    def report(
        self, end: RunEnd, seconds: float, counts: Counts, minimum: MinimumTokens | None, notes: tuple[str, ...]
    ) -> RunReport:
        """The report of the run, which ended with `end`."""
        throughput = self.throughput
        return RunReport(
            end,
            seconds,
            throughput.busy_s,
            counts,
            throughput.answers,
            throughput.tokens,
            throughput.rates(),
            throughput.busy_slots,
            self.misses,
            minimum,
            self.crashes,
            notes,
            throughput.long_prefill_tok_s,
            self._shape.width,
            dict(self._finish_reasons.most_common()),
            self._slot_use if self._slot_use.steps else None,
            self._checks,
        )

    def _mean(self, lengths: AnswerLengths) -> RemainingWork | None:
        """The mean cost of a job; None: unknown.

        The first jobs to finish are those whose prefix was cached, so the forecast of prompts counts as much as the
        jobs of all slots.
        """
        known = lengths.remaining(1)
        if self._expected is None or known is None:
            return known or (None if self._expected is None else self._expected.mean)
        answers = self.throughput.answers
        slots = self._shape.width
        prompt = (slots * self._expected.mean.prompt_tokens + answers * known.prompt_tokens) / (slots + answers)
        return RemainingWork(prompt, known.output_tokens)

    def _left(self, mean: RemainingWork, counts: Counts, in_flight: Sequence[int]) -> RemainingWork:
        """The work left in unfinished jobs that cost `mean` each."""
        decoding = [tokens for tokens in in_flight if tokens]  # the prompts of these jobs have been computed
        waiting = max(0, counts.pending + counts.running - len(decoding))
        prompt = waiting * mean.prompt_tokens
        if not self.throughput.answers:  # a long prefix is computed for the first jobs
            prompt = max(0.0, (waiting + len(decoding)) * mean.prompt_tokens - self._live_prompt)
        output = waiting * mean.output_tokens + sum(max(0.0, mean.output_tokens - tokens) for tokens in decoding)
        return RemainingWork(prompt, output)

    def _eta_s(self, left: RemainingWork) -> float | None:
        rates = self.throughput.rates()
        if not self.throughput.answers:
            return None if self._expected is None else eta_s(left, self._expected.rates, self._shape.width)
        # Without a prefill rate, the decode rate was measured over whole answers and includes their prompts.
        prompt = left.prompt_tokens if rates.prefill_tok_s is not None else 0.0
        return eta_s(RemainingWork(prompt, left.output_tokens), rates, self._shape.width)


def _share(mean: RemainingWork, left: RemainingWork, counts: Counts) -> float | None:
    """The share of the tokens of all jobs that is done."""
    total = counts.total * (mean.prompt_tokens + mean.output_tokens)
    return max(0.0, 1 - (left.prompt_tokens + left.output_tokens) / total) if total else None


OnSnapshot = Callable[[Snapshot], None]
