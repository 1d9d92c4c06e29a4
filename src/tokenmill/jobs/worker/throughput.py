"""Throughput of a run: tokens computed and decoded, and rates that explain the elapsed time.

An engine that runs several jobs mixes prefill and decode in one step, so neither rate can be observed directly. The
engine's own timings give the cost of a decoded token relative to a prompt token; both are then scaled so that together
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
"""A moment of a run: busy seconds, and the same summed over jobs."""
LEAST_TOKENS = 64  # minimum for computing a rate


class Throughput:
    """Token and time counters of a run."""

    def __init__(self) -> None:
        self.answers = 0
        self.busy_s = 0.0  # with at least one job in flight
        self._lane_s = 0.0  # summed over jobs
        self._prompt = self._cached = self._generated = 0
        self._written = 0  # tokens of finished answers
        self._timed_prompt = self._timed_written = 0  # those with the engine's own timings
        self._prefill_s = self._decode_s = 0.0
        self._head_tokens, self._head_s = 0, 0.0  # prompts with many computed tokens
        self._at: dict[int, tuple[int, float]] = {}  # by concurrent jobs: tokens decoded, and seconds

    @property
    def mark(self) -> RateMark:
        """The current moment, for an attempt that begins."""
        return self.busy_s, self._lane_s

    def passed(self, seconds: float, at_work: int) -> None:
        """Account for elapsed time with this many jobs in flight."""
        if at_work:
            self.busy_s += seconds
            self._lane_s += seconds * at_work

    def received(self, tokens: int) -> None:
        """Count received tokens of an answer."""
        self._generated += tokens

    def answered(self, answer: Answer, received: int, since: RateMark = (0.0, 0.0)) -> None:
        """Count a complete answer that began at a mark and of which some tokens were counted as received."""
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
            if computed >= LEAST_TOKENS:
                self._head_tokens += computed
                self._head_s += timings.prefill_s
            if self.busy_s > since[0]:
                lanes = max(1, round((self._lane_s - since[1]) / (self.busy_s - since[0])))
                written, seconds = self._at.get(lanes, (0, 0.0))
                self._at[lanes] = written + usage.completion_tokens, seconds + timings.decode_s

    @property
    def tokens(self) -> RunTokens:
        """Token counts so far."""
        return RunTokens(self._prompt, self._cached, self._generated)

    @property
    def lanes(self) -> float:
        """Average number of jobs in flight while there were any."""
        return self._lane_s / self.busy_s if self.busy_s else 0.0

    @property
    def head_tok_s(self) -> float | None:
        """Prefill rate of long prompts by the engine's own timings; None if there were none.

        A few tokens take as long as a hundred, so the rates of short suffixes after a reused prefix do not predict the
        prefill of the prefix.
        """
        return self._head_tokens / self._head_s if self._head_s > 0 else None

    def by_lanes(self) -> MeasuredRates:
        """Unscaled rates by number of concurrent jobs, from the engine's own timings."""
        decode = {
            lanes: lanes * written / seconds
            for lanes, (written, seconds) in self._at.items()
            if written >= LEAST_TOKENS and seconds > 0
        }
        enough = self._timed_prompt >= LEAST_TOKENS and self._prefill_s > 0
        prefill = self.head_tok_s or (self._timed_prompt / self._prefill_s if enough else None)
        return MeasuredRates(prefill, tuple(sorted(decode.items())))

    def rates(self) -> MeasuredRates:
        """Measured rates, one for all numbers of slots; empty before the first answer."""
        if not self.answers or self.busy_s <= 0 or not self._written:
            return MeasuredRates()
        computed = self._prompt - self._cached
        if not self._timed_prompt or not self._timed_written or self._prefill_s <= 0 or self._decode_s <= 0:
            return MeasuredRates(
                None, ((1, self._generated / self.busy_s),)
            )  # prompts are included here, without a rate of their own
        prompt_s = self._prefill_s / self._timed_prompt
        written_s = self._decode_s / self._timed_written / max(1.0, self.lanes)
        scale = self.busy_s / (computed * prompt_s + self._generated * written_s)
        return MeasuredRates(1 / (scale * prompt_s), ((1, 1 / (scale * written_s)),))
