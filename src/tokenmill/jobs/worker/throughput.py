"""Throughput of a run: prompt and output tokens, and prefill and decode rates.

An engine that runs several jobs mixes prefill and decode in one step, so neither rate can be observed directly. The
engine's own timings give the cost of an output token relative to a prompt token; both costs are then scaled so that
they add up to the elapsed time. Pure: times are passed in as numbers.
"""

from dataclasses import dataclass

from tokenmill.engine.engine import Answer
from tokenmill.jobs.scheduler.estimates import MeasuredRates


@dataclass(frozen=True, slots=True)
class RunTokens:
    """Token counts of a run."""

    prompt: int = 0
    cached: int = 0  # of the prompt tokens, reused
    generated: int = 0  # received so far, including unfinished answers

    @property
    def computed(self) -> int:
        """Prompt tokens computed."""
        return self.prompt - self.cached


RateMark = tuple[float, float]
"""A point in time of a run: busy seconds, and busy seconds summed over jobs."""
MIN_TOKENS = 64  # minimum number of tokens for computing a rate


class Throughput:
    """Token and time counters of a run."""

    def __init__(self) -> None:
        self.answers = 0
        self.busy_s = 0.0  # seconds with at least one job in flight
        self._job_s = 0.0  # the same, summed over jobs
        self._prompt = self._cached = self._generated = 0
        self._written = 0  # tokens of finished answers
        self._timed_prompt = self._timed_written = 0  # tokens of answers that have the engine's timings
        self._prefill_s = self._decode_s = 0.0
        self._long_tokens, self._long_s = 0, 0.0  # prompts with many computed tokens
        self._at: dict[int, tuple[int, float]] = {}  # by number of concurrent jobs: tokens decoded, and seconds

    @property
    def mark(self) -> RateMark:
        """The current point in time, to be passed to `answered` when an attempt that starts now ends."""
        return self.busy_s, self._job_s

    def passed(self, seconds: float, in_flight: int) -> None:
        """Account for elapsed time with this many jobs in flight."""
        if in_flight:
            self.busy_s += seconds
            self._job_s += seconds * in_flight

    def received(self, tokens: int) -> None:
        """Count received tokens of an answer."""
        self._generated += tokens

    def answered(self, answer: Answer, received: int, since: RateMark = (0.0, 0.0)) -> None:
        """Count an answer that began at `since`, `received` of whose tokens have been counted already."""
        usage = answer.usage
        timings = answer.timings
        computed = usage.prompt_tokens - (usage.cached_tokens or 0)
        self.answers += 1
        self._prompt += usage.prompt_tokens
        self._cached += usage.cached_tokens or 0
        self._written += usage.completion_tokens
        self._generated += usage.completion_tokens - received
        if timings.prefill_s is not None and timings.decode_s is not None:
            self._timed_prompt += computed
            self._timed_written += usage.completion_tokens
            self._prefill_s += timings.prefill_s
            self._decode_s += timings.decode_s
            if computed >= MIN_TOKENS:
                self._long_tokens += computed
                self._long_s += timings.prefill_s
            if self.busy_s > since[0]:
                slots = max(1, round((self._job_s - since[1]) / (self.busy_s - since[0])))
                written, seconds = self._at.get(slots, (0, 0.0))
                self._at[slots] = written + usage.completion_tokens, seconds + timings.decode_s

    @property
    def tokens(self) -> RunTokens:
        """Token counts so far."""
        return RunTokens(self._prompt, self._cached, self._generated)

    @property
    def busy_slots(self) -> float:
        """Average number of jobs in flight while there were any."""
        return self._job_s / self.busy_s if self.busy_s else 0.0

    @property
    def long_prefill_tok_s(self) -> float | None:
        """Prefill rate of long prompts by the engine's timings; None if there were none.

        Prefill of a few tokens takes as long as of a hundred, so the rate of short suffixes after a cached prefix does
        not predict the rate of long prompts.
        """
        return self._long_tokens / self._long_s if self._long_s > 0 else None

    def by_concurrency(self) -> MeasuredRates:
        """Unscaled rates by number of concurrent jobs, by the engine's timings."""
        decode = {
            slots: slots * written / seconds
            for slots, (written, seconds) in self._at.items()
            if written >= MIN_TOKENS and seconds > 0
        }
        enough = self._timed_prompt >= MIN_TOKENS and self._prefill_s > 0
        prefill = self.long_prefill_tok_s or (self._timed_prompt / self._prefill_s if enough else None)
        return MeasuredRates(prefill, tuple(sorted(decode.items())))

    def rates(self) -> MeasuredRates:
        """Rates scaled to the elapsed time, regardless of the number of slots; empty before the first answer."""
        if not self.answers or self.busy_s <= 0 or not self._written:
            return MeasuredRates()
        computed = self._prompt - self._cached
        if not self._timed_prompt or not self._timed_written or self._prefill_s <= 0 or self._decode_s <= 0:
            # The time includes the prompts, whose rate is unknown.
            return MeasuredRates(None, ((1, self._generated / self.busy_s),))
        prompt_s = self._prefill_s / self._timed_prompt
        written_s = self._decode_s / self._timed_written / max(1.0, self.busy_slots)
        scale = self.busy_s / (computed * prompt_s + self._generated * written_s)
        return MeasuredRates(1 / (scale * prompt_s), ((1, 1 / (scale * written_s)),))
