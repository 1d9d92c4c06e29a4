"""Stored points and trials, and when they no longer apply."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tokenmill import measurements
from tokenmill.measurements import journal_path
from tokenmill.tuner.history import SpeedRecord, append, read
from tokenmill.tuner.point import Aim, Figures, OperatingPoint, PointScope, Trial, TrialSettings
from tokenmill.tuner.point_store import (
    find,
    for_others,
    forget_trials,
    has_points,
    keep_trial,
    load_point,
    points,
    save_point,
    trials_of,
)

PLACE = PointScope("mill", "a" * 16, "Small", "b" * 64, "native", "llama.cpp 1 (x)")
DIALS = TrialSettings(13, 16, 12, 512, 4096)
TRIAL = Trial(DIALS, "measured", Figures(decode_tok_s=91.0, jobs_tok_s=80.0), 6.5, when="2026-11-15T01:02:03+00:00")
POINT = OperatingPoint(
    PLACE,
    Aim(),
    DIALS,
    TRIAL.figures,
    0.02,
    ("13 threads instead of 16",),
    "beyond 12 it falls",
    (TRIAL,),
    (TRIAL, Trial(replace(DIALS, sequences=64), "out of memory", detail="killed")),
    1,
    60.0,
    "2026-11-15T02:00:00+00:00",
)


def test_trials_count_for_every_aim_and_know_their_own(tmp_path: Path) -> None:
    keep_trial(tmp_path, PLACE, "work", TRIAL, Aim("cores", within=0.1))
    keep_trial(tmp_path, PLACE, "work", TRIAL, Aim("cores", within=0.2))
    assert trials_of(tmp_path, PLACE, "work", Aim()) == (TRIAL, TRIAL)
    assert len(for_others(tmp_path, PLACE, "work", Aim())) == 2
    assert len(for_others(tmp_path, PLACE, "work", Aim("cores", within=0.2))) == 1
    assert for_others(tmp_path, PLACE, "other work", Aim()) == ()


def test_a_point_comes_back_as_it_was(tmp_path: Path) -> None:
    assert not has_points(tmp_path)
    assert save_point(tmp_path, POINT) == journal_path(tmp_path)
    assert has_points(tmp_path)
    assert load_point(tmp_path, PLACE) == POINT
    save_point(tmp_path, replace(POINT, noise=0.5))
    assert load_point(tmp_path, PLACE) == replace(POINT, noise=0.5)
    assert points(tmp_path) == [replace(POINT, noise=0.5)]


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (replace(PLACE, build="llama.cpp 2"), "llama.cpp 1 (x), and this is llama.cpp 2"),
        (replace(PLACE, machine_id="c" * 16), "another machine, mill"),
        (replace(PLACE, model_id="d" * 64), "another file of Small"),
        (replace(PLACE, model_id="b" * 63 + "c"), "another file of Small"),  # the same name of the file, even
        (replace(PLACE, engine="vllm"), None),
        (replace(PLACE, model="Other", model_id="d" * 64), None),
    ],
)
def test_a_point_of_another_scope_does_not_apply_and_the_reason_is_given(
    tmp_path: Path, place: PointScope, words: str | None
) -> None:
    save_point(tmp_path, POINT)
    found = find(tmp_path, place)
    assert found.point is None
    assert load_point(tmp_path, place) is None
    if words is None:
        assert found.why_not is None
    else:
        assert found.why_not is not None
        assert words in found.why_not
        assert "operating point of 2026-11-15" in found.why_not


def test_a_point_of_another_version_does_not_count(tmp_path: Path) -> None:
    measurements.append(tmp_path, "point", {**asdict(POINT), "unknown": True})
    assert load_point(tmp_path, PLACE) is None
    assert points(tmp_path) == []


def test_trials_come_back_for_the_same_place_and_work(tmp_path: Path) -> None:
    keep_trial(tmp_path, PLACE, "drawn", TRIAL)
    keep_trial(tmp_path, replace(PLACE, build="older"), "drawn", TRIAL)
    keep_trial(tmp_path, PLACE, "other work", TRIAL)
    second = replace(TRIAL, disturbed="python3 (pid 1) used 0.8 cores")
    keep_trial(tmp_path, PLACE, "drawn", second)
    assert trials_of(tmp_path, PLACE, "drawn", Aim()) == (TRIAL, second)
    assert trials_of(tmp_path, PLACE, "drawn", Aim("cores")) == (TRIAL, second), "figures do not depend on the aim"
    forget_trials(tmp_path, PLACE)
    forget_trials(tmp_path, PLACE)
    assert trials_of(tmp_path, PLACE, "drawn", Aim()) == ()


def test_for_latency_only_trials_count_that_measured_it(tmp_path: Path) -> None:
    timed = replace(TRIAL, figures=replace(TRIAL.figures, first_token_s=0.5))
    crashed = Trial(DIALS, "died", detail="SIGSEGV")
    for trial in (TRIAL, timed, crashed):
        keep_trial(tmp_path, PLACE, "drawn", trial)
    assert trials_of(tmp_path, PLACE, "drawn", Aim("latency", first_token_s=1.0)) == (timed, crashed)


def test_measured_speeds_are_stored_with_predictions(tmp_path: Path) -> None:
    speed = SpeedRecord(
        "2026-11-15T01:02:03+00:00",
        "mill",
        "a",
        "Small",
        "b",
        "native",
        "llama.cpp 1",
        "tune",
        DIALS,
        576,
        TRIAL.figures,
        Figures(decode_tok_s=88.0),
    )
    assert read(tmp_path) == ()
    append(tmp_path, speed)
    append(tmp_path, replace(speed, source="bench"))
    assert [each.source for each in read(tmp_path)] == ["tune", "bench"]
    assert read(tmp_path)[0] == speed
    assert read(tmp_path, machine_id="other") == ()
