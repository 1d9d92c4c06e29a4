"""The files that a batch writes: answers, errors, and the table of `tokenmill distill`."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet

from support import contracts
from support.run_cli import said, write

# What differs from run to run, build to build or processor to processor.
VOLATILE = {"id", "request_id", "created", "model", "system_fingerprint", "content", "text", "finish_reason", "message"}
VOLATILE |= {"cached_tokens", "completion_tokens", "total_tokens"}


def masked(value: Any, key: str = "") -> Any:
    """The value with everything volatile replaced by its type; log-probabilities by their shape."""
    match value:
        case _ if key == "logprobs":
            return contracts.shape_of(value, maps=["top_logprobs"])
        case dict():
            return {name: masked(item, name) for name, item in value.items()}
        case list():
            return [masked(item, key) for item in value]
    return type(value).__name__ if key in VOLATILE else value


def lines(path: Path) -> str:
    return "".join(json.dumps(masked(json.loads(line))) + "\n" for line in path.read_text().splitlines())


def test_answers(home: Path) -> None:
    contracts.check("results/results.jsonl", lines(home / "results.jsonl"))


def test_errors(home: Path) -> None:
    contracts.check("results/errors.jsonl", lines(home / "errors.jsonl"))


def test_both_in_one_file(home: Path, tmp_path: Path) -> None:
    done = said(home, "run", home / "jobs.jsonl", "-o", tmp_path / "all.jsonl", "--store", tmp_path / "batches")
    assert done.returncode == 0, done.stderr
    contracts.check("results/all.jsonl", lines(tmp_path / "all.jsonl"))


def test_the_table_of_distill(home: Path, tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", [{"id": name, "prompt": f"What is a {name}?"} for name in ("river", "mill")])
    words = ("distill", rows, "-o", tmp_path / "d.parquet", "--max-tokens", 3, "--top-logprobs", 2)
    done = said(home, *words, "--store", tmp_path / "batches")
    assert done.returncode == 0, done.stderr
    schema = pyarrow.parquet.read_schema(tmp_path / "d.parquet")
    contracts.check("results/distill.txt", schema.remove_metadata().to_string() + "\n")
    metadata = sorted(key.decode() for key in schema.metadata or {})
    contracts.check("results/distill_metadata.txt", "".join(f"{key}\n" for key in metadata))
