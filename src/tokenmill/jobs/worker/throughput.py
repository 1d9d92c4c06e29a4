"""How fast a run goes: what has been computed and written, and the rates that explain the time it took.

An engine that works on many jobs at once mixes prompts and answers in one step, so neither rate can be read off alone.
The engine's own times for each job say how much dearer a written token is than a prompt's; both are then scaled so that
together they give the time that really passed. Pure: times come in as numbers.
"""

from dataclasses import dataclass

from tokenmill.engine.engine import Answer
from tokenmill.jobs.scheduler.estimates import MeasuredRates


@dataclass(frozen=True, slots=True)
class RunTokens:
    """Of the answers of a run."""

    prompt: int = 0
    cached: int = 0  # of the prompts', reused
    generated: int = 0  # that have come so far, of answers under way too

    @property
    def computed(self) -> int:
        """Of the prompts', computed."""
        return self.prompt - self.cached


RateMark = tuple[float, float]
"""A moment of a run: busy seconds, and the same summed over jobs."""
LEAST_TOKENS = 64  # that a rate is told from


class Throughput:
    """Sums over a run. All methods but `rates` and `by_lanes` mutate, properties do not."""

    def __init__(self) -> None:
        self.answers = 0
        self.busy_s = 0.0  # with at least one job in the engine
        self._lane_s = 0.0  # summed over jobs
        self._prompt = self._cached = self._generated = 0
        self._written = 0  # tokens of finished answers
        self._timed_prompt = self._timed_written = 0  # of those with the engine's own times
        self._prefill_s = self._decode_s = 0.0
        self._head_tokens, self._head_s = 0, 0.0  # of prompts of which much was computed
        self._at: dict[int, tuple[int, float]] = {}  # by jobs beside it and itself: tokens written, and seconds

    @property
    def mark(self) -> RateMark:
        """Now, for the answer of a job that begins."""
        return self.busy_s, self._lane_s

    def passed(self, seconds: float, at_work: int) -> None:
        """Time went by with so many jobs in the engine."""
        if at_work:
            self.busy_s += seconds
            self._lane_s += seconds * at_work

    def received(self, tokens: int) -> None:
        """Tokens of an answer came."""
        self._generated += tokens

    def answered(self, answer: Answer, received: int, since: RateMark = (0.0, 0.0)) -> None:
        """An answer is complete that was begun at a mark, and so many of its tokens had come in pieces."""
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
        """Counted so far."""
        return RunTokens(self._prompt, self._cached, self._generated)

    @property
    def lanes(self) -> float:
        """Jobs in the engine, on average while there were any."""
        return self._lane_s / self.busy_s if self.busy_s else 0.0

    @property
    def head_tok_s(self) -> float | None:
        """How fast long prompts are computed, by the engine's own times; None: none was.

        A few tokens take as long as a hundred: rates of what is left of prompts when their heads are reused say nothing
        of what the heads would have taken.
        """
        return self._head_tokens / self._head_s if self._head_s > 0 else None

    def by_lanes(self) -> MeasuredRates:
        """Speeds by how many jobs were at work, as far as answers tell: by the engine's own times, nothing scaled."""
        decode = {
            lanes: lanes * written / seconds
            for lanes, (written, seconds) in self._at.items()
            if written >= LEAST_TOKENS and seconds > 0
        }
        enough = self._timed_prompt >= LEAST_TOKENS and self._prefill_s > 0
        prefill = self.head_tok_s or (self._timed_prompt / self._prefill_s if enough else None)
        return MeasuredRates(prefill, tuple(sorted(decode.items())))

    def rates(self) -> MeasuredRates:
        """As measured, one rate for all widths; empty before there is anything to measure by."""
        if not self.answers or self.busy_s <= 0 or not self._written:
            return MeasuredRates()
        computed = self._prompt - self._cached
        if not self._timed_prompt or not self._timed_written or self._prefill_s <= 0 or self._decode_s <= 0:
            return MeasuredRates(
                None, ((1, self._generated / self.busy_s),)
            )  # prompts are in this, and in no rate of their own
        prompt_s = self._prefill_s / self._timed_prompt
        written_s = self._decode_s / self._timed_written / max(1.0, self.lanes)
        scale = self.busy_s / (computed * prompt_s + self._generated * written_s)
        return MeasuredRates(1 / (scale * prompt_s), ((1, 1 / (scale * written_s)),))
