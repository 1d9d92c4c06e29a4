"""Retry policy: what an error means for its job, when to retry, and when the engine is at fault.

Pure: errors and numbers in, verdicts out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tokenmill.engine.engine import Answer
from tokenmill.errors import EngineDied, EngineError, EngineTimeout, TokenmillError, TooLong, UsageError
from tokenmill.jobs.models import INVALID_LINE, Failure
from tokenmill.units import number_of

MOST_ATTEMPTS = 3
FIRST_DELAY_S = 2.0
LONGEST_DELAY_S = 300.0
_IN_A_ROW = 12  # minimum for consecutive engine failures, or three per slot if that is more

OF_THE_ENGINE = frozenset(("engine_failed", "engine_died"))
"""Failure codes that the job may not have caused."""


class CutShort(TooLong):
    """An answer was cut off by the context before its max_tokens; a larger context would continue it."""


@dataclass(frozen=True, slots=True)
class RetryVerdict:
    """The failure to write to the output, and whether a retry can help."""

    failure: Failure
    can_pass: bool


def verdict(error: TokenmillError) -> RetryVerdict:
    """Classify the error that ended a stream."""
    if isinstance(error, TooLong):
        over = max(1, error.needed_tokens - error.context_tokens)
        by = "" if "too many" in error.message else f" ({number_of(over, 'token')} too many)"
        return RetryVerdict(Failure("too_long", _words(error, by)), can_pass=False)
    if isinstance(error, UsageError):
        return RetryVerdict(Failure("refused", _words(error)), can_pass=False)
    if isinstance(error, EngineTimeout):
        return RetryVerdict(Failure("timeout", _words(error)), can_pass=True)
    if isinstance(error, EngineDied):
        # its hint is a page of a log
        return RetryVerdict(Failure("engine_died", f"at work when the engine died: {error.message}"), can_pass=True)
    if isinstance(error, EngineError):
        return RetryVerdict(Failure("engine_failed", _words(error)), can_pass=True)
    return RetryVerdict(Failure("failed", _words(error)), can_pass=False)


def cut_short(answer: Answer, max_tokens: int | None, context: int | None) -> CutShort | None:
    """The error for an answer that was cut off by the context; None if it was not."""
    usage = answer.usage
    if answer.finish_reason != "length" or max_tokens is None or usage.completion_tokens >= max_tokens:
        return None
    there = usage.prompt_tokens + usage.completion_tokens if context is None else context
    words = f"the answer may have {max_tokens} tokens, and the context ended after {usage.completion_tokens}"
    return CutShort(words, needed_tokens=there + 1, context_tokens=there)  # any larger context continues it


def after(failure: Failure, attempts: int) -> Failure:
    """The failure of a job after its last attempt."""
    return failure if attempts < 2 else Failure(failure.code, f"{failure.message}; tried {attempts} times")


def delay_s(attempts: int, chance: float, first_s: float = FIRST_DELAY_S) -> float:
    """Backoff after a number of attempts: doubled each time, with jitter from `chance` (0 to 1)."""
    return min(LONGEST_DELAY_S, first_s * 2.0 ** (attempts - 1)) * (0.5 + chance)


def most_in_a_row(width: int) -> int:
    """Maximum consecutive failures after which the engine, not the jobs, is at fault."""
    return max(_IN_A_ROW, 3 * width)


def _words(error: TokenmillError, more: str = "") -> str:
    return f"{error.message}{more}; {error.hint}" if error.hint else f"{error.message}{more}"


_LINES = frozenset((INVALID_LINE, "refused"))
_CHANGES = {
    "too_long": ("too long", "a larger --context"),
    "timeout": ("not done in time", "a longer --job-timeout"),
    "deadline": ("given up at the deadline", "a later --deadline"),
}
"""The reason, and the option that prevents the failure next time."""
_BY_ITSELF = frozenset(("deadline",))  # the command with the changed option makes them pending again


def remedies(codes: Mapping[str, int], batch: str) -> list[str]:
    """One sentence per remedy; `codes` counts failed and quarantined jobs by failure code."""
    retry = f"tokenmill retry {batch} --failed, then the same command"
    found = [*_lines(codes)]
    for code, count in codes.items():
        if code in _CHANGES:
            why, change = _CHANGES[code]
            found.append(f"{count:,} {why}: {'the same command' if code in _BY_ITSELF else retry} with {change}")
    others = sum(count for code, count in codes.items() if code not in _LINES and code not in _CHANGES)
    if others:
        which = "again" if not found else "the other one again" if others == 1 else f"the other {others:,} again"
        found.append(f"to try {which}: {retry}")
    return found


def needed(codes: Mapping[str, int]) -> list[str]:
    """What must change before retrying all failed jobs can help."""
    return [
        *_lines(codes),
        *(f"{codes[code]:,} {why}: give {change}" for code, (why, change) in _CHANGES.items() if code in codes),
    ]


def _lines(codes: Mapping[str, int]) -> Iterator[str]:
    lines = sum(count for code, count in codes.items() if code in _LINES)
    if lines:
        yield f"{number_of(lines, 'line')} cannot be run: mend the file and run it; no answer is computed again"
