"""Tables of every kind become the same texts, and what is wrong with one is said with its place."""

import gzip
import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from tokenmill.errors import UsageError
from tokenmill.jobs.layout import lay_out
from tokenmill.jobs.table import Table, custom_ids, read_table
from tokenmill.jobs.template import Field, JobTemplate, read_template

COLUMNS = ("id", "name", "note")
ROWS = (("1", 'Ann, "A"', "two\nlines"), ("2", "Bé", ""))


def test_jsonl_csv_tsv_and_parquet_are_one_table(tmp_path: Path) -> None:
    jsonl = '{"id": 1, "name": "Ann, \\"A\\"", "note": "two\\nlines"}\n\n{"id": 2, "name": "Bé", "note": null}\n'
    (tmp_path / "t.jsonl").write_text(jsonl)
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(jsonl.encode()))
    (tmp_path / "t.csv").write_bytes('\ufeffid,name,note\r\n1,"Ann, ""A""","two\nlines"\r\n2,Bé,\r\n'.encode())
    (tmp_path / "t.TSV").write_text('id\tname\tnote\n1\t"Ann, ""A"""\t"two\nlines"\n2\tBé\t\n')
    parquet.write_table(
        pa.table({"id": [1, 2], "name": ['Ann, "A"', "Bé"], "note": ["two\nlines", None]}), tmp_path / "t.pq"
    )
    for name in ("t.jsonl", "t.jsonl.gz", "t.csv", "t.TSV", "t.pq"):
        table = read_table(tmp_path / name)
        assert (table.columns, table.rows) == (COLUMNS, ROWS), name


def test_a_cell_may_cross_the_blocks_a_file_is_read_in(tmp_path: Path) -> None:
    cell = "a line of a long cell\n" * 60_000  # more than a megabyte
    (tmp_path / "t.csv").write_text(f'a,b\n"{cell}",x\n')
    assert read_table(tmp_path / "t.csv").rows == ((cell, "x"),)


def test_values_are_written_as_a_person_would(tmp_path: Path) -> None:
    row = {"a": True, "b": 1.5, "c": None, "d": {"x": [1, "é"]}, "e": 10**20, "f": "  as it is\t"}
    (tmp_path / "t.jsonl").write_text(json.dumps(row))
    assert read_table(tmp_path / "t.jsonl").rows == (
        ("true", "1.5", "", '{"x":[1,"é"]}', "1" + "0" * 20, "  as it is\t"),
    )
    when = datetime(2026, 1, 3, 4, 5, 6, tzinfo=UTC)
    columns = {"t": [when], "d": [Decimal("1.50")], "b": [b"bytes"], "l": [[{"when": when}]]}
    parquet.write_table(pa.table(columns), tmp_path / "t.pq")
    assert read_table(tmp_path / "t.pq").rows == (
        ("2026-01-03T04:05:06+00:00", "1.50", "bytes", '[{"when":"2026-01-03T04:05:06+00:00"}]'),
    )


def test_columns_that_come_late_are_empty_before(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"a": "1"}\n{"b": "2", "a": "3"}\n{"c": "4"}\n')
    table = read_table(tmp_path / "t.jsonl")
    assert table.columns == ("a", "b", "c")
    assert table.rows == (("1", "", ""), ("3", "2", ""), ("", "", "4"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.jsonl", b'{"a": 1}\nnonsense\n', "line 2 of .*not JSON"),
        ("t.jsonl", b"", "no rows"),
        ("t.jsonl", b'{"a": "\xff"}', "line 1 of .*not UTF-8"),
        ("t.jsonl", b'{"a": "\\ud800"}', "line 1 of .*surrogate"),
        ("t.csv", b"a,b\n1\n", "line 2 of .* has 1 cells, but the header has 2"),
        ("t.csv", b"a,a\n1,2\n", "two columns named 'a'"),
        ("t.csv", b"a,\n1,2\n", "without a name"),
        ("t.csv", b'a\n"x', "line "),
        ("t.csv", b"a\n\xff\n", "line 2 of .* is not UTF-8"),
        ("t.csv", b"a,b\n", "no rows"),
        ("t.pq", b"PAR1nonsense", "Parquet data cannot be read"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_table(tmp_path / name)


def test_bytes_that_are_no_text_and_files_that_are_not_there(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"b": [b"\xff"]}), tmp_path / "t.pq")
    with pytest.raises(UsageError, match="bytes that are not UTF-8"):
        read_table(tmp_path / "t.pq")
    for name in ("absent.jsonl", "absent.csv"):
        with pytest.raises(UsageError, match="cannot read"):
            read_table(tmp_path / name)


TABLE = Table("t", ("id", "name"), (("a", "x"), ("b", "y"), ("a", "z"), ("", "w")))


def test_rows_are_named_by_number_or_key() -> None:
    assert custom_ids(TABLE, None) == ["row-1", "row-2", "row-3", "row-4"]
    assert custom_ids(TABLE, "name") == ["x", "y", "z", "w"]


@pytest.mark.parametrize(
    ("key", "rows", "message", "hint"),
    [
        ("id", 3, 'rows 1 and 3 of t .* "a"', "unique"),
        ("id", 4, "row 4 of t has \"\" .* 'id'|rows 1 and 3", None),
        ("nam", 4, "--key names 'nam'", "did you mean 'name'?"),
    ],
)
def test_keys_that_cannot_be(key: str, rows: int, message: str, hint: str | None) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        custom_ids(Table("t", TABLE.columns, TABLE.rows[:rows]), key)
    assert hint is None or hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("plain", ("plain",)),
        ("a {b} c", ("a ", Field("b"), " c")),
        ("{a}{b}", (Field("a"), Field("b"))),
        ('{{"x": {a}}}', ('{"x": ', Field("a"), "}")),
        ("{{{a}}}", ("{", Field("a"), "}")),
        ("{*}\n", (Field("*"), "\n")),
        ("{two words}", (Field("two words"),)),
        ("", ()),
    ],
)
def test_templates_are_read(text: str, pieces: tuple[object, ...]) -> None:
    assert read_template(text) == JobTemplate(pieces)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("user", "system", "message"),
    [
        ("a { b", None, "the template .* { in line 1"),
        ("a\n}", None, "the template .* } in line 2"),
        ("{}", None, " {} in line 1"),
        ("x", '\n{"a": 1', "the system template .* { in line 2"),
        ("{*} and {*}", None, "{\\*}"),
        ("{*}", "{*}", "{\\*}"),
    ],
)
def test_braces_that_are_wrong(user: str, system: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        read_template(user, system)
    assert caught.value.hint


def test_a_column_that_is_not_there_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="the template names 'nmae'") as caught:
        lay_out(TABLE, read_template("Hello {nmae}"))
    assert caught.value.hint == "did you mean 'name'?"
