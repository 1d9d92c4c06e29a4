"""The example project on a real engine: its run is killed in the middle, and the next one computes nothing twice."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support import patient
from support.dagster_runs import batches, command, done, environment, facts, home_in, instance_in, kill, until
from support.gateway import Served, config_in, native_engine, served
from tokenmill.storage.rows import read_rows

NIGHT = "2026-11-02"
NOTES = 12
ONE_PROCESS = '{"execution": {"config": {"in_process": {}}}}'
RUN = ("asset", "materialize", "-m", "nightly.definitions", "--config-json", ONE_PROCESS)


@pytest.fixture(scope="module")
def gateway(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    state = tmp_path_factory.mktemp("state")
    with served(native_engine(smollm2_path, context=1024, sequences=4), config_in(state)) as one:
        yield one


def generated(gateway: Served) -> int:
    """Tokens that the engine has written since it started."""
    return int(patient.get(f"{gateway.url}/api/status").json()["engines"][0]["counters"]["generated_tokens"])


def test_a_killed_run_finds_its_batch_again(gateway: Served, tmp_path: Path) -> None:
    home = home_in(tmp_path / "home")
    env = environment(home, gateway.url, NIGHTLY_OUT=str(tmp_path / "out"), NIGHTLY_TOKENS="32", NIGHTLY_POLL_S="0.2")
    before = generated(gateway)

    def at_work() -> bool:
        return any(batch["request_counts"]["completed"] > 0 for batch in batches(gateway.url))

    with command(*RUN, "--select", "+headlines", "--partition", NIGHT, env=env) as first:
        until(at_work, first)
        kill(first)
    (left,) = batches(gateway.url)
    assert left["status"] == "in_progress"  # nobody told the gateway
    assert not (tmp_path / "out" / "headlines" / f"{NIGHT}.parquet").exists()

    with command(*RUN, "--select", "+headlines", "--partition", NIGHT, env=env) as second:
        done(second)
    (batch,) = batches(gateway.url)
    assert (batch["id"], batch["status"]) == (left["id"], "completed")
    # nothing was written that is in no answer, but for what ends one
    assert 0 <= generated(gateway) - before - batch["usage"]["output_tokens"] <= NOTES
    with instance_in(home) as instance:
        told = facts(instance, "headlines", NIGHT)
    assert told["re-attached"] == [batch["id"]]
    rows = list(read_rows(Path(told["table"])))
    assert [row["custom_id"] for row in rows] == [f"note-{number:02}" for number in range(1, NOTES + 1)]
    assert told["generated tokens"] == batch["usage"]["output_tokens"] == sum(row["completion_tokens"] for row in rows)
    assert told["dagster/row_count"] == told["answers"] == NOTES
    assert told["cached tokens"] > 0
    assert told["generated tok/s"] > 0
    assert told["page"] == f"{gateway.url}/"
    assert told["cost EUR"] == pytest.approx(told["seconds"] / 3600 * 0.40, abs=1e-6)


def test_the_recipes_of_the_project(gateway: Served, tmp_path: Path) -> None:
    home = home_in(tmp_path / "home")
    env = environment(home, gateway.url, NIGHTLY_OUT=str(tmp_path / "out"), NIGHTLY_POLL_S="0.2")
    whole = (*RUN, "--select", "summaries,dataset,teacher", "--partition", NIGHT)
    with command(*whole, env=env) as night:
        done(night)
    with instance_in(home) as instance:
        summaries = facts(instance, "summaries")
    there, before = len(batches(gateway.url)), generated(gateway)
    with command(*whole, env=env) as again:
        done(again)
    assert (len(batches(gateway.url)), generated(gateway)) == (there, before)
    with instance_in(home) as instance:
        unchanged, dataset, teacher = (facts(instance, name) for name in ("summaries", "dataset", "teacher"))
    assert summaries["done"] == summaries["documents"] == summaries["dagster/row_count"] == 2
    assert {row["document"] for row in read_rows(Path(summaries["table"]))} == {"cooling.md", "power.md"}
    assert (unchanged["unchanged"], unchanged["batches"], unchanged["dagster/row_count"]) == (2, [], 2)
    assert dataset["made"] == 6
    assert dataset["dagster/row_count"] == dataset["kept"] + 3 > 3  # the seeds are kept, and something grew
    assert len(dataset["re-attached"]) == 1
    assert teacher["asked"] == teacher["dagster/row_count"] == dataset["dagster/row_count"]
    assert teacher["re-attached"] == teacher["batches"]
