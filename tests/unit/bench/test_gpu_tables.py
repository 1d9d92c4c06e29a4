"""What the proof says of its rows: which targets are met, and the pages that are made of them."""

import sys
from pathlib import Path
from typing import Any

import pytest
import table
from prove_judge import batches, device_totals, holds, speeds, summary, within
from prove_rows import Rows

from tokenmill.units import MIB


def item(tier: str, name: str, predicted: int, measured: int | None, source: str = "engine") -> dict[str, Any]:
    measured_bytes = None if measured is None else measured * MIB
    return {
        "tier": tier,
        "item": name,
        "predicted_bytes": predicted * MIB,
        "measured_bytes": measured_bytes,
        "source": source,
    }


def speed(point: str, axis: str, before: float, after: float | None, measured: float) -> dict[str, Any]:
    dials = {"threads": 15, "sequences": 1, "ubatch": 512}
    return {
        "case": "a plan",
        "point": point,
        "axis": axis,
        "dials": dials,
        "head": 512,
        "vram": {"gpu0": 1000 * MIB},
        "vram_predicted": {"gpu0": 990 * MIB},
        "measured": {"decode": measured, "prefill": 10 * measured},
        "before": {"decode": before, "prefill": 10 * before},
        "after": None if after is None else {"decode": after, "prefill": 10 * after},
    }


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    kept = Rows(tmp_path / "rows")
    kept.add(
        "build",
        "about",
        date="2026-11-15T12:00:00+00:00",
        cpu_only=False,
        cores=16,
        cpu="a processor",
        dram_bytes=128 << 30,
        gpus=[{"name": "H200", "vram_bytes": 139 << 30}],
        driver="580",
    )
    kept.add("slice", "slice", bytes=39 << 30, layers=5, seconds=20.0)
    kept.add(
        "ledger",
        "a plan",
        case="a plan",
        build="llama.cpp 1",
        load_s=20.0,
        load_warm_s=10.0,
        settings={"context": 16384, "sequences": 8, "ubatch": 512},
        rows=[
            item("gpu0", "weights", 2324, 2324),
            item("gpu0", "total", 6280, 6400, "driver"),
            item("host", "weights", 37478, 37478),
            item("host", "own", 1000, 300, "process"),
        ],
    )
    kept.add("ledger", "another", case="another", error="it died")
    kept.add("speed", "a", **speed("15t", "first", 120.0, 100.0, 100.0))
    kept.add("speed", "b", **speed("8t", "threads", 60.0, 52.0, 50.0))
    kept.add("speed", "c", case="a plan", point="64s", axis="sequences", skipped="3 s were left")
    for way, rate in (("native, tuned", 90.0), ("-np 1", 45.0), ("-np 8", 60.0), ("-np 32, untuned", 31.0)):
        kept.add(
            "batch",
            f"one digest / {way}",
            load="one digest",
            way=way,
            tok_s=rate,
            written=900,
            seconds=10.0,
            computed=100,
            jobs=10,
            lanes=8,
        )
    kept.add("digest", "predicted", slots=57, context=16640, cells=23552)
    kept.add(
        "digest", "slots for all", slots=96, outcome="out of memory", predicted_fits=False, kv_predicted_bytes=8 << 30
    )
    kept.add(
        "digest",
        "shared",
        sequences=96,
        running=96,
        cells_used=22000,
        cells_total=23552,
        cached_least=16384,
        tok_s=80.0,
        kv_bytes=130 * MIB,
        kv_predicted_bytes=130 * MIB,
    )
    return tmp_path / "rows"


@pytest.mark.parametrize(
    ("predicted", "measured", "good"),
    [
        (100.0, 100.0, True),
        (102.0, 100.0, True),
        (102.1, 100.0, False),
        (97.9, 100.0, False),
        (39_800.0, 40_000.0, True),
        (39_799.0, 40_000.0, False),  # within 2 %, but more than 200 MiB under
        (40_700.0, 40_000.0, True),
    ],
)
def test_a_ledger_is_close_and_hardly_ever_under(predicted: float, measured: float, good: bool) -> None:
    assert holds(predicted * MIB, measured * MIB) is good


@pytest.mark.parametrize(
    ("predicted", "measured", "good"),
    [
        (125.0, 100.0, True),
        (126.0, 100.0, False),
        (75.0, 100.0, True),
        (74.0, 100.0, False),
        (None, 1.0, None),
        (1.0, None, None),
        (1.0, 0.0, None),
    ],
)
def test_a_forecast_is_within_its_share(predicted: float | None, measured: float | None, good: bool | None) -> None:
    assert within(predicted, measured, 0.25) is good


def test_a_device_is_judged_by_the_driver_where_it_says(rows: Path) -> None:
    found = device_totals(table.load([rows])["ledger"].values())
    assert {one.what: (one.predicted, one.measured, one.met) for one in found} == {
        "a plan, gpu0": (6280 * MIB, 6400 * MIB, True),
        "a plan, host": (37478 * MIB, 37478 * MIB, True),
    }


def test_the_run_that_calibrates_is_not_judged_by_what_it_says(rows: Path) -> None:
    found = speeds(table.load([rows])["speed"].values())
    assert [one.met for one in found["decode before"]] == [True, True]
    assert [one.what for one in found["decode after"]] == ["a plan, 8t"]
    assert summary(found["decode after"])[:2] == (1, 1)
    assert summary([]) == (0, 0, None, None)


def test_batches_are_judged_against_one_slot_and_untuned_ones(rows: Path) -> None:
    found = {one.what.partition("against ")[2]: one for one in batches(table.load([rows])["batch"].values())}
    assert (found["-np 1"].ratio, found["-np 1"].met) == (2.0, True)
    assert found["-np 8"].met is None
    assert found["-np 32, untuned"].met is False


def test_the_page_has_every_part(rows: Path) -> None:
    text = table.page(table.load([rows]), "h200")
    for words in (
        "H200",
        "| a plan | threads | 15 |",
        "6280.0 | 6400.0",
        "64s: 3 s were left",
        "it died",
        "57 slots",
        "out of memory",
        "1 of 1 | 2.00",
        "0 of 1 | 2.90",
    ):
        assert words in text, words
    assert "\n\n\n" not in text


def test_a_page_of_nothing_says_so(tmp_path: Path) -> None:
    assert "Nothing was measured." in table.page(table.load([tmp_path]), "h200")


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["table.py", *words])
    return table.main()


def test_page_archive_and_summary_are_written(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary, raw, docs = tmp_path / "README.md", tmp_path / "proof.tar.gz", tmp_path / "docs"
    summary.write_text("before\n<!-- measured -->\nold\n<!-- /measured -->\nafter\n")
    raw.write_bytes(b"rows")
    words = (str(rows), "--name", "h200", "--docs", str(docs), "--raw", str(raw), "--summary", str(summary))
    assert run(monkeypatch, *words) == 0
    assert (docs / "h200.md").read_text().startswith("# Predicted against measured: h200")
    assert (docs / "h200-raw.tar.gz").read_bytes() == b"rows"
    text = summary.read_text()
    assert text.startswith("before\n<!-- measured -->\n|")
    assert text.endswith("<!-- /measured -->\nafter\n")
    assert "old" not in text
    assert run(monkeypatch, *words) == 0
    assert summary.read_text() == text


def test_what_was_measured_without_a_card_goes_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Rows(tmp_path / "rows").add("build", "about", cpu_only=True, date="2026-11-15")
    assert run(monkeypatch, str(tmp_path / "rows"), "--name", "x", "--docs", str(tmp_path / "docs")) == 2
    assert not (tmp_path / "docs").exists()


def test_a_summary_without_marks_is_left_alone(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = tmp_path / "README.md"
    summary.write_text("no marks\n")
    assert run(monkeypatch, str(rows), "--name", "h200", "--summary", str(summary)) == 2
    assert summary.read_text() == "no marks\n"
