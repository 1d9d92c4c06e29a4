"""`tokenmill distill` and `tokenmill export` on the command line: killed, limited, refused."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

from support.run_cli import THINGS, command, environment, last_batch, said, until, write
from tokenmill.cli import run

ONE_LANE = ("--context", "512", "--sequences", "1", "--threads", "1", "--threads-batch", "1", "--no-warm")
LINES = [
    {"id": thing, "messages": [{"role": "system", "content": f"{thing}."}, {"role": "user", "content": "What is it?"}]}
    for thing in THINGS[:6]
]


def distilled(home: Path, *words: object) -> dict[str, Any]:
    done = said(home, "distill", *words, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_killed_and_limited_it_goes_on_and_ends_with_the_bytes_of_an_undisturbed_run(
    smollm2_path: Path, tmp_path: Path
) -> None:
    """One slot and prompts without a common prefix, so that repeated jobs are computed in the same steps."""
    source, output, whole = write(tmp_path / "p.jsonl", LINES), tmp_path / "killed.parquet", tmp_path / "whole.parquet"
    words = (source, "--model", smollm2_path, "--max-tokens", 12, "--temperature", 0.7, "--top-logprobs", 20, *ONE_LANE)
    store = tmp_path / "killed"
    here = ("-o", output, "--store", store)
    process = subprocess.Popen(
        command("distill", *words, *here),
        env=environment(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: len(last_batch(store)[1]) >= 1)
    finally:
        process.kill()
        process.communicate()
    kept = last_batch(store)[1]
    assert not output.exists()  # whole or not at all

    limited = distilled(
        tmp_path, *words, *here, "--max-tokens-total", 50, "--export", f"messages={tmp_path / 'train.jsonl'}"
    )
    assert (limited["end"], limited["exports"], limited["reused"]) == ("tokens", [], len(kept))
    assert len(kept) < limited["rows"] == len(kept) + limited["answers"] < len(LINES)
    assert limited["waiting"] == len(LINES) - limited["rows"]
    assert parquet.read_table(output).num_rows == limited["rows"]

    last = distilled(tmp_path, *words, *here)
    assert (last["end"], last["reused"]) == ("finished", limited["rows"])
    assert last["answers"] + limited["rows"] == last["rows"] == len(LINES)  # nothing is computed twice
    assert {number: body for number, body in last_batch(store)[1].items() if number in kept} == kept
    undisturbed = distilled(tmp_path, *words, "-o", whole, "--store", tmp_path / "whole")
    assert undisturbed["answers"] == len(LINES)
    assert output.read_bytes() == whole.read_bytes()
    rows = parquet.read_table(whole).to_pylist()
    assert [row["id"] for row in rows] == [f"{line['id']}/0" for line in LINES]
    assert all(row["token_ids"] and row["seed"] is not None for row in rows)


def test_a_dry_run_prints_a_forecast_and_starts_nothing(smollm2_path: Path, tmp_path: Path) -> None:
    source, output = write(tmp_path / "p.jsonl", LINES), tmp_path / "teacher.parquet"
    done = said(
        tmp_path,
        "distill",
        source,
        "-o",
        output,
        "--model",
        smollm2_path,
        "--samples",
        3,
        "--dry-run",
        *ONE_LANE,
        "--top-logprobs",
        20,
    )
    assert done.returncode == 0, done.stderr
    assert "3 samples" in " ".join(done.stdout.split())
    assert "temperature 0.7" in " ".join(done.stdout.split())
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert not output.exists()
    assert last_batch(tmp_path / "tokenmill" / "batches")[1] == {}


@pytest.fixture(name="teacher")
def make_teacher(tmp_path: Path) -> Path:
    row = {"id": "a/0", "messages": [{"role": "user", "content": "Why?"}], "answer": "So.", "finish_reason": "stop"}
    cut = row | {"id": "a/1", "finish_reason": "length"}
    return write(tmp_path / "teacher.jsonl", [row, cut])


def test_an_export_prints_a_summary_of_80_columns(
    teacher: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = teacher.with_name("train.jsonl")
    assert run(["export", str(teacher), "--to", "messages", "-o", str(out), "--check"]) == 0
    out_text = capfd.readouterr().out
    assert "1 row" in out_text
    assert "1 truncated" in out_text
    assert "--cut-too" in out_text
    assert "datasets" in out_text
    assert max(map(len, out_text.splitlines())) <= 80
    again = ["export", str(teacher), "--to", "alpaca", "-o", str(out), "--cut-too", "--json"]
    assert run(again) == 2
    assert "--force" in " ".join(capfd.readouterr().err.split())
    assert out.read_text().startswith('{"messages"')
    assert run([*again, "--force"]) == 0
    assert json.loads(capfd.readouterr().out)["rows"] == 2


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("export", "{t}", "--to", "messages", "-o", "{d}/x.parquet"), "messages"),
        (("export", "{t}", "--to", "messages", "-o", "{t}"), "teacher.jsonl"),
        (("export", "{d}/none.parquet", "--to", "messages", "-o", "{d}/x.jsonl"), "none.parquet"),
        (("export", "{t}", "--to", "messages", "-o", "{d}/none/x.jsonl"), "/none"),
        (("distill", "{p}", "-o", "{p}"), "p.jsonl"),
        (("distill", "{p}", "-o", "{d}/x.txt"), "x.txt"),
        (("distill", "{p}", "-o", "{d}/x.parquet", "--samples", "0"), "--samples"),
        (
            ("distill", "{p}", "-o", "{d}/x.parquet", "--samples", "2", "--temperature", "0"),
            "--temperature",
        ),
        (("distill", "{p}", "-o", "{d}/x.parquet", "--top-logprobs", "21"), "--top-logprobs"),
        (("distill", "{p}", "-o", "{d}/x.parquet", "--export", "messages"), "FORMAT=FILE"),
        (("distill", "{p}", "-o", "{d}/x.parquet", "--export", "alpaca={d}/x.parquet"), "alpaca"),
        (("distill", "{p}", "-o", "{d}/x.parquet", "--export", "messages={p}"), "p.jsonl"),
        (("distill", "{p}", "-o", "{d}/x.jsonl", "--export", "messages={d}/x.jsonl"), "twice"),
        (("distill", "{p}", "-o", "{d}/x.parquet", "--check"), "--export"),
        (("distill", "{p}", "-o", "{d}/x.parquet", "--column", "none"), "'none'"),
        (("distill", "{p}", "-o", "{d}/x.parquet", "--system", "{d}/none.txt"), "none.txt"),
        (("distill", "{p}", "-o", "{d}/x.parquet", "--body", '{"temprature": 1}'), "temprature"),
        (("distill", "{p}", "-o", "{d}/x.parquet", "--body", '{"n": 1}'), "--samples"),
        (("distill", "{p}", "-o", "{d}/x.parquet", "--body", '{"seed": 1}'), "seed"),
        (("distill", "{d}/none.jsonl", "-o", "{d}/x.parquet"), "none.jsonl"),
    ],
)
def test_usage_errors_are_reported_before_anything_is_loaded(
    teacher: Path, capfd: pytest.CaptureFixture[str], words: tuple[str, ...], named: str
) -> None:
    prompts = write(teacher.with_name("p.jsonl"), LINES)
    before = sorted(path.name for path in teacher.parent.iterdir())
    filled = [
        word.replace("{t}", str(teacher)).replace("{p}", str(prompts)).replace("{d}", str(teacher.parent))
        for word in words
    ]
    assert run(filled) == 2
    captured = capfd.readouterr()
    assert named in captured.err
    assert "hint:" in captured.err or "--samples" in captured.err or "--top-logprobs" in captured.err
    assert "Traceback" not in captured.err
    assert sorted(path.name for path in teacher.parent.iterdir()) == before
