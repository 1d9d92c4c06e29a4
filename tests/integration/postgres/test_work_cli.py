"""`tokenmill run` on one host and `tokenmill work` on another, with real engines: one batch, one output."""

import json
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from support.jobs_store import answer, submitted
from support.postgres import Cluster, cluster
from support.run_cli import SMALL, command, environment, names, tokenmill, until, write
from tokenmill.cli import run
from tokenmill.errors import StoreError
from tokenmill.jobs.models import JobId
from tokenmill.jobs.sharding.coordination import Runner
from tokenmill.jobs.store.address import PostgresAddress
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.jobs.store.store import Store

DIGESTS = [
    " ".join(f"Rule {rule} of house {house}: a report names its author." for rule in range(12)) for house in range(4)
]


def lines() -> list[Mapping[str, Any]]:
    return [
        {"custom_id": f"{house}-{word}", "prompt": f"{digest}\nNow say {word}.", "max_tokens": 4, "temperature": 0}
        for word in ("one", "two", "three")
        for house, digest in enumerate(DIGESTS)
    ]


def begun(home: Path, *words: object) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    return subprocess.Popen(command(*words), env=environment(home), stdout=pipe, stderr=pipe, text=True)


def runners(server: PostgresAddress) -> list[Runner]:
    try:
        with StoreReader(server) as reader:
            return reader.runners()
    except StoreError:  # it is being made
        return []


def test_a_batch_of_one_host_is_worked_on_by_two(postgres: Cluster, smollm2_path: Path, tmp_path: Path) -> None:
    server, output = postgres.fresh(), tmp_path / "out.jsonl"
    jobs = write(tmp_path / "jobs.jsonl", lines())
    words = ("--store", server.url, "--model", smollm2_path, *SMALL, "--no-warm", "--json")
    two = begun(tmp_path / "two", "work", *words, "--stay")
    try:
        until(lambda: bool(runners(server)) or two.poll() is not None)
        one = begun(tmp_path / "one", "run", jobs, "-o", output, *words)
        try:
            first = one.communicate(timeout=200)
        finally:
            one.kill()
        two.terminate()  # it waits for more, or is still loading
        second = two.communicate(timeout=200)
    finally:
        two.kill()
    assert (one.returncode, two.returncode) == (0, 143), (first[1][-2000:], second[1][-2000:])
    ran, worked = json.loads(first[0]), json.loads(second[0])
    assert (ran["jobs"], ran["succeeded"], ran["pending"]) == (12, 12, 0)
    assert ran["computed"] + worked["computed"] == ran["batch_totals"]["computed"] == 12
    assert names(output) == [line["custom_id"] for line in lines()]
    assert runners(server) == []
    # The same again finds everything done, wherever it is said; a runner finds nothing to do.
    again = tokenmill(tmp_path / "two", "run", jobs, "-o", output, *words)
    assert (again.returncode, json.loads(again.stdout)["computed"]) == (0, 0), again.stderr
    idle = tokenmill(tmp_path / "two", "work", *words)
    assert (idle.returncode, json.loads(idle.stdout)["batches"]) == (0, []), idle.stderr


def test_a_worker_that_begins_while_the_server_starts_up_waits_for_it(smollm2_path: Path, tmp_path: Path) -> None:
    with cluster() as own:
        server = own.fresh()
        with own.starting_up() as promote:
            words = ("--store", server.url, "--model", smollm2_path, *SMALL, "--stay")
            worker = begun(tmp_path, "work", *words)
            try:
                assert worker.stderr is not None
                assert "waiting up to 60 s" in worker.stderr.readline()
                promote()
                while "waiting for batches" not in (line := worker.stderr.readline()):
                    assert line
                worker.send_signal(signal.SIGHUP)
                _, said = worker.communicate(timeout=200)
            finally:
                worker.kill()
    assert worker.returncode == 129
    assert "stopping (SIGHUP)" in said


def test_the_commands_for_batches_take_a_server(
    postgres: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    server = postgres.fresh()
    config = tmp_path / "tokenmill.toml"
    config.write_text(f'store = "{server.url}"\n')
    there = ("--config", str(config))
    assert run(["status", *there]) == 0
    assert "no batches in postgresql://" in capsys.readouterr().out.replace("\n", " ")
    with Store(server) as store:
        batch = submitted(store, tmp_path / "j", ["a", "b", "c"])
        store.start([JobId.of(batch.id, 1)])
        assert run(["status", "last", *there]) == 0
        said = capsys.readouterr().out
        assert "running (1 runner: " in said
        assert run(["status", *there, "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)
        assert [each["running"] for each in found["runners"]] == [1]
        store.commit([answer(JobId.of(batch.id, 1))])
    assert run(["cancel", "last", *there]) == 0
    assert f"cancelled {batch.name}" in capsys.readouterr().err
    assert run(["retry", "last", "--cancelled", *there]) == 0
    assert "2 jobs" in capsys.readouterr().err
    assert run(["results", "last", "--store", server.url]) == 0
    assert [json.loads(line)["custom_id"] for line in capsys.readouterr().out.splitlines()] == ["1-a"]


def test_a_folder_is_for_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["work", "--store", str(tmp_path), "--model", "x.gguf"]) == 2
    assert "--store postgresql://" in capsys.readouterr().err
