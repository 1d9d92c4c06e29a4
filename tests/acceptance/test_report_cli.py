"""`tokenmill report` on the command line."""

import json
from pathlib import Path

import pytest

from support.run_cli import SMALL, jobs, ran_here, said, write
from tokenmill.report.render import GENERATOR


def test_a_page_of_a_giant_on_a_machine_of_the_catalogue(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    words = ("kimi-k2.5:Q4_K_S", "--machine", "xeon-6980p", "--context", "16384", "-o", page)
    done = said(tmp_path, "report", *words)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr == f"wrote {page}\n"
    text = page.read_text(encoding="utf-8")
    assert "kimi-k2.5 on xeon-6980p" in text.lower()
    assert "another machine" in text
    assert (
        "tokenmill run jobs.jsonl --output results.jsonl --model hf:unsloth/Kimi-K2.5-GGUF:Q4_K_S --context 16384"
        in text
    )
    assert said(tmp_path, "report", *words).returncode == 0, "a report may be overwritten"


def test_a_batch_then_its_report(tmp_path: Path, smollm2_path: Path) -> None:
    lines = write(tmp_path / "night.jsonl", jobs())
    totals = ran_here(tmp_path, lines, "--output", tmp_path / "out.jsonl", "--model", smollm2_path, *SMALL)
    done = said(tmp_path, "report", smollm2_path, "--json", "-o", tmp_path / "report.md", *SMALL)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (batch,) = found["reuse"]
    assert (batch["source"], batch["jobs"]) == ("night.jsonl", totals["jobs"])
    assert batch["reused_tokens"] == totals["reused_tokens"] > 0
    assert batch["finish_reasons"] == totals["finish_reasons"]
    assert batch["finish_reasons"]["length"] == totals["cut_by_max_tokens"] > 0
    (tier,) = found["tiers"]
    measured = {part["item"]: part["bytes"] for part in tier["loaded"]["measured"]}
    assert measured["weights"] == {part["item"]: part["bytes"] for part in tier["planned"]}["weights"]
    assert {gap["about"] for gap in found["gaps"]} == {"machine", "curves", "depth", "point", "soaked", "qualified"}
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "last load (4 x 1024 tokens" in text
    assert f"`tokenmill tune {smollm2_path}`" in text
    assert f"`tokenmill results {batch['name']} --cut`" in text


def test_without_a_model_or_a_file_it_is_markdown_about_the_machine(tmp_path: Path) -> None:
    config = tmp_path / "tokenmill.toml"
    config.write_text(f'models_dir = "{tmp_path / "none"}"\n')
    done = said(tmp_path, "report", "--config", config)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("<!-- tokenmill report -->\n\n# ")
    assert "`tokenmill report MODEL -o report.html`" in done.stdout
    assert "`tokenmill run jobs.jsonl --output results.jsonl`" in done.stdout


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("-o", "report.pdf"), "--output must end in .html or .md (got report.pdf)"),
        (("no-such-model", "-o", "x.html"), "no model 'no-such-model'"),
        (("-o", "no/folder/x.html"), "cannot write no/folder/x.html"),
        (("--machine", "no-such-machine"), "no-such-machine"),
    ],
)
def test_errors_have_a_hint_and_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = said(tmp_path, "report", *words)
    assert done.returncode in (1, 2)
    assert error in done.stderr
    assert "hint:" in done.stderr
    assert done.stdout == ""
    assert [path for path in tmp_path.iterdir() if path.suffix in (".html", ".part")] == []


def test_other_files_are_not_overwritten(tmp_path: Path) -> None:
    notes = tmp_path / "notes.md"
    notes.write_text("# my notes\n")
    done = said(tmp_path, "report", "-o", notes)
    assert (done.returncode, notes.read_text()) == (2, "# my notes\n")
    assert f"{notes} exists" in done.stderr
    assert GENERATOR not in done.stderr
