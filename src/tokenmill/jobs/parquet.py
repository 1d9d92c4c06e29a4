"""Parquet tables of jobs as lines: one row is one line, its number the row's, from 1.

Columns are the keys of a plain line (custom_id, messages, prompt, temperature, ...) or of OpenAI's batch form (body,
url, method). Columns of text that stand for objects or lists (messages, tools, body) are read as JSON.
"""

import difflib
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from tokenmill.errors import UsageError
from tokenmill.jobs.json_text import compact_json
from tokenmill.jobs.openai.requests import JOB_KEYS, LINE_KEYS
from tokenmill.jobs.read import BadLine, Chunk

_ROWS = 1024
_JSON_COLUMNS = frozenset(
    (
        "body",
        "messages",
        "tools",
        "tool_choice",
        "response_format",
        "json_schema",
        "logit_bias",
        "metadata",
        "chat_template_kwargs",
    )
)


def parquet_chunks(name: str, file: BinaryIO) -> Iterator[Chunk | BadLine]:
    """The rows of a table, written as JSON lines."""
    try:
        import pyarrow  # noqa: PLC0415
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError:
        raise UsageError(f"{name} is Parquet", hint="pip install 'tokenmill[parquet]', or write it as JSONL") from None
    try:
        table = parquet.ParquetFile(file)
        _check_columns(name, table.schema_arrow.names)
        maps = {field.name for field in table.schema_arrow if pyarrow.types.is_map(field.type)}
        number = 1
        for batch in table.iter_batches(_ROWS):
            yield from _written(number, batch.to_pylist(), maps)
            number += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(
            f"{name}: the Parquet data cannot be read: {str(error).splitlines()[0]}", hint="write the file again"
        ) from error


def _check_columns(name: str, columns: list[str]) -> None:
    known = sorted(JOB_KEYS | LINE_KEYS)
    for column in columns:
        if column not in known:
            near = difflib.get_close_matches(column, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "leave the column out; nothing is ignored silently"
            raise UsageError(f"{name} has the column {column!r}, which is no key of a job", hint=hint)


def _written(first: int, rows: list[dict[str, Any]], maps: set[str]) -> Iterator[Chunk | BadLine]:
    start = first
    written = list[str]()
    for number, row in enumerate(rows, first):
        try:
            written.append(compact_json(_line(row, maps)))
        except (ValueError, TypeError) as error:
            if written:
                yield Chunk(start, "\n".join(written).encode())
            yield BadLine(number, str(error))
            start = number + 1
            written = []
    if written:
        yield Chunk(start, "\n".join(written).encode())


def _line(row: dict[str, Any], maps: set[str]) -> dict[str, Any]:
    line = {}
    for column, value in row.items():
        if value is None:
            continue
        if column in maps:
            line[column] = dict(value)
        elif column in _JSON_COLUMNS and isinstance(value, str) and value not in ("none", "auto", "required"):
            line[column] = _parsed(column, value)
        else:
            line[column] = _without_nulls(value)
    return line


def _parsed(column: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{column} is not JSON: {error}") from None


def _without_nulls(value: Any) -> Any:
    """Arrow's structs have every field in every row: null there is what absence is in JSON."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
