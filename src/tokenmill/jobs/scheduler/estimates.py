"""How long answers will be and how long the rest will take: running means of what has finished, and arithmetic.

A job's max_tokens is a ceiling and, before anything has finished, the only thing known. Jobs of one kind (the same
first 512 bytes, or 64 where they have no more, and the same ceiling) are expected to answer alike; the mean of all
stands in while few of them have.
"""

from collections import OrderedDict
from dataclasses import dataclass

from tokenmill.engine.engine import Usage
from tokenmill.jobs.identity import FINE_CHUNKS, KEY_BYTES, head_of
from tokenmill.jobs.models import Waiting
from tokenmill.jobs.scheduler.prefix_groups import Pending

ASSUMED_TOKENS_PER_BYTE = 0.25  # until the first answer tells: English text in most vocabularies
_TRUST = 4  # finished jobs of a kind that weigh as much as the mean of all
_MOST_KINDS = 1024  # remembered; the one that was used longest ago goes

LengthKey = tuple[bytes, int | None]


@dataclass(frozen=True, slots=True)
class MeasuredRates:
    """Measured speeds of an engine, all lanes together."""

    prefill_tok_s: float | None = None
    decode_tok_s: tuple[tuple[int, float], ...] = ()  # (lanes at work, tokens per second), by lanes

    def decode_at(self, lanes: int) -> float | None:
        """Between measured widths on a straight line, beyond the widest no faster; None: narrower than any measured."""
        for (narrow, slow), (wide, fast) in zip(self.decode_tok_s, self.decode_tok_s[1:], strict=False):
            if narrow <= lanes <= wide:
                return slow + (fast - slow) * (lanes - narrow) / (wide - narrow)
        if self.decode_tok_s and lanes >= self.decode_tok_s[-1][0]:
            return self.decode_tok_s[-1][1]
        return None


@dataclass(slots=True)
class _Mean:
    jobs: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Left:
    """Work that is still to be done."""

    prompt_tokens: float  # to be computed: what is reused is not in it
    output_tokens: float


class AnswerLengths:
    """What finished jobs tell of those to come."""

    def __init__(self) -> None:
        self._all = _Mean()
        self._kinds: OrderedDict[LengthKey, _Mean] = OrderedDict()
        self._prompt_bytes = self._prompt_tokens = self._computed_tokens = 0

    @property
    def mean_tokens(self) -> float | None:
        """Of an answer; None: none has come. Mutates nothing."""
        return self._all.tokens / self._all.jobs if self._all.jobs else None

    @property
    def tokens_per_byte(self) -> float:
        """Of prompts, their template's own tokens included. Mutates nothing."""
        return self._prompt_tokens / self._prompt_bytes if self._prompt_bytes else ASSUMED_TOKENS_PER_BYTE

    def finished(self, record: Pending, usage: Usage) -> None:
        """An answer has come; mutates."""
        mean = self._kinds.setdefault(_kind(record.head, record.max_tokens), _Mean())
        for each in (self._all, mean):
            each.jobs += 1
            each.tokens += usage.completion_tokens
        self._kinds.move_to_end(_kind(record.head, record.max_tokens))
        if len(self._kinds) > _MOST_KINDS:
            self._kinds.popitem(last=False)
        self._prompt_bytes += record.prompt_bytes
        self._prompt_tokens += usage.prompt_tokens
        self._computed_tokens += usage.prompt_tokens - (usage.cached_tokens or 0)

    def expect(self, head: bytes, max_tokens: int | None) -> float | None:
        """Output tokens of a job; None: nothing is known. Mutates nothing."""
        overall = self.mean_tokens
        if overall is None:
            return max_tokens
        mean = self._kinds.get(_kind(head, max_tokens), _Mean())
        expected = (_TRUST * overall + mean.tokens) / (_TRUST + mean.jobs)
        return expected if max_tokens is None else min(expected, max_tokens)

    def pending(self, waiting: Waiting, *, deadline_s: float | None = None) -> Pending:
        """The record of a job as the store has it; a deadline of its batch counts too. Mutates nothing."""
        deadlines = [time_s for time_s in (waiting.deadline_s, deadline_s) if time_s is not None]
        head = head_of(waiting.place)
        return Pending(
            waiting.id,
            head,
            waiting.prompt_bytes,
            self.expect(head, waiting.max_tokens),
            -waiting.rank,
            min(deadlines, default=None),
            waiting.max_tokens,
        )

    def left(self, jobs: int) -> Left | None:
        """What so many jobs are expected to cost if they are like the finished ones; None: none has finished."""
        if not self._all.jobs:
            return None
        return Left(jobs * self._computed_tokens / self._all.jobs, jobs * self._all.tokens / self._all.jobs)


def eta_s(left: Left, rates: MeasuredRates, lanes: int) -> float | None:
    """Seconds until the work is done at a width; None: a rate that it takes is not known."""
    prefill_s = decode_s = 0.0
    if left.prompt_tokens > 0:
        if not rates.prefill_tok_s:
            return None
        prefill_s = left.prompt_tokens / rates.prefill_tok_s
    if left.output_tokens > 0:
        rate = rates.decode_at(lanes)
        if not rate:
            return None
        decode_s = left.output_tokens / rate
    return prefill_s + decode_s


def _kind(head: bytes, max_tokens: int | None) -> LengthKey:
    """Prompts of a single chunk have a first chunk that nobody else has: they are told apart by their ceiling alone."""
    known = FINE_CHUNKS * KEY_BYTES
    known = known if len(head) > known else KEY_BYTES
    return head[:known] if len(head) > known else b"", max_tokens
