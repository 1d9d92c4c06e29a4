"""Statistics of a run for progress and the final report: tokens, throughput, cache misses, failures. Pure."""

from collections.abc import Callable, Sequence

from tokenmill.engine.engine import Answer, Counters, EngineKind, EngineStatus
from tokenmill.jobs.models import Counts
from tokenmill.jobs.scheduler.decisions import Dispatch
from tokenmill.jobs.scheduler.estimates import AnswerLengths, Left, eta_s
from tokenmill.jobs.scheduler.shape import EngineShape
from tokenmill.jobs.worker.attempts import Attempt
from tokenmill.jobs.worker.progress import Failed, Least, RunEnd, RunReport, Snapshot
from tokenmill.jobs.worker.reuse import MOST_JOBS, MOST_TOKENS, SLOT_SIMILARITY, Evidence, Misses, Reckoned
from tokenmill.jobs.worker.throughput import Throughput


class RunStats:
    """Statistics of one run."""

    def __init__(self, shape: EngineShape, kind: EngineKind) -> None:
        self.pace = Throughput()
        self.misses = Misses()
        self.failed: Failed | None = None  # the last one
        self.deaths = 0
        self.in_a_row = 0  # engine failures since the last answer
        self._shape = shape
        self._kind = kind
        self._reckoned = Reckoned()
        self._sample: list[int] = []  # the first answered jobs, up to the limits of counting
        self._sample_least = 0.0  # minimum tokens estimated for them
        self._status: EngineStatus | None = None
        self._live_prompt = 0

    @property
    def counters(self) -> Counters:
        """The engine's latest counters."""
        return self._status.counters if self._status is not None else Counters()

    @property
    def countable(self) -> list[int]:
        """The first answered jobs: all, or as many as can be tokenized again in a short time."""
        return self._sample

    def seen(self, status: EngineStatus) -> None:
        """Record an engine status."""
        before = self.counters.prompt_tokens_computed
        now = status.counters.prompt_tokens_computed
        if now is not None and self._status is not None:
            self._live_prompt += now - before if before is not None and before <= now else now
        self._status = status

    def answered(self, attempt: Attempt, answer: Answer, prompt: bytes) -> None:
        """Record the answer of a job."""
        self.in_a_row = 0
        self.pace.answered(answer, attempt.tokens, attempt.since)
        self._reckoned.add(prompt, answer.usage)
        if len(self._sample) < MOST_JOBS and self.pace.tokens.prompt <= MOST_TOKENS:
            self._sample.append(attempt.id)
            self._sample_least = self._reckoned.least

    def evidence(self, sent: Dispatch, attempt: Attempt, answer: Answer) -> Evidence:
        """The evidence for explaining a cache miss, without the prompts."""
        evicted = self.counters.evicted_tokens
        before = attempt.evicted_tokens
        chooses = self._kind in ("llama-server", "ik_llama") and sent.lane is None
        return Evidence(
            self._shape.reuse,
            lane=answer.lane,
            notes=answer.notes,
            cells_total=self.counters.cells_total,
            evicted_tokens=evicted - before if evicted is not None and before is not None else None,
            similarity=SLOT_SIMILARITY if chooses else None,
        )

    def least(self, exact: int | None) -> Least | None:
        """Minimum prompt tokens of the run; exact if the exact count covers all answers.

        Otherwise the estimate is scaled by its error on the sample. Without that it would be far off for short
        suffixes, because it spreads the chat template's tokens evenly over the prompt.
        """
        if not self.pace.answers:
            return None
        if exact is None or not self._sample_least:
            return Least(round(self._reckoned.least), exact=False)
        if len(self._sample) == self.pace.answers:
            return Least(exact, exact=True)
        return Least(round(self._reckoned.least * exact / self._sample_least), exact=False)

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
        """Current progress; `in_flight` has the tokens received so far of each running job."""
        tokens = self.pace.tokens
        width = self._shape.width
        status = self._status
        if down is None and status is not None and status.state != "ready":
            down = f"is {status.state}" + (f": {status.detail}" if status.detail else "")
        says = status.detail if status is not None and down is None else None
        return Snapshot(
            elapsed_s,
            counts,
            tokens,
            max(self._live_prompt, tokens.computed),
            min(len(in_flight), width),
            width,
            retrying,
            self._eta_s(lengths, counts, in_flight),
            down,
            says,
            self.failed,
            output,
        )

    def report(
        self, end: RunEnd, seconds: float, counts: Counts, least: Least | None, notes: tuple[str, ...]
    ) -> RunReport:
        """The final report."""
        pace = self.pace
        return RunReport(
            end,
            seconds,
            pace.busy_s,
            counts,
            pace.answers,
            pace.tokens,
            pace.rates(),
            pace.lanes,
            self.misses,
            least,
            self.deaths,
            notes,
            pace.head_tok_s,
        )

    def _eta_s(self, lengths: AnswerLengths, counts: Counts, in_flight: Sequence[int]) -> float | None:
        begun = [tokens for tokens in in_flight if tokens]  # their prompts are computed
        left = lengths.left(max(0, counts.pending + counts.running - len(begun)))
        mean = lengths.mean_tokens
        if left is None or mean is None:
            return None
        output = left.output_tokens + sum(max(0.0, mean - tokens) for tokens in begun)
        rates = self.pace.rates()
        # A rate measured from answers alone includes the prompts.
        prompt = left.prompt_tokens if rates.prefill_tok_s is not None else 0.0
        return eta_s(Left(prompt, output), rates, self._shape.width)


OnSnapshot = Callable[[Snapshot], None]
