"""The sensor, checks, pools, termination and the development server."""

import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import httpx
import pytest
from dagster._core.definitions.sensor_definition import SensorExecutionData
from dagster_tokenmill import TokenmillResource, batch_asset, checks_for, finished_batches_sensor, pools

from support import patient
from support.batches import created, prompt_line
from support.batches import until as comes_to
from support.dagster_runs import LIMIT_S, batches, command, environment, home_in, instance_in, until
from support.fake_engine import FakeEngine
from support.gateway import Served
from support.gateway_clients import faked

SLOTS = 3


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[tuple[Served, FakeEngine]]:
    with faked(tmp_path / "state", slots=SLOTS) as found:
        yield found


def line(name: str, prompt: str) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt}}


def resource(url: str) -> TokenmillResource:
    return TokenmillResource(base_url=url, model="fake", poll_s=0.05)


# The sensor.


@dg.op
def nothing() -> None:
    pass


@dg.job
def follow() -> None:
    nothing()


def ticked(sensor: dg.SensorDefinition, url: str, cursor: str | None) -> SensorExecutionData:
    with dg.DagsterInstance.ephemeral() as instance:
        context = dg.build_sensor_context(instance, cursor=cursor, resources={"tokenmill": resource(url)})
        return sensor.evaluate_tick(context)


def test_the_sensor_reports_each_batch_once(gateway: tuple[Served, FakeEngine]) -> None:
    served_at, _ = gateway
    client, wanted = served_at.client(), {"source": "by hand"}
    sensor = finished_batches_sensor("over", target=follow, metadata=wanted)
    old = comes_to(client, created(client, prompt_line("a", "x"), metadata=wanted), "completed")
    slow = created(client, prompt_line("a", "slow"), prompt_line("b", "y"), metadata=wanted)

    first = ticked(sensor, served_at.url, None)
    assert not first.run_requests  # earlier batches are not reported
    quick = comes_to(client, created(client, prompt_line("a", "z"), metadata=wanted), "completed")
    comes_to(client, created(client, prompt_line("a", "other")), "completed")
    second = ticked(sensor, served_at.url, first.cursor)
    assert [run.tags["tokenmill/batch"] for run in second.run_requests or ()] == [quick.id]
    assert not ticked(sensor, served_at.url, second.cursor).run_requests

    client.batches.cancel(slow.id)
    comes_to(client, slow, "cancelled")
    every = finished_batches_sensor(
        "ends", target=follow, statuses=("completed", "cancelled"), from_the_start=True, metadata=wanted
    )
    third = ticked(every, served_at.url, second.cursor)
    assert [run.run_key for run in third.run_requests or ()] == [f"{slow.id}:cancelled"]
    assert not ticked(every, served_at.url, third.cursor).run_requests
    whole = ticked(every, served_at.url, None)
    assert [run.tags["tokenmill/batch"] for run in whole.run_requests or ()] == [old.id, slow.id, quick.id]


def test_the_sensor_materialises_external_assets(gateway: tuple[Served, FakeEngine]) -> None:
    served_at, _ = gateway
    client = served_at.client()
    batch = comes_to(client, created(client, prompt_line("a", "x"), metadata={"partition": "mon"}), "completed")
    sensor = finished_batches_sensor("made", asset="elsewhere", from_the_start=True)
    (event,) = ticked(sensor, served_at.url, None).asset_events
    assert isinstance(event, dg.AssetMaterialization)
    assert (event.asset_key, event.partition) == (dg.AssetKey("elsewhere"), "mon")
    assert event.metadata["answers"].value == 1
    assert str(event.metadata["batch"].value).endswith(batch.id)


def test_the_sensor_skips_a_tick_without_a_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagster_tokenmill.sensor.PATIENCE_S", 0.01)
    data = ticked(finished_batches_sensor("over", target=follow), "http://127.0.0.1:9", "[null, 0, []]")
    assert "http://127.0.0.1:9" in (data.skip_message or "")


# Checks.


def test_checks_of_written_tables(gateway: tuple[Served, FakeEngine], tmp_path: Path) -> None:
    def judged(row: Any) -> str | None:
        return None if row["text"] and "two" not in row["text"] else "it is not wanted"

    jobs = [line(f"l{number}", prompt) for number, prompt in enumerate(("one", "one", "two", "three"))]
    nights = dg.StaticPartitionsDefinition(["mon", "tue"])
    answers = batch_asset(
        "answers",
        path=str(tmp_path / "{partition}.parquet"),
        partitions_def=nights,
        lines=lambda context: jobs if context.partition_key == "mon" else jobs[1:2],
    )
    checks = checks_for(answers, rows=(2, 10), duplicates_at_most=0.1, valid=judged, invalid_at_most=0.2)
    found = {}
    for night in ("mon", "tue"):
        result = dg.materialize(
            [answers, *checks], resources={"tokenmill": resource(gateway[0].url)}, partition_key=night
        )
        for one in result.get_asset_check_evaluations():
            found[night, one.check_name] = (one.passed, one.description)
            assert str(one.metadata["table"].value) == str(tmp_path / f"{night}.parquet")
    assert found == {
        ("mon", "row_count"): (True, "4 rows, 2 to 10 expected"),
        ("mon", "duplicates"): (False, "1 of 4 rows repeat an earlier row (25.0%); the limit is 10.0%"),
        ("mon", "validity"): (False, "1 of 4 rows are invalid (25.0%); the limit is 20.0%"),
        ("tue", "row_count"): (False, "1 rows, 2 to 10 expected"),
        ("tue", "duplicates"): (True, "0 of 1 rows repeat an earlier row (0.0%); the limit is 10.0%"),
        ("tue", "validity"): (True, "0 of 1 rows are invalid (0.0%); the limit is 20.0%"),
    }


# Pools.


def test_the_pool_has_the_number_of_slots_and_limits_submitted_batches(
    gateway: tuple[Served, FakeEngine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    served_at, engine = gateway
    home = home_in(tmp_path / "home")
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    assert pools.main(["pools", "--url", served_at.url]) == 0
    assert capsys.readouterr().out == f"tokenmill {SLOTS}\n"
    assert pools.main(["pools", "--url", served_at.url, "--lanes-each", str(SLOTS)]) == 0
    with instance_in(home) as instance:
        assert instance.event_log_storage.get_concurrency_info("tokenmill").slot_count == 1
    with monkeypatch.context() as hasty:
        hasty.setattr("dagster_tokenmill.gateway.FIRST_PAUSE_S", 60.0)  # longer than its patience: a single request
        assert pools.main(["pools", "--url", "http://127.0.0.1:9"]) == 1
    assert "http://127.0.0.1:9" in capsys.readouterr().err

    made: dict[str, dg.ExecuteInProcessResult] = {}

    def run(name: str, prompt: str) -> None:
        one = batch_asset(name, path=str(tmp_path / f"{name}.jsonl"), lines=lambda _: [line("a", prompt)])
        with instance_in(home) as instance:
            made[name] = dg.materialize(
                [one], instance=instance, resources={"tokenmill": resource(served_at.url)}, raise_on_error=False
            )

    first, second = (threading.Thread(target=run, args=args) for args in (("held", "slow"), ("next", "one")))
    first.start()
    until(lambda: len(engine.at_work) == 1)
    second.start()
    with instance_in(home) as instance:
        # Wait until the step is queued: Dagster loses a slot that is freed between a step's request for a slot and its
        # entry in the queue.
        until(lambda: instance.event_log_storage.get_concurrency_info("tokenmill").pending_step_count == 1)
    (held,) = batches(served_at.url)  # the other step waits in Dagster
    patient.post(f"{served_at.url}/v1/batches/{held['id']}/cancel").raise_for_status()
    first.join(LIMIT_S)
    second.join(LIMIT_S)
    assert (made["held"].success, made["next"].success) == (False, True)
    assert [batch["status"] for batch in batches(served_at.url)] == ["completed", "cancelled"]


# Termination.

TERMINATED = """
import os
import dagster as dg
from dagster_tokenmill import TokenmillResource, batch_asset
JOB = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "slow"}}
defs = dg.Definitions(
    assets=[batch_asset("answers", path=os.environ["TABLE"], lines=lambda _: [JOB])],
    resources={"tokenmill": TokenmillResource(
        base_url=os.environ["TOKENMILL_URL"], model="fake", poll_s=0.05,
        cancel_on_termination=os.environ["CANCEL"] == "yes",
    )},
    executor=dg.in_process_executor,
)
"""


@pytest.mark.parametrize(("cancel", "status"), [("no", "in_progress"), ("yes", "cancelled")])
def test_a_terminated_run_cancels_its_batch_only_if_configured(
    gateway: tuple[Served, FakeEngine], tmp_path: Path, cancel: str, status: str
) -> None:
    served_at, engine = gateway
    (tmp_path / "terminated.py").write_text(TERMINATED)
    table = tmp_path / "t.jsonl"
    env = environment(home_in(tmp_path / "home"), served_at.url, TABLE=str(table), CANCEL=cancel)
    words = ("asset", "materialize", "-f", "terminated.py", "--select", "answers")
    with command(*words, env=env, folder=tmp_path) as process:
        until(lambda: len(engine.at_work) == 1, process)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=LIMIT_S)
        assert process.returncode != 0
    client = served_at.client()
    (batch,) = client.batches.list().data
    assert comes_to(client, batch, status, "cancelling" if cancel == "yes" else status).status in (status, "cancelling")
    assert not table.exists()


# The development server.


def test_dagster_dev_serves_the_project(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = environment(home_in(tmp_path), "http://127.0.0.1:9")
    asked = {"query": "{ assetNodes { assetKey { path } pools hasAssetChecks } }"}
    found: list[dict[str, Any]] = []

    def answers() -> bool:
        try:
            told = patient.post(f"http://127.0.0.1:{port}/graphql", json=asked).json()
        except httpx.TransportError:
            return False
        found[:] = (told.get("data") or {}).get("assetNodes") or []
        return bool(found)

    with command("dev", "--port", str(port), "--host", "127.0.0.1", env=env) as process:
        until(answers, process)
    pooled = {node["assetKey"]["path"][0]: node["pools"] for node in found}
    assert pooled == {"notes": [], **{name: ["tokenmill"] for name in ("headlines", "summaries", "dataset", "teacher")}}
    assert {node["assetKey"]["path"][0] for node in found if node["hasAssetChecks"]} == {"headlines", "dataset"}
