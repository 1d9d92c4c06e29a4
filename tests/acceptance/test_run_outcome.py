"""What `tokenmill run` says at its end: useless answers, errors, exit codes, time limits."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from support.run_cli import (
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
    tokenmill,
    until,
    write,
)

SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
FORM = {"type": "json_schema", "json_schema": {"name": "word", "schema": SCHEMA}}


def test_cut_answers_and_invalid_json_are_reported(home: Path, store: tuple[str, Path], tmp_path: Path) -> None:
    lines = [
        job("json", "Describe a river.", response_format=FORM, max_tokens=3),
        job("short", "Say yes.", max_tokens=2),
    ]
    source, output = write(tmp_path / "jobs.jsonl", lines), tmp_path / "out.jsonl"
    found = ran_here(home, source, "-o", output, *store)
    assert (found["cut_by_max_tokens"], found["cut_by_context"]) == (2, 0)
    assert (found["json_answers"], found["invalid_json"]) == (1, 1)
    assert found["finish_reasons"] == {"length": 2}
    assert (found["engine"], found["tok_s"] > 0, found["jobs_per_hour"] > 0) == ("native", True, True)
    assert found["build"]
    assert found["model"]

    shown = said(home, "run", source, "-o", tmp_path / "new.jsonl", *store, "--no-reuse", "--max-tokens", 2).stdout
    assert "2 answers reached max_tokens" in shown
    assert "1 of 1 JSON answer" in shown
    cut = said(home, "results", "last", "--cut", *store).stdout
    assert [json.loads(line)["custom_id"] for line in cut.splitlines()] == ["json", "short"]
    assert said(home, "results", "last", "--cut", "--failed", *store).returncode == 2


def test_exit_codes(home: Path, store: tuple[str, Path], tmp_path: Path) -> None:
    mixed = write(tmp_path / "mixed.jsonl", [job("good", "Say yes.", max_tokens=2), "{not json"])
    assert said(home, "run", mixed, "-o", tmp_path / "a.jsonl", *store).returncode == 0
    assert said(home, "run", mixed, "-o", tmp_path / "a.jsonl", *store, "--fail-on-error").returncode == 1
    empty = write(tmp_path / "empty.jsonl", [])
    assert said(home, "run", empty, "-o", tmp_path / "b.jsonl", *store, "--fail-on-error").returncode == 0
    assert (tmp_path / "b.jsonl").read_bytes() == b""
    bad = write(tmp_path / "bad.jsonl", ["{not json", "[]"])
    assert said(home, "run", bad, "-o", tmp_path / "c.jsonl", *store).returncode == 1
    assert [line["error"]["code"] for line in read(tmp_path / "c.jsonl")] == ["invalid_line"] * 2


@pytest.mark.parametrize(
    "words", [("run", "absent.jsonl", "-o", "out.jsonl"), ("lint", "absent.jsonl"), ("run", "--no-such-option")]
)
def test_errors_are_json_with_json(words: tuple[str, ...], home: Path) -> None:
    done = said(home, *words, "--json")
    error = json.loads(done.stdout)["error"]
    assert done.returncode == 2
    assert error["code"] == "invalid_usage"
    assert error["message"] in done.stderr
    assert error["hint"]


def test_a_job_that_is_too_long_fails_before_the_model_is_loaded(
    smollm2_path: Path, store: tuple[str, Path], tmp_path: Path
) -> None:
    source = write(tmp_path / "jobs.jsonl", [job("long", "word " * 3000)])
    words = ("--model", smollm2_path, *SMALL, *store)
    done = tokenmill(tmp_path, "run", source, "-o", tmp_path / "out.jsonl", *words, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["failed_by_code"], found["load_seconds"]) == ({"too_long": 1}, None)
    assert "too many" in read(tmp_path / "out.jsonl")[0]["error"]["message"]
    assert "loaded in" not in done.stderr


def test_another_model_in_the_lines_is_reported_once(home: Path, store: tuple[str, Path], tmp_path: Path) -> None:
    lines = jobs(THINGS[:3], max_tokens=1, model="gpt-4o")
    done = said(home, "run", write(tmp_path / "a.jsonl", lines), "-o", tmp_path / "a.out", *store)
    assert done.stderr.count("gpt-4o") == 1
    own = jobs(THINGS[:3], max_tokens=2, model="SmolLM2")
    done = said(home, "run", write(tmp_path / "b.jsonl", own), "-o", tmp_path / "b.out", *store)
    assert "answers them" not in done.stderr


def long_jobs() -> list[dict[str, Any]]:
    return jobs(max_tokens=200, ignore_eos=True)


def test_a_run_ends_at_its_time_limit_and_continues(home: Path, store: tuple[str, Path], tmp_path: Path) -> None:
    source, output = write(tmp_path / "jobs.jsonl", long_jobs()), tmp_path / "out.jsonl"
    done = said(home, "run", source, "-o", output, *store, "--max-hours", "0.0003", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["end"]) == (1, "hours")
    assert found["pending"] > 0
    assert last_batch(store[1])[0].running == 0
    again = ran_here(home, source, "-o", output, *store)
    assert (again["end"], again["pending"]) == ("finished", 0)
    assert names(output) == [line["custom_id"] for line in long_jobs()]


def test_outside_of_its_window_a_run_waits_without_an_engine(
    home: Path, store: tuple[str, Path], tmp_path: Path
) -> None:
    source = write(tmp_path / "jobs.jsonl", jobs(THINGS[:2], max_tokens=2))
    hour = (time.localtime().tm_hour + 12) % 24
    window = ("--window", f"{hour:02}:00-{hour:02}:30")
    process = begun(home, source, "-o", tmp_path / "out.jsonl", *store, *window)
    try:
        until(lambda: last_batch(store[1])[0].pending == 2)
        lines = process.stderr
        assert lines is not None
        until(lambda: b"waits until" in lines.readline())
        # the store is free meanwhile: another run can use it
        assert ran_here(home, source, "-o", tmp_path / "now.jsonl", *store)["succeeded"] == 2
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 130
    finally:
        process.kill()
        process.communicate()
    assert last_batch(store[1])[0].done == 2
