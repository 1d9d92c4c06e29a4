"""Shell completion: bash completes commands and options with the script; the other shells' scripts name them."""

import json
import subprocess
from pathlib import Path

import pytest

from tokenmill.cli import app, run


def completed(script: Path, *words: str) -> list[str]:
    """What bash offers for the last word."""
    quoted = " ".join(f"'{word}'" for word in ("tokenmill", *words))
    text = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words)}; _tokenmill; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    argv = ["bash", "--norc", "-c", f". {script}; {text}"]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()


def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    script = tmp_path / "completion.bash"
    assert run(["completion", "bash", "-o", str(script)]) == 0
    assert completed(script, "pl") == ["plan"]
    assert completed(script, "models", "sy") == ["synth"]
    assert "--reserve-cores" in completed(script, "run", "--reserve")
    assert completed(script, "nothing-begins-like-this") == []


@pytest.mark.parametrize(("shell", "begin"), [("zsh", "#compdef tokenmill"), ("fish", "# Fish completion")])
def test_scripts_of_other_shells_name_every_command(shell: str, begin: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell, "-o", "-"]) == 0
    script = capsys.readouterr().out
    assert script.startswith(begin)
    commands = [name for name in app if not name.startswith("-")]
    assert len(commands) > 20
    assert [name for name in commands if name not in script] == []


def test_it_installs_for_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run(["completion", "fish", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"shell": "fish", "path": str(tmp_path / ".config/fish/completions/tokenmill.fish")}
    assert Path(found["path"]).stat().st_size > 1000
    assert run(["completion", "tcsh"]) == 2
