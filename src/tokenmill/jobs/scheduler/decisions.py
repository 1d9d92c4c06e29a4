"""The decisions that a scheduler returns."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send this job to the engine now."""

    job: int
    lane: int | None
    expected_bytes: int  # minimum bytes of its canonical prompt that need not be computed, in whole chunks
    expected_tokens: int  # the same, estimated in tokens
    leader: bool  # it computes a prefix that pending jobs will reuse
    like: int | None  # the job whose prompt it should find in the cache


@dataclass(frozen=True, slots=True)
class Fetch:
    """Read this many more pending jobs, in prefix order after the last ones; other decisions do not wait for them."""

    jobs: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing can be sent until something changes."""

    reason: str


ScheduleDecision = Dispatch | Fetch | Wait
