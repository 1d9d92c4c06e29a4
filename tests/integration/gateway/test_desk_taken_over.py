"""Import of the files and batches that an older gateway stored in desk.db."""

import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from support import patient
from support.batches import lines_of, until
from support.desk import EXPECTED, old_state
from support.fake_engine import FakeEngine
from support.gateway import Served, config_in, fake_engines, served
from support.gateway_clients import open_gate
from support.jobs_store import Clock
from tokenmill.errors import StoreError
from tokenmill.gateway import app
from tokenmill.gateway.batches import routes
from tokenmill.gateway.batches.service import BatchService
from tokenmill.gateway.http import keys
from tokenmill.jobs.store.gateway_db import GATEWAY_DB, MIGRATED
from tokenmill.jobs.store.store import Store

ENDS = {"cancelling": "cancelled"} | dict.fromkeys(("in_progress", "finalizing", "validating"), "completed")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    made.now_s = EXPECTED["now_s"]
    monkeypatch.setattr(
        app, "extra_groups", lambda state: (routes.route_group(state, BatchService(state, 0.02, made)),)
    )
    return made


def listed(gateway: Served, secrets: dict[str, str]) -> dict[str, Any]:
    """What each key is told of files and batches."""
    return {
        name: {
            kind: patient.get(f"{gateway.url}/v1/{kind}", headers={"Authorization": f"Bearer {secret}"}).json()
            for kind in ("files", "batches")
        }
        for name, secret in secrets.items()
    }


def without_ids(state: Path) -> None:
    """Keys as an older version stored them: its files belong to their names."""
    path = keys.path_in(state)
    path.write_text(re.sub(r'"id": "[^"]*"', '"id": ""', path.read_text()))


def test_everything_is_there_and_goes_on(tmp_path: Path, clock: Clock) -> None:
    folder = old_state(tmp_path)
    secrets = {name: keys.add(tmp_path, name) for name in ("eva", "adam")}
    without_ids(tmp_path)
    made: list[FakeEngine] = []

    def make() -> list[tuple[str, FakeEngine]]:
        made.append(FakeEngine())
        return [("fake", made[-1])]

    with Store(folder, clock=clock), served(fake_engines(make), config_in(tmp_path)) as gateway:  # nothing moves yet
        assert listed(gateway, secrets) == EXPECTED["listed"]
        assert not (folder / GATEWAY_DB).exists()
        assert (folder / MIGRATED).exists()
    with served(fake_engines(make), config_in(tmp_path)) as gateway:
        open_gate(gateway, made[-1])
        clients = {name: gateway.client(secret) for name, secret in secrets.items()}
        for name, before in EXPECTED["listed"].items():
            for batch in before["batches"]["data"]:
                was = batch["status"]
                now = until(clients[name], clients[name].batches.retrieve(batch["id"]), ENDS.get(was, was))
                if was not in ENDS:
                    assert now.model_dump(exclude_unset=True) == batch
                if now.output_file_id:
                    assert len(lines_of(clients[name], now.output_file_id)) == now.request_counts.completed
                if now.error_file_id:
                    assert len(lines_of(clients[name], now.error_file_id)) == now.request_counts.failed
        assert sorted(made[-1].seen.streams) == ["gated 0", "gated 1", "gated w", "valid"]  # nothing is computed twice
        after = listed(gateway, secrets)
    with served(fake_engines(make), config_in(tmp_path)) as gateway:
        assert listed(gateway, secrets) == after


@pytest.mark.usefixtures("clock")
def test_a_desk_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    folder = old_state(tmp_path)
    with sqlite3.connect(folder / GATEWAY_DB) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with (
        pytest.raises(StoreError, match="newer tokenmill"),
        served(fake_engines(lambda: [("fake", FakeEngine())]), config_in(tmp_path)),
    ):
        pass
    assert (folder / GATEWAY_DB).exists()
