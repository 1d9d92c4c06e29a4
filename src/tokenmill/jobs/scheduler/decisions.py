"""The decisions that a scheduler returns."""

from dataclasses import dataclass
from typing import Literal

WaitReason = Literal[
    "engine_down",
    "no_jobs",
    "all_in_flight",
    "interactive",  # interactive requests use all slots
    "max_in_flight",
    "recompute_too_costly",  # a free slot would have to recompute a prefix
    "prefix_pending",  # a prefix that the next jobs share is being computed
    "kv_cache_full",
]


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send this job to the engine now."""

    job: int
    slot: int | None  # None: the engine chooses
    expected_bytes: int  # minimum bytes of its canonical prompt that should be cached, in whole chunks
    expected_tokens: int  # the same, estimated in tokens
    leader: bool  # it computes a prefix that pending jobs will reuse
    source_job: int | None  # the job that computed the prefix it should find in the cache
    later: tuple[int, ...] = ()  # jobs whose prompts diverge from its own, if the engine must know where


@dataclass(frozen=True, slots=True)
class Fetch:
    """Read up to this many more pending jobs, in prefix order after the last ones; other decisions need not wait."""

    jobs: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing can be sent until the next event."""

    reason: WaitReason


ScheduleDecision = Dispatch | Fetch | Wait
