"""Records of loads: their values, and that they are read back unchanged."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from support.plans import placed, settings
from tokenmill.engine.load_history import LoadRecord, append, read, record
from tokenmill.engine.reconcile.reconcile import ObservedMemory, ReconciledItem, Reconciliation, reconcile
from tokenmill.hardware.catalog import find
from tokenmill.hardware.identity import machine_id
from tokenmill.model.read import read as read_model
from tokenmill.units import GIB

ROWS = (
    ReconciledItem("host", "kv", 10, 12, "engine"),
    ReconciledItem("gpu0", "total", GIB, None, "driver", None, "why"),
)


def kept(model: str = "kimi") -> LoadRecord:
    return LoadRecord(
        "2026-11-15T06:00:00+00:00", "mill", "0123", model, "sha", "b11549 (abc)", {"context": 8192}, ROWS, 61.5
    )


def test_what_is_kept_of_a_load() -> None:
    plan = placed(read_model("kimi-k2.5:Q4_K_S"), settings())
    plan = replace(plan, forecast=replace(plan.forecast, load_cold_s=180.0))
    found = Reconciliation(reconcile(plan, ObservedMemory()).rows + ROWS, "b11549 (abc)")
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


def test_a_folder_that_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "state").write_text("a file", encoding="utf-8")
    append(tmp_path / "state", kept())
    assert "cannot store measurements" in caplog.text
