"""The command line as a process: streams, exit codes, help and common mistakes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import pytest

from support.audited import audited
from tokenmill.cli import run

COMMANDS = ("probe", "machines", "inspect", "models", "models list", "models ghost", "models synth", "models pull")


def tokenmill(
    *arguments: str, stdout: int | IO[bytes] = subprocess.PIPE, cwd: Path | None = None, **env: str
) -> subprocess.CompletedProcess[bytes]:
    """A process with buffered streams, as is usual."""
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, "-m", "tokenmill", *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        cwd=cwd,
        env=inherited | {"COLUMNS": "80"} | env,
        check=False,
    )


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_explains_at_eighty_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*command.split(), "--help"]) == 0
    out, err = capsys.readouterr()
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 80
    assert f"Usage: {' '.join(['tokenmill', *command.split()])}" in out
    assert command in ("", "models") or "--json" in out
    assert err == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("probe",),
        ("machines",),
        ("machines", "epyc-9175f"),
        ("inspect", "kimi-k2.5:Q4_K_S"),
        ("inspect", "kimi-k2.5:Q4_K_S", "--tensors"),
        ("models", "list"),
        ("models", "ghost", "qwen3-32b:Q4_K_M", "-o", "ghost.gguf"),
        ("models", "synth", "--layers", "1", "-o", "synth.gguf"),
    ],
)
def test_json_is_one_document_and_nothing_else(
    arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "code", "hint"),
    [
        (("bogus",), 2, "tokenmill --help"),
        (("inspect", "--bogus"), 2, "tokenmill inspect --help"),
        (("models", "ghost"), 2, "tokenmill models ghost --help"),
        (("models", "bogus"), 2, "tokenmill models --help"),
        (("inspect", "no-such-model:Q4_K_M"), 2, "kimi-k2.5"),
        (("inspect", "hf:nobody:Q4_K_M"), 2, "hf:OWNER/REPO:QUANT"),
        (("inspect", "absent/file.gguf"), 2, "models list"),
        (("inspect", "text.gguf"), 1, "download it again"),
        (("inspect", "a" * 300), 1, "check the path"),
        (("probe", "-o", "text.gguf"), 2, "another output file"),
        (("probe", "--config", "absent.toml"), 2, "config.example.toml"),
        (("models", "synth", "--layers", "1" * 30, "-o", "x.gguf"), 2, "synth --help"),
    ],
)
def test_mistakes_say_what_to_do(
    arguments: tuple[str, ...],
    code: int,
    hint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.gguf").write_text("precious")
    assert run(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert run([*arguments, "--json"]) == code
    document = json.loads(capsys.readouterr().out)["error"]
    assert document["hint"] == err.partition("hint: ")[2].rstrip("\n")
    assert err.startswith(f"error: {document['message']}")
    assert hint in err.partition("hint: ")[2]
    assert "bug" not in err
    assert (tmp_path / "text.gguf").read_text() == "precious"


def test_a_machine_file_may_be_written_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "machine.toml"
    for _ in range(2):
        assert run(["probe", "--machine", "epyc-9554", "-o", str(path)]) == 0
    assert "wrote" in capsys.readouterr().err
    assert run(["machines", str(path), "--json"]) == 0


@pytest.mark.parametrize("arguments", [("machines",), ("machines", "--json"), ("--help",), ("--version",)])
def test_a_reader_that_goes_away_is_no_error(arguments: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = tokenmill(*arguments, stdout=writer)
    finally:
        os.close(writer)
    assert done.returncode == 0
    assert b"rror" not in done.stderr


def test_a_full_disk_behind_stdout_is_an_error() -> None:
    with Path("/dev/full").open("wb") as full:
        done = tokenmill("machines", stdout=full)
    assert done.returncode == 1
    assert b"error: output: No space left on device" in done.stderr
    assert b"Exception" not in done.stderr


def test_names_that_are_not_unicode_leave_as_they_came(tmp_path: Path) -> None:
    name = b"m\xff.gguf"
    arguments = ("models", "synth", "--layers", "1", "-o", os.fsdecode(name))
    made = tokenmill(*arguments, cwd=tmp_path, PYTHONIOENCODING="utf-8:strict")
    assert (made.returncode, made.stderr) == (0, b"")
    assert name in made.stdout
    seen = tokenmill("inspect", os.fsdecode(name), "--json", cwd=tmp_path, PYTHONIOENCODING="utf-8:strict")
    assert json.loads(seen.stdout)["files"][0]["path"] == os.fsdecode(name)


def test_an_interrupted_command_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tokenmill", "models", "synth", "--layers", "200", "-o", "model.gguf"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell's background jobs ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    ) as process:
        deadline = time.monotonic() + 200
        while not any(path.stat().st_size for path in tmp_path.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=200)
    assert (process.returncode, out, err) == (130, b"", b"interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_a_trillion_parameters_in_two_hundred_megabytes(tmp_path: Path) -> None:
    path = tmp_path / "kimi.gguf"
    assert run(["models", "ghost", "kimi-k2.5:Q4_K_S", "-o", str(path)]) == 0
    seen = audited(tmp_path / "seen", "inspect", path, "--json")
    assert seen.code == 0, seen.stderr
    assert json.loads(seen.stdout)["parameters"] > 10**12
    assert seen.peak_bytes < 200 * 2**20


def test_short_options_and_suffixes(capsys: pytest.CaptureFixture[str]) -> None:
    long = ("kimi-k2.5:Q4_K_S", "--context", "16384", "--threads", "8", "--ubatch", "512", "--reserve-ram", "64 GiB")
    short = ("-m", "kimi-k2.5:Q4_K_S", "-c", "16k", "-t", "8", "--ubatch", "512", "--reserve-ram", "64GiB")
    plans = []
    for words in (long, short):
        assert run(["plan", *words, "--machine", "epyc-9175f", "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert plans[0] == plans[1]
    assert plans[0]["settings"]["context"] == 16384
