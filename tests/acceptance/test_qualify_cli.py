"""`tokenmill qualify` on a tiny model with random weights, which passes only the repeatability check."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.run_cli import said, tokenmill
from tokenmill.cli import run
from tokenmill.measurements import journal_path, read_json
from tokenmill.model.synthetic import generate

SMALL = ("--quick", "--depths", "256", "--threads", "1", "--threads-batch", "1", "--no-warm")


def made(path: Path, seed: int = 0, **sizes: int | None) -> Path:
    chosen = {"layers": 2, "embed": 128, "heads": 2, "vocab": 512, "dense_ff": 256, **sizes}
    generate.write("dense", generate.sizes("dense", chosen), path, seed=seed)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def qualified(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, "subprocess.CompletedProcess[str]"]:
    home = tmp_path_factory.mktemp("home")
    return home, tokenmill(home, "qualify", model, *SMALL, "--against", model, "--strict", "--json")


def test_the_result_says_what_it_is_good_for(qualified: tuple[Path, "subprocess.CompletedProcess[str]"]) -> None:
    _, done = qualified
    assert done.returncode == 1, done.stderr  # by --strict
    found: dict[str, Any] = json.loads(done.stdout)
    assert list(found["checks"]) == ["needle", "json", "python", "c-like", "repeat", "agreement"]
    assert found["good"] is False
    assert [name for name, check in found["checks"].items() if check["good"]] == ["repeat", "agreement"]
    assert found["verdict"].startswith("not good enough for ")
    assert "; good enough for " in found["verdict"]
    for check in found["checks"].values():
        assert check["good"] == (check["score"] >= check["threshold"])
        assert check["words"]
    assert found["checks"]["json"]["failures"][0].keys() == {"asked", "why", "said"}


def test_a_model_stands_in_for_itself(qualified: tuple[Path, "subprocess.CompletedProcess[str]"]) -> None:
    agreement = json.loads(qualified[1].stdout)["checks"]["agreement"]
    assert agreement["score"] == 1.0
    assert agreement["figures"]["kl_max"] < 1e-6
    assert agreement["figures"]["perplexity"] == pytest.approx(agreement["figures"]["perplexity_reference"])


def test_the_result_is_kept_for_the_report(qualified: tuple[Path, "subprocess.CompletedProcess[str]"]) -> None:
    home, done = qualified
    found = json.loads(done.stdout)
    assert read_json(home / "tokenmill", "qualification", model_id=found["model_id"]) == [found]


def test_a_person_reads_why_and_poor_scores_are_no_failure(model: Path, tmp_path: Path) -> None:
    other = made(tmp_path / "other.gguf", seed=7)
    done = said(tmp_path, "qualify", model, *SMALL, "--against", other)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^verdict +not good enough for", done.stdout, re.MULTILINE)
    assert re.search(r"^needle .* fail ", done.stdout, re.MULTILINE)
    assert re.search(r"^repeat .* pass ", done.stdout, re.MULTILINE)
    assert "KL divergence" in done.stdout
    assert "no JSON" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert str(journal_path(tmp_path / "tokenmill")) in done.stderr
    assert "needle" in done.stderr


def refused(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: object) -> str:
    """The error message of an invalid command."""
    monkeypatch.setenv("XDG_STATE_HOME", str(home))
    assert run(["qualify", *map(str, words)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "hint:" in told.err
    return told.err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--depths", "1K,deep"), "--depths must be a number of tokens (got 'deep')"),
        (("--depths", "16"), "--depths must be at least 256 tokens (got '16')"),
        (("--against", "no/such/file.gguf"), "no/such/file.gguf"),
        (("--engine", "nonsense"), "nonsense"),
    ],
)
def test_wrong_use_says_what_is_right(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    reason: str,
) -> None:
    assert reason in refused(tmp_path, capsys, monkeypatch, model, *words)


def test_what_cannot_be_compared_is_refused_before_anything_is_loaded(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = made(tmp_path / "other.gguf", vocab=640)
    told = refused(tmp_path, capsys, monkeypatch, model, "--against", other)
    assert "(512 and 640 tokens)" in told
    assert "loaded" not in told


def test_a_model_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "missing.gguf" in refused(tmp_path, capsys, monkeypatch, tmp_path / "missing.gguf")
