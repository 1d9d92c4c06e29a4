"""`tokenmill tune`: finds an operating point, other commands use it, and Ctrl-C keeps its trials."""

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest

from support.processes import command_lines
from support.run_cli import LIMIT_S, command, environment, said, tokenmill, until, write
from tokenmill.engine import load_history
from tokenmill.engine.engine import Engine, Request
from tokenmill.measurements import journal_path, read_json
from tokenmill.model.synthetic import generate
from tokenmill.tuner import history, slots
from tokenmill.tuner.point import SlotPoint

ONE = ("--threads", 1, "--threads-batch", 1, "--context", 512, "--no-warm")
SMALL = (
    *ONE,
    "--ubatch",
    128,
    "--cache-type",
    "f16",
    "--prefix-tokens",
    32,
    "--own-tokens",
    4,
    "--answer-tokens",
    8,
    "--trial-seconds",
    0.1,
)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "moe.gguf"
    generate.write("moe-mla", generate.sizes("moe-mla", {"layers": 2, "embed": 256}), path)
    return path


@pytest.fixture(scope="module")
def home(moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state folder after tuning the model with three trials."""
    home = tmp_path_factory.mktemp("home")
    done = tokenmill(home, "tune", moe, *SMALL, "--trials", 3, "--busy")
    assert done.returncode == 0, done.stderr
    (home / "said.out").write_text(done.stdout)
    (home / "said.err").write_text(done.stderr)
    return home


def point_of(home: Path) -> dict[str, Any]:
    (found,) = read_json(home / "tokenmill", "point")
    return found


def copied(home: Path, where: Path) -> Path:
    """A copy of the state folder."""
    (where / "tokenmill").mkdir()
    copyfile(journal_path(home / "tokenmill"), journal_path(where / "tokenmill"))
    return where


def test_it_says_beforehand_what_it_will_do_and_at_the_end_what_it_found(home: Path) -> None:
    told, shown = (home / "said.err").read_text(), (home / "said.out").read_text()
    before = told.partition("\n  1  ")[0]
    assert before.startswith("aim: ")
    assert "varied: sequences" in before
    assert "3 trials, 1 load" in before
    assert all(f"\n  {number}  " in told for number in (1, 2, 3))
    for label in ("settings", "measured", "knee", "trade-off", "trials"):
        assert f"\n{label} " in f"\n{shown}"
    assert "1 thread" in shown
    assert "plan, run and serve with --context 512 or less use it" in shown
    point = point_of(home)
    assert (point["loads"], len(point["trials"])) == (1, 3)
    path = shown.rstrip().splitlines()[-1]
    assert Path(path) == journal_path(home / "tokenmill")
    assert all(len(line) <= 80 for line in shown.splitlines() if line != path)
    assert all(len(line) <= 80 for line in told.splitlines() if line.startswith(("aim", "varied", "  ", "about")))


def test_the_same_command_again_makes_no_trial_and_no_load(home: Path, moe: Path) -> None:
    loads = len(load_history.read(home / "tokenmill"))
    done = said(home, "tune", moe, *SMALL, "--trials", 3, "--busy", "--json")
    assert done.returncode == 0, done.stderr
    assert "3 earlier trials" in done.stderr
    found = json.loads(done.stdout)
    assert found["dials"] == point_of(home)["dials"]
    assert len(found["trials"]) == 3
    assert len(load_history.read(home / "tokenmill")) == loads


def test_a_plan_takes_the_point_up_for_what_is_not_said(home: Path, moe: Path) -> None:
    sequences = point_of(home)["dials"]["sequences"]
    done = said(home, "plan", moe, "--context", 512, "--json")
    assert done.returncode == 0, done.stderr
    assert f"{sequences} sequence" in done.stderr
    assert "operating point of" in done.stderr
    assert "--no-point" in done.stderr
    plan = json.loads(done.stdout)
    assert plan["settings"]["sequences"] == sequences
    assert (plan["settings"]["threads"], plan["settings"]["context"]) == (1, 512)
    reasons = {each["name"]: each["reason"] for each in plan["decisions"]}
    assert reasons["sequences"].startswith("operating point of")
    own = said(home, "plan", moe, "--context", 512, "--json", "--sequences", 3)
    assert json.loads(own.stdout)["settings"]["sequences"] == 3
    without = said(home, "plan", moe, "--context", 512, "--json", "--no-point")
    assert "operating point" not in without.stderr
    usual = said(home, "plan", moe, "--json")
    assert "--context 512" in usual.stderr, "the context of a tuning is not that of every later command"
    assert json.loads(usual.stdout)["settings"]["context"] > 512
    other = said(home, "plan", moe, "--context", 512, "--reserve-ram", "1 GiB")
    assert "without --reserve-ram" in other.stderr


def test_old_trials_do_not_overrule_what_is_said_now(home: Path, moe: Path, tmp_path: Path) -> None:
    own = copied(home, tmp_path)
    asked = next(count for count in (3, 5) if count != point_of(own)["dials"]["sequences"])
    done = said(own, "tune", moe, *SMALL, "--trials", 1, "--busy", "--sequences", asked, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["dials"]["sequences"] == asked, "the goal's own number, which was not tried before"
    assert {trial["dials"]["sequences"] for trial in found["trials"]} == {asked}


def test_a_point_holds_with_the_options_it_was_found_with(home: Path, moe: Path, tmp_path: Path) -> None:
    own = copied(home, tmp_path)
    done = said(own, "tune", moe, *SMALL, "--trials", 1, "--busy", "--reserve-ram", "1 GiB", "--json")
    assert done.returncode == 0, done.stderr
    assert "earlier trial" not in done.stderr, "trials with another amount of memory cannot be compared"
    words = ("plan", moe, "--context", 512, "--json")
    assert "operating point of" in said(own, *words, "--reserve-ram", "1 GiB").stderr
    assert "with --reserve-ram" in said(own, *words).stderr


def test_a_run_uses_the_point_and_does_not_measure_slots(
    home: Path, moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, measured_limits = slots.measure, list[int]()

    async def counted(engine: Engine, requests: Sequence[Request], limit: int, **options: Any) -> SlotPoint:
        measured_limits.append(limit)
        return await measure(engine, requests, limit, **options)

    monkeypatch.setattr(slots, "measure", counted)
    monkeypatch.setattr(slots, "MIN_BATCH_RATIO", 0)  # every batch is long enough to measure
    lines = [{"prompt": f"word {number}", "max_tokens": 2, "temperature": 0} for number in range(3)]
    jobs = write(tmp_path / "jobs.jsonl", lines)
    words = ("run", jobs, "--model", moe)
    without = said(home, *words, *ONE, "--no-point", "-o", tmp_path / "without.jsonl")
    assert without.returncode == 0, without.stderr
    assert len(measured_limits) == 1
    given = ("--context", 512, "--no-warm", "--no-reuse")
    done = said(home, *words, *given, "-o", tmp_path / "out.jsonl")
    assert done.returncode == 0, done.stderr
    assert "operating point of" in done.stderr
    assert len(measured_limits) == 1
    sequences = point_of(home)["dials"]["sequences"]
    assert f"{sequences} slots of 512 tokens" in done.stderr


def test_a_changed_model_is_told_and_not_tuned(home: Path, moe: Path, tmp_path: Path) -> None:
    other = tmp_path / "moe.gguf"
    data = bytearray(moe.read_bytes())
    data[-4096:] = bytes(4096)
    other.write_bytes(data)
    done = said(home, "plan", other)
    assert "another file of" in done.stderr


def test_jobs_of_one_s_own_and_quiet_trials_go_into_the_history(moe: Path, tmp_path: Path) -> None:
    jobs = write(
        tmp_path / "jobs.jsonl", [{"prompt": f"a word about {number}", "max_tokens": 4} for number in range(8)]
    )
    with jobs.open("a") as file:
        file.write("no JSON\n")  # is passed over
    done = said(tmp_path, "tune", moe, *SMALL, "--trials", 1, "--jobs", jobs, "--json")
    state = tmp_path / "tokenmill"
    kept = read_json(state, "trial")
    assert len(kept) == 1
    assert kept[0]["work"].startswith("jobs ")
    disturbed = kept[0]["trial"]["disturbed"]
    if disturbed is None:
        assert done.returncode == 0, done.stderr
        (speed,) = history.read(state)
        assert speed.source == "tune"
        assert 0 < speed.depth < 64
        assert speed.figures.decode_tok_s
    else:  # on a machine that others use, that is what it must say
        assert done.returncode == 1
        assert "disturbed" in done.stderr
        assert "--busy" in done.stderr
        assert history.read(state) == ()


def test_ctrl_c_keeps_trials_and_leaves_no_engine_behind(moe: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        command("tune", moe, *SMALL, "--busy"),
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    state = tmp_path / "tokenmill"
    try:
        until(lambda: bool(read_json(state, "trial")))
        engines = list(command_lines(process.pid))
        assert engines
        process.send_signal(signal.SIGINT)
        _, talk = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 130, talk
    kept = len(read_json(state, "trial"))
    assert f"stopped: {kept} trial" in talk.decode()
    assert b"tune again to continue" in talk
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in engines))
    again = said(tmp_path, "tune", moe, *SMALL, "--busy", "--trials", kept, "--json")
    assert again.returncode == 0, again.stderr
    assert len(json.loads(again.stdout)["trials"]) == kept


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--aim", "latency"), "(got aim latency, first_token None)"),
        (("--first-token", "2s"), "(got aim throughput, first_token 2s)"),
        (("--aim", "latency", "--first-token", "soon"), "first_token must be a time (got 'soon')"),
        (("--aim", "cores", "--within", "150%"), "within must be a share from 0 to less than 1 (got '150%')"),
        (("--trials", 0), "trials must be at least 1"),
        (("--trial-seconds", 0), "trial_seconds must be more than 0"),
        (("--context", 128), "jobs of 640 tokens do not fit a context of 128"),
        (("--own-tokens", 0), "own_tokens must be at least 1"),
        (("--sequences", 0), "sequences must be at least 1"),
        (("--engine", "http://localhost:1"), "http://localhost:1"),
        (("--jobs", os.devnull), f"{os.devnull} has no valid job"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_loaded(
    moe: Path, tmp_path: Path, words: tuple[object, ...], message: str
) -> None:
    done = said(tmp_path, "tune", moe, *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "tokenmill" / "engines").exists()
