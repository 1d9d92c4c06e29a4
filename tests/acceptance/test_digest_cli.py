"""`tokenmill digest`: stable bytes, the summary and errors."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from tokenmill.cli import run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "docs" / "deep").mkdir(parents=True)
    (tmp_path / "docs" / "a.md").write_text("# A\r\n\r\nText of a.\r\n")
    (tmp_path / "docs" / "deep" / "b.md").write_text("# B\n" + "A line that is as long as others are.\n" * 300)
    (tmp_path / "docs" / "picture.png").write_bytes(b"\x89PNG\0")
    return tmp_path / "docs"


def test_it_is_written_and_described(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    assert run(["digest", str(folder), "-o", "digest.md", "--tokens", "500"]) == 0
    text = (tmp_path / "digest.md").read_bytes()
    assert text.startswith(b'<file path="a.md">\n# A\n\nText of a.\n</file>\n\n<file path="deep/b.md" lines="1-')
    assert len(text) <= 2000
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    rows = {line.split("  ")[0]: line for line in out.splitlines()}
    assert "1: a.md" in rows["whole"]
    assert "1: deep/b.md" in rows["cut"]
    assert "1: picture.png (not text)" in rows["skipped"]
    assert hashlib.sha256(text).hexdigest() in rows["sha256"]


def test_the_same_again_is_unchanged_and_something_else_is_not_overwritten(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = folder / "digest.md"  # inside of what is read
    assert run(["digest", str(folder), "-o", str(target), "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    os.utime(folder / "a.md", (1, 1))
    assert run(["digest", str(folder), "-o", str(target), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again == first | {"unchanged": True}
    (folder / "a.md").write_text("changed")
    assert run(["digest", str(folder), "-o", str(target)]) == 2
    assert "--force" in capsys.readouterr().err
    assert run(["digest", str(folder), "-o", str(target), "--json", "--force"]) == 0
    assert json.loads(capsys.readouterr().out)["sha256"] != first["sha256"]


def test_a_model_counts_tokens(
    folder: Path, tmp_path: Path, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "digest.md"
    assert (
        run(["digest", str(folder), "-o", str(target), "--tokens", "700", "--model", str(smollm2_path), "--json"]) == 0
    )
    said = json.loads(capsys.readouterr().out)
    assert said["tokens_counted"]
    assert 600 < said["tokens"] <= 700
    assert [(file["path"], file["shown"]) for file in said["files"]] == [("a.md", "whole"), ("deep/b.md", "part")]
    assert said["left_out"] == [{"path": "picture.png", "reason": "not text"}]


def test_a_long_digest_is_warned_of(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "long.txt").write_text("Many words in a line that comes again.\n" * 2000)
    assert run(["digest", str(folder), "-o", str(tmp_path / "d.md"), "--tokens", "17000"]) == 0
    assert "warning: a prefix of more than 16,384 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "d.md"], "no files given"),
        (["docs"], "output"),
        (["absent", "-o", "d.md"], "no file or folder at absent"),
        (["docs", "-o", "d.md", "--tokens", "0"], "--tokens must be at least 1"),
        (["docs", "-o", "d.md", "--tokens", "1"], "no text"),
        (["docs/picture.png", "-o", "d.md"], "no text"),
        (["docs", "-o", "docs"], "docs is a folder"),
        (["docs", "-o", "absent/d.md"], "cannot write absent/d.md"),
    ],
)
def test_wrong_use(
    folder: Path,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder.parent)
    assert run(["digest", *arguments]) in (1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "hint: " in err
