"""`tokenmill models ghost` and `tokenmill models synth`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tokenmill.cli import run


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run([*arguments, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_a_ghost_says_what_it_is_and_inspect_agrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kimi.gguf"
    made = _json(capsys, "models", "ghost", "kimi-k2.5:Q4_K_S", "-o", str(path))
    assert made["apparent_bytes"] == path.stat().st_size
    assert made["disk_bytes"] < 8 << 20
    seen = _json(capsys, "inspect", str(path))
    assert seen["ghost"] is True
    assert (seen["tensor_count"], seen["parameters"]) == (made["tensors"], made["parameters"])


def test_output_fits_eighty_columns(tmp_path: Path) -> None:
    for arguments in (("ghost", "kimi-k2.5:Q4_K_S"), ("synth",), ("ghost", "--help"), ("synth", "--help")):
        wanted = () if "--help" in arguments else ("-o", "model.gguf", "--force")
        done = subprocess.run(
            [sys.executable, "-m", "tokenmill", "models", *arguments, *wanted],
            capture_output=True,
            text=True,
            check=True,
            cwd=tmp_path,
            env={"COLUMNS": "80", "PATH": "/usr/bin:/bin"},
        )
        assert done.stdout
        assert max(len(line.rstrip()) for line in done.stdout.splitlines()) <= 80
        assert "default: False" not in done.stdout


def test_a_ghost_of_a_file_is_asked_for_with_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, ghost = tmp_path / "model.gguf", tmp_path / "ghost.gguf"
    made = _json(capsys, "models", "synth", "-o", str(model), "--kind", "moe-mla", "--experts", "4", "--type", "q8_0")
    copied = _json(capsys, "models", "ghost", "--from", str(model), "-o", str(ghost))
    assert (copied["architecture"], copied["tensors"]) == ("deepseek2", made["tensors"])
    assert copied["parameters"] == made["parameters"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("ghost", "kimi-k2.5:Q9"), "'Q9'"),
        (("ghost", "kimi-k9:Q4_K_S"), "no model 'kimi-k9'"),
        (("ghost",), "either a catalogue name or --from"),
        (("ghost", "qwen3-32b:Q8_0", "--from", "x.gguf"), "either a catalogue name or --from"),
        (("ghost", "absent.gguf"), "no such file"),
        (("synth", "--kind", "sparse"), "sparse"),
        (("synth", "--type", "Q9"), "Q9"),
        (("synth", "--kind", "dense", "--experts", "8"), "--experts"),
    ],
)
def test_mistakes_are_sentences_and_exit_code_two(
    arguments: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["models", *arguments, "-o", str(tmp_path / "model.gguf")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert list(tmp_path.iterdir()) == []
