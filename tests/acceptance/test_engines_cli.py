"""`tokenmill serve --engine-only` and `tokenmill engines`."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.run_cli import LIMIT_S, environment, said, tokenmill

SMALL = ("--context", "512", "--sequences", "2", "--threads", "1", "--threads-batch", "1")


@contextmanager
def served(home: Path, *words: str) -> Iterator[tuple["subprocess.Popen[str]", dict[str, Any]]]:
    """A `tokenmill serve` process that is ready, and its JSON output."""
    argv = [sys.executable, "-m", "tokenmill", "serve", "--engine-only", *words, "--json"]
    with subprocess.Popen(
        argv, env=environment(home), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        text = ""
        try:
            while not text.endswith("\n}\n"):
                line = process.stdout.readline()
                assert line, process.stderr.read()
                text += line
            yield process, json.loads(text)
        finally:
            process.kill()


def test_a_native_engine_is_left_running_shown_and_stopped(smollm2_path: Path, tmp_path: Path) -> None:
    done = tokenmill(tmp_path, "serve", "--engine-only", str(smollm2_path), *SMALL, "--detach", "--name", "night")
    assert done.returncode == 0, done.stderr
    assert "predicted" in done.stdout
    assert "tokenmill engines stop night" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    (listed,) = json.loads(said(tmp_path, "engines", "--json").stdout)
    assert (listed["name"], listed["kind"], listed["status"]["state"]) == ("night", "native", "ready")
    assert "night" in said(tmp_path, "engines").stdout
    again = said(tmp_path, "serve", "--engine-only", str(smollm2_path), *SMALL, "--detach", "--name", "night")
    assert again.returncode == 1
    assert "night" in again.stderr
    assert "llama" in said(tmp_path, "engines", "log", "night").stdout
    assert said(tmp_path, "engines", "stop", "night").returncode == 0
    assert json.loads(said(tmp_path, "engines", "--json").stdout) == []
    assert not Path(f"/proc/{listed['engine']['pid']}").exists()


def test_a_digest_is_kept_over_a_restart(smollm2_path: Path, tmp_path: Path) -> None:
    digest = tmp_path / "rules.md"
    digest.write_text("You grind words into flour, and you never hurry. " * 6)
    words = ("serve", "--engine-only", str(smollm2_path), *SMALL, "--no-warm", "--detach", "--name", "held")
    for told in ("tokens computed", "tokens restored"):
        done = tokenmill(tmp_path, *words, "--digest", str(digest))
        assert done.returncode == 0, done.stderr
        assert told in done.stdout
        assert said(tmp_path, "engines", "stop", "held").returncode == 0
    assert len(list((tmp_path / "tokenmill" / "heads").iterdir())) == 1
    digest.write_text("You grind words into flour. " * 100)
    for path, reason in (
        (digest, "601 tokens"),
        (tmp_path / "absent.md", str(tmp_path / "absent.md")),
    ):
        wrong = said(tmp_path, *words, "--digest", str(path))
        assert wrong.returncode == 2
        assert reason in wrong.stderr


def test_an_engine_to_be_left_running_is_not_left_when_its_start_is_broken_off(
    smollm2_path: Path, tmp_path: Path
) -> None:
    digest = tmp_path / "long.md"
    digest.write_text("".join(f"Bag {number} is full of wheat. " for number in range(400)))
    argv = [
        sys.executable,
        "-m",
        "tokenmill",
        "serve",
        "--engine-only",
        str(smollm2_path),
        "--context",
        "8192",
        "--sequences",
        "1",
        "--threads",
        "1",
        "--detach",
        "--name",
        "left",
        "--digest",
        str(digest),
    ]
    with subprocess.Popen(argv, env=environment(tmp_path), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("prefixes"):
                process.send_signal(signal.SIGINT)
                break
        assert "error: left" in process.stderr.read()
        assert process.wait(LIMIT_S) == 1
    assert json.loads(said(tmp_path, "engines", "--json").stdout) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_answers_until_it_is_told_to_stop_and_leaves_nothing(
    number: signal.Signals, smollm2_path: Path, tmp_path: Path
) -> None:
    words = (str(smollm2_path), *SMALL, "--engine", "llama-server", "--port", "0")
    with served(tmp_path, *words) as (process, told):
        assert told["kind"] == "llama-server"
        models = httpx.get(f"{told['address']}/v1/models", timeout=LIMIT_S).json()
        assert models["data"]
        weights = [row for row in told["reconciliation"] if row["item"] == "weights"]
        assert weights
        assert all(not row["flagged"] for row in weights)
        process.send_signal(number)
        assert process.wait(LIMIT_S) == 0
        assert not Path(f"/proc/{told['pid']}").exists()
    assert json.loads(said(tmp_path, "engines", "--json").stdout) == []


def test_an_engine_dies_with_a_serve_that_was_killed(smollm2_path: Path, tmp_path: Path) -> None:
    with served(tmp_path, str(smollm2_path), *SMALL) as (process, told):
        pidfd = os.pidfd_open(told["pid"])
        process.kill()
        assert select.select([pidfd], [], [], LIMIT_S)[0]
        os.close(pidfd)


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (("serve", "smollm2", "--detach"), 2, "--engine-only"),
        (("serve", "--engine-only"), 2, "--engine-only requires a model"),
        (("serve", "--engine-only", "kimi-k2.5:Q4_K_S"), 2, "tokenmill models pull hf:unsloth/Kimi-K2.5-GGUF:Q4_K_S"),
        (("serve", "--engine-only", "/nowhere.gguf"), 2, "/nowhere.gguf"),
        (("serve", "--engine-only", "smollm2", "--engine", "ollama"), 2, "native, llama-server, ik_llama, vllm"),
        (("engines", "stop", "nobody"), 2, "no running engine named nobody"),
        (("engines", "log", "nobody"), 2, "no log of an engine named nobody"),
    ],
)
def test_mistakes_are_answered(
    words: tuple[str, ...], code: int, reason: str, smollm2_path: Path, tmp_path: Path
) -> None:
    assert smollm2_path.is_file()  # pulled, so that its name is known
    done = said(tmp_path, *words)
    assert done.returncode == code
    assert reason in done.stderr
    assert "hint:" in done.stderr


def test_what_does_not_fit_is_not_started(smollm2_path: Path, tmp_path: Path) -> None:
    done = said(tmp_path, "serve", "--engine-only", str(smollm2_path), "--context", "8192", "--sequences", "400")
    assert done.returncode == 3, done.stderr
    assert "would fit with" in done.stderr
