"""A report is made of the stored results of its model on its machine, and of nothing else."""

import json
import sqlite3
from contextlib import closing
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from support import reports
from tokenmill import measurements
from tokenmill.engine import load_history
from tokenmill.report.collect import Results, Subject, build_report, collect, gaps, read
from tokenmill.tuner import history
from tokenmill.tuner.point_store import save_point
from tokenmill.tuner.soak import store as soak_store

GIVEN = reports.asked()


def filled(state: Path) -> None:
    kept = reports.kept(GIVEN)
    assert kept.point is not None
    assert kept.soak is not None
    load_history.append(state, kept.loads[0])
    for speed in kept.speeds[:4]:
        history.append(state, speed)
    save_point(state, kept.point)
    soak_store.save(state, kept.soak)
    measurements.append(state, "qualification", {**(kept.qualified or {}), "model_id": GIVEN.model_id})


def test_stored_results_are_found(tmp_path: Path) -> None:
    filled(tmp_path)
    found, kept = read(GIVEN, tmp_path, tmp_path / "batches"), reports.kept(GIVEN)
    qualified = {**(kept.qualified or {}), "model_id": GIVEN.model_id}
    assert found == replace(kept, speeds=kept.speeds[:4], qualified=qualified, batches=(), finish_reasons={})


def test_other_models_and_machines_are_not(tmp_path: Path) -> None:
    filled(tmp_path)
    kept = reports.kept(GIVEN)
    load_history.append(tmp_path, replace(kept.loads[0], model_id="other"))
    history.append(tmp_path, replace(kept.speeds[0], machine_id="other"))
    found = read(GIVEN, tmp_path, tmp_path / "batches")
    assert (len(found.loads), len(found.speeds)) == (1, 4)
    elsewhere = replace(GIVEN, machine=replace(GIVEN.machine, gpus=()))
    assert replace(read(elsewhere, tmp_path, tmp_path), qualified=None) == Results()


@pytest.mark.parametrize("record", ["", "{", "[]", '{"usable_context": "many"}', b"\xff\xfe"])
def test_unreadable_records_are_skipped(tmp_path: Path, record: str | bytes) -> None:
    filled(tmp_path)
    with closing(sqlite3.connect(measurements.journal_path(tmp_path))) as connection, connection:
        connection.execute("UPDATE measurements SET record = ?", (record,))
    report = collect(GIVEN, tmp_path, batches=tmp_path / "batches")
    assert (report.point, report.soaked, report.qualified, report.comparisons) == (None, None, None, ())
    assert {gap.about for gap in report.gaps} >= {"curves", "depth", "point", "soaked", "qualified"}


def test_a_points_own_trials_stand_in_for_a_lost_history() -> None:
    kept = replace(reports.kept(GIVEN), speeds=())
    report = build_report(GIVEN, kept, reports.WHEN)
    assert {curve.key for curve in report.curves} == {"threads", "sequences"}
    assert report.curves[0].chosen == 14


def test_everything_is_in_the_report() -> None:
    report = reports.full_report()
    assert report.gaps == ()
    assert {curve.key for curve in report.curves} == {"threads", "sequences"}
    assert [batch.share for batch in report.reuse] == [pytest.approx(52770 / 62000), 0.0]
    assert [(batch.finish_reasons, batch.cut) for batch in report.reuse] == [(None, 0), ({"length": 8, "stop": 40}, 8)]
    assert report.soaked is not None
    assert (report.soaked.usable_context, report.soaked.goal_context) == (7168, 8192)
    assert [line.name for line in report.soaked.curves[0].lines] == ["measured", "predicted"]
    assert report.qualified is not None
    assert [check.good for check in report.qualified.checks] == [True, False]
    assert json.dumps(asdict(report), allow_nan=False)


def test_every_gap_names_the_command_that_fills_it() -> None:
    bare = build_report(GIVEN, Results(), reports.WHEN)
    commands = {gap.about: gap.command for gap in bare.gaps}
    assert commands["curves"] == f"tokenmill tune {reports.MODEL}"
    assert commands["depth"] == f"tokenmill bench {reports.MODEL}"
    assert commands["soaked"] == f"tokenmill soak {reports.MODEL}"
    assert commands["qualified"] == f"tokenmill qualify {reports.MODEL}"
    assert (commands["reuse"] or "").startswith("tokenmill run ")


def test_names_in_commands_are_quoted() -> None:
    bare = build_report(replace(GIVEN, model="my model; rm -rf"), Results(), reports.WHEN)
    assert {gap.command for gap in bare.gaps if gap.about == "point"} == {"tokenmill tune 'my model; rm -rf'"}


def test_measurements_of_another_machine_are_not_requested_here() -> None:
    bare = build_report(GIVEN, Results(), reports.WHEN)
    found = gaps(bare, "m", files=True, elsewhere=True)
    assert [gap.about for gap in found] == ["point"]
    assert bare.machine.name in found[0].words
    assert found[0].command == "tokenmill tune m"
    assert gaps(bare, "m", files=False, elsewhere=False)[0].command == "tokenmill models pull m"


def test_a_machine_alone(tmp_path: Path) -> None:
    when = datetime(2026, 11, 15, 12, tzinfo=UTC)
    report = collect(Subject(replace(GIVEN.machine, measured=None)), tmp_path, batches=tmp_path, when=when)
    assert (report.made, report.model, report.plan) == ("2026-11-15T12:00:00+00:00", None, None)
    assert [gap.about for gap in report.gaps] == ["machine", "plan", "reuse"]
