"""Rows of the proof outlive a kill, a second run leaves out what is there, and budgets are read as they are written."""

import json
from pathlib import Path

import pytest
from prove_rows import Clock, Rows, budgets, read


def test_a_row_is_found_again_by_another_run(tmp_path: Path) -> None:
    Rows(tmp_path / "rows").add("speed", "first", tok_s=3.5)
    again = Rows(tmp_path / "rows")
    assert again.has("speed", "first")
    assert not again.has("speed", "second")
    assert not again.has("ledger", "first")
    assert [row["tok_s"] for row in again.of("speed")] == [3.5]


def test_a_line_that_was_cut_short_is_passed_over_and_ended(tmp_path: Path) -> None:
    rows = Rows(tmp_path)
    rows.add("speed", "one", tok_s=1.0)
    with (tmp_path / "speed.jsonl").open("ab") as file:
        file.write(b'{"key":"two","tok')
    rows.add("speed", "three", tok_s=3.0)
    assert [row["key"] for row in rows.of("speed")] == ["one", "three"]


def test_what_was_skipped_is_measured_later_and_never_takes_a_measurement_away(tmp_path: Path) -> None:
    rows = Rows(tmp_path)
    rows.add("speed", "one", skipped="3 s were left")
    assert not rows.has("speed", "one")
    rows.add("speed", "one", tok_s=1.0)
    rows.add("speed", "one", skipped="0 s were left")
    assert rows.has("speed", "one")
    assert rows.get("speed", "one") == {**(rows.get("speed", "one") or {}), "tok_s": 1.0}


def test_rows_are_written_where_they_are_handed_back_too(tmp_path: Path) -> None:
    Rows(tmp_path / "rows").add("speed", "one", tok_s=1.0)
    second = Rows(tmp_path / "rows", tmp_path / "out")
    second.mirror_all()
    second.add("speed", "two", tok_s=2.0)
    lines = (tmp_path / "out" / "speed.jsonl").read_text().splitlines()
    assert [json.loads(line)["key"] for line in lines] == ["one", "two"]


def test_of_several_runs_what_was_measured_last_counts(tmp_path: Path) -> None:
    for name, speed in (("first", 1.0), ("second", 2.0)):
        Rows(tmp_path / name).add("speed", "one", tok_s=speed)
    Rows(tmp_path / "third").add("speed", "one", skipped="no time")
    folders = [tmp_path / name for name in ("first", "second", "third", "none")]
    assert read(folders, "speed")["one"]["tok_s"] == 2.0


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ledger", {"ledger": 100.0}),
        ("ledger,speed:20", {"ledger": 100.0, "speed": 20.0}),
        (" tune:7.5 , digest", {"tune": 7.5, "digest": 100.0}),
    ],
)
def test_budgets(text: str, found: dict[str, float]) -> None:
    assert budgets(text, 100.0) == found


@pytest.mark.parametrize("text", ["", "ledgers", "ledger:soon", "ledger,,speed"])
def test_a_budget_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError, match="unknown stage|number of seconds"):
        budgets(text, 100.0)


def test_a_clock_never_gives_more_than_the_whole_has() -> None:
    whole = Clock.of(1000.0)
    assert whole.allows(900.0)
    assert not whole.allows(1001.0)
    assert whole.part(5000.0).ends_s == whole.ends_s
    assert whole.part(10.0).left_s <= 10.0
    assert Clock(0.0).left_s == 0.0
