"""Tokens of prompts: counted with a tokeniser where a limit decides and on a sample of the rest, or estimated.

Without a tokeniser four bytes are a token, which fits English prose and is wrong by a third for other text.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tokenmill.jobs.lint.report import BYTES_PER_TOKEN
from tokenmill.units import KIB

TokenCount = Callable[[str], int]
SAMPLE_BYTES = 256 * KIB
MOST_COUNTED = 1000  # prompts near a limit that are counted one by one; later ones are judged by these
MOST_LONG_HEADS = 4096
LONG_HEAD_BYTES = 32 * KIB  # shorter ones have no 16 K tokens
_HEAD_SAMPLE, _TAIL_SAMPLE = 8192, 4096  # characters of one


@dataclass(frozen=True, slots=True)
class TooMany:
    """Jobs that go beyond a limit, and the farthest of them in words."""

    jobs: int
    words: str


@dataclass(slots=True)
class _LongHead:
    line: int
    bytes: int
    text: str
    jobs: int = 0


class Tokens:
    """Token counts of the prompts so far."""

    def __init__(self, count: TokenCount | None, context: int | None) -> None:
        self._count = count
        self._context = context
        self._sample: list[str] = []
        self._sampled = 0
        self._last_head = ""
        self._ratio: float | None = None
        self._measured_at = 0
        self._counted_bytes = self._counted_tokens = self._counted = 0
        self._head_tokens: dict[int, int] = {}
        self._over, self._farthest = 0, (0, 0, 0)  # tokens, to write, line
        self._long: dict[int, _LongHead] = {}

    def add(self, number: int, head: str, tail: str, key: int, sizes: tuple[int, int], to_write: int | None) -> None:
        """A prompt of two texts and their bytes; `key` stands for the prefix."""
        if self._sampled < SAMPLE_BYTES:
            self._take(head, tail)
        if sizes[0] >= LONG_HEAD_BYTES:
            self._long_head(number, head, key, sizes[0])
        # No vocabulary makes more tokens than bytes.
        if self._context is not None and sum(sizes) + (to_write or 0) > self._context:
            tokens = self._exact(head, tail, key, sizes) if self._count else round(sum(sizes) / BYTES_PER_TOKEN)
            self._check(number, tokens, to_write)

    def numbers(self, number: int, tokens: int, to_write: int | None) -> None:
        """A prompt that was given as tokens."""
        self._check(number, tokens, to_write)

    def _take(self, head: str, tail: str) -> None:
        if head != self._last_head:
            self._last_head = head
            self._sample.append(head[:_HEAD_SAMPLE])
        self._sample.append(tail[:_TAIL_SAMPLE])
        self._sampled += sum(len(text) for text in self._sample[-2:])

    def _long_head(self, number: int, head: str, key: int, size: int) -> None:
        found = self._long.get(key)
        if found is None and len(self._long) < MOST_LONG_HEADS:
            longest = all(size > other.bytes for other in self._long.values() if other.text)
            if longest:  # the text of one is kept, to be counted
                for other in self._long.values():
                    other.text = ""
            found = self._long[key] = _LongHead(number, size, head if longest else "")
        if found is not None:
            found.jobs += 1

    def _exact(self, head: str, tail: str, key: int, sizes: tuple[int, int]) -> int:
        assert self._count is not None  # noqa: S101
        if self._counted >= MOST_COUNTED:
            return round(sum(sizes) * self._counted_tokens / self._counted_bytes)
        if key not in self._head_tokens:
            if len(self._head_tokens) >= MOST_COUNTED:
                self._head_tokens.clear()
            self._head_tokens[key] = self._count(head) if head else 0
        tokens = self._head_tokens[key] + self._count(tail)
        self._counted += 1
        self._counted_bytes += sum(sizes)
        self._counted_tokens += tokens
        return tokens

    def _check(self, number: int, tokens: int, to_write: int | None) -> None:
        if self._context is not None and tokens + (to_write or 1) > self._context:
            self._over += 1
            self._farthest = max(self._farthest, (tokens, to_write or 0, -number))

    def too_long(self) -> TooMany | None:
        """Prompts that do not fit the context with what they ask for."""
        if not self._over:
            return None
        tokens, to_write, line = self._farthest
        asked = f" and {to_write:,} to write" if to_write else ""
        about = "" if self._count else "about "
        return TooMany(
            self._over,
            f"line {-line} has {about}{tokens:,} tokens{asked}, in a context of {(self._context or 0):,}",
        )

    def long_heads(self, limit: int) -> TooMany | None:
        """Prefixes of more tokens than a limit that several jobs have."""
        per_token = self.measured() or BYTES_PER_TOKEN
        over = [head for head in self._long.values() if head.jobs > 1 and head.bytes / per_token > limit]
        if not over:
            return None
        longest = max(over, key=lambda head: head.bytes)
        if self._count and longest.text:
            tokens = self._count(longest.text)
            about = ""
        else:
            tokens = round(longest.bytes / per_token)
            about = "about "
        heads = "it" if len(over) == 1 else f"{len(over):,} heads; the longest"
        return TooMany(sum(head.jobs for head in over), f"{heads} has {about}{tokens:,} tokens, line {longest.line}")

    def measured(self) -> float | None:
        """Bytes per token in these prompts; None without a tokeniser or text."""
        if self._count is None or not self._sample:
            return None
        if self._ratio is None or self._sampled != self._measured_at:
            tokens = sum(self._count(text) for text in self._sample if text)
            size = sum(len(text.encode()) for text in self._sample)
            self._ratio, self._measured_at = size / tokens if tokens else BYTES_PER_TOKEN, self._sampled
        return self._ratio
