"""`tokenmill run` on a running native engine: input formats, results, errors, cancelling."""

import gzip
import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support import growing
from support.run_cli import (
    LIMIT_S,
    THINGS,
    begun,
    command,
    environment,
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
from tokenmill.cli import run as cli
from tokenmill.jobs.ingest import submit as submitting
from tokenmill.jobs.store.submissions import Submissions


def test_a_batch_is_answered_in_order_with_its_head_computed_once(
    home: Path, store: tuple[str, Path], tmp_path: Path
) -> None:
    source, output = write(tmp_path / "jobs.jsonl", jobs()), tmp_path / "out.jsonl"
    done = tokenmill(home, "run", source, "--output", output, *store, "--json")
    assert done.returncode == 0, done.stderr
    assert "no model was given: using smollm2" in done.stderr
    assert "night, running as process" in done.stderr
    totals = json.loads(done.stdout)
    assert (totals["jobs"], totals["succeeded"], totals["failed"], totals["computed"]) == (12, 12, 0, 12)
    assert totals["least_is_exact"]
    assert totals["computed_prompt_tokens"] <= 1.02 * totals["least_prompt_tokens"]
    assert totals["reused_tokens"] > totals["computed_prompt_tokens"]
    assert totals["generated_tokens"] > 12
    assert names(output) == [line["custom_id"] for line in jobs()]
    first = read(output)[0]
    assert first["error"] is None
    assert first["response"]["status_code"] == 200
    assert first["response"]["body"]["choices"][0]["message"]["content"]

    before = output.read_bytes()
    again = tokenmill(home, "run", source, "--output", output, *store)
    assert again.returncode == 0
    assert "all in earlier runs" in again.stdout
    assert "engine" not in again.stderr  # none was needed
    assert output.read_bytes() == before

    # another file with the same jobs has its answers already, whatever they are called there
    renamed = write(
        tmp_path / "again.jsonl", [{**line, "custom_id": f"x{number}"} for number, line in enumerate(jobs())]
    )
    elsewhere = ran_here(home, renamed, "--output", tmp_path / "again.out", *store)
    assert (elsewhere["succeeded"], elsewhere["computed"], elsewhere["generated_tokens"]) == (12, 0, 0)
    forced = ran_here(home, renamed, "--output", tmp_path / "forced.out", *store, "--no-reuse", "--max-tokens", 2)
    assert (forced["succeeded"], forced["computed"]) == (12, 12)


def test_jobs_are_answered_before_the_last_line_is_stored(
    home: Path, store: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing.small_groups(monkeypatch.setattr)
    monkeypatch.setattr(submitting, "GROUP_LINES", 2)
    add, answered = Submissions.add, list[int]()

    def add_behind_an_answer(self: Submissions, batch: int, *args: Any, **more: Any) -> None:
        if self.last_line(batch) >= 6:  # the first lines are stored; the rest only when one of them is answered
            until(lambda: self._reader.batch(batch).counts.done > 0)
            answered.append(self._reader.batch(batch).counts.done)
        add(self, batch, *args, **more)

    monkeypatch.setattr(Submissions, "add", add_behind_an_answer)
    source, output = write(tmp_path / "jobs.jsonl", jobs()), tmp_path / "out.jsonl"
    totals = ran_here(home, source, "--output", output, *store)
    assert answered
    assert (totals["jobs"], totals["succeeded"], totals["computed"]) == (12, 12, 12)
    assert totals["computed_prompt_tokens"] <= 1.02 * totals["least_prompt_tokens"]
    assert names(output) == [line["custom_id"] for line in jobs()]


def test_bad_lines_become_error_lines_and_the_rest_runs(home: Path, store: tuple[str, Path], tmp_path: Path) -> None:
    lines: list[dict[str, Any] | str] = [
        job("good", "Say yes."),
        "{not json",
        job("unknown key", "Say yes.", temprature=0),
        job("too long", "word " * 3000),
        {"custom_id": "plain", "prompt": "One, two,", "max_tokens": 3, "temperature": 0},
    ]
    source, output, errors = write(tmp_path / "jobs.jsonl", lines), tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    totals = ran_here(home, source, "--output", output, *store)
    assert (totals["jobs"], totals["succeeded"], totals["failed"]) == (5, 2, 3)
    found = read(output)
    assert [line["custom_id"] for line in found] == ["good", None, "unknown key", "too long", "plain"]
    assert found[1]["error"]["line"] == 2
    assert found[1]["error"]["code"] == found[2]["error"]["code"] == "invalid_line"
    assert "did you mean 'temperature'" in found[2]["error"]["message"]
    assert found[3]["error"]["code"] == "too_long"
    assert "too many" in found[3]["error"]["message"]
    assert found[4]["response"]["body"]["object"] == "text_completion"

    apart = ran_here(home, source, "--output", tmp_path / "apart.jsonl", "--errors", errors, *store)
    assert apart["computed"] == 0
    assert names(tmp_path / "apart.jsonl") == ["good", "plain"]
    assert names(errors) == [None, "unknown key", "too long"]

    strict = said(home, "run", source, "--output", tmp_path / "strict.jsonl", "--strict", *store)
    assert strict.returncode == 2
    assert "line 2" in strict.stderr
    assert not (tmp_path / "strict.jsonl").exists()


def test_a_summary_says_what_failed_and_how_to_go_on(home: Path, store: tuple[str, Path], tmp_path: Path) -> None:
    source = write(
        tmp_path / "jobs.jsonl", [job("good", "Say yes."), job("late", "Say no.", max_tokens=900, timeout=0.1)]
    )
    done = tokenmill(home, "run", source, "--output", tmp_path / "out.jsonl", *store, "--attempts", 1)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "1 failed" in done.stdout
    batch = json.loads(said(home, "status", "last", *store, "--json").stdout)["name"]
    assert f"tokenmill retry {batch} --failed" in " ".join(done.stdout.split())

    shown = said(home, "status", batch[6:10], *store)
    assert "1 done, 1 failed" in shown.stdout
    assert "not done within 0.1 s" in " ".join(shown.stdout.split())
    failed = said(home, "results", "last", "--failed", *store)
    assert [json.loads(line)["custom_id"] for line in failed.stdout.splitlines()] == ["late"]

    assert said(home, "retry", "last", *store).returncode == 2
    assert "1 job of batch_" in said(home, "retry", "last", "--failed", *store).stderr
    assert "stopped" in said(home, "status", *store).stdout
    again = ran_here(home, source, "--output", tmp_path / "out.jsonl", *store, "--attempts", 2)
    assert (again["failed"], again["computed"]) == (1, 0)
    assert "tried 2 times" in read(tmp_path / "out.jsonl")[1]["error"]["message"]


@pytest.mark.parametrize("form", ["stdin", "gz"])
def test_jobs_come_through_pipes_and_packed(form: str, home: Path, store: tuple[str, Path], tmp_path: Path) -> None:
    lines = jobs(THINGS[:3], max_tokens=2)
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    (tmp_path / "jobs.gz").write_bytes(gzip.compress(data))
    source: object = "-" if form == "stdin" else tmp_path / "jobs.gz"
    done = tokenmill(home, "run", source, "-o", "-", *store, stdin=data)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["custom_id"] for line in done.stdout.splitlines()] == [line["custom_id"] for line in lines]
    assert "3 of 3 answered" in done.stderr  # the summary does not mix with the data
    again = tokenmill(home, "run", source, "-o", "-", *store, stdin=data)
    assert again.stdout == done.stdout
    assert "all in earlier runs" in again.stderr


def test_results_on_stdout_follow_what_a_file_has(home: Path, store: tuple[str, Path], tmp_path: Path) -> None:
    """`(echo before; tokenmill run ... -o -; echo after) > file` keeps all of it, and again in a second run."""
    source = write(tmp_path / "jobs.jsonl", jobs(THINGS[:2], max_tokens=2))
    words = command("run", source, "-o", "-", *store)
    with (tmp_path / "out.txt").open("wb", buffering=0) as out:
        for _ in range(2):
            out.write(b"before\n")
            done = subprocess.run(words, env=environment(home), stdout=out, stderr=subprocess.PIPE, check=False)
            assert done.returncode == 0, done.stderr
            out.write(b"after\n")
    first, *answers, last = (tmp_path / "out.txt").read_text().splitlines()
    assert (first, last) == ("before", "after")
    assert answers[2:4] == ["after", "before"]
    assert answers[:2] == answers[4:]
    assert [json.loads(answer)["custom_id"] for answer in answers[:2]] == ["00-river", "01-bridge"]


def test_a_duplicate_name_is_refused_with_both_lines(home: Path, store: tuple[str, Path], tmp_path: Path) -> None:
    source = write(tmp_path / "jobs.jsonl", [job("same", "One."), job("other", "Two."), job("same", "Three.")])
    done = said(home, "run", source, "--output", tmp_path / "out.jsonl", *store)
    assert done.returncode == 2
    assert re.search(r"1 and 3 .*'same'", done.stderr)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "no jobs"),
        (("absent.jsonl",), "cannot read absent.jsonl"),
        (("jobs.jsonl", "--engine", "nowhere"), "no engine 'nowhere'"),
        (("jobs.jsonl", "--engine", "http://127.0.0.1:9"), "nothing answers at http://127.0.0.1:9"),
        (("jobs.jsonl", "--model", "absent.gguf"), "absent.gguf"),
        (("jobs.jsonl", "--max-tokens", "0"), "defaults: max_tokens"),
        (("jobs.jsonl", "--body", "[]"), "--body is not a JSON object"),
        (("jobs.jsonl", "--deadline", "soon"), "cannot read 'soon' as a time"),
        (("jobs.jsonl", "--attempts", "0"), "attempts must be at least 1"),
        (("jobs.jsonl", "--template", "t.txt"), "--template requires --table"),
        (("jobs.jsonl", "--output", "jobs.jsonl"), "is not the output of this batch"),
        (("jobs.jsonl", "--output", "nowhere/out.jsonl"), "the folder of"),
        (("jobs.jsonl", "--output", "--json"), "--output requires a file (got --json)"),
        (("jobs.jsonl", "--output", "-", "--json"), "--json and --output -"),
    ],
)
def test_usage_errors(
    words: tuple[str, ...],
    reason: str,
    home: Path,
    store: tuple[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(home))
    write(tmp_path / "jobs.jsonl", jobs(THINGS[:2]))
    output = () if "--output" in words else ("--output", "out.jsonl")
    assert cli(["run", *words, *output, *map(str, store)]) in (1, 2)
    err = capsys.readouterr().err
    assert "error: " in err
    assert reason in err
    assert names(tmp_path / "jobs.jsonl") == [line["custom_id"] for line in jobs(THINGS[:2])]


def test_rows_of_a_table_become_jobs(home: Path, store: tuple[str, Path], tmp_path: Path) -> None:
    rows = [
        {"id": f"r{number}", "colour": "red" if number % 2 else "blue", "note": f"note {number}"} for number in range(4)
    ]
    table = write(tmp_path / "rows.jsonl", rows)
    (tmp_path / "prompt.txt").write_text("Write one word.\n{*}\n")
    words = ("--table", table, "--template", tmp_path / "prompt.txt", "--key", "id", "--max-tokens", 2)
    done = tokenmill(home, "run", *words, "--output", tmp_path / "out.jsonl", *store)
    assert done.returncode == 0, done.stderr
    assert "4 rows" in done.stderr
    shown = said(home, "status", "last", *store).stdout
    assert str(table) in "".join(shown.split())  # the source is the table, not the temporary job file
    assert names(tmp_path / "out.jsonl") == ["r0", "r1", "r2", "r3"]


def test_a_running_batch_can_be_watched_and_cancelled_from_elsewhere(
    home: Path, store: tuple[str, Path], tmp_path: Path
) -> None:
    source, output = write(tmp_path / "jobs.jsonl", jobs(max_tokens=400, ignore_eos=True)), tmp_path / "out.jsonl"
    process = begun(home, source, "--output", output, *store)
    try:
        until(lambda: last_batch(store[1])[0].running > 0)
        shown = said(home, "status", "last", *store)
        assert f"running (process {process.pid})" in shown.stdout
        assert said(home, "results", "last", *store).returncode == 0
        second = said(home, "run", source, "--output", tmp_path / "other.jsonl", *store)
        assert second.returncode == 1
        assert f"process {process.pid} " in second.stderr
        assert "asked the process that works on it to cancel" in said(home, "cancel", "last", *store).stderr
        assert process.wait(LIMIT_S) == 0  # every line has its result or its error
    finally:
        process.kill()
        process.communicate()
    errors = [line["error"] for line in read(output)]
    assert len(errors) == 12
    assert {error["code"] for error in errors if error} == {"cancelled"}
    assert said(home, "cancel", "last", *store).returncode == 2
    assert "cancelled" in said(home, "status", *store).stdout
    said(home, "retry", "last", "--cancelled", *store)
    assert last_batch(store[1])[0].cancelled == 0


def test_an_interrupted_run_is_resumed_by_the_same_command(home: Path, store: tuple[str, Path], tmp_path: Path) -> None:
    source, output = write(tmp_path / "jobs.jsonl", slow_at_the_end()), tmp_path / "out.jsonl"
    process = begun(home, source, "--output", output, *store)
    try:
        until(lambda: last_batch(store[1])[0].done >= 3)
        process.send_signal(signal.SIGINT)
        _, talk = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "run the same command again to continue" in " ".join(talk.decode().split())
    counts, before = last_batch(store[1])[0], output.read_bytes()
    assert counts.running == 0
    assert 3 <= counts.done < 12
    totals = ran_here(home, source, "--output", output, *store)
    assert totals["computed"] == 12 - counts.done
    assert output.read_bytes().startswith(before)
    assert names(output) == [line["custom_id"] for line in jobs()]
