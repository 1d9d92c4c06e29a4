"""Tables whose rows a template turns into jobs, with every value as text.

A table is held in memory. Text is unchanged; numbers, lists and objects become JSON; null and missing values become
empty. A damaged table is rejected as a whole, because missing rows could go unnoticed.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.errors import UsageError
from tokenmill.jobs.ingest.line import MAX_CUSTOM_ID_LENGTH
from tokenmill.storage.json_text import compact_json, shown
from tokenmill.storage.rows import check_columns, plain, read_rows

_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of texts under named columns."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def index(self, column: str, what: str) -> int:
        """Index of a column; raises UsageError, with a hint, if it does not exist."""
        if column in self.columns:
            return self.columns.index(column)
        near = difflib.get_close_matches(column, self.columns, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the columns are {', '.join(self.columns)}"
        raise UsageError(f"{what} names {column!r}, but {self.name} has no such column", hint=hint)


def read_table(where: str | Path) -> Table:
    """Read a table from a file in a format of `read_rows`."""
    return _table(str(where), (), read_rows(Path(where)))


def custom_ids(table: Table, key: str | None) -> list[str]:
    """A custom_id for each row: its number from 1, or its value in the column `key`, which must be unique."""
    if key is None:
        return [f"row-{number}" for number in range(1, len(table.rows) + 1)]
    column = table.index(key, "--key")
    seen: dict[str, int] = {}
    for number, row in enumerate(table.rows, 1):
        value = row[column]
        if not 0 < len(value) <= MAX_CUSTOM_ID_LENGTH:
            raise UsageError(
                f"row {number} of {table.name} has {shown(value)} in the key column {key!r}",
                hint=f"a key has 1 to {MAX_CUSTOM_ID_LENGTH} characters",
            )
        if (before := seen.setdefault(value, number)) != number:
            raise UsageError(
                f"rows {before} and {number} of {table.name} have the same key {shown(value)}",
                hint="choose a column with unique values, or omit the key",
            )
    return list(seen)


def table_from_arrow(source: Any) -> Table:
    """A table from pandas, Polars, PyArrow or another object with `__arrow_c_stream__`."""
    import pyarrow  # noqa: PLC0415  slow to import

    table = pyarrow.table(source)
    rows = (row for batch in table.to_batches(_ROWS) for row in batch.to_pylist())
    return _table("table", tuple(table.column_names), rows)


def table_from_rows(rows: Iterable[Mapping[str, Any]]) -> Table:
    """A table from dicts; its columns are the keys of all of them."""
    return _table("rows", (), map(_dict, rows))


def _dict(row: Any) -> Mapping[str, Any]:
    if not isinstance(row, Mapping):
        raise UsageError(f"a row for a template must be a dict (got {type(row).__name__})")
    return {str(column): value for column, value in row.items()}


def _table(name: str, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> Table:
    """Build a table. Equal values share memory; columns that appear later are empty in earlier rows."""
    check_columns(name, columns)
    indices = {column: index for index, column in enumerate(columns)}
    values = dict[str, str]()
    found = list[tuple[str, ...]]()
    for row in rows:
        for column in row:
            indices.setdefault(column, len(indices))
        texts = map(_text, map(row.get, indices))
        found.append(tuple([values.setdefault(text, text) for text in texts]))
    check_columns(name, tuple(indices))
    if not found:
        raise UsageError(f"{name} has no rows")
    wide = len(indices)
    return Table(name, tuple(indices), tuple(row + ("",) * (wide - len(row)) for row in found))


def _text(value: Any) -> str:
    """A value as text for a prompt."""
    value = plain(value)
    if isinstance(value, str):
        return value
    return "" if value is None else compact_json(value)
