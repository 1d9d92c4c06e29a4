"""`tokenmill run` with crashing engines, deadlines, servers, interactive requests and files in the way."""

import asyncio
import json
import os
import re
import shutil
import signal
import sqlite3
import time
from pathlib import Path

import pytest

from support.run_cli import (
    LIMIT_S,
    SMALL,
    THINGS,
    begun,
    job,
    jobs,
    last_batch,
    names,
    ran_here,
    read,
    said,
    slow_at_the_end,
    tokenmill,
    until,
    write,
)
from support.tiny_models import write_nan
from tokenmill.cli import run as cli
from tokenmill.engine.engine import Chat, Request, Sampling, answer
from tokenmill.engine.process import registry
from tokenmill.errors import StoreError
from tokenmill.jobs.ingest.submit import submit
from tokenmill.jobs.models import State, Submission
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.jobs.store.store import Store
from tokenmill.model.identity import identity_of
from tokenmill.native.launching import adopt

SERVER = ("--engine", "llama-server", *SMALL, "--no-warm")


def state_of(store: Path, number: int) -> State:
    """The state of a job of the newest batch."""
    try:
        with StoreReader(store) as reader:
            found = [result for result in reader.results(reader.batches()[-1].id, 0, 100) if result.number == number]
    except (StoreError, IndexError):
        return State.PENDING
    return found[0].state if found else State.PENDING


def test_a_job_that_kills_the_engine_is_found_and_quarantined(smollm2_path: Path, tmp_path: Path) -> None:
    store, state = tmp_path / "batches", tmp_path / "tokenmill"
    lines = [
        *jobs(THINGS[:5], max_tokens=10, ignore_eos=True),
        job("poison", "Say it.", max_tokens=600, ignore_eos=True),
    ]
    source, output = write(tmp_path / "jobs.jsonl", lines), tmp_path / "out.jsonl"
    words = (source, "--output", output, "--store", store, "--model", smollm2_path, *SMALL, "--no-warm", "--json")
    process, killed = begun(tmp_path, *words), set[int]()
    try:
        while len(killed) < 2:
            until(lambda: state_of(store, 6) is State.RUNNING or process.poll() is not None)
            assert process.poll() is None, process.stderr and process.stderr.read()
            for record in registry.listed(state):
                if record.engine.pid not in killed:
                    killed.add(record.engine.pid)
                    os.kill(record.engine.pid, signal.SIGSEGV)  # as a bug in the engine would
            until(lambda: state_of(store, 6) is not State.RUNNING)
        out, talk = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, talk
    totals = json.loads(out)
    assert (totals["succeeded"], totals["set_aside"], totals["engine_deaths"]) == (5, 1, 2)
    assert totals["failed_by_code"] == {"engine_died": 1}
    assert names(output) == [line["custom_id"] for line in lines]
    assert "SIGSEGV" in read(output)[5]["error"]["message"]
    assert "killed by SIGSEGV" in talk.decode()


def test_a_model_with_nan_in_its_weights_ends_the_run_and_stores_no_answer(tmp_path: Path) -> None:
    store, model = tmp_path / "batches", write_nan(tmp_path)
    source = write(tmp_path / "jobs.jsonl", jobs(THINGS[:6], max_tokens=4))
    output = tmp_path / "out.jsonl"
    words = (source, "--output", output, "--store", store, "--model", model, *SMALL, "--no-warm", "--json")
    done = tokenmill(tmp_path, "run", *words)
    assert done.returncode == 1, done.stderr
    assert "models verify" in done.stderr
    assert {state_of(store, number) for number in range(1, 7)} == {State.PENDING}
    assert not output.exists() or read(output) == []


def test_an_unusable_output_leaves_no_batch_behind(
    home: Path,
    store: tuple[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(home))
    source = write(tmp_path / "jobs.jsonl", jobs(THINGS[:2], max_tokens=1))
    (tmp_path / "thesis.txt").write_text("my thesis\n")
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    (tmp_path / "t.txt").write_text("Say {a}.")
    table = ("--table", tmp_path / "rows.csv", "--template", tmp_path / "t.txt")
    for jobs_from, wrong in (
        ((source,), ("--output", tmp_path / "nowhere" / "out.jsonl")),
        ((source,), ("--output", tmp_path / "thesis.txt")),
        ((source,), ("--output", tmp_path / "out.jsonl", "--errors", tmp_path / "out.jsonl")),
        (table, ("--output", tmp_path / "thesis.txt")),
        ((source,), ("--output", tmp_path / "out.jsonl", "--sequences", 0)),
    ):
        assert cli([*map(str, ("run", *jobs_from, *wrong, *store))]) == 2
        assert "error: " in capsys.readouterr().err
    assert cli([*map(str, ("status", *store))]) == 0
    assert "no batches" in capsys.readouterr().out
    assert not store[1].exists()

    (tmp_path / "out.jsonl").write_text('{"id":"batch_req_0123_1"}\n')
    assert cli([*map(str, ("run", source, "--output", tmp_path / "out.jsonl", *store))]) == 2
    assert "batch_0123" in capsys.readouterr().err
    assert cli([*map(str, ("status", *store, "--json"))]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_a_deadline_and_a_priority_may_change(
    home: Path, smollm2_path: Path, store: tuple[str, Path], tmp_path: Path
) -> None:
    lines = jobs(THINGS[:3], max_tokens=2)
    source, output = write(tmp_path / "jobs.jsonl", lines), tmp_path / "out.jsonl"
    # an earlier submission, with a deadline that has passed since
    with Store(store[1], clock=lambda: time.time() - 3600) as opened:
        how = Submission(identity_of(smollm2_path), output=str(output), deadline_s=time.time() - 60, priority=2)
        assert submit(opened, source, how).batch.counts.pending == 3
    late = tokenmill(home, "run", source, "--output", output, *store, "--json")
    assert late.returncode == 0, late.stderr
    assert "night" not in late.stderr, "no engine is needed"
    first = json.loads(late.stdout)
    assert (first["succeeded"], first["failed_by_code"]) == (0, {"deadline": 3})
    assert {line["error"]["code"] for line in read(output)} == {"deadline"}
    shown = said(home, "status", "last", *store).stdout
    assert re.search(r"priority +2", shown)
    assert re.search(r"deadline +\d", shown)
    again = tokenmill(home, "run", source, "--output", output, *store, "--deadline", "8h", "--priority", 3)
    assert again.returncode == 0, again.stderr
    assert "3 expired jobs" in again.stderr
    assert "priority is now 3" in again.stderr
    assert [line["error"] for line in read(output)] == [None] * 3
    assert names(output) == [line["custom_id"] for line in lines]


def test_a_retry_is_not_suggested_where_it_cannot_help(home: Path, store: tuple[str, Path], tmp_path: Path) -> None:
    source = write(tmp_path / "jobs.jsonl", [job("fine", "Say yes.", max_tokens=1), job("long", "word " * 3000)])
    done = tokenmill(home, "run", source, "--output", tmp_path / "out.jsonl", *store)
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    assert "1 too long: tokenmill retry batch_" in shown
    assert "a larger --context" in shown
    assert shown.count("tokenmill retry") == 1
    retried = said(home, "retry", "last", "--failed", *store)
    assert "1 job of batch_" in retried.stderr
    assert "1 too long: " in retried.stderr
    assert "a larger --context" in retried.stderr


def test_a_batch_runs_on_a_server(smollm2_path: Path, home: Path, store: tuple[str, Path], tmp_path: Path) -> None:
    words = ("serve", "--engine-only", smollm2_path, *SERVER, "--port", 0, "--detach", "--name", "server")
    assert tokenmill(home, *words).returncode == 0
    try:
        (record,) = (each for each in registry.listed(home / "tokenmill") if each.name == "server")
        source = write(tmp_path / "jobs.jsonl", [*jobs(THINGS[:4], max_tokens=4), job("long", "word " * 3000)])
        by_name = ran_here(home, source, "--output", tmp_path / "named.jsonl", *store, "--engine", "server")
        assert (by_name["succeeded"], by_name["failed_by_code"]) == (4, {"too_long": 1})
        assert by_name["computed_prompt_tokens"] <= 1.02 * by_name["least_prompt_tokens"]
        assert "too many" in read(tmp_path / "named.jsonl")[4]["error"]["message"]
        by_url = ran_here(home, source, "--output", tmp_path / "url.jsonl", *store, "--engine", record.address)
        assert (by_url["succeeded"], by_url["failed"]) == (4, 1)
        assert names(tmp_path / "url.jsonl") == names(tmp_path / "named.jsonl")
    finally:
        assert said(home, "engines", "stop", "server").returncode == 0


def test_interactive_requests_go_before_batch_jobs(home: Path, store: tuple[str, Path], tmp_path: Path) -> None:
    source, output = write(tmp_path / "jobs.jsonl", slow_at_the_end()), tmp_path / "out.jsonl"
    process = begun(home, source, "--output", output, *store, "--json")

    async def ask() -> str:
        engine = await adopt(home / "tokenmill", "night")
        assert engine is not None
        try:
            chat = Chat(({"role": "user", "content": "Who are you?"},))
            request = Request(chat, Sampling(temperature=0.0), max_tokens=4, priority="interactive")
            async with asyncio.timeout(LIMIT_S):
                return (await answer(engine, request)).text
        finally:
            await engine.close()

    try:
        until(lambda: last_batch(store[1])[0].running >= 4)
        assert asyncio.run(ask())
        assert last_batch(store[1])[0].done < 12  # four tokens came before the batch's hundreds
        out, talk = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, talk
    assert json.loads(out)["succeeded"] == 12
    assert names(output) == [line["custom_id"] for line in jobs()]


def test_a_removed_output_folder_is_an_error_and_can_be_created_again(
    home: Path, store: tuple[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    source = write(tmp_path / "jobs.jsonl", slow_at_the_end())
    process = begun(home, source, "--output", folder / "out.jsonl", *store)
    try:
        until(lambda: last_batch(store[1])[0].done >= 2)
        shutil.rmtree(folder)
        _, talk = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "was removed or replaced" in talk.decode()
    assert last_batch(store[1])[0].done == 12  # the jobs did not wait for it
    folder.mkdir()
    assert ran_here(home, source, "--output", folder / "out.jsonl", *store)["computed"] == 0
    assert names(folder / "out.jsonl") == [line["custom_id"] for line in jobs()]


def test_a_database_that_another_program_has_locked_is_an_error(
    home: Path,
    store: tuple[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(home))
    monkeypatch.setattr("tokenmill.jobs.store.sqlite.BUSY_WAIT_S", 0.1)
    source = write(tmp_path / "jobs.jsonl", jobs(THINGS[:2], max_tokens=1))
    words = [*map(str, ("run", source, "--output", tmp_path / "out.jsonl", *store))]
    Store(store[1]).close()
    other = sqlite3.connect(store[1] / "store.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        assert cli(words) == 1
        assert "locked" in capsys.readouterr().err
        assert cli([*map(str, ("status", *store))]) == 0  # reading does not wait
    finally:
        other.close()
    assert cli(words) == 0
    assert len(read(tmp_path / "out.jsonl")) == 2
