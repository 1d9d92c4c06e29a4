"""An expansion on a real engine that is killed: no answer is computed twice, and the rows are the same bytes.

Answers are bit-equal only under the conditions of docs/determinism.md: one slot, one token at a time, and prompts
without a shared prefix, because a cached prefix changes the order of KV cells.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

from support.run_cli import command, environment, tokenmill, until, write
from tokenmill.errors import StoreError
from tokenmill.jobs.store.reader import StoreReader

EXACT = (
    "--context",
    "1024",
    "--sequences",
    "1",
    "--ubatch",
    "1",
    "--threads",
    "1",
    "--threads-batch",
    "1",
    "--no-warm",
)
PROMPT = "## system\n{example}\n## user\nSay that in other words. {fields}\n"
JUDGE = "## system\n{example}\n## user\nHow good is this, from 1 to 5?\n"
TEXTS = ("Mills stand at rivers.", "Flour is kept dry.", "Bread is rye.")
SCHEMA = {"type": "string", "minLength": 8, "maxLength": 24}  # short answers
LINES = len(TEXTS)  # one per text


def words(folder: Path, model: Path, name: str) -> list[object]:
    prompts = folder / "prompts"
    prompts.mkdir(exist_ok=True)
    (prompts / "again.md").write_text(PROMPT)
    (prompts / "judge.md").write_text(JUDGE)
    schema = folder / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    seeds = write(folder / "seeds.jsonl", [{"text": text} for text in TEXTS])
    return [
        "expand",
        seeds,
        "--output",
        folder / f"{name}.jsonl",
        "--rejected",
        folder / f"{name}-rejected.jsonl",
        "--store",
        folder / name,
        "--prompts",
        prompts,
        "--ways",
        "again",
        "--max-tokens",
        "48",
        "--schema",
        schema,
        "--near",
        "0.95",
        "--least-score",
        "1",
        "--model",
        model,
        *EXACT,
        "--json",
    ]


def answers(store: Path) -> int:
    """Number of answers in the store."""
    try:
        with StoreReader(store) as reader:
            found = [reader.results(batch.id, 0, 100) for batch in reader.batches()]
    except StoreError:  # it does not exist yet
        return 0
    return sum(result.body is not None for results in found for result in results)


def ended(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["end"] == "finished"
    return document


def test_a_run_after_kill_9_reuses_answers_and_writes_the_same_rows(smollm2_path: Path, tmp_path: Path) -> None:
    whole = ended(tokenmill(tmp_path, *words(tmp_path, smollm2_path, "whole")))
    assert whole["made"] == LINES
    assert whole["reused"] == 0
    judged = whole["answers"] - LINES
    assert judged == whole["kept"] + whole["judged_too_low"] > 0

    cut = words(tmp_path, smollm2_path, "cut")
    process = subprocess.Popen(
        command(*cut), env=environment(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: answers(tmp_path / "cut") >= 2 or process.poll() is not None)
    finally:
        process.kill()
        process.wait()
    kept = answers(tmp_path / "cut")
    assert 2 <= kept < whole["answers"]
    assert not (tmp_path / "cut.jsonl").exists()  # written atomically at the end

    again = ended(tokenmill(tmp_path, *cut))
    assert (again["answers"], again["reused"]) == (whole["answers"] - kept, kept)
    assert again["made"] == LINES
    assert (tmp_path / "cut.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert (tmp_path / "cut-rejected.jsonl").read_bytes() == (tmp_path / "whole-rejected.jsonl").read_bytes()

    third = ended(tokenmill(tmp_path, *cut))
    assert (third["answers"], third["load_seconds"]) == (0, None)  # no engine is started for existing answers
    assert (tmp_path / "cut.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
