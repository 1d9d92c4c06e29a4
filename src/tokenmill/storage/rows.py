"""Reads and writes tables of rows: JSONL (plain, gzip, zstd), CSV and TSV (also compressed), and Parquet.

`read_rows` streams; values keep their types, CSV and TSV cells are text. `write_rows` replaces the file atomically.
Errors name the file and the line.
"""

import csv
import datetime
import gzip
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from tokenmill.errors import TokenmillError, UsageError
from tokenmill.storage.atomic import new_file
from tokenmill.storage.json_text import compact_json, parse
from tokenmill.storage.lines import BadLine, is_parquet, open_source, split

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_COMPRESSED = (".gz", ".zst")
_LONGEST_CELL = 1 << 27  # characters; the csv module's default of 131072 is only a few pages
_SCALARS = ("string", "int32", "int64", "float32", "float64", "bool", "json", "messages")
_LISTS = ("list<int32>", "list<float32>", "list<list<int32>>", "list<list<float32>>", "list<string>")
COLUMN_TYPES = (*_SCALARS, *_LISTS)
# A row with 4,000 tokens and 20 log probabilities each takes 5 MB as Python objects, so groups are bounded by size.
_GROUP_ROWS = 1024
_GROUP_WEIGHT = 1_000_000  # numbers and characters
_READ_ROWS = 64
_GZIP_LEVEL = 6

Row = Mapping[str, Any]
Write = Callable[[BinaryIO], int]


class Sink(Protocol):
    """Takes bytes."""

    def write(self, data: bytes, /) -> int:
        """Return the number of bytes written."""


def suffix_of(path: Path) -> str:
    """The suffix of an output file; UsageError if it is not one of `SUFFIXES`."""
    for suffix in SUFFIXES:
        if path.name.lower().endswith(suffix):
            return suffix
    raise UsageError(f"cannot tell the output format from {path}", hint=f"use one of {', '.join(SUFFIXES)}")


def check_target(path: Path) -> None:
    """UsageError if the file could not be written. Writes nothing."""
    suffix_of(path)
    if path.is_dir() or (path.exists() and not path.is_file()):
        raise UsageError(f"{path} is not a regular file", hint="give a file name")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"folder {path.absolute().parent} does not exist", hint="create the folder first")
    if not os.access(path.absolute().parent, os.W_OK):
        raise UsageError(f"folder {path.absolute().parent} is not writable", hint="choose another folder")


# -- reading -----------------------------------------------------------------------------------------------------------


def read_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file; UsageError names the bad line.

    `columns` limits the result to those columns that exist; Parquet reads no others.
    """
    if (delimiter := _delimiter_of(path)) is not None:
        rows = _csv_rows(path, delimiter)
    elif is_parquet(path):
        rows = (plain(row) for row in _parquet_rows(path, columns))
    else:
        rows = _jsonl_rows(path)
    for row in rows:
        yield row if columns is None else {name: row[name] for name in columns if name in row}


def check_columns(name: object, columns: Sequence[str]) -> None:
    """UsageError if a column has no name or a duplicate one."""
    seen = set[str]()
    for column in columns:
        if column in seen:
            raise UsageError(f"{name} has two columns named {column!r}", hint="rename one of them")
        seen.add(column)
    if any(not column.strip() for column in columns):
        raise UsageError(f"{name} has a column without a name", hint="the first line must name every column")


def plain(value: Any) -> Any:
    """A JSON-compatible value: dates, decimals, durations and bytes become text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, bytes):
        return _decoded(value)
    return str(value) if isinstance(value, Decimal | datetime.timedelta) else value


def _decoded(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise UsageError("a column holds bytes that are not UTF-8 text", hint="drop the column or encode it") from None


def _jsonl_rows(path: Path) -> Iterator[dict[str, Any]]:
    with open_source(path) as source:
        for chunk in source.chunks():
            for item in (chunk,) if isinstance(chunk, BadLine) else split(chunk):
                if isinstance(item, BadLine):
                    raise UsageError(f"line {item.number} of {path}: {item.reason}")
                number, text = item
                try:
                    row = parse(text)
                except ValueError as error:
                    hint = "JSONL needs one JSON object per line; CSV and TSV files must end in .csv or .tsv"
                    raise UsageError(f"line {number} of {path}: {error}", hint=hint) from None
                if "\\u" in text:
                    _check_characters(f"line {number} of {path}", compact_json(row))
                yield row


def _check_characters(where: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        hint = "write both halves of the pair, or UTF-8"
        raise UsageError(f"{where}: lone surrogate in a string", hint=hint) from None


def _delimiter_of(path: Path) -> str | None:
    """The delimiter of CSV or TSV; None for another name."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in _COMPRESSED]
    return _DELIMITERS.get(suffixes[-1]) if suffixes else None


def _csv_rows(path: Path, delimiter: str) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL))
    reader = csv.reader(_csv_lines(path), delimiter=delimiter, strict=True)
    try:
        header = next(reader, [])
        check_columns(path, header)
        for cells in reader:
            if cells and len(cells) != len(header):
                raise UsageError(
                    f"line {reader.line_num} of {path} has {len(cells)} cells, but the header has {len(header)}",
                    hint="quote cells that contain delimiters or line breaks",
                )
            if cells:
                yield dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise UsageError(f"{path}, line {reader.line_num}: {error}", hint="check the quoting of its cells") from error


def _csv_lines(path: Path) -> Iterator[str]:
    with open_source(path) as source:
        for chunk in source.chunks():
            if isinstance(chunk, BadLine):
                raise UsageError(f"line {chunk.number} of {path}: {chunk.reason}")
            # The rest after the last line end is not a line of its own, not even within a multi-line cell.
            for number, raw in enumerate(chunk.data.removesuffix(b"\n").split(b"\n"), chunk.first):
                try:
                    line = raw.decode()
                except UnicodeDecodeError:
                    raise UsageError(f"line {number} of {path} is not UTF-8", hint="write it as UTF-8") from None
                yield line + "\n"


# -- writing -----------------------------------------------------------------------------------------------------------


def write_rows(
    path: Path, rows: Iterable[Row], columns: Mapping[str, str], *, metadata: Mapping[str, str] | None = None
) -> int:
    """Replace a file with rows, in the format of its suffix; return their number.

    `columns` maps names to `COLUMN_TYPES`. A missing value is null, an unknown key an error. Columns of "json"
    are JSON text in Parquet and the value itself in JSONL; "messages" are a list of structs in Parquet. `metadata` is
    only written to Parquet. Infinities become null in JSON.
    """
    suffix = suffix_of(path)
    unknown = [kind for kind in columns.values() if kind not in COLUMN_TYPES]
    if unknown:
        raise ValueError(f"unknown column type {unknown[0]!r}")
    checked = _checked(rows, columns)
    if suffix == ".parquet":
        write = _parquet_writer(path, checked, columns, metadata or {})
    else:
        write = _jsonl_writer(path, suffix, checked, columns)
    with new_file(path, force=True) as file:
        return write(file)


def _checked(rows: Iterable[Row], columns: Mapping[str, str]) -> Iterator[Row]:
    for number, row in enumerate(rows, 1):
        if not row.keys() <= columns.keys():
            raise ValueError(f"row {number} has {sorted(row.keys() - columns.keys())[0]!r}, which is not a column")
        yield row


def _jsonl_writer(path: Path, suffix: str, rows: Iterable[Row], columns: Mapping[str, str]) -> Write:
    compressed: Callable[[BinaryIO], AbstractContextManager[Sink]] = nullcontext
    if suffix == ".jsonl.gz":
        compressed = _gzipped
    elif suffix == ".jsonl.zst":
        compressed = _zstandard

    def write(file: BinaryIO) -> int:
        count = 0
        with compressed(file) as target:
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


def _gzipped(file: BinaryIO) -> AbstractContextManager[Sink]:
    # No modification time and no name in the header, so that equal rows give equal bytes.
    return gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0, compresslevel=_GZIP_LEVEL)


def _zstandard(file: BinaryIO) -> AbstractContextManager[Sink]:
    import zstandard  # noqa: PLC0415  slow to import

    target: AbstractContextManager[Sink] = zstandard.ZstdCompressor().stream_writer(file, closefd=False)
    return target


# -- Parquet -----------------------------------------------------------------------------------------------------------


@contextmanager
def reading_parquet(name: object) -> Iterator[tuple[Any, Any]]:
    """Yield pyarrow and pyarrow.parquet; their errors in the block become UsageErrors about the file."""
    import pyarrow  # noqa: PLC0415  slow to import
    from pyarrow import parquet  # noqa: PLC0415

    try:
        yield pyarrow, parquet
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"{name}: the Parquet data cannot be read: {reason}", hint="write the file again") from error


def parquet_columns(path: Path) -> list[str]:
    """The names of a Parquet file's columns."""
    with reading_parquet(path) as (_, parquet):
        return list(parquet.read_schema(path).names)


def parquet_metadata(path: Path) -> dict[str, str]:
    """The metadata that was passed to `write_rows`."""
    with reading_parquet(path) as (_, parquet):
        found = parquet.read_schema(path).metadata or {}
    return {key.decode(errors="replace"): value.decode(errors="replace") for key, value in found.items()}


def _parquet_rows(path: Path, columns: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    with reading_parquet(path) as (_, parquet):
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        check_columns(path, names)
        wanted = None if columns is None else [name for name in columns if name in names]
        batches = file.iter_batches(_READ_ROWS, columns=wanted)
    while True:
        with reading_parquet(path):
            rows = next((batch.to_pylist() for batch in batches), None)
        if rows is None:
            return
        yield from rows


def _parquet_writer(path: Path, rows: Iterable[Row], columns: Mapping[str, str], metadata: Mapping[str, str]) -> Write:
    import pyarrow  # noqa: PLC0415  slow to import
    from pyarrow import parquet  # noqa: PLC0415

    fields = [(name, _arrow_type(pyarrow, kind)) for name, kind in columns.items()]
    schema = pyarrow.schema(fields, metadata=dict(metadata) or None)
    json_columns = [name for name, kind in columns.items() if kind == "json"]

    def write(file: BinaryIO) -> int:
        count = 0
        try:
            with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
                for group in _groups(rows):
                    made = [_with_json(row, json_columns) for row in group]
                    writer.write_table(pyarrow.Table.from_pylist(made, schema=schema))
                    count += len(group)
        except pyarrow.ArrowException as error:
            reason = str(error).splitlines()[0]
            raise TokenmillError(f"cannot write {path}: {reason}", hint="write .jsonl instead") from error
        return count

    return write


def _groups(rows: Iterable[Row]) -> Iterator[list[Row]]:
    group = list[Row]()
    weight = 0
    for row in rows:
        group.append(row)
        weight += sum(map(_weight, row.values()))
        if weight >= _GROUP_WEIGHT or len(group) >= _GROUP_ROWS:
            yield group
            group = []
            weight = 0
    if group:
        yield group


def _weight(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list) and value:
        return len(value) * (1 + len(value[0]) if isinstance(value[0], list) else 1)
    return 0


def _with_json(row: Row, columns: Iterable[str]) -> dict[str, Any]:
    return {**row, **{name: _json(row[name]) for name in columns if row.get(name) is not None}}


def _arrow_type(pyarrow: Any, kind: str) -> Any:
    if kind == "messages":
        return pyarrow.list_(pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())]))
    if kind.startswith("list<"):
        return pyarrow.list_(_arrow_type(pyarrow, kind[5:-1]))
    return pyarrow.type_for_alias({"json": "string"}.get(kind, kind))
