"""Exports loaded by the real `datasets` library."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tokenmill.errors import TokenmillError, UsageError
from tokenmill.recipes.distillation.rows import COLUMNS
from tokenmill.recipes.export import ExportFormat, ExportRequest, export
from tokenmill.recipes.export_check import check
from tokenmill.storage.rows import write_rows

TEXTS = ("Blue.", 'She said "ü"\n\tand \u2028 left\x00', "漢字 🦊 </s>", "{}", "null")
STRUCTS = "List({'role': Value('string'), 'content': Value('string')})"


@pytest.fixture(name="teacher")
def make_teacher(tmp_path: Path) -> Path:
    rows: list[dict[str, Any]] = []
    for number, text in enumerate(TEXTS):
        system = [{"role": "system", "content": "Be brief."}] if number % 2 else []
        before = [{"role": "user", "content": "And?"}, {"role": "assistant", "content": text}] if number == 3 else []
        messages = [*system, *before, {"role": "user", "content": f"{text}?"}]
        rows.append(
            {
                "id": f"p{number}/0",
                "prompt_id": f"p{number}",
                "sample": 0,
                "messages": messages,
                "answer": text,
                "reasoning": "hm" if number == 1 else None,
                "finish_reason": "length" if number == 4 else "stop",
                "token_ids": [number, 7],
                "logprobs": [-0.1, -9999.0],
                "top_ids": [[1, 2], []],
                "top_logprobs": [[-0.1, -2.3], []],
                "model": "tiny",
                "model_id": "sha256:1",
            }
        )
    write_rows(tmp_path / "teacher.parquet", rows, COLUMNS)
    return tmp_path / "teacher.parquet"


@pytest.mark.parametrize(
    ("format", "name", "features"),
    [
        ("messages", "out.jsonl", {"messages": STRUCTS}),
        ("messages", "out.jsonl.gz", {"messages": STRUCTS}),
        ("messages", "out.jsonl.zst", {"messages": STRUCTS}),
        ("sharegpt", "out.jsonl", {"conversations": "List({'from': Value('string'), 'value': Value('string')})"}),
        (
            "alpaca",
            "out.jsonl",
            {
                "instruction": "Value('string')",
                "input": "Value('string')",
                "output": "Value('string')",
                "system": "Value('string')",
                "history": "List(List(Value('string')))",
            },
        ),
        (
            "parquet",
            "out.parquet",
            {
                "messages": STRUCTS,
                "token_ids": "List(Value('int32'))",
                "top_logprobs": "List(List(Value('float32')))",
                "reasoning": "Value('string')",
            },
        ),
    ],
)
def test_every_row_is_loaded(teacher: Path, format: ExportFormat, name: str, features: dict[str, str]) -> None:
    target, wanted = teacher.with_name(name), ExportRequest(format)
    assert export(teacher, target, wanted).rows == 4
    found = check(teacher, target, wanted)
    assert found.rows == 4
    assert {column: found.features[column] for column in features} == features
    assert sorted(path.name for path in teacher.parent.iterdir()) == sorted([name, teacher.name])  # no cache is left


def test_rows_as_trainers_load_them(teacher: Path, tmp_path: Path) -> None:
    import datasets

    target = teacher.with_name("train.parquet")
    export(teacher, target, ExportRequest("parquet", cut_too=True, with_reasoning=True))
    datasets.disable_progress_bars()
    found = datasets.load_dataset("parquet", data_files=str(target), split="train", cache_dir=str(tmp_path / "cache"))
    assert found.num_rows == len(TEXTS)
    assert [row["messages"][-1]["content"] for row in found][0::2] == [TEXTS[0], TEXTS[2], TEXTS[4]]
    assert found[1]["messages"][-1]["content"] == f"<think>\nhm\n</think>\n\n{TEXTS[1]}"
    assert found[2]["token_ids"] == [2, 7]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda lines: lines[:-1], "rows, fewer"),
        (lambda lines: [*lines, lines[0]], "rows, more"),
        (lambda lines: [lines[1], lines[0], *lines[2:]], "messages in row 1 "),
        (lambda lines: [json.dumps({**json.loads(line), "id": 1}) for line in lines], "columns"),
        (lambda lines: [*lines[:-1], "{"], "out.jsonl"),
        (lambda lines: [*lines[:-1], '{"messages": "text"}'], "messages is read"),
    ],
)
def test_a_file_that_differs_is_reported(teacher: Path, spoil: Any, says: str) -> None:
    target, wanted = teacher.with_name("out.jsonl"), ExportRequest("messages")
    export(teacher, target, wanted)
    target.write_text("".join(line + "\n" for line in spoil(target.read_text().split("\n")[:-1])))
    with pytest.raises(TokenmillError, match=says) as told:
        check(teacher, target, wanted)
    assert told.value.hint is not None


def test_without_the_library_the_hint_names_it(teacher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, wanted = teacher.with_name("out.jsonl"), ExportRequest("messages")
    export(teacher, target, wanted)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match="datasets") as told:
        check(teacher, target, wanted)
    assert "pip install datasets" in (told.value.hint or "")
