"""Daily time windows: open, closed, over midnight, and days on which the clock changes."""

import time
from collections.abc import Iterator
from datetime import datetime

import pytest

from tokenmill.api.time_window import TimeWindow
from tokenmill.errors import UsageError


@pytest.fixture(autouse=True)
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def at(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


@pytest.mark.parametrize(
    ("window", "now", "opens", "closes"),
    [
        ("22:00-06:00", "2026-11-19T23:30", "2026-11-19T23:30", "2026-11-20T06:00"),
        ("22:00-06:00", "2026-11-20T05:59", "2026-11-20T05:59", "2026-11-20T06:00"),
        ("22:00-06:00", "2026-11-20T06:00", "2026-11-20T22:00", "2026-11-20T06:00"),
        ("22:00-06:00", "2026-11-20T22:00", "2026-11-20T22:00", "2026-11-21T06:00"),
        ("9:30-17:00", "2026-11-20T08:00", "2026-11-20T09:30", "2026-11-20T08:00"),
        ("9:30-17:00", "2026-11-20T12:00", "2026-11-20T12:00", "2026-11-20T17:00"),
        ("9:30-17:00", "2026-11-20T18:00", "2026-11-21T09:30", "2026-11-20T18:00"),
    ],
)
def test_when_a_window_opens_and_closes(window: str, now: str, opens: str, closes: str) -> None:
    found = TimeWindow.parse(window)
    assert (found.opens_s(at(now)), found.closes_s(at(now))) == (at(opens), at(closes))


def test_the_clock_of_the_wall_counts_when_it_changes() -> None:
    night = TimeWindow.parse("22:00-06:00")
    assert night.closes_s(at("2026-10-24T22:00")) - at("2026-10-24T22:00") == 9 * 3600  # the clock is set back
    assert night.closes_s(at("2026-03-28T22:00")) - at("2026-03-28T22:00") == 7 * 3600


@pytest.mark.parametrize(
    "text", ["", "22-06", "22:00", "22:00-22:00", "24:00-06:00", "22:60-06:00", "22:00-06:00-07:00"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        TimeWindow.parse(text)
    assert "22:00-06:00" in (refused.value.hint or "")
