"""Speeds measured by the stages of recipes: storage, filters, means."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tokenmill.api.engines.speeds import (
    MAX_STAGES,
    EngineOrigin,
    StageSpeed,
    record_speed,
    speeds_of_stages,
    stage_speed,
    stage_speeds,
)
from tokenmill.hardware.catalog import find
from tokenmill.hardware.identity import machine_id
from tokenmill.jobs.models import Counts
from tokenmill.jobs.scheduler.estimates import MeasuredRates
from tokenmill.jobs.worker.progress import RunReport
from tokenmill.jobs.worker.reuse import Misses
from tokenmill.jobs.worker.throughput import RunTokens
from tokenmill.measurements import read_json

MACHINE = find("epyc-9175f")
ORIGIN = EngineOrigin("m", "native", "b2")
WHEN = datetime(2026, 11, 2, 3, 4, 5, tzinfo=UTC)
REPORT = RunReport(
    "finished",
    20.0,
    20.0,
    Counts(),
    40,
    RunTokens(3000, 1000, 800),
    MeasuredRates(200.0, ((1, 80.0),)),
    3.9,
    Misses(),
    None,
    0,
    (),
)
PACE = StageSpeed(
    "2026-11-02T03:04:05+00:00", machine_id(MACHINE), "m", "native", "b2", 40, 3.9, 2000, 200.0, 800, 80.0
)


def test_the_speed_of_a_stage() -> None:
    assert stage_speed(REPORT, ORIGIN, MACHINE, WHEN) == PACE


@pytest.mark.parametrize(
    "report",
    [
        replace(REPORT, rates=MeasuredRates()),
        replace(REPORT, rates=MeasuredRates(None, ((1, 80.0),))),  # an engine that reports no times
        replace(REPORT, tokens=RunTokens(3000, 2990, 800)),
        replace(REPORT, tokens=RunTokens(3000, 1000, 8)),
    ],
)
def test_too_few_tokens_are_not_stored(tmp_path: Path, report: RunReport) -> None:
    record_speed(tmp_path, MACHINE, report, ORIGIN)
    assert read_json(tmp_path, "stage") == []


def test_stages_are_filtered_by_machine_model_and_build(tmp_path: Path) -> None:
    for origin in (ORIGIN, replace(ORIGIN, model_id="n"), replace(ORIGIN, engine="vllm"), replace(ORIGIN, build="b1")):
        record_speed(tmp_path, MACHINE, REPORT, origin)

    def found(build: str | None) -> list[str]:
        return [
            pace.build for pace in stage_speeds(tmp_path, machine=MACHINE, model_id="m", engine="native", build=build)
        ]

    assert (found("b2"), found("b3"), found(None)) == (["b2"], [], ["b1"])
    assert stage_speeds(tmp_path, machine=find("this"), model_id="m", engine="native", build=None) == []


def test_a_read_only_folder_does_not_end_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    record_speed(tmp_path / "state", MACHINE, REPORT, ORIGIN)


def test_stages_are_weighted_by_their_tokens() -> None:
    short = replace(
        PACE,
        when="2026-11-03T00:00:00+00:00",
        answers=1,
        lanes=1.0,
        written_tokens=200,
        decode_tok_s=20.0,
        computed_tokens=1000,
        prefill_tok_s=100.0,
    )
    found = speeds_of_stages([PACE, short])
    assert found is not None
    assert found.rates.prefill_tok_s == pytest.approx(3000 / 20)
    assert [found.rates.decode_at(lanes) for lanes in (1, 3)] == pytest.approx([50 / 3, 50.0])
    assert (found.width, found.measured) == (3, True)
    assert all(fact in found.source for fact in ("41 answers", "2026-11-03", "b2"))


def test_old_stages_do_not_count() -> None:
    found = speeds_of_stages([replace(PACE, decode_tok_s=1.0), *[replace(PACE, lanes=1.2)] * MAX_STAGES])
    assert found is not None
    assert found.rates.decode_at(1) == pytest.approx(80.0)
    assert speeds_of_stages([]) is None
