"""What a scheduler decides."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send this job now."""

    job: int
    lane: int | None
    expected_bytes: int  # of its canonical prompt that need not be computed: at least, and in whole chunks
    expected_tokens: int  # the same, as tokens are expected to be
    leader: bool  # it computes a head that pending jobs will reuse
    like: int | None  # the job whose prompt it should find


@dataclass(frozen=True, slots=True)
class Fetch:
    """Give me so many more pending jobs, in head order, behind the last ones; what else is decided does not wait."""

    jobs: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing can be sent until something happens."""

    reason: str


ScheduleDecision = Dispatch | Fetch | Wait
