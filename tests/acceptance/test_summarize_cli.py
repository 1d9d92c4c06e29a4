"""`tokenmill summarize` on the command line: repeated, killed, refused."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.run_cli import SMALL, command, environment, last_batch, said, tokenmill, until
from tokenmill.cli import run

LONG = "".join(
    f"# Mill {number}\n\nMill {number} stands by the river. It grinds wheat and rye.\n\n" for number in range(40)
)
NAMES = ("river", "bridge", "harbour", "field", "tower", "garden")


@pytest.fixture(scope="module")
def home(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A state folder with a running engine."""
    folder = tmp_path_factory.mktemp("home")
    done = tokenmill(folder, "serve", "--engine-only", smollm2_path, *SMALL, "--no-warm", "--detach", "--name", "night")
    assert done.returncode == 0, done.stderr
    yield folder
    assert said(folder, "engines", "stop", "night").returncode == 0


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    (folder / "deep").mkdir(parents=True)
    for name in NAMES:
        (folder / "deep" / f"{name}.md").write_text(f"# The {name}\n\nThe {name} was looked at in May. All is well.\n")
    (folder / "scan.pdf").write_bytes(b"%PDF-1.7")
    return folder


@pytest.fixture
def words(tmp_path: Path, docs: Path, smollm2_path: Path) -> tuple[object, ...]:
    """The nightly command."""
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    for kind in ("document", "piece", "reduce"):
        (prompts / f"{kind}.md").write_text("Summarize it.")
    return (
        "summarize",
        docs,
        "-o",
        tmp_path / "out",
        "--prompts",
        prompts,
        "--max-tokens",
        8,
        "--body",
        '{"ignore_eos": true}',
        "--store",
        tmp_path / "batches",
        "--model",
        smollm2_path,
    )


def told(home: Path, *words: object) -> dict[str, Any]:
    done = said(home, *words, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_repeated_run_summarizes_only_changed_documents(
    home: Path, docs: Path, words: tuple[object, ...], tmp_path: Path
) -> None:
    (docs / "long.md").write_text(LONG)
    first = told(home, *words)
    assert (first["documents"], first["done"], first["skipped"], first["failed"]) == (7, 7, 1, 0)
    assert first["pieces"] > 7
    assert first["tokens"] == first["computed_prompt_tokens"] + first["generated_tokens"] > 0
    assert first["files"]["skipped"] == [{"document": "scan.pdf", "reason": "a PDF, not text"}]
    assert (tmp_path / "out" / "deep" / "river.md.md").read_text().strip()

    done = said(home, *words)
    assert done.returncode == 0
    assert "7 unchanged" in done.stdout
    assert "scan.pdf" in done.stderr
    assert "engine:" not in done.stderr  # none was started
    assert max(map(len, done.stdout.splitlines())) <= 80

    (docs / "deep" / "river.md").write_text("The river is dry.")
    (docs / "deep" / "tower.md").unlink()
    third = told(home, *words)
    assert (third["done"], third["unchanged"], third["vanished"], third["answers"]) == (1, 5, 1, 1)

    shutil.rmtree(tmp_path / "out")
    foreseen = told(home, *words, "--dry-run")
    assert (foreseen["rows"], foreseen["total"]["jobs"]) == (6, 0)
    lost = told(home, *words)
    assert (lost["done"], lost["answers"], lost["tokens"]) == (6, 0, 0)


def test_after_kill_9_the_same_command_computes_nothing_twice(
    home: Path, words: tuple[object, ...], tmp_path: Path
) -> None:
    # longer answers, so that some jobs are in flight when the first are done
    words = tuple(100 if word == 8 else word for word in words)
    process = subprocess.Popen(command(*words), env=environment(home), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        until(lambda: len(last_batch(tmp_path / "batches")[1]) >= 2)
    finally:
        process.kill()
        process.communicate()
    kept = len(last_batch(tmp_path / "batches")[1])
    totals = told(home, *words)
    assert totals["done"] == 6
    assert totals["answers"] == 6 - kept
    assert totals["answers"] + totals["reused"] == 6
    assert len(list((tmp_path / "out").rglob("*.md"))) == 6
    assert list((tmp_path / "out").rglob(".*")) == []


def test_a_budget_stops_a_run_that_can_be_continued(home: Path, words: tuple[object, ...], tmp_path: Path) -> None:
    first = told(home, *words, "--max-tokens-total", 60)
    assert first["end"] == "tokens"
    assert first["left"] > 0
    assert first["done"] + first["left"] == 6
    assert len(list((tmp_path / "out").rglob("*.md"))) == first["done"]
    second = told(home, *words)
    assert (second["end"], second["done"], second["left"]) == ("finished", first["left"], 0)


def test_failed_documents_are_listed_and_retried(home: Path, docs: Path, smollm2_path: Path, tmp_path: Path) -> None:
    words = ("summarize", docs, "-o", tmp_path / "out", "--store", tmp_path / "batches", "--model", smollm2_path)
    for attempt in (1, 2):
        done = said(home, *words, "--body", '{"grammar": "no grammar"}', "--json")
        assert done.returncode == 1, done.stderr
        totals = json.loads(done.stdout)
        assert (totals["failed"], totals["done"]) == (6, 0)
        assert totals["files"]["failed"][0]["code"] == "refused"
        lines = [json.loads(line) for line in (tmp_path / "out" / "manifest.jsonl").read_text().splitlines()]
        assert [line["failures"] for line in lines] == [attempt] * 6
        assert "again" in done.stderr


# -- without an engine -------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    return tmp_path


def test_a_dry_run_names_the_stages_and_starts_nothing(
    alone: Path, docs: Path, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (docs / "long.md").write_text(LONG)
    words = [
        "summarize",
        str(docs),
        "-o",
        str(alone / "out"),
        "--model",
        str(smollm2_path),
        "--max-tokens",
        "48",
        "--context",
        "1024",
        "--dry-run",
    ]
    assert run([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == 7
    assert [stage["jobs"] for stage in found["stages"]][1] == 1
    assert found["stages"][0]["jobs"] > 7
    assert found["tokens_counted"]
    assert run(words) == 0
    out = capsys.readouterr().out
    assert "1 document" in out
    assert max(map(len, out.splitlines())) <= 80
    assert not (alone / "out").exists()
    assert not (alone / "state").exists() or not list((alone / "state").rglob("store.db"))


def test_prompts_can_be_written_to_a_folder(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["summarize", "--write-prompts", str(alone / "prompts")]) == 0
    assert sorted(path.name for path in (alone / "prompts").iterdir()) == ["document.md", "piece.md", "reduce.md"]
    assert "--prompts" in capsys.readouterr().err
    assert run(["summarize", "--write-prompts", str(alone / "prompts")]) == 2
    assert "--force" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((), "output"),
        (("-o", "out"), "documents"),
        (("no", "-o", "out"), "no"),
        (("scan", "-o", "out"), "scan"),
        (("docs", "-o", "docs"), "docs"),
        (("docs", "-o", "out", "--strict"), "scan.pdf"),
        (("docs", "-o", "out", "--max-tokens", "0"), "--max-tokens"),
        (("docs", "-o", "out", "--digest", "no.md"), "no.md"),
        (("docs", "-o", "out", "--prompts", "docs"), "docs"),
        (("docs", "-o", "out", "--body", '{"prompt": "x"}'), "prompt"),
        (("docs", "-o", "docs/scan.pdf"), "scan.pdf"),
        (("docs", "-o", "out", "--context", "256", "--max-tokens", "200"), "256"),
        (("docs", "-o", "out", "--max-hours", "0"), "--max-hours"),
    ],
)
def test_usage_errors_are_reported_before_anything_is_loaded(
    alone: Path,
    docs: Path,
    smollm2_path: Path,
    words: tuple[str, ...],
    named: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (alone / "scan").mkdir()
    shutil.copy(docs / "scan.pdf", alone / "scan")
    monkeypatch.chdir(alone)
    assert run(["summarize", *words, "--model", str(smollm2_path)]) == 2
    captured = capsys.readouterr()
    assert named in captured.err
    assert captured.out == ""
    assert "hint:" in captured.err or "--max" in captured.err
