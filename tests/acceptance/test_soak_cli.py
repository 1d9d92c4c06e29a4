"""`tokenmill soak`: a reached goal, a memory limit, a crashing engine and errors."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from support.run_cli import LIMIT_S, command, environment, said, tokenmill
from tokenmill.measurements import journal_path, read_json
from tokenmill.model.identity import identity_of
from tokenmill.model.synthetic import generate
from tokenmill.tuner import history
from tokenmill.tuner.soak.store import load

LEAN = ("--sequences", "2", "--ubatch", "64", "--threads", "1", "--threads-batch", "1", "--no-warm")
SMALL = ("--context", "256", *LEAN)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "moe.gguf"
    generate.write("moe", generate.sizes("moe", {"layers": 2, "embed": 256}), path)
    return path


def test_all_of_a_context_is_filled_on_every_lane(moe: Path, tmp_path: Path) -> None:
    done = tokenmill(tmp_path, "soak", moe, *SMALL, "--step", "128", "--lanes")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    goal = done.stdout.split("usable context: ")[1].split()[2]
    assert f"usable context: {goal} of {goal}" in done.stdout
    assert f"with 2 slots full: {goal} of {goal} each" in done.stdout
    assert "host memory has" in done.stdout
    assert "depth S_PP t/s S_TG t/s memory predicted measured" in " ".join(done.stdout.split())
    state = tmp_path / "tokenmill"
    assert str(journal_path(state)) in done.stderr
    [kept] = read_json(state, "soak")
    found = load(tmp_path / "tokenmill", kept["machine_id"], identity_of(moe))
    assert found is not None
    assert (found.usable_context, found.usable_with_lanes, found.lanes, found.ended) == (
        int(goal),
        int(goal),
        2,
        "goal",
    )
    assert [(step.depth, step.sequences) for step in found.steps][-1] == (int(goal), 2)
    assert {speed.source for speed in history.read(tmp_path / "tokenmill")} <= {"soak"}


def test_a_limit_that_is_too_small_is_a_result_and_no_crash(moe: Path, tmp_path: Path) -> None:
    done = said(tmp_path, "soak", moe, *SMALL, "--memory-limit", "30 MiB", "--json")
    assert done.returncode == 3, done.stderr
    found = json.loads(done.stdout)
    assert (found["usable_context"], found["ended"], found["limit_bytes"]) == (0, "memory", 30 << 20)
    assert "host memory had" in found["reason"]
    assert found["reserve_bytes"] == {"dram": round(0.05 * (30 << 20))}
    assert "--memory-limit" in done.stderr
    assert read_json(tmp_path / "tokenmill", "soak") == [], "a machine with 30 MiB is not this one"


def test_an_engine_that_dies_is_a_result_with_its_last_words(moe: Path, tmp_path: Path) -> None:
    words = command("soak", moe, *LEAN, "--context", "4096", "--step", "64")
    with subprocess.Popen(words, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as soak:
        assert soak.stderr is not None
        assert any(b" of 4,096 tokens at " in line for line in soak.stderr)  # it has filled some
        [record] = (tmp_path / "tokenmill" / "engines").glob("*/engine.json")
        os.kill(json.loads(record.read_text())["engine"]["pid"], signal.SIGKILL)
        out, _ = soak.communicate(timeout=LIMIT_S)
    assert soak.returncode == 1
    text = out.decode()
    assert "SIGKILL" in text
    [kept] = read_json(tmp_path / "tokenmill", "soak")
    assert kept["ended"] == "died"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("no-such-model",), "no model 'no-such-model'"),
        (("{moe}", "--depth", "8"), "--depth must be more than 16"),
        (("{moe}", "--memory-limit", "lots"), "is not a size"),
        (("{moe}", *SMALL, "--depth", "4096"), "--depth 4096 exceeds the context of 256"),
    ],
)
def test_what_is_wrong_is_said_and_what_to_do(moe: Path, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = said(tmp_path, "soak", *(word.format(moe=moe) for word in words))
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""
