"""Summaries of measurements, and their display."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.api.engines.speeds import StageSpeed
from tokenmill.cli.measuring.history_rows import COMPARED, HistoryRow, errors, rows_of, settings_text, trends
from tokenmill.cli.views.history import CURVE, curve
from tokenmill.engine.load_history import LoadRecord
from tokenmill.engine.reconcile.reconcile import ReconciledItem as Held
from tokenmill.tuner.history import SpeedRecord
from tokenmill.tuner.point import Figures, TrialSettings

DIALS = TrialSettings(threads=13, threads_batch=16, sequences=4, ubatch=512, context=8192)
SPEED = SpeedRecord(
    "2026-11-15T10:00:00+00:00",
    "box",
    "id",
    "a model",
    "m1",
    "native",
    "b1",
    "tune",
    DIALS,
    512,
    Figures(decode_tok_s=10.0, prefill_tok_s=100.0),
    Figures(decode_tok_s=11.0),
)
LOAD = LoadRecord(
    "2026-11-14T10:00:00+00:00",
    "box",
    "id",
    "a model",
    "m1",
    "b1",
    {"sequences": 4, "context": 8192},
    (Held("host", "weights", 100, 110, "engine"), Held("host", "own", 900, 120, "process")),
    20.0,
    60.0,
    10.0,
)


def test_each_quantity_is_a_row_with_its_error() -> None:
    rows = rows_of([SPEED], [LOAD])
    found = {row.quantity: (row.measured, row.predicted, row.error) for row in rows}
    assert [row.source for row in rows] == ["load", "load", "tune", "tune"]
    assert found["decode"][:2] == (10.0, 11.0)
    assert found["decode"][2] == pytest.approx(0.1)
    assert found["prefill"] == (100.0, None, None)
    assert found["load"] == (20.0, 20.0, 0.0)  # between warm and cold
    assert found["memory"][:2] == (110, 100)  # the process total counts the same bytes again


BATCH = StageSpeed("2026-11-16T10:00:00+00:00", "id", "m1", "native", "b1", 120, 7.5, 9000, 210.0, 6000, 46.0)


def test_batches_are_rows_without_predictions() -> None:
    rows = rows_of([], [LOAD], [BATCH, replace(BATCH, model_id="0123456789abcdef")])
    found = {row.quantity: row for row in rows if row.source == "run" and row.model_id == "m1"}
    assert {name: row.measured for name, row in found.items()} == {"batch prefill": 210.0, "batch decode": 46.0}
    assert {(row.model, row.machine, row.predicted) for row in found.values()} == {("a model", "box", None)}
    assert "0123456789ab" in {row.model for row in rows}, "a model that was never loaded by this state folder"


def test_the_load_of_a_small_model_is_not_compared() -> None:
    """The start of a process takes most of the time, and forecasts leave it out."""
    small = replace(LOAD, load_s=2.3, load_warm_s=0.01, load_cold_s=0.02)
    (row,) = (row for row in rows_of([], [small]) if row.quantity == "load")
    assert (row.predicted, row.error) == (None, None)


@pytest.mark.parametrize(("load_s", "predicted"), [(5.0, 10.0), (20.0, 20.0), (90.0, 60.0)])
def test_a_load_is_held_against_the_nearest_end_of_its_range(load_s: float, predicted: float) -> None:
    (row,) = (row for row in rows_of([], [replace(LOAD, load_s=load_s)]) if row.quantity == "load")
    assert row.predicted == predicted


def test_a_load_without_a_forecast_has_no_error() -> None:
    bare = replace(LOAD, load_warm_s=None, load_cold_s=None, rows=())
    assert [(row.quantity, row.error) for row in rows_of([], [bare])] == [("load", None)]


def test_errors_are_of_the_first_and_of_the_last_predictions() -> None:
    speeds = [
        replace(
            SPEED, when=f"2026-11-{day:02}", figures=Figures(10.0), predicted=Figures(20.0 if day <= COMPARED else 10.5)
        )
        for day in range(1, 26)
    ]
    first, last, count = errors(rows_of(speeds, []))
    assert (first, count) == (1.0, 25)
    assert last == pytest.approx(0.05)
    assert errors(rows_of([replace(SPEED, predicted=Figures())], [])) == (None, None, 0)


def test_a_model_is_one_under_whatever_name_and_called_what_it_was_called_last() -> None:
    later = replace(SPEED, when="2026-11-16", model="renamed")
    other = replace(SPEED, model_id="m2", model="another")
    found = trends(rows_of([SPEED, later, other], [LOAD]))
    assert [(trend.model, trend.quantity, len(trend.measured)) for trend in found] == [
        ("another", "decode", 1),
        ("another", "prefill", 1),
        ("renamed", "decode", 2),
        ("renamed", "prefill", 2),
        ("renamed", "load", 1),
        ("renamed", "memory", 1),
    ]


@pytest.mark.parametrize(
    ("dials", "words"),
    [
        (DIALS, "13/16 threads, 4 slots"),
        (replace(DIALS, threads_batch=13, ubatch=1024), "13 threads, 4 slots, ubatch 1024"),
        (
            replace(DIALS, cache_type_k="q8_0", flash_attention=False, placement="experts on gpu0"),
            "13/16 threads, 4 slots, cache q8_0/f16, no flash attention, experts on gpu0",
        ),
    ],
)
def test_settings_text(dials: TrialSettings, words: str) -> None:
    assert settings_text(dials) == words


def test_a_curve_rises_where_values_do() -> None:
    assert curve([1, 2, 3, 4, 5, 6, 7, 8]) == "▁▂▃▄▅▆▇█"
    assert curve([5, 5]) == "▄▄"
    assert curve([]) == ""
    assert curve([8, 1]) == "█▁"


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=200))
def test_a_curve_never_outgrows_its_column(values: list[float]) -> None:
    assert 1 <= len(curve(values)) <= CURVE


@given(st.lists(st.tuples(st.floats(0.1, 1e3), st.floats(0.1, 1e3) | st.none()), max_size=40))
def test_errors_count_what_was_predicted(pairs: list[tuple[float, float | None]]) -> None:
    rows = [HistoryRow("w", "m", "i", "a", "b", None, None, "tune", "", 0, "decode", *pair) for pair in pairs]
    first, last, count = errors(rows)
    assert count == sum(predicted is not None for _, predicted in pairs)
    assert (first is None) == (last is None) == (count == 0)
