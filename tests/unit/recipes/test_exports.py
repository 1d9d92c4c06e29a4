"""Exports in the formats of training libraries."""

import json
from pathlib import Path
from typing import Any, cast

import pytest

from tokenmill.errors import UsageError
from tokenmill.recipes.distillation.rows import COLUMNS, is_distilled
from tokenmill.recipes.export import ExportFormat, ExportRequest, check_replaceable, export
from tokenmill.storage.rows import read_rows, write_rows

SYSTEM = {"role": "system", "content": "Be brief."}


def asked(*texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]


def row(id: str, messages: list[dict[str, str]], answer: str, **more: Any) -> dict[str, Any]:
    return {
        "id": id,
        "prompt_id": id,
        "sample": 0,
        "messages": messages,
        "answer": answer,
        "finish_reason": "stop",
        **more,
    }


def table(folder: Path, *rows: dict[str, Any], name: str = "teacher.parquet") -> Path:
    write_rows(folder / name, rows, COLUMNS, metadata={"tokenmill.recipe": "distill"})
    return folder / name


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", ["teacher.parquet", "teacher.jsonl.gz"])
@pytest.mark.parametrize(
    ("format", "expected"),
    [
        (
            "messages",
            {"messages": [SYSTEM, {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]},
        ),
        (
            "sharegpt",
            {
                "conversations": [
                    {"from": "system", "value": "Be brief."},
                    {"from": "human", "value": "Why?"},
                    {"from": "gpt", "value": "Because."},
                ]
            },
        ),
        ("alpaca", {"instruction": "Why?", "input": "", "output": "Because.", "system": "Be brief."}),
    ],
)
def test_one_row(tmp_path: Path, name: str, format: ExportFormat, expected: dict[str, Any]) -> None:
    source = table(tmp_path, row("a", [SYSTEM, *asked("Why?")], "Because.", reasoning="hm"), name=name)
    done = export(source, tmp_path / "out.jsonl", ExportRequest(format))
    assert lines(tmp_path / "out.jsonl") == [expected]
    assert (done.rows, done.cut, done.empty) == (1, 0, 0)


def test_alpaca_has_only_the_columns_that_are_used(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    export(table(tmp_path, row("a", asked("Why?"), "So.")), out, ExportRequest("alpaca"))
    assert lines(out) == [{"instruction": "Why?", "input": "", "output": "So."}]
    export(
        table(tmp_path, row("a", asked("Why?"), "So."), row("b", asked("1", "2", "3"), "4")),
        out,
        ExportRequest("alpaca"),
    )
    assert lines(out) == [
        {"instruction": "Why?", "input": "", "output": "So.", "history": []},
        {"instruction": "3", "input": "", "output": "4", "history": [["1", "2"]]},
    ]


def test_alpaca_refuses_messages_that_do_not_alternate(tmp_path: Path) -> None:
    twice = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(UsageError, match="^a: .*user"):
        export(table(tmp_path, row("a", twice, "c")), tmp_path / "out.jsonl", ExportRequest("alpaca"))
    assert not (tmp_path / "out.jsonl").exists()


def test_cut_and_empty_answers_are_left_out_and_counted(tmp_path: Path) -> None:
    source = table(
        tmp_path,
        row("a", asked("1"), "whole"),
        row("b", asked("2"), "hal", finish_reason="length"),
        row("c", asked("3"), " \n"),
        row("d", asked("4"), "", finish_reason="length", reasoning="hm"),
    )
    out = tmp_path / "out.jsonl"
    done = export(source, out, ExportRequest("messages"))
    assert (done.rows, done.cut, done.empty) == (1, 2, 1)
    assert export(source, out, ExportRequest("messages", cut_too=True)).rows == 2
    assert export(source, out, ExportRequest("messages", cut_too=True, with_reasoning=True)).rows == 3
    assert lines(out)[-1]["messages"][-1]["content"] == "<think>\nhm\n</think>\n\n"


def test_nothing_left_to_export_is_an_error(tmp_path: Path) -> None:
    source = table(tmp_path, row("a", asked("1"), "hal", finish_reason="length"))
    with pytest.raises(UsageError, match="1 were cut") as refused:
        export(source, tmp_path / "out.jsonl", ExportRequest("sharegpt"))
    assert refused.value.hint is not None


@pytest.mark.parametrize(("format", "name"), [("messages", "a.parquet"), ("parquet", "a.jsonl"), ("alpaca", "a.txt")])
def test_a_file_name_of_another_format_is_refused(tmp_path: Path, format: ExportFormat, name: str) -> None:
    with pytest.raises(UsageError):
        export(table(tmp_path, row("a", asked("1"), "x")), tmp_path / name, ExportRequest(format))


def test_other_tables_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "x"}\n')
    with pytest.raises(UsageError, match="row 1 of .*other.jsonl"):
        export(other, tmp_path / "out.jsonl", ExportRequest("messages"))
    assert not is_distilled(other)
    assert is_distilled(table(tmp_path, row("a", asked("1"), "x")))
    assert is_distilled(table(tmp_path, row("a", asked("1"), "x"), name="t.jsonl"))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 but no table")
    assert not is_distilled(tmp_path / "broken.parquet")


def test_long_rows_are_written_in_small_groups(tmp_path: Path) -> None:
    """A row group has at most a million numbers, whatever the number of rows."""
    import pyarrow.parquet as parquet

    tops = [[-1.0] * 20] * 10_000
    rows = (row(str(number), asked("1"), "x", top_logprobs=tops) for number in range(12))
    path = table(tmp_path, *rows)
    file = parquet.ParquetFile(path)
    assert [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)] == [5, 5, 2]
    assert [found["id"] for found in read_rows(path, ("id", "none"))] == [str(number) for number in range(12)]


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
@pytest.mark.parametrize("format", ["messages", "sharegpt", "alpaca"])
def test_only_an_export_in_the_same_format_is_replaced(tmp_path: Path, format: ExportFormat, name: str) -> None:
    source, out = table(tmp_path, row("a", [SYSTEM, *asked("1", "2", "3")], "4")), tmp_path / name
    check_replaceable(out, format)  # the file does not exist
    export(source, out, ExportRequest(format))
    check_replaceable(out, format)
    for other in {"messages", "sharegpt", "alpaca"} - {format}:
        with pytest.raises(UsageError, match=other) as refused:
            check_replaceable(out, cast(ExportFormat, other))
        assert refused.value.hint is not None


@pytest.mark.parametrize(
    "text", ["notes, not JSON", '{"text": "x"}', '{"messages": "x"}', '{"messages": [{"role": "user"}]}', "[1]"]
)
def test_other_files_are_not_replaced(tmp_path: Path, text: str) -> None:
    out = tmp_path / "mine.jsonl"
    out.write_text(text)
    with pytest.raises(UsageError, match="mine.jsonl"):
        check_replaceable(out, "messages")
    out.write_text("")
    check_replaceable(out, "messages")


def test_only_an_export_in_parquet_is_replaced(tmp_path: Path) -> None:
    source, out = table(tmp_path, row("a", asked("1"), "2")), tmp_path / "out.parquet"
    export(source, out, ExportRequest("parquet"))
    check_replaceable(out, "parquet")
    for other in (source, tmp_path / "broken.parquet"):
        (tmp_path / "broken.parquet").write_bytes(b"PAR1 but no table")
        with pytest.raises(UsageError, match=other.name):
            check_replaceable(other, "parquet")
