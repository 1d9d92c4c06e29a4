"""Tables with long rows as Parquet: groups bounded by what they hold, and messages as trainers read them.

An answer of 4 000 tokens with 20 probabilities each is 160 000 numbers, as Python's objects 5 MB: a thousand such rows
at once would take memory that the model is in. Other endings of a file's name are written as rows.py writes them.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from tokenmill.errors import TokenmillError, UsageError
from tokenmill.jobs.json_text import compact_json
from tokenmill.jobs.table import arrow
from tokenmill.recipes.rows import read_rows, suffix_of, write_rows
from tokenmill.storage.atomic import new_file

MESSAGES = "messages"
"""A column type beside those of rows.py: list<struct<role: string, content: string>>."""
_GROUP_ROWS = 1024
_GROUP_WEIGHT = 1_000_000  # numbers and characters, about
_READ_ROWS = 64


def write_table(
    path: Path,
    rows: Iterable[Mapping[str, Any]],
    columns: Mapping[str, str],
    *,
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Write rows in place of what is there, whole or not at all; how many."""
    if suffix_of(path) != ".parquet":
        plain = {name: "json" if kind == MESSAGES else kind for name, kind in columns.items()}
        return write_rows(path, rows, plain, metadata=metadata)
    with new_file(path, force=True) as file:
        return _write(file, path, rows, columns, metadata or {})


def read_table_columns(path: Path, columns: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Rows with these columns alone, as far as they are there: what is not asked for is not read from Parquet."""
    if suffix_of(path) != ".parquet":
        yield from ({name: row[name] for name in columns if name in row} for row in read_rows(path))
        return
    with arrow(path) as parquet:
        file = parquet.ParquetFile(path)
        wanted = [name for name in columns if name in file.schema_arrow.names]
        batches = file.iter_batches(_READ_ROWS, columns=wanted)
    while True:
        with arrow(path):
            found = next((batch.to_pylist() for batch in batches), None)
        if found is None:
            return
        yield from found


def columns_in(path: Path) -> list[str]:
    """The names of a Parquet file's columns; UsageError where it is none."""
    with arrow(path) as parquet:
        return list(parquet.read_schema(path).names)


def _write(
    file: BinaryIO,
    path: Path,
    rows: Iterable[Mapping[str, Any]],
    columns: Mapping[str, str],
    metadata: Mapping[str, str],
) -> int:
    count = 0
    with _writing(path) as (pyarrow, parquet):
        fields = [(name, _type(pyarrow, kind)) for name, kind in columns.items()]
        schema = pyarrow.schema(fields, metadata=dict(metadata) or None)
        texts = [name for name, kind in columns.items() if kind == "json"]
        with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
            for group in _groups(rows):
                made = [
                    {**row, **{name: compact_json(row[name]) for name in texts if row.get(name) is not None}}
                    for row in group
                ]
                writer.write_table(pyarrow.Table.from_pylist(made, schema=schema))
                count += len(group)
    return count


def _groups(rows: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    group = list[Mapping[str, Any]]()
    weight = 0
    for row in rows:
        group.append(row)
        weight += _weight(row)
        if weight >= _GROUP_WEIGHT or len(group) >= _GROUP_ROWS:
            yield group
            group = []
            weight = 0
    if group:
        yield group


def _weight(row: Mapping[str, Any]) -> int:
    weight = 0
    for value in row.values():
        if isinstance(value, str):
            weight += len(value)
        elif isinstance(value, list) and value:
            weight += len(value) * (1 + len(value[0]) if isinstance(value[0], list) else 1)
    return weight


def _type(pyarrow: Any, kind: str) -> Any:
    if kind == MESSAGES:
        return pyarrow.list_(pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())]))
    if kind.startswith("list<"):
        return pyarrow.list_(_type(pyarrow, kind[5:-1]))
    return pyarrow.type_for_alias({"json": "string"}.get(kind, kind))


@contextmanager
def _writing(path: Path) -> Iterator[tuple[Any, Any]]:
    try:
        import pyarrow  # noqa: PLC0415  an extra
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError:
        raise UsageError(f"{path} is to be Parquet", hint="pip install 'tokenmill[recipes]', or .jsonl") from None
    try:
        yield pyarrow, parquet
    except pyarrow.ArrowException as error:
        raise TokenmillError(f"cannot write {path}: {str(error).splitlines()[0]}") from error


def written_by(path: Path, columns: Iterable[str]) -> str | None:
    """The recipe that wrote a table with these columns; None: it is something else."""
    try:
        if suffix_of(path) == ".parquet":
            with arrow(path) as parquet:
                name = (parquet.read_schema(path).metadata or {}).get(b"tokenmill.recipe", b"").decode()
                return name or None
        first = next(read_rows(path), {})
    except UsageError:
        return None
    return "distill" if list(first) == list(columns) else None
