"""Assets, retries, partitions, budgets and restarts, in the real Dagster, on a gateway with a fake engine."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from dagster_tokenmill import BatchResult, TokenmillResource, batch_asset

from support import patient
from support.dagster_runs import LIMIT_S, batches, until
from support.fake_engine import FakeEngine
from support.gateway import Served, config_in, fake_engines, served
from support.gateway_clients import faked
from support.jobs_store import Clock
from tokenmill.config import Config, GatewayConfig
from tokenmill.gateway import app
from tokenmill.gateway.batches import routes as gateway_batches
from tokenmill.gateway.batches.service import BatchService
from tokenmill.gateway.monitoring import dashboard_api
from tokenmill.recipes.runner import Answered
from tokenmill.storage.rows import read_rows


def line(name: str, prompt: str) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt}}


def resource(url: str, **more: Any) -> TokenmillResource:
    return TokenmillResource(**{"base_url": f"{url}/v1/", "model": "fake", "poll_s": 0.05, **more})


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[tuple[Served, FakeEngine]]:
    with faked(tmp_path / "state") as found:
        yield found


def materialized(
    *assets: Any, tokenmill: TokenmillResource, partition: str | None = None, **how: Any
) -> dg.ExecuteInProcessResult:
    return dg.materialize(list(assets), resources={"tokenmill": tokenmill}, partition_key=partition, **how)


def failed_step(result: dg.ExecuteInProcessResult) -> tuple[str, str]:
    """The error code and the message of the only failed step."""
    (failed,) = result.filter_events(lambda event: event.is_step_failure)
    data = failed.step_failure_data.user_failure_data
    assert data is not None
    return str(data.metadata["code"].value), data.description or ""


def facts(result: dg.ExecuteInProcessResult, asset: str) -> dict[str, Any]:
    (made,) = result.asset_materializations_for_node(asset)
    return {name: value.value for name, value in made.metadata.items()}


def test_rows_are_in_line_order_and_downstream_assets_get_the_path(
    gateway: tuple[Served, FakeEngine], tmp_path: Path
) -> None:
    served_at, _ = gateway
    got: list[str] = []

    @dg.asset
    def lines() -> list[dict[str, Any]]:
        return [line(f"l{number}", prompt) for number, prompt in enumerate(("z", "too long", "a"))]

    @dg.asset
    def after(answers: str) -> None:
        got.append(answers)

    answers = batch_asset("answers", path=str(tmp_path / "{asset}.jsonl"), lines=lines)
    result = materialized(lines, answers, after, tokenmill=resource(served_at.url))
    told = facts(result, "answers")
    assert got == [told["table"]] == [str(tmp_path / "answers.jsonl")]
    rows = list(read_rows(Path(got[0])))
    assert [(row["custom_id"], row["text"], row["error_code"]) for row in rows] == [
        ("l0", "z: 0 1 2 3", None),
        ("l1", None, "too_long"),
        ("l2", "a: 0 1 2 3", None),
    ]
    assert (told["lines"], told["answers"], told["lines without an answer"]) == (3, 2, 1)
    assert (told["end"], told["model"], told["build"]) == ("finished", "fake", "fake 1")
    assert told["batch"] == f"{served_at.url}/v1/batches/{told['batches'][0]}"
    assert patient.get(told["batch"]).json()["status"] == "completed"


def test_a_retry_reuses_the_existing_batch(gateway: tuple[Served, FakeEngine], tmp_path: Path) -> None:
    served_at, engine = gateway
    failures = iter([True, False])

    def row(answer: Answered) -> dict[str, Any]:
        if answer.custom_id == "b" and next(failures):
            raise RuntimeError("the disk is full")
        return {"custom_id": answer.custom_id}

    flaky = batch_asset(
        "flaky",
        path=str(tmp_path / "flaky.jsonl"),
        lines=lambda _: [line("a", "one"), line("b", "two")],
        rows=row,
        columns={"custom_id": "string"},
        retry_policy=dg.RetryPolicy(max_retries=1),
    )
    result = materialized(flaky, tokenmill=resource(served_at.url))
    assert result.success
    assert result.retry_attempts_for_node("flaky") == 1
    (batch,) = batches(served_at.url)
    assert facts(result, "flaky")["re-attached"] == [batch["id"]]
    assert sorted(engine.seen.streams) == ["one", "two"]


def test_each_partition_is_a_batch(gateway: tuple[Served, FakeEngine], tmp_path: Path) -> None:
    served_at, engine = gateway
    nights = dg.StaticPartitionsDefinition(["mon", "tue/wed"])
    answers = batch_asset(
        "nightly",
        path=str(tmp_path / "{partition}" / "t.jsonl"),
        lines=lambda _: [line("a", "the same")],
        partitions_def=nights,
    )
    tokenmill = resource(served_at.url)
    files = [
        facts(materialized(answers, tokenmill=tokenmill, partition=night), "nightly")["table"]
        for night in ("mon", "tue/wed", "mon")
    ]
    assert files == [str(tmp_path / name / "t.jsonl") for name in ("mon", "tue%2Fwed", "mon")]
    found = batches(served_at.url)
    assert [batch["metadata"]["dagster_partition"] for batch in found] == ["tue/wed", "mon"]
    assert {batch["metadata"]["dagster_asset"] for batch in found} == {"nightly"}
    assert engine.seen.streams == ["the same"]  # the second batch found the answer of the first


def test_failed_lines_are_retried_when_the_asset_is_materialised_again(
    gateway: tuple[Served, FakeEngine], tmp_path: Path
) -> None:
    served_at, engine = gateway
    answers = batch_asset(
        "answers", path=str(tmp_path / "t.jsonl"), lines=lambda _: [line("a", "fine"), line("b", "too long")]
    )
    for tries in (1, 2):
        told = facts(materialized(answers, tokenmill=resource(served_at.url)), "answers")
        assert (told["answers"], told["re-attached"], len(batches(served_at.url))) == (1, [], tries)
    kept = facts(materialized(answers, tokenmill=resource(served_at.url, retry_failed=False)), "answers")
    assert len(kept["re-attached"]) == 1
    assert engine.seen.streams.count("fine") == 1
    assert engine.seen.streams.count("too long") == 2


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ([line("a", "one"), line("a", "two")], "custom_id 'a'"),
        ([{**line("a", "one"), "body": {"prompt": "x", "model": "other"}}], "other"),
    ],
)
def test_lines_that_the_gateway_refuses(
    gateway: tuple[Served, FakeEngine], tmp_path: Path, lines: list[dict[str, Any]], named: str
) -> None:
    answers = batch_asset(
        "answers", path=str(tmp_path / "t.jsonl"), lines=lambda _: lines, retry_policy=dg.RetryPolicy(max_retries=2)
    )
    result = materialized(answers, tokenmill=resource(gateway[0].url), raise_on_error=False)
    code, message = failed_step(result)
    assert code == "batch_refused"
    assert named in message
    assert result.retry_attempts_for_node("answers") == 0
    assert not (tmp_path / "t.jsonl").exists()


def test_no_gateway_at_the_address() -> None:
    unreachable = resource("http://127.0.0.1:9", first_patience_s=0.0)
    with pytest.raises(dg.Failure) as caught:
        unreachable.slots()
    assert caught.value.allow_retries
    assert caught.value.metadata["code"].value == "gateway_unavailable"
    assert "tokenmill serve" in str(caught.value.metadata["hint"].value)


def in_a_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    box: list[Any] = []
    thread = threading.Thread(target=lambda: box.append(work()))
    thread.start()
    return thread, box


def test_a_budget_cancels_the_batch_and_the_next_run_has_the_whole_budget(
    gateway: tuple[Served, FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served_at, engine = gateway
    jobs = [line("a", "one"), line("b", "a slow one")]
    answers = batch_asset("answers", path=str(tmp_path / "t.jsonl"), lines=lambda _: jobs, max_tokens_total=3)
    told = facts(materialized(answers, tokenmill=resource(served_at.url)), "answers")
    assert (told["end"], told["dagster/row_count"]) == ("tokens", 1)
    assert [row["custom_id"] for row in read_rows(Path(told["table"]))] == ["a"]
    assert [batch["status"] for batch in batches(served_at.url)] == ["cancelled"]

    clock = Clock()
    monkeypatch.setattr("dagster_tokenmill.runner.time", SimpleNamespace(monotonic=clock))
    thread, box = in_a_thread(lambda: resource(served_at.url).run_batch(None, jobs, scope=("x",), max_hours=1))
    until(lambda: [batch["request_counts"]["completed"] for batch in batches(served_at.url)] == [1, 1])
    clock.now_s += 3600
    thread.join(LIMIT_S)
    (result,) = box
    assert isinstance(result, BatchResult)
    assert (result.end, [answer.custom_id for answer in result.answers]) == ("hours", ["a"])
    assert engine.seen.streams.count("one") == 1


def test_a_batch_cancelled_by_another_client_fails_the_asset(
    gateway: tuple[Served, FakeEngine], tmp_path: Path
) -> None:
    served_at, engine = gateway
    answers = batch_asset("answers", path=str(tmp_path / "t.jsonl"), lines=lambda _: [line("a", "slow")])
    thread, box = in_a_thread(lambda: materialized(answers, tokenmill=resource(served_at.url), raise_on_error=False))
    until(lambda: len(engine.at_work) == 1)
    (batch,) = batches(served_at.url)
    patient.post(f"{served_at.url}/v1/batches/{batch['id']}/cancel").raise_for_status()
    thread.join(LIMIT_S)
    code, message = failed_step(box[0])
    assert code == "batch_cancelled"
    assert batch["id"] in message
    assert "0 of 1" in message


def test_an_expired_batch_fails_the_asset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(
        app,
        "extra_groups",
        lambda state: (
            gateway_batches.route_group(state, BatchService(state, 0.02, clock)),
            dashboard_api.route_group(state),
        ),
    )
    jobs = [line("a", "one"), line("b", "slow")]
    answers = batch_asset("answers", path=str(tmp_path / "t.jsonl"), lines=lambda _: jobs)
    with faked(tmp_path / "state") as (served_at, engine):
        tokenmill = resource(served_at.url, window="1h")
        thread, box = in_a_thread(lambda: materialized(answers, tokenmill=tokenmill, raise_on_error=False))
        until(lambda: [batch["request_counts"]["completed"] for batch in batches(served_at.url)] == [1])
        clock.now_s += 3600
        thread.join(LIMIT_S)
        assert [batch["status"] for batch in batches(served_at.url)] == ["expired"]
    code, message = failed_step(box[0])
    assert code == "batch_expired"
    assert "1 of 2" in message
    assert engine.seen.streams.count("one") == 1


def test_the_gateway_is_restarted_in_the_middle(tmp_path: Path) -> None:
    seen: list[FakeEngine] = []

    def engines() -> list[tuple[str, FakeEngine]]:
        seen.append(FakeEngine(seen[0].seen if seen else None, slots=2))
        return [("fake", seen[-1])]

    jobs = [line(f"l{number}", f"steady {number}") for number in range(12)]
    answers = batch_asset("answers", path=str(tmp_path / "t.jsonl"), lines=lambda _: jobs)
    with served(fake_engines(engines), config_in(tmp_path / "state")) as first:
        port = first.port
        thread, box = in_a_thread(lambda: materialized(answers, tokenmill=resource(first.url), raise_on_error=False))
        until(lambda: any(batch["request_counts"]["completed"] > 0 for batch in batches(first.url)))
    again = Config(state_dir=str(tmp_path / "state"), gateway=GatewayConfig(port=port, log="off"))
    with served(fake_engines(engines), again) as second:
        thread.join(LIMIT_S)
        assert box[0].success
        (batch,) = batches(second.url)
    told = facts(box[0], "answers")
    assert (told["batches"], told["answers"]) == ([batch["id"]], len(jobs))
    assert [row["text"] for row in read_rows(tmp_path / "t.jsonl")] == [f"steady {n}: 0 1 2 3" for n in range(12)]


def test_a_batch_whose_files_are_gone_is_submitted_again(gateway: tuple[Served, FakeEngine], tmp_path: Path) -> None:
    served_at, engine = gateway
    answers = batch_asset("answers", path=str(tmp_path / "t.jsonl"), lines=lambda _: [line("a", "one")])
    materialized(answers, tokenmill=resource(served_at.url))
    (batch,) = batches(served_at.url)
    patient.request("DELETE", f"{served_at.url}/v1/files/{batch['output_file_id']}").raise_for_status()
    told = facts(materialized(answers, tokenmill=resource(served_at.url)), "answers")
    assert (told["answers"], told["re-attached"], len(batches(served_at.url))) == (1, [], 2)
    assert engine.seen.streams == ["one"]
