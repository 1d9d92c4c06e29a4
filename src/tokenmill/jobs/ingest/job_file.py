"""Reads job files: JSONL, or Parquet, whose rows become lines numbered from 1.

Columns are the keys of a plain line (custom_id, messages, prompt, temperature, ...) or of OpenAI's batch format (body,
url, method). Text in columns for objects or lists (messages, tools, body) is parsed as JSON.
"""

import difflib
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO

from tokenmill.errors import UsageError
from tokenmill.jobs.openai.requests import JOB_KEYS, LINE_KEYS
from tokenmill.storage.json_text import compact_json
from tokenmill.storage.lines import BadLine, Chunk, Hashed, Source, open_source, split
from tokenmill.storage.rows import reading_parquet

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


def open_jobs(where: str | Path, hashed: Hashed | None = None) -> AbstractContextManager[Source]:
    """Open a job file for reading lines; see `open_source`."""
    return open_source(where, hashed, parquet=_parquet_lines)


def job_lines(where: str | Path) -> Iterator[tuple[int, str] | BadLine]:
    """Every line of a job file with its number."""
    with open_jobs(where) as source:
        for chunk in source.chunks():
            if isinstance(chunk, BadLine):
                yield chunk
            else:
                yield from split(chunk)


def _parquet_lines(name: str, file: BinaryIO) -> Iterator[Chunk | BadLine]:
    with reading_parquet(name) as (pyarrow, parquet):
        table = parquet.ParquetFile(file)
        _check_columns(name, table.schema_arrow.names)
        maps = {field.name for field in table.schema_arrow if pyarrow.types.is_map(field.type)}
        number = 1
        for batch in table.iter_batches(_ROWS):
            yield from _written(number, batch.to_pylist(), maps)
            number += batch.num_rows


def _check_columns(name: str, columns: list[str]) -> None:
    known = sorted(JOB_KEYS | LINE_KEYS)
    for column in columns:
        if column not in known:
            near = difflib.get_close_matches(column, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "remove the column; unknown keys are not ignored"
            raise UsageError(f"{name} has the column {column!r}, which is not a key of a job", hint=hint)


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
    """Remove nulls, which Arrow structs have for missing fields."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
