"""What a run has done so far: tokens, pace, reuse against what was expected, failures; for telling and for the report.

Knows no store and sends nothing; times come in as numbers.
"""

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
    """Of one run."""

    def __init__(self, shape: EngineShape, kind: EngineKind) -> None:
        self.pace = Throughput()
        self.misses = Misses()
        self.failed: Failed | None = None  # the last one
        self.deaths = 0
        self.in_a_row = 0  # failures of the engine since the last answer
        self._shape = shape
        self._kind = kind
        self._reckoned = Reckoned()
        self._sample: list[int] = []  # the first that were answered; no more than can be counted
        self._sample_least = 0.0  # tokens reckoned for them
        self._status: EngineStatus | None = None
        self._live_prompt = 0

    @property
    def counters(self) -> Counters:
        """The engine's, as it said last."""
        return self._status.counters if self._status is not None else Counters()

    @property
    def countable(self) -> list[int]:
        """Jobs that were answered first: all, or as many as prompts can be made tokens of again in a short time."""
        return self._sample

    def seen(self, status: EngineStatus) -> None:
        """How the engine is."""
        before = self.counters.prompt_tokens_computed
        now = status.counters.prompt_tokens_computed
        if now is not None and self._status is not None:
            self._live_prompt += now - before if before is not None and before <= now else now
        self._status = status

    def answered(self, attempt: Attempt, answer: Answer, prompt: bytes) -> None:
        """A job has its answer."""
        self.in_a_row = 0
        self.pace.answered(answer, attempt.tokens, attempt.since)
        self._reckoned.add(prompt, answer.usage)
        if len(self._sample) < MOST_JOBS and self.pace.tokens.prompt <= MOST_TOKENS:
            self._sample.append(attempt.id)
            self._sample_least = self._reckoned.least

    def evidence(self, sent: Dispatch, attempt: Attempt, answer: Answer) -> Evidence:
        """What is known around an answer, without the prompts."""
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
        """What the prompts had to cost, from what was counted for the sample: that, where the sample is all.

        Else as reckoned, which is far off where tails are short (a template's own tokens are shared out evenly), and
        therefore corrected by how far it is off for the sample.
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
        """The run as it is now; `in_flight`: tokens that have come of each job in the engine."""
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
        """The run when it is over."""
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
        # A rate of answers alone has the prompts in it.
        prompt = left.prompt_tokens if rates.prefill_tok_s is not None else 0.0
        return eta_s(Left(prompt, output), rates, self._shape.width)


OnSnapshot = Callable[[Snapshot], None]
