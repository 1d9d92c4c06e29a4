"""What would help jobs that have no answer, by why they have none. Pure: counts in, sentences out."""

from collections.abc import Iterator, Mapping

from tokenmill.jobs.models import INVALID_LINE
from tokenmill.units import number_of

_LINES = frozenset((INVALID_LINE, "refused"))
_CHANGES = {
    "too_long": ("too long", "a larger --context"),
    "timeout": ("not done in time", "a longer --job-timeout"),
    "deadline": ("given up at the deadline", "a later --deadline"),
}
"""Why, and what the command needs so that the same does not happen again."""
_BY_ITSELF = frozenset(("deadline",))  # the command with its change makes them pending again


def remedies(codes: Mapping[str, int], batch: str) -> list[str]:
    """A sentence for each thing to do; `codes`: failed jobs and those set aside, by code."""
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
    """What must change before another try of all that failed can help."""
    return [
        *_lines(codes),
        *(f"{codes[code]:,} {why}: give {change}" for code, (why, change) in _CHANGES.items() if code in codes),
    ]


def _lines(codes: Mapping[str, int]) -> Iterator[str]:
    lines = sum(count for code, count in codes.items() if code in _LINES)
    if lines:
        yield f"{number_of(lines, 'line')} cannot be run: mend the file and run it; no answer is computed again"
