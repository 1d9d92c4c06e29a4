"""`tokenmill doctor` on the machine that runs the tests."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.audited import audited
from support.run_cli import USUAL_HOME, said
from tokenmill.cli import run

FEWEST_CHECKS = 10


def tokenmill(*words: str) -> subprocess.CompletedProcess[str]:
    return said(USUAL_HOME, *words)


def examined(*words: str) -> tuple[int, dict[str, Any]]:
    done = tokenmill("doctor", *words, "--json")
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, found


def test_looks_at_this_machine_and_its_exit_code_tells_of_problems() -> None:
    code, found = examined()
    severities = {finding["severity"] for finding in found["findings"]}
    assert severities <= {"problem", "advice", "fine", "unknown"}
    assert code == (1 if "problem" in severities else 0)
    assert len(found["findings"]) >= FEWEST_CHECKS
    assert sum(found["counts"].values()) == len(found["findings"])
    for finding in found["findings"]:
        assert set(finding) == {"check", "severity", "seen", "why", "source", "remedies"}
        for remedy in finding["remedies"]:
            assert set(remedy) == {"when", "command", "root", "note"}


def test_reads_well_at_eighty_columns() -> None:
    done = tokenmill("doctor", "--all")
    assert done.returncode in (0, 1)
    lines = done.stdout.splitlines()
    # text is folded; a command to copy is not, and stands six columns in
    assert all(len(line) <= 80 or line.startswith("      ") for line in lines)
    assert "fine" in lines
    short = tokenmill("doctor").stdout.splitlines()
    assert short[-1].endswith("unknown (use --all to list them)")
    assert len(short) <= len(lines)


def test_a_model_that_does_not_fit_is_a_problem_with_its_command() -> None:
    code, found = examined("kimi-k2.5:Q8_0", "--context", "4096")
    problems = {finding["check"]: finding for finding in found["findings"] if finding["severity"] == "problem"}
    assert code == 1
    assert "does not fit: " in problems["plan"]["seen"]
    assert problems["plan"]["remedies"][0]["command"] == "tokenmill plan kimi-k2.5:Q8_0"


def test_a_real_model_is_looked_at(smollm2_path: Path) -> None:
    _, found = examined(str(smollm2_path), "--context", "2048", "--no-repack")
    checks = {finding["check"]: finding for finding in found["findings"]}
    assert checks["plan"]["severity"] == "fine"
    assert checks["page-cache"]["severity"] in ("fine", "advice")
    assert "of the model's 93.8 MiB" in checks["page-cache"]["seen"]
    assert str(smollm2_path.parent) in checks["file-system"]["seen"]


@pytest.mark.parametrize(
    ("words", "hint"),
    [(("--context", "4096"), "name the model"), (("absent.gguf",), "models list"), (("kimi-k2.5:Q9",), "")],
)
def test_wrong_use_is_a_sentence(words: tuple[str, ...], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert hint in err


def test_it_only_asks_programs_that_describe_the_machine(smollm2_path: Path, tmp_path: Path) -> None:
    seen = audited(tmp_path / "seen", "doctor", smollm2_path, "--json")
    assert seen.code in (0, 1), seen.stderr
    assert {"lscpu"} <= set(seen.programs) <= {"lscpu", "dmidecode", "ipmctl", "ndctl", "nvidia-smi"}
    assert seen.loaded == []


def test_help_tells_of_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--help"]) == 0
    assert "Exit code 0: no problems; 1:" in " ".join(capsys.readouterr().out.split())
