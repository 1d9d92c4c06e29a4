"""Retry policy: classifies errors, computes the backoff, and suggests how to fix failed jobs.

Pure; `completion.py` applies it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tokenmill.engine.engine import Answer
from tokenmill.errors import EngineDied, EngineError, EngineTimeout, TokenmillError, TooLong, UsageError
from tokenmill.jobs.models import INVALID_LINE, Failure
from tokenmill.units import number_of

MAX_ATTEMPTS = 3
FIRST_DELAY_S = 2.0
MAX_DELAY_S = 300.0
_MIN_CONSECUTIVE_FAILURES = 12

ENGINE_FAILURES = frozenset(("engine_failed", "engine_died"))
"""Failure codes for which the engine may be at fault."""


class CutShort(TooLong):
    """An answer was cut off by the context before it reached max_tokens."""


@dataclass(frozen=True, slots=True)
class RetryDecision:
    """The failure as written to the output, and whether a retry can help."""

    failure: Failure
    retryable: bool


def classify(error: TokenmillError) -> RetryDecision:
    """Classify the error that ended a stream."""
    if isinstance(error, TooLong):
        over = max(1, error.needed_tokens - error.context_tokens)
        by = "" if "too many" in error.message else f" ({number_of(over, 'token')} too many)"
        return RetryDecision(Failure("too_long", _words(error, by)), retryable=False)
    if isinstance(error, UsageError):
        return RetryDecision(Failure("refused", _words(error)), retryable=False)
    if isinstance(error, EngineTimeout):
        return RetryDecision(Failure("timeout", _words(error)), retryable=True)
    if isinstance(error, EngineDied):
        # The hint is left out: it is a page of the engine's log.
        return RetryDecision(Failure("engine_died", f"in flight when the engine died: {error.message}"), retryable=True)
    if isinstance(error, EngineError):
        return RetryDecision(Failure("engine_failed", _words(error)), retryable=True)
    return RetryDecision(Failure("failed", _words(error)), retryable=False)


def cut_short(answer: Answer, max_tokens: int | None, context: int | None) -> CutShort | None:
    """The error for an answer that was cut off by the context; None if it was not."""
    usage = answer.usage
    if answer.finish_reason != "length" or max_tokens is None or usage.completion_tokens >= max_tokens:
        return None
    if context is None:
        context = usage.prompt_tokens + usage.completion_tokens
    message = f"the answer was cut off by the context after {usage.completion_tokens} of up to {max_tokens} tokens"
    return CutShort(message, needed_tokens=context + 1, context_tokens=context)  # any larger context continues it


def final_failure(failure: Failure, attempts: int) -> Failure:
    """The failure of a job after its last attempt, with the number of attempts."""
    return failure if attempts < 2 else Failure(failure.code, f"{failure.message}; tried {attempts} times")


def delay_s(attempts: int, chance: float, first_s: float = FIRST_DELAY_S) -> float:
    """Exponential backoff after a number of attempts, with jitter from `chance` (0 to 1)."""
    return min(MAX_DELAY_S, first_s * 2.0 ** (attempts - 1)) * (0.5 + chance)


def max_consecutive_failures(width: int) -> int:
    """Number of consecutive failures after which the engine counts as broken: 12, or three per slot if that is more."""
    return max(_MIN_CONSECUTIVE_FAILURES, 3 * width)


def _words(error: TokenmillError, more: str = "") -> str:
    return f"{error.message}{more}; {error.hint}" if error.hint else f"{error.message}{more}"


_LINES = frozenset((INVALID_LINE, "refused"))
_CHANGES = {
    "too_long": ("too long", "a larger --context"),
    "timeout": ("timed out", "a longer --job-timeout"),
    "deadline": ("not done by the deadline", "a later --deadline"),
}
"""By failure code: the reason, and the option that prevents it."""
_RETRIED_BY_RUN = frozenset(("deadline",))  # running the command with the changed option retries these


def remedies(codes: Mapping[str, int], batch: str) -> list[str]:
    """Suggestions for failed and quarantined jobs, given their number by failure code."""
    retry = f"tokenmill retry {batch} --failed, then the same command"
    found = [*_lines(codes)]
    for code, count in codes.items():
        if code in _CHANGES:
            why, change = _CHANGES[code]
            found.append(f"{count:,} {why}: {'the same command' if code in _RETRIED_BY_RUN else retry} with {change}")
    others = sum(count for code, count in codes.items() if code not in _LINES and code not in _CHANGES)
    if others:
        which = "" if not found else " the other one" if others == 1 else f" the other {others:,}"
        found.append(f"to retry{which}: {retry}")
    return found


def needed(codes: Mapping[str, int]) -> list[str]:
    """The changes required before retrying all failed jobs can help."""
    return [
        *_lines(codes),
        *(f"{codes[code]:,} {why}: use {change}" for code, (why, change) in _CHANGES.items() if code in codes),
    ]


def _lines(codes: Mapping[str, int]) -> Iterator[str]:
    lines = sum(count for code, count in codes.items() if code in _LINES)
    if lines:
        yield f"{number_of(lines, 'line')} cannot be run: fix the file and run it; finished answers are reused"
