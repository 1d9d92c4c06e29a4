"""Rows through files and back: types kept, written whole, damaged files named."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from tokenmill.errors import TokenmillError, UsageError
from tokenmill.storage.rows import SUFFIXES, check_target, read_rows, suffix_of, write_rows

COLUMNS = {
    "id": "string",
    "small": "int32",
    "big": "int64",
    "thin": "float32",
    "wide": "float64",
    "good": "bool",
    "ids": "list<int32>",
    "logs": "list<float32>",
    "top": "list<list<int32>>",
    "top_logs": "list<list<float32>>",
    "tags": "list<string>",
    "messages": "json",
}
ROWS: list[dict[str, Any]] = [
    {
        "id": "a",
        "small": 1,
        "big": 1 << 40,
        "thin": -0.5,
        "wide": 0.1,
        "good": True,
        "ids": [1, 2],
        "logs": [-1.5],
        "top": [[3], []],
        "top_logs": [[-0.25, -2.0]],
        "tags": ["x", "ü"],
        "messages": [{"role": "user", "n": None}],
    },
    {"id": "b"} | dict.fromkeys([name for name in COLUMNS if name != "id"]),
]


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_rows_come_back_as_they_were(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    assert write_rows(path, iter(ROWS), COLUMNS) == 2
    found = list(read_rows(path))
    if suffix == ".parquet":
        texts = [row["messages"] for row in found]
        assert texts == ['[{"role":"user","n":null}]', None]
        for row, text in zip(found, texts, strict=True):
            row["messages"] = None if text is None else json.loads(text)
    assert found == ROWS
    assert list(found[0]) == list(COLUMNS)
    assert names(tmp_path) == [path.name]


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=20), max_size=5),
    suffix=st.sampled_from(SUFFIXES),
)
def test_any_text_survives(tmp_path_factory: pytest.TempPathFactory, texts: list[str], suffix: str) -> None:
    path = tmp_path_factory.mktemp("rows") / f"rows{suffix}"
    write_rows(path, ({"text": text} for text in texts), {"text": "string"})
    assert [row["text"] for row in read_rows(path)] == texts


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_same_rows_are_the_same_bytes(tmp_path: Path, suffix: str) -> None:
    for name in ("one", "two"):
        write_rows(tmp_path / f"{name}{suffix}", ROWS, COLUMNS, metadata={"made": "by tokenmill"})
    assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()


def test_metadata_is_in_the_schema(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write_rows(path, ROWS, COLUMNS, metadata={"tokenmill.model": "kimi"})
    assert parquet.read_schema(path).metadata == {b"tokenmill.model": b"kimi"}
    assert [str(parquet.read_schema(path).field(name).type) for name in ("ids", "top_logs", "messages", "thin")] == [
        "list<element: int32>",
        "list<element: list<element: float>>",
        "string",
        "float",
    ]


def test_many_rows_go_in_groups(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    assert write_rows(path, ({"n": n} for n in range(2500)), {"n": "int32"}) == 2500
    assert [row["n"] for row in read_rows(path)] == list(range(2500))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_no_rows_are_a_file_without_rows(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    assert write_rows(path, [], {"id": "string"}) == 0
    assert list(read_rows(path)) == []


def test_infinities_are_null_in_json(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, [{"logs": [-1.0, float("-inf")]}], {"logs": "list<float32>"})
    assert path.read_text() == '{"logs":[-1.0,null]}\n'


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_failure_keeps_the_old_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    write_rows(path, [{"id": "old"}], {"id": "string"})
    before = path.read_bytes()

    def broken() -> Iterator[dict[str, Any]]:
        yield {"id": "new"}
        raise UsageError("the source went away")

    with pytest.raises(UsageError, match="went away"):
        write_rows(path, broken(), {"id": "string"})
    assert path.read_bytes() == before
    assert names(tmp_path) == [path.name]


def test_readers_never_see_a_partial_file(tmp_path: Path) -> None:
    path, seen = tmp_path / "rows.jsonl", []

    def rows() -> Iterator[dict[str, Any]]:
        for number in range(3):
            seen.append(path.exists())
            yield {"n": number}

    write_rows(path, rows(), {"n": "int32"})
    assert seen == [False, False, False]


def test_a_key_without_a_column_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="row 2 .*'extra'"):
        write_rows(tmp_path / "rows.jsonl", [{"id": "a"}, {"id": "b", "extra": 1}], {"id": "string"})
    with pytest.raises(ValueError, match="'date'"):
        write_rows(tmp_path / "rows.jsonl", [], {"id": "date"})
    assert names(tmp_path) == []


def test_a_value_of_another_type_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TokenmillError, match=r"rows\.parquet"):
        write_rows(tmp_path / "rows.parquet", [{"n": "many"}], {"n": "int32"})
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "suffix"), [("A.JSONL", ".jsonl"), ("a.b.jsonl.gz", ".jsonl.gz"), ("x.parquet", ".parquet")]
)
def test_the_suffix_determines_the_format(name: str, suffix: str) -> None:
    assert suffix_of(Path(name)) == suffix


@pytest.mark.parametrize("name", ["rows.csv", "rows", "rows.json", "jsonl", "rows.parquet.gz"])
def test_other_names_are_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot tell the output format") as refused:
        write_rows(tmp_path / name, [], {"id": "string"})
    assert ".jsonl.zst" in (refused.value.hint or "")
    assert names(tmp_path) == []


def test_a_target_is_checked_beforehand(tmp_path: Path) -> None:
    for suffix in SUFFIXES:
        check_target(tmp_path / f"rows{suffix}")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(UsageError, match="not a regular file"):
        check_target(tmp_path / "folder.jsonl")
    with pytest.raises(UsageError, match="folder .* does not exist"):
        check_target(tmp_path / "none" / "rows.jsonl")


@pytest.mark.parametrize(("name", "delimiter"), [("t.csv", ","), ("t.tsv", "\t"), ("t.csv.gz", ",")])
def test_cells_are_text(tmp_path: Path, name: str, delimiter: str) -> None:
    path = tmp_path / name
    data = f'id{delimiter}text\n1{delimiter}"two\nlines"\n'.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert list(read_rows(path)) == [{"id": "1", "text": "two\nlines"}]


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b'{"a": 1}\n{"a": \n', "line 2 of .*JSON"),
        (b'{"a": 1}\n[1]\n', "line 2 of .*object"),
        (b'{"a": "\\ud800"}\n', "line 1 of .*surrogate"),
        (b'{"a": "\xff"}\n', "line 1 of .*UTF-8"),
        (b"PAR1 and nothing more", "Parquet"),
    ],
)
def test_errors_in_a_file_name_the_line(tmp_path: Path, data: bytes, named: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=named):
        list(read_rows(path))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="none.jsonl"):
        list(read_rows(tmp_path / "none.jsonl"))
