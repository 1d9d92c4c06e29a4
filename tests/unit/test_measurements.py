"""The measurement journal: transactions, limits, concurrent writers, and the files of earlier versions."""

import json
import multiprocessing
import os
import resource
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copytree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill import measurements
from tokenmill.api.engines.speeds import StageSpeed
from tokenmill.engine import load_history
from tokenmill.errors import TokenmillError
from tokenmill.measurements import MAX_RECORDS, MeasurementKind, append, delete, journal_path, read, read_json
from tokenmill.tuner import history
from tokenmill.tuner.point import Aim
from tokenmill.tuner.point_store import points, trials_of
from tokenmill.tuner.soak import store as soak_store

EARLIER = Path(__file__).parents[1] / "data" / "state-0.1"
EARLIER_KINDS: dict[MeasurementKind, str] = {
    "load": "measured/loads.jsonl",
    "speed": "measured/trials.jsonl",
    "stage": "measured/stages.jsonl",
    "trial": "points/*.trials.jsonl",
    "point": "points/*.json",
    "soak": "soaks/*.json",
    "qualification": "qualified/*.json",
}


@dataclass(frozen=True, slots=True)
class Sample:
    machine_id: str
    model_id: str
    engine: str
    build: str
    when: str
    value: int


SAMPLE = Sample("machine", "model", "native", "b1", "2026-11-15T06:00:00+00:00", 0)


def values(state: Path, kind: MeasurementKind = "speed") -> list[int]:
    return [sample.value for sample in read(state, kind, Sample)]


def test_records_come_back_in_order_and_by_kind_machine_model_and_engine(tmp_path: Path) -> None:
    others = [replace(SAMPLE, value=1, machine_id="m2"), replace(SAMPLE, value=2, model_id="m2")]
    others.append(replace(SAMPLE, value=3, engine="vllm"))
    for sample in (SAMPLE, *others):
        append(tmp_path, "speed", sample)
    append(tmp_path, "stage", SAMPLE)
    assert list(read(tmp_path, "speed", Sample)) == [SAMPLE, *others]
    assert list(read(tmp_path, "speed", Sample, machine_id="m2")) == [others[0]]
    assert list(read(tmp_path, "speed", Sample, model_id="m2")) == [others[1]]
    assert list(read(tmp_path, "speed", Sample, machine_id="machine", model_id="model", engine="vllm")) == [others[2]]


def test_reading_creates_nothing(tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert read_json(state, "load") == []
    delete(state, "trial", machine_id="a", model_id="b", engine="native")
    assert not state.exists()


def test_machine_engine_build_and_date_of_each_record_are_columns(tmp_path: Path) -> None:
    append(tmp_path, "speed", SAMPLE)
    place = {"machine_id": "m", "model_id": "o", "engine": "vllm", "build": "b2"}
    append(tmp_path, "trial", {"place": place, "when": "2026-11-16T00:00:00+00:00"})
    append(tmp_path, "trial", {"place": place})
    with closing(sqlite3.connect(journal_path(tmp_path))) as connection:
        found = connection.execute("SELECT machine_id, model_id, engine, build, recorded_at FROM measurements")
        rows = found.fetchall()
    assert rows[0] == ("machine", "model", "native", "b1", SAMPLE.when)
    assert rows[1] == ("m", "o", "vllm", "b2", "2026-11-16T00:00:00+00:00")
    assert rows[2][4].endswith("+00:00")


def test_replace_keeps_one_record_for_a_machine_a_model_and_an_engine(tmp_path: Path) -> None:
    measurements.replace(tmp_path, "soak", SAMPLE)
    measurements.replace(tmp_path, "soak", replace(SAMPLE, value=1, build="b2"))
    measurements.replace(tmp_path, "soak", replace(SAMPLE, value=2, engine="vllm"))
    assert values(tmp_path, "soak") == [1, 2]


def test_delete_removes_one_kind_of_one_model(tmp_path: Path) -> None:
    append(tmp_path, "trial", SAMPLE)
    append(tmp_path, "trial", replace(SAMPLE, value=1, model_id="other"))
    append(tmp_path, "speed", SAMPLE)
    delete(tmp_path, "trial", machine_id="machine", model_id="model", engine="native")
    assert (values(tmp_path, "trial"), values(tmp_path)) == ([1], [0])


def test_the_oldest_records_go_by_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "MAX_RECORDS", {**MAX_RECORDS, "speed": 3})
    append(tmp_path, "load", SAMPLE)
    for value in range(5):
        append(tmp_path, "speed", replace(SAMPLE, value=value))
    assert (values(tmp_path, "load"), values(tmp_path)) == ([0], [2, 3, 4])


def test_records_of_another_version_are_skipped(tmp_path: Path) -> None:
    append(tmp_path, "speed", {"value": 7, "unknown": True})
    append(tmp_path, "speed", SAMPLE)
    assert values(tmp_path) == [0]
    assert [record.get("value") for record in read_json(tmp_path, "speed")] == [7, 0]


def _append_many(state: Path, first: int) -> None:
    for value in range(first, first + 20):
        append(state, "speed", replace(SAMPLE, value=value))


def test_several_processes_create_and_write_the_journal_concurrently(tmp_path: Path) -> None:
    copytree(EARLIER, tmp_path, dirs_exist_ok=True)
    earlier = len(lines(tmp_path, EARLIER_KINDS["speed"]))
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append_many, args=(tmp_path, 100 * number)) for number in range(1, 4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert sorted(values(tmp_path)) == [100 * number + offset for number in (1, 2, 3) for offset in range(20)]
    assert len(read_json(tmp_path, "speed")) == 60 + earlier, "one of them took the earlier files over"


def _append_and_report(state: Path, report: int) -> None:
    for value in range(10**9):
        append(state, "speed", replace(SAMPLE, value=value))
        os.write(report, b"%d\n" % value)


def test_killed_writers_lose_nothing_that_was_stored(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    stored = 0
    for _ in range(3):
        reading, writing = os.pipe()
        writer = context.Process(target=_append_and_report, args=(tmp_path, writing))
        writer.start()
        os.close(writing)
        with os.fdopen(reading) as reports:
            reported = [int(reports.readline()) for _ in range(3)]
            assert writer.pid is not None
            os.kill(writer.pid, signal.SIGKILL)
            reported += [int(line) for line in reports]
        writer.join()
        stored += len(reported)
        kept = values(tmp_path)
        assert stored <= len(kept) <= stored + 1, "at most the record whose report the kill prevented"
        stored = len(kept)


@contextmanager
def small_files(max_bytes: int) -> Iterator[None]:
    """Files cannot grow beyond that, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_keeps_what_is_there(tmp_path: Path) -> None:
    append(tmp_path, "speed", SAMPLE)
    size = journal_path(tmp_path).stat().st_size
    with small_files(size + 50_000), pytest.raises(TokenmillError) as caught:
        measurements.replace(tmp_path, "speed", {"value": 1, "text": "x" * 500_000, "machine_id": "machine"})
    assert caught.value.code == "measurements_not_stored"
    assert values(tmp_path) == [0]
    append(tmp_path, "speed", replace(SAMPLE, value=1))
    assert values(tmp_path) == [0, 1]


def test_a_state_folder_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(TokenmillError) as caught:
        append(tmp_path / "state", "speed", SAMPLE)
    assert caught.value.code == "measurements_not_stored"


def test_a_damaged_journal_reads_as_empty_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal_path(tmp_path).write_bytes(b"not a database, but long enough to be one" * 200)
    assert read_json(tmp_path, "speed") == []
    assert str(journal_path(tmp_path)) in caplog.text
    with pytest.raises(TokenmillError):
        append(tmp_path, "speed", SAMPLE)


def test_the_journal_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    append(tmp_path, "speed", SAMPLE)
    with closing(sqlite3.connect(journal_path(tmp_path))) as connection:
        connection.execute("PRAGMA user_version = 2")
    assert read_json(tmp_path, "speed") == []
    with pytest.raises(TokenmillError):
        append(tmp_path, "speed", SAMPLE)


def lines(state: Path, pattern: str) -> list[dict[str, object]]:
    """What the files of an earlier version hold."""
    found = []
    for path in sorted(state.glob(pattern)):
        text = path.read_text(encoding="utf-8")
        found += [json.loads(each) for each in (text.splitlines() if path.suffix == ".jsonl" else [text])]
    return found


@pytest.mark.parametrize("kind", EARLIER_KINDS)
def test_files_of_version_0_1_are_taken_over(tmp_path: Path, kind: MeasurementKind) -> None:
    copytree(EARLIER, tmp_path, dirs_exist_ok=True)
    assert read_json(tmp_path, kind) == lines(EARLIER, EARLIER_KINDS[kind])
    assert lines(tmp_path, EARLIER_KINDS[kind]) == lines(EARLIER, EARLIER_KINDS[kind]), "the files stay"


def test_records_of_version_0_1_read_as_what_they_are(tmp_path: Path) -> None:
    copytree(EARLIER, tmp_path, dirs_exist_ok=True)
    (point,) = points(tmp_path)
    assert len(load_history.read(tmp_path)) == len(lines(EARLIER, EARLIER_KINDS["load"]))
    assert {speed.source for speed in history.read(tmp_path)} == {"tune", "bench"}
    assert len(list(read(tmp_path, "stage", StageSpeed))) == 2
    assert len(trials_of(tmp_path, point.place, "drawn 32+4+8 on a busy machine", Aim())) == len(point.trials) == 2
    assert soak_store.load(tmp_path, point.place.machine_id, point.place.model_id) is not None


def test_earlier_files_are_taken_over_once(tmp_path: Path) -> None:
    copytree(EARLIER, tmp_path, dirs_exist_ok=True)
    append(tmp_path, "speed", SAMPLE)
    (place,) = (point.place for point in points(tmp_path))
    before = len(read_json(tmp_path, "trial"))
    delete(tmp_path, "trial", machine_id=place.machine_id, model_id=place.model_id, engine=place.engine)
    assert (before, read_json(tmp_path, "trial")) == (3, [])


@given(cut=st.integers(1, 200))
def test_a_torn_line_of_an_earlier_file_costs_only_itself(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    state = tmp_path_factory.mktemp("state")
    copytree(EARLIER / "measured", state / "measured")
    path = state / "measured" / "loads.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut] + b'\n[1]\n"text"\n\xff\xfe\n{"place": "nowhere", "when": 1}\n' + whole)
    found = read_json(state, "load")
    count = len(whole.splitlines())
    assert len(found) == 2 * count + (1 if cut == 1 else 0)
    assert [record for record in found if "machine" in record][-count:] == [
        json.loads(each) for each in whole.splitlines()
    ]
