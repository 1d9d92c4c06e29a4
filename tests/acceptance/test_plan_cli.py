"""`tokenmill plan` as a person and as a script."""

import json
import os
import subprocess
import sys
import time
from typing import Any

import pytest


def tokenmill(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "80", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-m", "tokenmill", *words], env=environment, capture_output=True, text=True, check=False
    )


def plan_json(*words: str) -> dict[str, Any]:
    done = tokenmill("plan", *words, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


KIMI = (
    "kimi-k2.5:Q4_K_S",
    "--machine",
    "epyc-9175f",
    "--context",
    "32768",
    "--sequences",
    "1",
    "--engine",
    "llama.cpp",
)


def test_json_holds_what_it_promises() -> None:
    found = plan_json(*KIMI)
    assert found["fits"] is True
    items = {"weights", "kv", "compute", "staging", "repack", "prompt_cache", "runtime", "reserve"}
    for name in ("ledger", "ledger_at_load_peak"):
        assert found[name]
        for row in found[name]:
            assert set(row) == {"tier", "item", "bytes"}
            assert row["item"] in items
    for name in ("decode_tok_s", "prefill_tok_s"):
        for speed in found["forecast"][name]:
            assert speed["tok_s"] > 0
            assert speed["confidence"] in ("measured", "calibrated", "estimated")
            assert sum(term["seconds"] for term in speed["terms"]) > 0
    assert set(found["placement"].values()) <= {"gpu0", "dram"}
    assert found["command"]["argv"][0].endswith("llama-server")
    assert isinstance(found["command"]["env"], dict)
    assert all(set(decision) == {"name", "value", "reason"} for decision in found["decisions"])


def test_a_person_sees_it_in_80_columns() -> None:
    done = tokenmill("plan", *KIMI, "--explain")
    assert done.returncode == 0
    before_command = done.stdout.partition("run:")[0]
    assert max(len(line) for line in before_command.splitlines()) <= 80
    for words in ("gpu0", "dram", "decode, tok/s", "estimated", "fits"):
        assert words in done.stdout


def test_it_takes_about_a_second() -> None:
    start = time.perf_counter()
    tokenmill("plan", *KIMI)
    assert time.perf_counter() - start < 4  # on two busy cores; alone it is under one


def test_what_does_not_fit_exits_with_3() -> None:
    done = tokenmill("plan", "kimi-k2.5:Q4_K_M", "--machine", "epyc-7763", "--context", "32768")
    assert done.returncode == 3
    assert "does not fit: dram lacks" in done.stdout
    assert "would fit with quantisation" in done.stdout


def test_comparison_in_one_table() -> None:
    done = tokenmill("plan", "kimi-k2.5:Q4_K_S", "--machine", "epyc-9175f", "--compare", "Q4_K_S,Q8_0")
    assert done.returncode == 0
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[1] for row in rows[1:3]] == ["yes", "NO"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no model given"),
        (("nope:Q4_K_M",), "no model 'nope' in the catalogue"),
        (("kimi-k2.5:Q4_K_S", "--machine", "nope"), "nope"),
        (("kimi-k2.5:Q4_K_S", "--machine", "epyc-9175f", "--context", "0"), "--context must be at least 1"),
        (("kimi-k2.5:Q4_K_S", "--machine", "epyc-9175f", "--context", "999999"), "trained for 262144"),
        (("kimi-k2.5:Q4_K_S", "--machine", "epyc-9175f", "--gpus", "a"), "--gpus takes numbers"),
        (("kimi-k2.5:Q4_K_S", "--machine", "epyc-9175f", "--cache-type", "q9"), "q9"),
        (("kimi-k2.5:Q4_K_S", "--machine", "epyc-9175f", "--reserve-ram", "lots"), "'lots' is not a size"),
        (("kimi-k2.5:Q4_K_S", "--machine", "epyc-9175f", "--engine", "ollama"), "ollama"),
    ],
)
def test_wrong_use_says_what_is_right(words: tuple[str, ...], message: str) -> None:
    done = tokenmill("plan", *words)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
