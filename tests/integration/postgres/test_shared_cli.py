"""`tokenmill run` and `tokenmill work` with unequal contexts, with real engines: whatever one of them can do is done."""

import json
import subprocess
from pathlib import Path
from typing import Any

from support.postgres import Cluster, asked
from support.run_cli import command, environment, read, until, write
from tokenmill.errors import StoreError
from tokenmill.jobs.store.address import PostgresAddress
from tokenmill.jobs.store.reader import StoreReader

OPTIONS = ("--sequences", "2", "--threads", "1", "--threads-batch", "1", "--no-warm", "--json")
LINES = [
    {"custom_id": str(number), "prompt": " ".join(f"{number} {word}" for word in range(40)), "max_tokens": 4}
    for number in range(3)
]


def begun(home: Path, *words: object) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    return subprocess.Popen(command(*words), env=environment(home), stdout=pipe, stderr=pipe, text=True)


def announced(server: PostgresAddress) -> bool:
    """Whether a runner has said what it will do."""
    try:
        with StoreReader(server):
            return asked(server, "SELECT count(*) FROM runners WHERE model_id IS NOT NULL") == [(1,)]
    except StoreError:  # it is being made
        return False


def test_what_is_too_long_for_run_is_done_by_work(postgres: Cluster, smollm2_path: Path, tmp_path: Path) -> None:
    server, output = postgres.fresh(), tmp_path / "out.jsonl"
    there = ("--store", server.url, "--model", smollm2_path, *OPTIONS)
    work = begun(tmp_path / "two", "work", *there, "--stay", "--context", 512)
    try:
        until(lambda: announced(server) or work.poll() is not None)
        jobs = write(tmp_path / "jobs.jsonl", LINES)
        run = begun(tmp_path / "one", "run", jobs, "-o", output, *there, "--context", 128)
        try:
            said = run.communicate(timeout=200)
        finally:
            run.kill()
        work.terminate()
        talk = work.communicate(timeout=200)
    finally:
        work.kill()
    assert (run.returncode, work.returncode) == (0, 143), (said[1][-2000:], talk[1][-2000:])
    found: dict[str, Any] = json.loads(said[0])
    assert (found["succeeded"], found["failed"]) == (3, 0)
    assert (found["computed"], json.loads(talk[0])["computed"]) == (0, 3)
    assert [line["error"] for line in read(output)] == [None] * 3
    tokens = {line["response"]["body"]["usage"]["prompt_tokens"] for line in read(output)}
    assert min(tokens) > 128
