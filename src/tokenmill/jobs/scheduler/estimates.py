"""Expected answer lengths and remaining time: running means of finished jobs, and arithmetic.

A job's max_tokens is an upper bound and, before anything has finished, all that is known. Jobs of one kind (the same
first 512 bytes, or 64 if they share no more, and the same max_tokens) are expected to have answers of similar length;
while few of them have finished, the mean of all jobs is used.
"""

from collections import OrderedDict
from dataclasses import dataclass

from tokenmill.engine.engine import Usage
from tokenmill.jobs.ingest.identity import FINE_CHUNKS, KEY_BYTES, head_of
from tokenmill.jobs.models import Waiting
from tokenmill.jobs.scheduler.prefix_groups import Pending

ASSUMED_TOKENS_PER_BYTE = 0.25  # until the first answer is known: English text in most vocabularies
_TRUST = 4  # number of finished jobs of a kind that weigh as much as the overall mean
_MOST_KINDS = 1024  # kinds kept; the least recently used is dropped

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
class Left:
    """Remaining work."""

    prompt_tokens: float  # to be computed, without what is reused
    output_tokens: float


class AnswerLengths:
    """Answer lengths and token counts of finished jobs, used to predict pending ones."""

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
        """Tokens per prompt byte, including those of the chat template."""
        return self._prompt_tokens / self._prompt_bytes if self._prompt_bytes else ASSUMED_TOKENS_PER_BYTE

    def finished(self, record: Pending, usage: Usage) -> None:
        """Count a finished job."""
        mean = self._kinds.setdefault(_kind(record.prefix_key, record.max_tokens), _Mean())
        for each in (self._all, mean):
            each.jobs += 1
            each.tokens += usage.completion_tokens
        self._kinds.move_to_end(_kind(record.prefix_key, record.max_tokens))
        if len(self._kinds) > _MOST_KINDS:
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
        expected = (_TRUST * overall + mean.tokens) / (_TRUST + mean.jobs)
        return expected if max_tokens is None else min(expected, max_tokens)

    def pending(self, waiting: Waiting, *, deadline_s: float | None = None) -> Pending:
        """The scheduler's record of a stored job; the earlier of its own and its batch's deadline counts."""
        deadlines = [time_s for time_s in (waiting.deadline_s, deadline_s) if time_s is not None]
        key = head_of(waiting.place)
        return Pending(
            waiting.id,
            key,
            waiting.prompt_bytes,
            self.expect(key, waiting.max_tokens),
            -waiting.rank,
            min(deadlines, default=None),
            waiting.max_tokens,
        )

    def left(self, jobs: int) -> Left | None:
        """Expected cost of a number of jobs like the finished ones; None before the first has finished."""
        if not self._all.jobs:
            return None
        return Left(jobs * self._computed_tokens / self._all.jobs, jobs * self._all.tokens / self._all.jobs)


def eta_s(left: Left, rates: MeasuredRates, slots: int) -> float | None:
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
    """Prompts of a single chunk have a unique first chunk, so only max_tokens tells their kind."""
    known = FINE_CHUNKS * KEY_BYTES
    known = known if len(key) > known else KEY_BYTES
    return key[:known] if len(key) > known else b"", max_tokens
