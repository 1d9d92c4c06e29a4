"""Tables of rows that a template makes jobs of: JSONL (also packed), CSV, TSV and Parquet, every value as text.

A table is held in memory, equal values once. Text stays as it is; numbers, lists and objects are written as JSON has
them; null and what a row lacks are empty. A table that is wrong is refused, for a row that is left out would be missed
by nobody until the morning.
"""

import csv
import datetime
import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from tokenmill.errors import UsageError
from tokenmill.jobs.json_text import compact_json, shown
from tokenmill.jobs.line import LONGEST_CUSTOM_ID, parse
from tokenmill.jobs.read import BadLine, open_source, split

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_PACKED = (".gz", ".zst")
_LONGEST_CELL = 1 << 27  # characters; csv's own limit is 131072, a few pages
_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of texts under named columns."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def index(self, column: str, what: str) -> int:
        """A column's place; UsageError names the nearest."""
        if column in self.columns:
            return self.columns.index(column)
        near = difflib.get_close_matches(column, self.columns, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"its columns: {', '.join(self.columns)}"
        raise UsageError(f"{what} names {column!r}, which is no column of {self.name}", hint=hint)


def read_table(where: str | Path) -> Table:
    """A table from a file; what it is its name and its first bytes say."""
    path = Path(where)
    delimiter = delimiter_of(path)
    if delimiter is not None:
        return _from_csv(path, delimiter)
    if is_parquet(path):
        return _from_parquet(path)
    return _from_jsonl(path)


def delimiter_of(path: Path) -> str | None:
    """Between the cells of a file of this name; None: its name is not that of such a table."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in _PACKED]
    return _DELIMITERS.get(suffixes[-1]) if suffixes else None


def custom_ids(table: Table, key: str | None) -> list[str]:
    """A name for each row's job: its number from 1, or what stands in a column, different in each."""
    if key is None:
        return [f"row-{number}" for number in range(1, len(table.rows) + 1)]
    column = table.index(key, "--key")
    seen: dict[str, int] = {}
    for number, row in enumerate(table.rows, 1):
        value = row[column]
        if not 0 < len(value) <= LONGEST_CUSTOM_ID:
            raise UsageError(
                f"row {number} of {table.name} has {shown(value)} in the key column {key!r}",
                hint=f"a key has 1 to {LONGEST_CUSTOM_ID} characters",
            )
        if (before := seen.setdefault(value, number)) != number:
            raise UsageError(
                f"rows {before} and {number} of {table.name} have the same key {shown(value)}",
                hint="choose a column that is different in every row, or none at all",
            )
    return list(seen)


def is_parquet(path: Path) -> bool:
    """Whether its first bytes say so; UsageError when it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"PAR1"
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint="check the path and who may read it") from error


def _from_jsonl(path: Path) -> Table:
    columns: dict[str, int] = {}
    rows = list[tuple[str, ...]]()
    values = dict[str, str]()
    for number, text in numbered(path):
        try:
            row = parse(text)
        except ValueError as error:
            hint = "a table has one JSON object on each line; other tables are told by .csv or .tsv"
            raise UsageError(f"line {number} of {path}: {error}", hint=hint) from None
        for column in row:
            columns.setdefault(column, len(columns))
        texts = dict.fromkeys(columns, "") | {column: _text(value) for column, value in row.items()}
        if "\\u" in text:
            check_characters(f"line {number} of {path}", "".join([*texts, *texts.values()]))
        rows.append(tuple([values.setdefault(text, text) for text in texts.values()]))
    # A column that comes up late is empty in the rows before.
    whole = [row if len(row) == len(columns) else row + ("",) * (len(columns) - len(row)) for row in rows]
    return _checked(Table(str(path), tuple(columns), tuple(whole)))


def check_characters(where: str, text: str) -> None:
    """UsageError where a text cannot be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        hint = "characters are written whole: both halves, or as UTF-8"
        raise UsageError(f"{where}: half of a surrogate pair stands alone", hint=hint) from None


def numbered(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file that are not blank, with their numbers; UsageError where one cannot be read."""
    with open_source(path) as source:
        for chunk in source.chunks():
            for item in (chunk,) if isinstance(chunk, BadLine) else split(chunk):
                if isinstance(item, BadLine):
                    raise UsageError(f"line {item.number} of {path}: {item.reason}")
                yield item


def _from_csv(path: Path, delimiter: str) -> Table:
    limit = csv.field_size_limit(_LONGEST_CELL)
    try:
        reader = csv.reader(_csv_lines(path), delimiter=delimiter, strict=True)
        header = next(reader, [])
        values = dict[str, str]()
        rows = list[tuple[str, ...]]()
        for cells in reader:
            if cells and len(cells) != len(header):
                raise UsageError(
                    f"line {reader.line_num} of {path} has {len(cells)} cells, the first {len(header)}",
                    hint="quote cells that hold delimiters or line ends",
                )
            if cells:
                rows.append(tuple([values.setdefault(cell, cell) for cell in cells]))
    except csv.Error as error:
        raise UsageError(f"{path}, line {reader.line_num}: {error}", hint="quote cells as CSV wants it") from error
    finally:
        csv.field_size_limit(limit)
    return _checked(Table(str(path), tuple(header), tuple(rows)))


def _csv_lines(path: Path) -> Iterator[str]:
    with open_source(path) as source:
        for chunk in source.chunks():
            if isinstance(chunk, BadLine):
                raise UsageError(f"line {chunk.number} of {path}: {chunk.reason}")
            # What stands behind the last line end is no line: it would be one inside a cell of several lines.
            for number, raw in enumerate(chunk.data.removesuffix(b"\n").split(b"\n"), chunk.first):
                try:
                    line = raw.decode()
                except UnicodeDecodeError:
                    raise UsageError(f"line {number} of {path} is not UTF-8", hint="write it as UTF-8") from None
                yield line + "\n"


def table_from_arrow(source: Any) -> Table:
    """A table of pandas, Polars or PyArrow: anything with `__arrow_c_stream__`."""
    try:
        import pyarrow  # noqa: PLC0415  an extra
    except ImportError:
        hint = "pip install 'tokenmill[parquet]', or give the rows as dicts"
        raise UsageError("reading a table needs pyarrow", hint=hint) from None
    table = pyarrow.table(source)
    rows = (row for batch in table.to_batches(_ROWS) for row in batch.to_pylist())
    return _from_rows("table", tuple(table.column_names), rows)


def table_from_rows(rows: Iterable[Mapping[str, Any]]) -> Table:
    """A table of dicts; its columns are the keys of all of them."""
    held = list(rows)
    wrong = next((row for row in held if not isinstance(row, Mapping)), None)
    if wrong is not None:
        raise UsageError(f"a row for a template must be a dict (got {type(wrong).__name__})")
    return _from_rows("rows", tuple(dict.fromkeys(str(column) for row in held for column in row)), held)


def _from_parquet(path: Path) -> Table:
    with arrow(path) as parquet:
        file = parquet.ParquetFile(path)
        rows = (row for batch in file.iter_batches(_ROWS) for row in batch.to_pylist())
        return _from_rows(str(path), tuple(file.schema_arrow.names), rows)


def _from_rows(name: str, columns: tuple[str, ...], rows: Iterable[Mapping[str, Any]]) -> Table:
    values: dict[str, str] = {}
    texts = (tuple(_text(row.get(column)) for column in columns) for row in rows)
    found = tuple(tuple([values.setdefault(text, text) for text in row]) for row in texts)
    return _checked(Table(name, columns, found))


@contextmanager
def arrow(path: Path) -> Iterator[Any]:
    """pyarrow.parquet, with what it raises about a file said as a UsageError."""
    try:
        import pyarrow  # noqa: PLC0415  an extra
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError:
        raise UsageError(f"{path} is Parquet", hint="pip install 'tokenmill[parquet]', or write it as JSONL") from None
    try:
        yield parquet
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(
            f"{path}: the Parquet data cannot be read: {str(error).splitlines()[0]}", hint="write the file again"
        ) from error


def _text(value: Any) -> str:
    """A value as a person would write it into a prompt."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, bytes):
        return _decoded(value)
    return str(value) if isinstance(value, Decimal | datetime.timedelta) else compact_json(plain(value))


def _decoded(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise UsageError("a column holds bytes that are no text", hint="leave it out, or encode it") from None


def plain(value: Any) -> Any:
    """A nested value with nothing in it that JSON lacks."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value if isinstance(value, str | int | float | None) else _text(value)


def _checked(table: Table) -> Table:
    repeated = _first_repeated(table.columns)
    if repeated is not None:
        raise UsageError(f"{table.name} has two columns called {repeated!r}", hint="give each a name of its own")
    if any(not column.strip() for column in table.columns):
        raise UsageError(f"{table.name} has a column without a name", hint="the first line names the columns")
    if not table.rows:
        raise UsageError(f"{table.name} has no rows")
    return table


def _first_repeated(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
