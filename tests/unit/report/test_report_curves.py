"""Grouping of measurements into curves, with their knee and predictions."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import reports
from tokenmill.report.curves import (
    bandwidth_curves,
    curve_text,
    depth_curves,
    dots,
    knee,
    setting_curves,
    settings_text,
)
from tokenmill.report.report import ChartCurve, Dot
from tokenmill.tuner.point import Figures, TrialSettings

GIVEN = reports.asked()


def curve(key: str, curves: list[ChartCurve]) -> ChartCurve:
    return next(each for each in curves if each.key == key)


def test_threads_with_their_spread_knee_and_chosen_point() -> None:
    found = curve("threads", setting_curves(reports.speeds(GIVEN), reports.point(GIVEN), None))
    line = found.lines[0]
    assert [dot.x for dot in line.dots] == [4, 8, 12, 14, 16]
    assert [dot.y for dot in line.dots] == [35.6, 60.4, 80.6, 91.2, 84.8]
    assert (line.dots[0].low, line.dots[0].high, line.dots[0].runs) == (35.6 * 0.97, 35.6 * 1.02, 3)
    assert (found.knee, found.chosen) == (14, 14)
    assert line.origin.words == "measured on h200-1x, llama.cpp b11549, 2026-11-15, tokenmill tune"


def test_a_fall_in_speed_is_the_knee_and_failed_trials_are_listed() -> None:
    found = curve("sequences", setting_curves(reports.speeds(GIVEN), reports.point(GIVEN), None))
    assert {line.name for line in found.lines} == {"decode", "predicted", "jobs"}
    assert found.lines[0].at(32) == Dot(32.0, 19.2)
    assert (found.knee, found.chosen) == (16, 16)
    assert [(trial.x, trial.why) for trial in found.lost] == [(64.0, "out of memory")]


def test_builds_and_sources_are_never_on_one_line() -> None:
    other = [replace(speed, build="b2", when="2027-01-01T00:00:00+00:00") for speed in reports.speeds(GIVEN)[:6]]
    found = curve("threads", setting_curves([*reports.speeds(GIVEN), *other], None, None))
    assert len(found.lines[0].dots) == 5
    assert found.lines[0].origin.build == reports.BUILD


def test_one_place_is_no_curve() -> None:
    alone = [reports.speed(GIVEN, reports.DIALS, Figures(decode_tok_s=50.0))] * 3
    assert setting_curves(alone, None, None) == []


def test_depth_curves_have_measured_and_predicted_lines() -> None:
    prefill, decode = depth_curves(reports.speeds(GIVEN), None, 512)
    assert (prefill.key, decode.key) == ("prefill-depth", "decode-depth")
    assert [line.name for line in decode.lines] == ["decode", "predicted"]
    assert decode.lines[0].at(4096) == Dot(4096.0, 60 - 4096 / 400)
    assert decode.lines[1].at(0) == Dot(0.0, 63.0)
    assert decode.knee is None


def test_without_measurements_the_plan_alone_is_drawn() -> None:
    plan = GIVEN.plan
    assert plan is not None
    found = [*setting_curves((), None, plan.forecast), *depth_curves((), plan.forecast, plan.settings.ubatch)]
    assert {curve.key for curve in found} == {"sequences", "prefill-depth", "decode-depth"}
    assert {line.origin.kind for curve in found for line in curve.lines} == {"predicted"}
    assert all(curve.knee is None and curve.chosen is None for curve in found)


def test_bandwidth_by_threads() -> None:
    (found,) = bandwidth_curves(GIVEN.machine)
    assert [line.name for line in found.lines] == ["dram"]
    assert found.lines[0].at(14) == Dot(14.0, 214.0)
    assert bandwidth_curves(replace(GIVEN.machine, measured=None)) == []


@pytest.mark.parametrize(
    ("ys", "bend"),
    [
        ([10, 20, 40, 41], 3),  # little is gained after the third
        ([10, 60, 95, 20, 100], 3),  # a fall counts, whatever follows it
        ([100, 90, 50], 2),  # the steepest of two falls
        ([100, 99, 98], None),  # nearly constant
        ([10, 20, 40], None),  # still rising
        ([1, 2], None),  # too few points
    ],
)
def test_the_knee(ys: list[float], bend: float | None) -> None:
    assert knee([Dot(x, y) for x, y in enumerate(ys, 1)]) == bend


@given(
    st.lists(st.floats(min_value=0.1, max_value=1e4), min_size=3, max_size=20), st.floats(min_value=0, max_value=0.2)
)
def test_after_a_knee_speed_falls_or_rises_little(ys: list[float], noise: float) -> None:
    found = knee([Dot(x, y) for x, y in enumerate(ys)], noise)
    if found is not None:
        at = int(found)
        assert 0 <= at < len(ys) - 1
        assert ys[at + 1] < ys[at] or max(ys) <= 1.1 * ys[at]


@given(st.lists(st.tuples(st.integers(1, 4), st.floats(min_value=0, max_value=100)), min_size=1))
def test_repeats_are_one_dot_within_their_spread(pairs: list[tuple[int, float]]) -> None:
    found = dots((float(x), y) for x, y in pairs)
    assert sum(dot.runs for dot in found) == len(pairs)
    assert [dot.x for dot in found] == sorted({x for x, _ in pairs})
    assert all(dot.low is None or dot.high is None or dot.low <= dot.y <= dot.high for dot in found)


def test_settings_as_text() -> None:
    assert settings_text(TrialSettings(14, 16, 1, 512, 8192)) == (
        "14 threads, 16 for prefill, 1 sequence, ubatch 512, context 8192"
    )
    odd = TrialSettings(2, 2, 8, 256, 0, "q8_0", "q8_0", flash_attention=False, repack=False, offload_min_batch=128)
    assert settings_text(odd) == (
        "2 threads, 8 sequences, ubatch 256, cache q8_0, no flash attention, no repack, offload from 128 rows"
    )


def test_a_chart_in_a_sentence() -> None:
    found = curve("sequences", setting_curves(reports.speeds(GIVEN), reports.point(GIVEN), None))
    assert curve_text(found) == "decode: maximum 91.2 tok/s at 16; chosen: 16, with 91.2 tok/s"
    assert "knee at 8, with 92 %" in curve_text(replace(found, knee=8.0))
