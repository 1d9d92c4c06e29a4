"""Rows out of and into files: datasets as people keep them, JSONL (also packed), CSV, TSV and Parquet.

Unlike a table for a template (jobs/table.py), values keep their types; a cell of CSV or TSV is text. A file that is
written appears whole under its name or not at all, and is on the disk then. What the rows mean is not known here.
"""

import gzip
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from tokenmill.errors import TokenmillError, UsageError
from tokenmill.jobs.json_text import compact_json
from tokenmill.jobs.line import parse
from tokenmill.jobs.table import arrow, check_characters, delimiter_of, is_parquet, numbered, plain, read_table
from tokenmill.storage.atomic import new_file

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst")
COLUMN_TYPES = (
    "string",
    "int32",
    "int64",
    "float32",
    "float64",
    "bool",
    "list<int32>",
    "list<float32>",
    "list<list<int32>>",
    "list<list<float32>>",
    "list<string>",
    "json",
)
_GROUP = 1024  # rows made columns of at once
_GZIP_LEVEL = 6

Row = Mapping[str, Any]


class Sink(Protocol):
    """Takes bytes."""

    def write(self, data: bytes, /) -> int:
        """How many it took."""


Write = Callable[[BinaryIO], int]


def suffix_of(path: Path) -> str:
    """One of `SUFFIXES`; UsageError for another."""
    for suffix in SUFFIXES:
        if path.name.lower().endswith(suffix):
            return suffix
    raise UsageError(f"{path} has no ending that says what to write", hint=f"one of {', '.join(SUFFIXES)}")


def check_target(path: Path) -> None:
    """Refuse before a night of work what could not be written after it. Writes nothing."""
    suffix = suffix_of(path)
    if path.is_dir() or (path.exists() and not path.is_file()):
        raise UsageError(f"{path} is not an ordinary file", hint="give the name of the file to write")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {path.absolute().parent}", hint="create the folder first")
    if not os.access(path.absolute().parent, os.W_OK):
        raise UsageError(f"{path.absolute().parent} cannot be written to", hint="choose another folder")
    if suffix == ".parquet":
        with _parquet(path):
            pass
    elif suffix == ".jsonl.zst":
        _zstandard(path)


def write_rows(
    path: Path, rows: Iterable[Row], columns: Mapping[str, str], *, metadata: Mapping[str, str] | None = None
) -> int:
    """Write rows as the name of the file says, in place of what is there; how many.

    `columns`: names with types of `COLUMN_TYPES`; what a row lacks is null, and a key that is no column is an error.
    "json" is a JSON text in Parquet and the value itself in JSONL, where `metadata` has no place. JSON has no
    infinities: they are null there.
    """
    suffix = suffix_of(path)
    unknown = [kind for kind in columns.values() if kind not in COLUMN_TYPES]
    if unknown:
        raise ValueError(f"no column can be of the type {unknown[0]!r}")
    named = _checked(rows, columns)
    write: Write
    if suffix == ".parquet":
        write = _as_parquet(path, named, columns, metadata or {})
    else:
        write = _as_lines(path, suffix, named, columns)
    with new_file(path, force=True) as file:
        return write(file)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file; UsageError names the line that is wrong. JSONL and Parquet are read as they are asked for."""
    if delimiter_of(path) is not None:
        table = read_table(path)
        yield from (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    elif is_parquet(path):
        yield from _from_parquet(path)
    else:
        yield from _from_lines(path)


def _from_lines(path: Path) -> Iterator[dict[str, Any]]:
    for number, text in numbered(path):
        try:
            row = parse(text)
        except ValueError as error:
            hint = "each line is one JSON object; other tables are told by .csv or .tsv"
            raise UsageError(f"line {number} of {path}: {error}", hint=hint) from None
        if "\\u" in text:
            check_characters(f"line {number} of {path}", compact_json(row))
        yield row


def _from_parquet(path: Path) -> Iterator[dict[str, Any]]:
    with arrow(path) as parquet:
        file = parquet.ParquetFile(path)
        batches = file.iter_batches(_GROUP)
    while True:
        with arrow(path):  # not around the yield: what its reader raises is none of the file's faults
            rows = next((batch.to_pylist() for batch in batches), None)
        if rows is None:
            return
        yield from (plain(row) for row in rows)


def _checked(rows: Iterable[Row], columns: Mapping[str, str]) -> Iterator[Row]:
    for number, row in enumerate(rows, 1):
        if not row.keys() <= columns.keys():
            raise ValueError(f"row {number} has {sorted(row.keys() - columns.keys())[0]!r}, which is no column")
        yield row


# -- JSONL -------------------------------------------------------------------------------------------------------------


def _as_lines(path: Path, suffix: str, rows: Iterable[Row], columns: Mapping[str, str]) -> Write:
    packed: Callable[[BinaryIO], AbstractContextManager[Sink]] = _plainly
    if suffix == ".jsonl.gz":
        packed = _gzipped
    elif suffix == ".jsonl.zst":
        packed = _zstandard(path)

    def write(file: BinaryIO) -> int:
        count = 0
        with packed(file) as target:
            for row in rows:
                target.write(_json({column: row.get(column) for column in columns}).encode() + b"\n")
                count += 1
        return count

    return write


def _json(value: Any) -> str:
    try:
        return compact_json(value)
    except ValueError:
        return compact_json(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def _plainly(file: BinaryIO) -> Iterator[Sink]:
    yield file


@contextmanager
def _gzipped(file: BinaryIO) -> Iterator[Sink]:
    # No time and no name in it: the same rows are the same bytes.
    with gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0, compresslevel=_GZIP_LEVEL) as packed:
        yield packed


def _zstandard(path: Path) -> Callable[[BinaryIO], AbstractContextManager[Sink]]:
    try:
        import zstandard  # noqa: PLC0415  an extra
    except ImportError:
        raise UsageError(f"{path} is to be packed with zstd", hint="pip install 'tokenmill[zstd]', or .gz") from None

    @contextmanager
    def packed(file: BinaryIO) -> Iterator[Sink]:
        with zstandard.ZstdCompressor().stream_writer(file, closefd=False) as target:
            yield target

    return packed


# -- Parquet -----------------------------------------------------------------------------------------------------------


@contextmanager
def _parquet(path: Path) -> Iterator[tuple[Any, Any]]:
    try:
        import pyarrow  # noqa: PLC0415  an extra
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError:
        raise UsageError(f"{path} is to be Parquet", hint="pip install 'tokenmill[parquet]', or write .jsonl") from None
    try:
        yield pyarrow, parquet
    except pyarrow.ArrowException as error:
        raise TokenmillError(
            f"cannot write {path}: {str(error).splitlines()[0]}", hint="write .jsonl instead"
        ) from error


def _as_parquet(path: Path, rows: Iterable[Row], columns: Mapping[str, str], metadata: Mapping[str, str]) -> Write:
    with _parquet(path) as (pyarrow, parquet):
        fields = [(name, _arrow_type(pyarrow, kind)) for name, kind in columns.items()]
        schema = pyarrow.schema(fields, metadata=dict(metadata) or None)
    json_columns = [name for name, kind in columns.items() if kind == "json"]

    def write(file: BinaryIO) -> int:
        count = 0
        left = iter(rows)
        with _parquet(path), parquet.ParquetWriter(file, schema, compression="zstd") as writer:
            while group := [_with_json(row, json_columns) for row in islice(left, _GROUP)]:
                writer.write_table(pyarrow.Table.from_pylist(group, schema=schema))
                count += len(group)
        return count

    return write


def _with_json(row: Row, columns: Iterable[str]) -> dict[str, Any]:
    written = {name: _json(row[name]) for name in columns if row.get(name) is not None}
    return {**row, **written}


def _arrow_type(pyarrow: Any, kind: str) -> Any:
    if kind.startswith("list<"):
        return pyarrow.list_(_arrow_type(pyarrow, kind.removeprefix("list<").removesuffix(">")))
    names = {"bool": "bool_", "json": "string"}
    return getattr(pyarrow, names.get(kind, kind))()
