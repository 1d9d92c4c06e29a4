"""desk.db of an older gateway is migrated into the store, also if a kill interrupts the migration."""

import os
import shutil
import signal
import sqlite3
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from support.desk import EXPECTED, old_state
from tokenmill.errors import StoreInUse
from tokenmill.jobs.store import gateway_db
from tokenmill.jobs.store.gateway_db import GATEWAY_DB, MIGRATED, migrate_gateway_db
from tokenmill.jobs.store.http_batches import HttpBatches, Page, batches_by_status
from tokenmill.jobs.store.store import Store

STEPS = 400  # more than a takeover has


def taken_over(folder: Path) -> dict[str, Any]:
    """Take over, and what the store holds then."""
    rows = HttpBatches(folder, clock=lambda: EXPECTED["now_s"])
    migrate_gateway_db(folder, rows)
    found = {"files": rows.files(None, Page(100)), "batches": rows.batches(None, Page(100))}
    rows.close()
    return found


def test_a_takeover_that_is_killed_at_any_step_is_repeated(tmp_path: Path) -> None:
    old = old_state(tmp_path / "old")
    whole = taken_over(Path(shutil.copytree(old, tmp_path / "whole")))
    assert {batch.id: batch.status for batch in whole["batches"]} == {
        batch["id"]: batch["status"] for one in EXPECTED["listed"].values() for batch in one["batches"]["data"]
    }
    killed = renamed = 0
    for step in range(1, STEPS):
        folder = Path(shutil.copytree(old, tmp_path / "killed"))
        if not _killed_at(step, folder):
            break
        killed += 1
        renamed += (folder / MIGRATED).exists()
        assert taken_over(folder) == whole, step
        assert not (folder / GATEWAY_DB).exists()
        shutil.rmtree(folder)
    assert killed > 20
    assert 0 < renamed < killed


def _killed_at(step: int, folder: Path) -> bool:
    """Take over in a process that is killed before it calls SQLite or the file system for the step-th time."""
    child = os.fork()
    if child == 0:
        calls = 0

        def count(_frame: FrameType, event: str, called: Any) -> None:
            nonlocal calls
            database = isinstance(getattr(called, "__self__", None), sqlite3.Connection | sqlite3.Cursor)
            if event == "c_call" and (database or called is os.rename):
                calls += 1
                if calls == step:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.setprofile(count)
            taken_over(folder)
            os._exit(0)
        finally:
            os._exit(1)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ended in (0, -signal.SIGKILL), step
    return ended != 0


def test_it_is_done_once(tmp_path: Path) -> None:
    folder = old_state(tmp_path)
    first = taken_over(folder)
    rows = HttpBatches(folder)
    file = EXPECTED["batches_by_status"]["unused_file"]
    assert rows.delete_file(file) is None
    assert not migrate_gateway_db(folder, rows)
    assert not rows.has_file(file)
    rows.close()
    assert len(first["files"]) == len(taken_over(folder)["files"]) + 1


def test_a_desk_whose_creation_was_interrupted(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / GATEWAY_DB).close()
    rows = HttpBatches(tmp_path)
    (tmp_path / GATEWAY_DB).touch()
    assert migrate_gateway_db(tmp_path, rows)
    assert rows.batches(None, Page(10)) == []
    rows.close()


def test_an_older_gateway_that_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_db, "_BUSY_S", 0.1)
    folder = old_state(tmp_path)
    running = sqlite3.connect(folder / GATEWAY_DB, isolation_level=None)
    running.execute("SELECT count(*) FROM batches").fetchone()
    rows = HttpBatches(folder)
    with pytest.raises(StoreInUse):
        migrate_gateway_db(folder, rows)
    assert batches_by_status(folder) == dict.fromkeys(batches_by_status(folder) or (), 0)
    running.close()
    assert migrate_gateway_db(folder, rows)
    rows.close()


def test_jobs_of_the_older_store_are_kept(tmp_path: Path) -> None:
    folder = old_state(tmp_path)
    taken_over(folder)
    with Store(folder) as store:
        stored = store.named(EXPECTED["batches_by_status"]["in_progress"])
        assert (stored.counts.done, stored.counts.pending) == (1, 2)
