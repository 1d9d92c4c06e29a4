"""`tokenmill.run`, `submit` and `work` with the real engine, and the batches that they share with the command line."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas
import pytest

import tokenmill
from tokenmill.config import Config
from tokenmill.errors import DoesNotFit, StoreError, UsageError
from tokenmill.jobs.worker.progress import Snapshot

SMALL: dict[str, Any] = {"context": 512, "sequences": 2, "threads": 1, "threads_batch": 1}
DEFAULTS = {"max_tokens": 6, "temperature": 0}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(state_dir=str(tmp_path / "state"))


@pytest.fixture
def call(smollm2_path: Path, tmp_path: Path, config: Config) -> dict[str, Any]:
    """Arguments that all calls have in common."""
    store = tmp_path / "store"
    return {"model": smollm2_path, "config": config, "store": store, "defaults": DEFAULTS, **SMALL}


def test_jobs_run_once_and_the_same_call_finds_the_answers(call: dict[str, Any], tmp_path: Path) -> None:
    jobs = ["Say hello.", {"prompt": "Once upon a time", "max_tokens": 4}, {"nonsense": True}]
    events = list[object]()
    first = tokenmill.run(jobs, output=tmp_path / "out.jsonl", on_progress=events.append, **call)
    assert (first.jobs, first.succeeded, first.failed, first.pending, first.end) == (3, 2, 1, 0, "finished")
    assert (first.computed, first.failed_by_code) == (2, {"invalid_line": 1})
    assert any(isinstance(event, Snapshot) for event in events)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [*first.results()] == lines
    texts = [*first.texts()]
    assert [text is not None for text in texts] == [True, True, False]
    assert texts[0] == lines[0]["response"]["body"]["choices"][0]["message"]["content"]
    again = tokenmill.run(jobs, output=tmp_path / "out.jsonl", **call)
    assert (again.batch.name, again.computed, again.load_s) == (first.batch.name, 0, None)
    assert [*again.texts()] == texts


def test_the_command_line_continues_what_python_began(call: dict[str, Any], tmp_path: Path) -> None:
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    batch = tokenmill.submit(jobs, output=tmp_path / "out.jsonl", **call)
    assert batch.counts.pending == 2
    settings = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    config = tmp_path / "tokenmill.toml"
    config.write_text(f'state_dir = "{tmp_path / "state"}"\n')
    command = [sys.executable, "-m", "tokenmill", "run", str(jobs), "-o", str(tmp_path / "out.jsonl"), "--json"]
    command += ["--model", str(call["model"]), "--store", str(call["store"]), "--config", str(config)]
    ran = subprocess.run(
        [*command, "--max-tokens", "6", "--temperature", "0", *settings], capture_output=True, text=True, check=True
    )
    assert json.loads(ran.stdout)["batch"] == batch.name
    with tokenmill.open_store(call["store"]) as store:
        assert [each.name for each in store.batches()] == [batch.name]
        assert len([*store.results(batch.name)]) == 2


def test_submitted_batches_are_worked_on_later(call: dict[str, Any], tmp_path: Path) -> None:
    first = tokenmill.submit(["a", "b"], output=tmp_path / "one.jsonl", **call)
    second = tokenmill.submit(["c"], **call)
    work = {name: value for name, value in call.items() if name != "defaults"}
    done = tokenmill.work(**work)
    assert set(done.batches) == {first.name, second.name}
    assert (done.computed, done.end) == (3, "finished")
    assert len((tmp_path / "one.jsonl").read_text().splitlines()) == 2
    assert tokenmill.work(**work).computed == 0


def test_a_table_and_a_template_make_jobs(call: dict[str, Any]) -> None:
    rows = pandas.DataFrame({"city": ["Wien", "Graz"], "year": [1900, 1950]})
    done = tokenmill.run(rows, template="Describe {city} in {year}.", key="city", **call)
    assert [line["custom_id"] for line in done.results()] == ["Wien", "Graz"]


def test_it_runs_where_an_event_loop_is_running(call: dict[str, Any]) -> None:
    async def cell() -> tokenmill.Summary:
        return tokenmill.run(["hello"], **call)

    assert asyncio.run(cell()).succeeded == 1


def test_what_cannot_run_is_refused_and_nothing_is_stored(call: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        tokenmill.run(["a"], **(call | {"attempts": 0}))
    with pytest.raises(UsageError, match="unknown option"):
        tokenmill.run(["a"], **(call | {"contxt": 3}))
    with pytest.raises(UsageError):
        tokenmill.run(tmp_path / "missing.jsonl", **call)
    with pytest.raises(UsageError, match="no store in"):
        tokenmill.work(model=call["model"], config=call["config"], store=tmp_path / "mistyped")
    assert not (tmp_path / "mistyped").exists()
    with pytest.raises(DoesNotFit) as caught:
        tokenmill.run(["a"], **(call | {"reserve_ram": "100000 GiB"}))
    assert caught.value.code == "does_not_fit"
    with pytest.raises(StoreError):  # a job that was never stored needs no store
        tokenmill.open_store(tmp_path / "elsewhere")
    with tokenmill.open_store(call["store"]) as store:
        assert store.batches() == []


SCRIPT = """
import sys, tokenmill
from tokenmill.config import Config
model, folder = sys.argv[1:]
jobs = [{"prompt": f"Story {number}", "max_tokens": 64} for number in range(200)]
def progress(event):
    if getattr(event, "busy", 0):
        print("busy", flush=True)
try:
    tokenmill.run(jobs, model=model, store=folder + "/store", config=Config(state_dir=folder + "/state"),
                  context=512, sequences=2, threads=1, threads_batch=1, on_progress=progress)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_leaves_no_process_and_can_be_continued(
    number: signal.Signals, smollm2_path: Path, tmp_path: Path, config: Config
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(smollm2_path), str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "busy\n"
        os.kill(child.pid, number)
        rest = child.stdout.read()
        child.wait(60)
    assert ("interrupted" in rest) == (number == signal.SIGINT)
    _wait_until_gone(tmp_path)
    with tokenmill.open_store(tmp_path / "store") as store:
        batch = store.batch()
    assert not batch.finished
    assert batch.counts.total == 200


def _wait_until_gone(folder: Path) -> None:
    """Wait until no process mentions the folder."""
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        if not any(str(folder).encode() in _words(each) for each in Path("/proc").glob("[0-9]*/cmdline")):
            return
        time.sleep(0.1)
    raise AssertionError("a process is left")


def _words(cmdline: Path) -> bytes:
    try:
        return b"" if int(cmdline.parent.name) == os.getpid() else cmdline.read_bytes()
    except OSError:
        return b""
