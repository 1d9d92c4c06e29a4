"""Expected answer lengths and remaining time, estimated from running means over finished jobs.

Before the first job has finished, the estimate is max_tokens. Jobs of one kind (the same first 512 bytes, or 64 if they
share no more, and the same max_tokens) are expected to have answers of similar length; until enough of them have
finished, the estimate leans on the mean of all jobs.
"""

from collections import OrderedDict
from dataclasses import dataclass

from tokenmill.engine.engine import Usage
from tokenmill.jobs.ingest.identity import FINE_CHUNKS, KEY_BYTES, stored_prefix_key
from tokenmill.jobs.models import QueuedJob
from tokenmill.jobs.scheduler.prefix_groups import Pending

ASSUMED_TOKENS_PER_BYTE = 0.25  # until the first answer; typical of English text
_PRIOR_JOBS = 4  # weight of the overall mean, in finished jobs of a kind
_MAX_KINDS = 1024  # kinds kept; the least recently used is dropped

LengthKey = tuple[bytes, int | None]


@dataclass(frozen=True, slots=True)
class MeasuredRates:
    """Measured speeds of an engine, all slots together."""

    prefill_tok_s: float | None = None
    decode_tok_s: tuple[tuple[int, float], ...] = ()  # (busy slots, tokens per second), ascending

    def decode_at(self, slots: int) -> float | None:
        """Decode rate, interpolated between measurements and constant above the largest; None below the smallest."""
        for (narrow, slow), (wide, fast) in zip(self.decode_tok_s, self.decode_tok_s[1:], strict=False):
            if narrow <= slots <= wide:
                return slow + (fast - slow) * (slots - narrow) / (wide - narrow)
        if self.decode_tok_s and slots >= self.decode_tok_s[-1][0]:
            return self.decode_tok_s[-1][1]
        return None


@dataclass(slots=True)
class _Mean:
    jobs: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class RemainingWork:
    """Remaining work in tokens."""

    prompt_tokens: float  # to be computed, excluding reused ones
    output_tokens: float


@dataclass(frozen=True, slots=True)
class ExpectedJobs:
    """What a job costs according to a forecast, until the first one has finished."""

    mean: RemainingWork  # of one job
    rates: MeasuredRates


class AnswerLengths:
    """Answer lengths and token counts of finished jobs, used to predict those of pending jobs."""

    def __init__(self) -> None:
        self._all = _Mean()
        self._kinds: OrderedDict[LengthKey, _Mean] = OrderedDict()
        self._prompt_bytes = self._prompt_tokens = self._computed_tokens = 0

    @property
    def mean_tokens(self) -> float | None:
        """Mean tokens of an answer; None before the first."""
        return self._all.tokens / self._all.jobs if self._all.jobs else None

    @property
    def tokens_per_byte(self) -> float:
        """Tokens per prompt byte, including the tokens of the chat template."""
        return self._prompt_tokens / self._prompt_bytes if self._prompt_bytes else ASSUMED_TOKENS_PER_BYTE

    def finished(self, record: Pending, usage: Usage) -> None:
        """Count a finished job."""
        mean = self._kinds.setdefault(_kind(record.prefix_key, record.max_tokens), _Mean())
        for each in (self._all, mean):
            each.jobs += 1
            each.tokens += usage.completion_tokens
        self._kinds.move_to_end(_kind(record.prefix_key, record.max_tokens))
        if len(self._kinds) > _MAX_KINDS:
            self._kinds.popitem(last=False)
        self._prompt_bytes += record.prompt_bytes
        self._prompt_tokens += usage.prompt_tokens
        self._computed_tokens += usage.prompt_tokens - (usage.cached_tokens or 0)

    def expect(self, key: bytes, max_tokens: int | None) -> float | None:
        """Expected output tokens of a job; None if unknown."""
        overall = self.mean_tokens
        if overall is None:
            return max_tokens
        mean = self._kinds.get(_kind(key, max_tokens), _Mean())
        expected = (_PRIOR_JOBS * overall + mean.tokens) / (_PRIOR_JOBS + mean.jobs)
        return expected if max_tokens is None else min(expected, max_tokens)

    def pending(self, waiting: QueuedJob, *, deadline_s: float | None = None) -> Pending:
        """The scheduler's record of a stored job; the earlier of its own and its batch's deadline counts."""
        deadlines = [time_s for time_s in (waiting.deadline_s, deadline_s) if time_s is not None]
        key = stored_prefix_key(waiting.place)
        return Pending(
            waiting.id,
            key,
            waiting.prompt_bytes,
            self.expect(key, waiting.max_tokens),
            -waiting.rank,
            min(deadlines, default=None),
            waiting.max_tokens,
        )

    def remaining(self, jobs: int) -> RemainingWork | None:
        """Expected cost of this many jobs similar to the finished ones; None before the first has finished."""
        if not self._all.jobs:
            return None
        return RemainingWork(jobs * self._computed_tokens / self._all.jobs, jobs * self._all.tokens / self._all.jobs)


def eta_s(left: RemainingWork, rates: MeasuredRates, slots: int) -> float | None:
    """Seconds until the work is done with this many slots; None if a required rate is unknown."""
    prefill_s = decode_s = 0.0
    if left.prompt_tokens > 0:
        if not rates.prefill_tok_s:
            return None
        prefill_s = left.prompt_tokens / rates.prefill_tok_s
    if left.output_tokens > 0:
        rate = rates.decode_at(slots)
        if not rate:
            return None
        decode_s = left.output_tokens / rate
    return prefill_s + decode_s


def _kind(key: bytes, max_tokens: int | None) -> LengthKey:
    """Group a job by the start of its prefix key and max_tokens.

    The key of a single-chunk prompt identifies the whole prompt, so such prompts are grouped by max_tokens alone.
    """
    size = FINE_CHUNKS * KEY_BYTES
    size = size if len(key) > size else KEY_BYTES
    return key[:size] if len(key) > size else b"", max_tokens
