"""`tokenmill expand` on the command line."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from support.run_cli import SMALL, said, tokenmill, write
from tokenmill.cli import run
from tokenmill.recipes.expansion.prompts import PACKAGED

SEEDS = [
    {"question": "What is rye?", "answer": '{"answer": "a grain"}', "topic": "grain"},
    {"question": "What is an oven for?", "answer": '{"answer": "baking"}', "topic": "bread"},
]
SCHEMA = {
    "type": "object",
    "required": ["answer"],
    "additionalProperties": False,
    "properties": {"answer": {"$ref": "#/$defs/short"}},
    "$defs": {"short": {"type": "string", "minLength": 1, "maxLength": 24}},
}
SHORT = "## user\nAsk something else. {fields}\n{example}\n"


@pytest.fixture
def seeds(tmp_path: Path) -> Path:
    return write(tmp_path / "seeds.jsonl", SEEDS)


def test_prompts_can_be_written_to_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    done = said(tmp_path, "expand", "--write-prompts", folder)
    assert done.returncode == 0
    assert sorted(path.stem for path in folder.iterdir()) == sorted(PACKAGED)
    assert "harder.md" in done.stdout
    again = said(tmp_path, "expand", "--write-prompts", folder)
    assert again.returncode == 2
    assert "exists" in again.stderr


def test_a_dry_run_counts_jobs_and_leaves_nothing(smollm2_path: Path, seeds: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    words = ("expand", seeds, "-o", output, "--target", "140", "--model", smollm2_path, *SMALL, "--dry-run", "--json")
    done = said(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert [(stage["stage"], stage["jobs"]) for stage in found["stages"]] == [("write", 204), ("judge", 204)]
    assert not output.exists()


def test_answers_follow_a_schema_and_a_budget_can_be_continued(smollm2_path: Path, seeds: Path, tmp_path: Path) -> None:
    output, prompts = tmp_path / "out.parquet", tmp_path / "prompts"
    prompts.mkdir()
    (prompts / "other.md").write_text(SHORT)
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    words = (
        "expand",
        seeds,
        "-o",
        output,
        "--ways",
        "other",
        "--prompts",
        prompts,
        "--schema",
        schema,
        "--no-judge",
        "--carry",
        "topic",
        "--keep-seeds",
        "--max-tokens",
        "120",
        "--temperature",
        "0.3",
        "--per-seed",
        "2",
        "--model",
        smollm2_path,
        *SMALL,
        "--no-warm",
        "--json",
    )
    paused = tokenmill(tmp_path, *words, "--max-tokens-total", "40")
    assert paused.returncode == 0, paused.stderr
    first: dict[str, Any] = json.loads(paused.stdout)
    assert first["end"] == "tokens"
    assert first["waiting"] > 0
    assert "--max-tokens-total 40 is reached" in paused.stderr
    assert len(pyarrow.parquet.read_table(output)) == 2 + first["kept"]

    done = said(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    second: dict[str, Any] = json.loads(done.stdout)
    assert (second["end"], second["made"], second["waiting"]) == ("finished", 4, 0)
    assert second["answers"] + second["reused"] == 4
    assert second["reused"] == first["answers"]
    rows = pyarrow.parquet.read_table(output).to_pylist()
    assert [row["way"] for row in rows] == ["seed", "seed", *["other"] * second["kept"]]
    assert second["made"] == second["kept"] + second["near_duplicates"] + second["invalid"]
    by_id = {row["id"]: row for row in rows}
    for row in rows[2:]:
        found = json.loads(row["answer"])
        assert set(found) == {"answer"}
        assert 1 <= len(found["answer"]) <= 24
        assert row["topic"] == by_id[row["root"]]["topic"]
        assert row["question"]


@pytest.mark.parametrize(
    ("words", "named", "hinted"),
    [
        (["seeds.jsonl"], "--output", "-o expanded.parquet"),
        (["nowhere.jsonl", "-o", "out.jsonl"], "nowhere.jsonl", "path"),
        (["odd.jsonl", "-o", "out.jsonl"], "a, b", "--column"),
        (["seeds.jsonl", "-o", "seeds.jsonl"], "seeds.jsonl", "another"),
        (["seeds.jsonl", "-o", "out.doc"], "out.doc", ".parquet"),
        (["seeds.jsonl", "-o", "out.jsonl", "--ways", "softer"], "'softer'", "paraphrase"),
        (["seeds.jsonl", "-o", "out.jsonl", "--ways", "language"], "language", "--languages"),
        (["seeds.jsonl", "-o", "out.jsonl", "--temperature", "-1"], "temperature", ""),
        (["seeds.jsonl", "-o", "out.jsonl", "--near", "0"], "0", "0.8"),
        (
            ["seeds.jsonl", "-o", "out.jsonl", "--prompts", "mine"],
            "harder.md, line 3: ",
            "{example}",
        ),
    ],
)
def test_usage_errors_are_reported_before_anything_runs(
    seeds: Path,
    tmp_path: Path,
    words: list[str],
    named: str,
    hinted: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(tmp_path / "odd.jsonl", [{"a": 1, "b": 2}])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "harder.md").write_text("Mine.\n## user\nHarder: {exmaple}\n")
    monkeypatch.chdir(seeds.parent)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    assert run(["expand", *words]) == 2
    captured = capsys.readouterr()
    assert named in captured.err
    assert hinted in captured.err
    assert captured.out == ""
    assert not (tmp_path / "home").exists()
