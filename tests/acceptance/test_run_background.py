"""`tokenmill run --detach`, `attach` and `status --watch`: a batch that outlives the command that started it."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.run_cli import SMALL, THINGS, command, environment, jobs, last_batch, names, said, tokenmill, until, write
from tokenmill.api import detached
from tokenmill.api.detached import DetachedRun


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """A state folder whose runs in the background are ended with the test."""
    folder = tmp_path / "state"
    yield folder
    for run in detached.runs(folder / "tokenmill"):
        run.process.send(signal.SIGKILL)
        until(lambda run=run: not run.supervisor.alive)  # type: ignore[misc]


def started(state: Path, *words: object) -> DetachedRun:
    done = tokenmill(state, "run", *words, "--detach", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    run = detached.find(state / "tokenmill", found["batch"])
    assert run.process.pid == found["pid"]
    return run


def background(state: Path, batch: str) -> Any:
    """The process of a batch, as `status` names it for the batch and in the list of all."""
    one = json.loads(tokenmill(state, "status", batch, "--json").stdout)
    (listed,) = json.loads(tokenmill(state, "status", "--json").stdout)
    assert one["background"] == listed["background"]
    return one["background"]


def test_a_detached_run_is_followed_to_its_end(smollm2_path: Path, state: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "jobs.jsonl", jobs(THINGS[:4], max_tokens=3))
    output = tmp_path / "out.jsonl"
    run = started(state, source, "-o", output, "--model", smollm2_path, *SMALL, "--limit", "3")
    watching = tokenmill(state, "status", run.batch, "--watch")
    assert (watching.returncode, "done" in watching.stdout) == (0, True)
    followed = tokenmill(state, "attach")
    assert followed.returncode == 0
    assert "3 of 3 answered" in followed.stdout
    assert names(output) == [line["custom_id"] for line in jobs(THINGS[:3])]
    again = tokenmill(state, "run", source, "-o", output, "--model", smollm2_path, *SMALL, "--limit", "3", "--detach")
    assert (again.returncode, "3 of 3 answered" in again.stdout) == (0, True)  # nothing to start
    assert not detached.find(state / "tokenmill", None).alive


def test_attach_leaves_the_run_alone_and_sigterm_stops_it(smollm2_path: Path, state: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "jobs.jsonl", jobs(max_tokens=400, ignore_eos=True))
    run = started(state, source, "-o", tmp_path / "out.jsonl", "--model", smollm2_path, *SMALL)
    attached = subprocess.Popen(command("attach", run.batch), env=environment(state), stdout=subprocess.PIPE)
    assert attached.stdout is not None
    until(lambda: b"engine:" in (attached.stdout.readline() if attached.stdout else b""))
    attached.send_signal(signal.SIGINT)
    attached.communicate(timeout=60)
    assert attached.returncode == 130
    assert run.alive
    assert background(state, run.batch) == {"pid": run.process.pid, "log": str(run.log)}
    os.kill(run.process.pid, signal.SIGTERM)
    ended = tokenmill(state, "attach", run.batch.removeprefix("batch_")[:6])
    assert ended.returncode == 143
    assert background(state, run.batch) is None
    counts, _ = last_batch(state / "tokenmill" / "batches")
    assert (counts.total, counts.running) == (12, 0)


def test_what_cannot_be_detached(smollm2_path: Path, state: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "jobs.jsonl", jobs(THINGS[:1]))
    words = ("--model", smollm2_path, *SMALL, "--detach")
    assert said(state, "run", source, "-o", "-", *words).returncode == 2
    assert tokenmill(state, "run", "-", "-o", tmp_path / "out.jsonl", *words, stdin=source.read_bytes()).returncode == 2
    assert said(state, "attach").returncode == 2
    assert said(state, "status", "--watch", "--json").returncode == 2
    too_large = ("--model", "kimi-k2.5:Q8_0", "--machine", "epyc-7532-8x3090", "--detach")
    assert said(state, "run", source, "-o", tmp_path / "out.jsonl", *too_large).returncode == 2
    assert detached.runs(state / "tokenmill") == []
