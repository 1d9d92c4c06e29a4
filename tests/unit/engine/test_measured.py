"""The history of loads: whole lines, never too many, read back as they were."""

import json
import multiprocessing
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from support.plans import placed, settings
from tokenmill.engine.measured import Record, append, machine_id, read, record
from tokenmill.engine.reconcile import Observed, Reconciliation, Row, reconcile
from tokenmill.errors import EngineError
from tokenmill.hardware.catalog import find
from tokenmill.model.read import read as read_model
from tokenmill.units import GIB

ROWS = (Row("host", "kv", 10, 12, "engine"), Row("gpu0", "total", GIB, None, "driver", None, "why"))


def kept(model: str = "kimi") -> Record:
    return Record(
        "2026-11-15T06:00:00+00:00", "mill", "0123", model, "sha", "b11549 (abc)", {"context": 8192}, ROWS, 61.5
    )


def test_what_is_kept_of_a_load() -> None:
    plan = placed(read_model("kimi-k2.5:Q4_K_S"), settings())
    plan = replace(plan, forecast=replace(plan.forecast, load_cold_s=180.0))
    found = Reconciliation(reconcile(plan, Observed()).rows + ROWS, "b11549 (abc)")
    when = datetime(2026, 11, 15, 8, 0, tzinfo=timezone(timedelta(hours=2)))
    made = record(plan, found, model_id="sha", load_s=200.0, when=when)
    assert (made.when, made.model, made.build) == ("2026-11-15T06:00:00+00:00", "Kimi-K2.5", "b11549 (abc)")
    assert (made.load_s, made.load_cold_s, made.settings["context"], made.rows) == (200.0, 180.0, 8192, ROWS)
    assert made.machine_id == machine_id(plan.machine)
    assert abs(datetime.fromisoformat(record(plan, found, model_id="x").when) - datetime.now(UTC)) < timedelta(
        minutes=1
    )


def test_a_machine_s_id_is_of_its_parts() -> None:
    box = find("epyc-7532-8x3090")
    assert machine_id(box) == machine_id(
        replace(box, name="other", notes=(), limits=replace(box.limits, cgroup_cpus=2))
    )
    assert machine_id(box) != machine_id(replace(box, gpus=box.gpus[1:]))


def test_records_come_back(tmp_path: Path) -> None:
    assert read(tmp_path) == ()
    for name in ("a", "b"):
        append(tmp_path, kept(name))
    assert read(tmp_path) == (kept("a"), kept("b"))


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    append(tmp_path, kept("a"))
    path = tmp_path / "measured" / "loads.jsonl"
    with path.open("ab") as file:
        file.write(b'{"when": "2026-1')  # the machine lost power
    append(tmp_path, kept("b"))
    with path.open("ab") as file:
        file.write(b'[1]\n{"from": "another version"}\n\xff\xfe\n')
    append(tmp_path, kept("c"))
    assert [found.model for found in read(tmp_path)] == ["a", "b", "c"]


def test_the_older_half_goes(tmp_path: Path) -> None:
    most = 20 * len(json.dumps({"x": 1})) * 40
    for index in range(100):
        append(tmp_path, kept(str(index)), most_bytes=most)
        path = tmp_path / "measured" / "loads.jsonl"
        assert path.stat().st_size <= most
    numbers = [int(found.model) for found in read(tmp_path)]
    assert numbers == list(range(numbers[0], 100))
    assert 5 < len(numbers) < 100
    assert sorted(entry.name for entry in (tmp_path / "measured").iterdir()) == ["loads.jsonl", "lock"]


def _many(state: Path, name: str) -> None:
    for index in range(20):
        append(state, kept(f"{name}{index}"))


def test_several_processes_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_many, args=(tmp_path, name)) for name in "xyz"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert {found.model for found in read(tmp_path)} == {f"{name}{index}" for name in "xyz" for index in range(20)}


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "measured").write_text("a file", encoding="utf-8")
    with pytest.raises(EngineError, match="cannot keep measurements"):
        append(tmp_path, kept())


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(tmp_path, kept("a"))
    import os

    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:10]))
    with pytest.raises(EngineError, match="No space left"):
        append(tmp_path, kept("b"))
    monkeypatch.undo()
    append(tmp_path, kept("c"))
    path = tmp_path / "measured" / "loads.jsonl"
    assert [json.loads(line)["model"] for line in path.read_text(encoding="utf-8").splitlines()] == ["a", "c"]
