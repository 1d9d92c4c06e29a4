"""The speed that `tokenmill status --watch` measures between two looks."""

import time
from dataclasses import replace

from tokenmill.cli.batches.watch import WatchedSpeeds
from tokenmill.jobs.models import Batch, BatchTotals, Counts

NOON_S = time.mktime((2026, 11, 19, 12, 0, 0, 0, 0, -1))
BATCH = Batch(1, "b", "jobs", "m", None, None, True, 0, None, {}, 0.0, 1.0, None, 100, Counts(), BatchTotals())


def at(done: int, tokens: int) -> Batch:
    return replace(BATCH, counts=Counts(pending=100 - done, done=done), totals=BatchTotals(completion_tokens=tokens))


def test_speed_and_time_left_are_those_of_the_last_minutes() -> None:
    speeds = WatchedSpeeds()
    assert speeds.add(at(0, 0), NOON_S) is None
    assert speeds.add(at(0, 0), NOON_S + 100) is None
    assert speeds.add(at(10, 1_000), NOON_S + 200) == "5 tok/s, 180 jobs/h; about 30 min, done at 12:33"
    # the first looks are more than five minutes ago
    assert speeds.add(at(50, 9_000), NOON_S + 400) == "30 tok/s, 600 jobs/h; about 5 min, done at 12:11"
    assert speeds.add(at(100, 9_000), NOON_S + 401) is None  # done
