"""Token counts of prompts: exact near a limit and sampled elsewhere, or estimated.

Without a tokenizer four bytes count as a token, which fits English prose and may be off by a third for other text.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tokenmill.jobs.lint.report import BYTES_PER_TOKEN
from tokenmill.units import KIB

TokenCount = Callable[[str], int]
SAMPLE_BYTES = 256 * KIB
MAX_COUNTED = 1000  # prompts near a limit that are tokenized; later ones are estimated from these
MAX_LONG_PREFIXES = 4096
LONG_PREFIX_BYTES = 32 * KIB  # shorter prefixes have fewer than 16 K tokens
_PREFIX_SAMPLE, _TAIL_SAMPLE = 8192, 4096  # characters per text


@dataclass(frozen=True, slots=True)
class TooMany:
    """Number of jobs that exceed a limit, and a description of the worst one."""

    jobs: int
    detail: str


@dataclass(slots=True)
class _LongPrefix:
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
        self._last_prefix = ""
        self._ratio: float | None = None
        self._measured_at = 0
        self._counted_bytes = self._counted_tokens = self._counted = 0
        self._prefix_tokens: dict[int, int] = {}
        self._over, self._farthest = 0, (0, 0, 0)  # prompt tokens, answer tokens, negative line
        self._long: dict[int, _LongPrefix] = {}

    def add(self, number: int, prefix: str, tail: str, key: int, sizes: tuple[int, int], to_write: int | None) -> None:
        """Add a prompt: prefix and last message with their sizes in bytes, and the checksum of the prefix."""
        if self._sampled < SAMPLE_BYTES:
            self._take(prefix, tail)
        if sizes[0] >= LONG_PREFIX_BYTES:
            self._long_prefix(number, prefix, key, sizes[0])
        # A text never has more tokens than bytes.
        if self._context is not None and sum(sizes) + (to_write or 0) > self._context:
            tokens = self._exact(prefix, tail, key, sizes) if self._count else round(sum(sizes) / BYTES_PER_TOKEN)
            self._check(number, tokens, to_write)

    def numbers(self, number: int, tokens: int, to_write: int | None) -> None:
        """Add a prompt that is given as token numbers."""
        self._check(number, tokens, to_write)

    def _take(self, prefix: str, tail: str) -> None:
        if prefix != self._last_prefix:
            self._last_prefix = prefix
            self._sample.append(prefix[:_PREFIX_SAMPLE])
        self._sample.append(tail[:_TAIL_SAMPLE])
        self._sampled += sum(len(text) for text in self._sample[-2:])

    def _long_prefix(self, number: int, prefix: str, key: int, size: int) -> None:
        found = self._long.get(key)
        if found is None and len(self._long) < MAX_LONG_PREFIXES:
            longest = all(size > other.bytes for other in self._long.values() if other.text)
            if longest:  # only the text of the longest is kept, to be tokenized
                for other in self._long.values():
                    other.text = ""
            found = self._long[key] = _LongPrefix(number, size, prefix if longest else "")
        if found is not None:
            found.jobs += 1

    def _exact(self, prefix: str, tail: str, key: int, sizes: tuple[int, int]) -> int:
        assert self._count is not None  # noqa: S101
        if self._counted >= MAX_COUNTED:
            return round(sum(sizes) * self._counted_tokens / self._counted_bytes)
        if key not in self._prefix_tokens:
            if len(self._prefix_tokens) >= MAX_COUNTED:
                self._prefix_tokens.clear()
            self._prefix_tokens[key] = self._count(prefix) if prefix else 0
        tokens = self._prefix_tokens[key] + self._count(tail)
        self._counted += 1
        self._counted_bytes += sum(sizes)
        self._counted_tokens += tokens
        return tokens

    def _check(self, number: int, tokens: int, to_write: int | None) -> None:
        if self._context is not None and tokens + (to_write or 1) > self._context:
            self._over += 1
            self._farthest = max(self._farthest, (tokens, to_write or 0, -number))

    def too_long(self) -> TooMany | None:
        """Prompts that exceed the context together with their answers."""
        if not self._over:
            return None
        tokens, to_write, line = self._farthest
        answer = f" plus {to_write:,} for the answer" if to_write else ""
        about = "" if self._count else "about "
        return TooMany(
            self._over,
            f"line {-line} has {about}{tokens:,} tokens{answer}; the context has {(self._context or 0):,}",
        )

    def long_prefixes(self, limit: int) -> TooMany | None:
        """Prefixes that are longer than a limit in tokens and shared by several jobs."""
        per_token = self.measured() or BYTES_PER_TOKEN
        over = [prefix for prefix in self._long.values() if prefix.jobs > 1 and prefix.bytes / per_token > limit]
        if not over:
            return None
        longest = max(over, key=lambda prefix: prefix.bytes)
        if self._count and longest.text:
            tokens = self._count(longest.text)
            about = ""
        else:
            tokens = round(longest.bytes / per_token)
            about = "about "
        several = "" if len(over) == 1 else f"{len(over):,} prefixes, the longest with "
        detail = f"{several}{about}{tokens:,} tokens (line {longest.line})"
        return TooMany(sum(prefix.jobs for prefix in over), detail)

    def measured(self) -> float | None:
        """Measured bytes per token; None without a tokenizer or text."""
        if self._count is None or not self._sample:
            return None
        if self._ratio is None or self._sampled != self._measured_at:
            tokens = sum(self._count(text) for text in self._sample if text)
            size = sum(len(text.encode()) for text in self._sample)
            self._ratio, self._measured_at = size / tokens if tokens else BYTES_PER_TOKEN, self._sampled
        return self._ratio
