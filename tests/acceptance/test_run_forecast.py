"""`tokenmill run --dry-run` and `--limit`: what a batch costs before anything is loaded, and its first jobs."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.run_cli import SMALL, THINGS, jobs, names, ran, ran_here, said, write

KIMI = ("--model", "kimi-k2.5:Q4_K_S", "--machine", "epyc-9175f", "--context", "16k")


def forecast(home: Path, *words: object) -> dict[str, Any]:
    done = said(home, "run", *words, "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_model_that_is_not_downloaded_is_forecast(tmp_path: Path) -> None:
    source = write(tmp_path / "jobs.jsonl", jobs(max_tokens=50))
    found = forecast(tmp_path / "state", source, "-o", tmp_path / "out.jsonl", *KIMI)
    assert (found["jobs"], found["answer_tokens_at_most"], found["tokens_counted"]) == (12, 600, False)
    assert found["computed_prompt_tokens"] < found["prompt_tokens"]
    assert found["seconds_at_most"] > 0
    assert (found["speed"]["measured"], found["energy_j"]) == (False, None)
    assert found["download"]["needed_bytes"] > 500 * 2**30
    assert found["download"]["path"] is None  # of another machine
    assert not (tmp_path / "out.jsonl").exists()
    assert not (tmp_path / "state" / "tokenmill" / "batches").exists()


def test_configured_power_and_price_are_used(tmp_path: Path) -> None:
    source = write(tmp_path / "jobs.jsonl", jobs())
    config = tmp_path / "tokenmill.toml"
    config.write_text('[costs]\nper_hour = 2.0\nwatts = 500.0\ncurrency = "CHF"\n')
    found = forecast(tmp_path / "state", source, "-o", tmp_path / "out.jsonl", *KIMI, "--config", config)
    assert found["energy_j"] == pytest.approx(500 * found["seconds_at_most"])
    assert found["cost_at_most"] == pytest.approx(2 * found["seconds_at_most"] / 3600)
    assert found["currency"] == "CHF"


def test_a_stream_and_a_model_that_does_not_fit_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "jobs.jsonl", jobs(THINGS[:1]))
    too_large = ("--model", "kimi-k2.5:Q8_0", "--machine", "epyc-7532-8x3090")
    words = ("-o", tmp_path / "out.jsonl", "--dry-run")
    assert said(tmp_path / "state", "run", source, *too_large, *words).returncode == 3
    (tmp_path / "empty.jsonl").touch()
    assert said(tmp_path / "state", "run", tmp_path / "empty.jsonl", *KIMI, *words).returncode == 2


def test_the_first_jobs_are_a_batch_whose_answers_are_reused(
    home: Path, store: tuple[str, Path], tmp_path: Path
) -> None:
    source = write(tmp_path / "jobs.jsonl", jobs(THINGS[:5], max_tokens=2))
    first = ran_here(home, source, "-o", tmp_path / "first.jsonl", *store, "--limit", 2)
    assert (first["jobs"], first["computed"]) == (2, 2)
    before = forecast(home, source, "-o", tmp_path / "all.jsonl", *store)
    assert (before["jobs"], before["done"], before["tokens_counted"]) == (5, 0, True)
    every = ran_here(home, source, "-o", tmp_path / "all.jsonl", *store)
    assert (every["jobs"], every["computed"], every["batch_totals"]["reused"]) == (5, 3, 2)
    after = forecast(home, source, "-o", tmp_path / "all.jsonl", *store)
    assert (after["jobs"], after["done"], after["seconds_at_most"], after["store"]) == (0, 5, 0.0, None)
    assert names(tmp_path / "first.jsonl") == names(tmp_path / "all.jsonl")[:2]
    assert said(home, "run", source, "-o", tmp_path / "x.jsonl", *store, "--limit", 0).returncode == 2


def test_the_time_left_is_forecast_before_the_first_answer(
    smollm2_path: Path, store: tuple[str, Path], tmp_path: Path
) -> None:
    source = write(tmp_path / "jobs.jsonl", jobs(THINGS[:4], max_tokens=80, ignore_eos=True))
    words = ("--model", smollm2_path, *SMALL, *store, "--no-warm")
    ran(tmp_path / "state", source, "-o", tmp_path / "one.jsonl", *words)  # its speed is recorded
    found = forecast(tmp_path / "state", source, "-o", tmp_path / "two.jsonl", *words)
    assert (found["speed"]["measured"], found["answer_tokens_at_most"]) == (True, 320)
    assert 0 < found["seconds_at_most"] < 86_400
