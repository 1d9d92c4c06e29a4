"""Converts a teacher's table to the formats of training libraries.

    messages   {"messages": [{"role", "content"}, ...]}                TRL, OpenAI, axolotl, LLaMA-Factory, unsloth
    sharegpt   {"conversations": [{"from", "value"}, ...]}             axolotl, LLaMA-Factory, unsloth
    alpaca     {"instruction", "input", "output"[, system, history]}   axolotl, LLaMA-Factory, unsloth
    parquet    messages as lists of structs, with the teacher's tokens and probabilities, for `datasets` and TRL

The answer is the assistant's last message. Every sample becomes a row. Omitted rows are counted and reported.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from tokenmill.engine.reasoning import join_reasoning
from tokenmill.errors import UsageError
from tokenmill.recipes.distillation.rows import COLUMNS
from tokenmill.storage.rows import parquet_columns, read_rows, suffix_of, write_rows

ExportFormat = Literal["messages", "sharegpt", "alpaca", "parquet"]
FORMATS: tuple[ExportFormat, ...] = get_args(ExportFormat)
_FINISHED = "stop"
_SPEAKERS = {"system": "system", "developer": "system", "user": "human", "assistant": "gpt"}
_NEEDED = ("id", "messages", "answer", "reasoning", "finish_reason")
_SYSTEM_ROLES = ("system", "developer")
_TOKENS = ("token_ids", "logprobs", "top_ids", "top_logprobs")
_ALPACA = {"instruction", "input", "output"}
_LISTS = {"messages": ("messages", {"role", "content"}), "sharegpt": ("conversations", {"from", "value"})}
_KEPT = ("id", "prompt_id", "sample", "reasoning", "finish_reason", "model", "model_id", *_TOKENS)


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """Options of an export."""

    format: ExportFormat
    cut_too: bool = False  # include answers cut at max_tokens
    with_reasoning: bool = False  # prepend it in think tags


@dataclass(frozen=True, slots=True)
class Exported:
    """Counts of an export."""

    path: Path
    format: ExportFormat
    rows: int
    cut: int  # omitted: the answer was cut
    empty: int  # omitted: no answer
    columns: Mapping[str, str]


@dataclass(slots=True)
class _Omitted:
    cut: int = 0
    empty: int = 0


def export(source: Path, target: Path, wanted: ExportRequest) -> Exported:
    """Convert a teacher's table, replacing the target."""
    check_export(target, wanted.format)
    columns = columns_of(source, wanted)
    omitted = _Omitted()
    rows = write_rows(target, _written(source, wanted, columns, omitted), columns)
    if not rows:
        raise UsageError(
            f"{source} has no answers to export: {omitted.cut} were cut at max_tokens, {omitted.empty} are empty",
            hint="export cut answers with --cut-too, or run distill with a larger --max-tokens",
        )
    return Exported(target, wanted.format, rows, omitted.cut, omitted.empty, columns)


def check_export(target: Path, format: ExportFormat) -> None:
    """Raise UsageError if the file name does not fit the format."""
    parquet = suffix_of(target) == ".parquet"
    if parquet != (format == "parquet"):
        ending = ".parquet" if format == "parquet" else ".jsonl, .jsonl.gz or .jsonl.zst"
        raise UsageError(
            f"the format {format} cannot be written to {target.name}", hint=f"use a file name that ends in {ending}"
        )


def check_replaceable(target: Path, format: ExportFormat) -> None:
    """Raise UsageError if the target exists and is not an export in this format or empty."""
    if target.is_file() and target.stat().st_size and not _looks_like(target, format):
        raise UsageError(
            f"{target} exists and is not an export in the format {format}",
            hint="use another file, or --force to overwrite it",
        )


def _looks_like(target: Path, format: ExportFormat) -> bool:
    """Whether a file has the columns of a format, by its first row."""
    try:
        if format == "parquet":
            return parquet_columns(target) == ["messages", *_KEPT]
        row = next(read_rows(target), None)
    except UsageError:
        return False
    if row is None:  # compressed and empty
        return True
    if format == "alpaca":
        return _ALPACA <= row.keys() <= _ALPACA | {"system", "history"}
    name, keys = _LISTS[format]
    value = row.get(name)
    return (
        row.keys() == {name}
        and isinstance(value, list)
        and all(isinstance(each, dict) and each.keys() == keys for each in value)
    )


def rows_of(source: Path, wanted: ExportRequest) -> Iterator[dict[str, Any]]:
    """The rows of the export."""
    return _written(source, wanted, columns_of(source, wanted), _Omitted())


def columns_of(source: Path, wanted: ExportRequest) -> dict[str, str]:
    """The columns and types of the export, equal for all rows as `datasets` requires."""
    if wanted.format == "messages":
        return {"messages": "messages"}
    if wanted.format == "sharegpt":
        return {"conversations": "json"}
    if wanted.format == "parquet":
        return {"messages": "messages", **{name: COLUMNS[name] for name in _KEPT}}
    systems = histories = False
    for row in _chosen(source, wanted, _Omitted(), _NEEDED):
        system, turns = _turns(row)
        systems = systems or system is not None
        histories = histories or len(turns) > 1
    columns = {"instruction": "string", "input": "string", "output": "string"}
    return columns | ({"system": "string"} if systems else {}) | ({"history": "json"} if histories else {})


def _written(
    source: Path, wanted: ExportRequest, columns: Mapping[str, str], omitted: _Omitted
) -> Iterator[dict[str, Any]]:
    read = (*_NEEDED, *_KEPT) if wanted.format == "parquet" else _NEEDED
    for row in _chosen(source, wanted, omitted, tuple(dict.fromkeys(read))):
        if wanted.format == "messages":
            yield {"messages": row["messages"]}
        elif wanted.format == "sharegpt":
            yield {"conversations": _conversation(row)}
        elif wanted.format == "alpaca":
            yield _alpaca(row, columns)
        else:
            yield {"messages": row["messages"], **{name: row.get(name) for name in _KEPT}}


def _chosen(source: Path, wanted: ExportRequest, omitted: _Omitted, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Exported rows with the answer as the last message."""
    for number, row in enumerate(read_rows(source, columns), 1):
        if row.get("answer") is None or row.get("messages") is None or "finish_reason" not in row:
            raise UsageError(
                f"row {number} of {source} was not written by tokenmill distill",
                hint="export a table written by distill",
            )
        if row["finish_reason"] != _FINISHED and not wanted.cut_too:
            omitted.cut += 1
        elif not row["answer"].strip() and not (wanted.with_reasoning and row.get("reasoning")):
            omitted.empty += 1
        else:
            yield {**row, "messages": _with_answer(row, wanted)}


def _with_answer(row: Mapping[str, Any], wanted: ExportRequest) -> list[dict[str, str]]:
    given = row["messages"]
    messages = json.loads(given) if isinstance(given, str) else given
    answer = join_reasoning(row["answer"], row.get("reasoning")) if wanted.with_reasoning else row["answer"]
    return [*messages, {"role": "assistant", "content": answer}]


def _conversation(row: Mapping[str, Any]) -> list[dict[str, str]]:
    return [{"from": _SPEAKERS[message["role"]], "value": message["content"]} for message in row["messages"]]


def _alpaca(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    system, turns = _turns(row)
    made: dict[str, Any] = {"instruction": turns[-1][0], "input": "", "output": turns[-1][1]}
    if "system" in columns:
        made["system"] = system or ""
    if "history" in columns:
        made["history"] = [list(turn) for turn in turns[:-1]]
    return made


def _turns(row: Mapping[str, Any]) -> tuple[str | None, list[tuple[str, str]]]:
    """Alpaca's form of a conversation: system message, then pairs of question and answer."""
    messages = list(row["messages"])
    system = messages.pop(0)["content"] if messages[0]["role"] in _SYSTEM_ROLES else None
    roles = [message["role"] for message in messages]
    if roles != ["user", "assistant"] * (len(roles) // 2):
        raise UsageError(
            f"{row['id']}: user and assistant messages do not alternate, as the Alpaca format requires",
            hint="use --to messages, which supports any conversation",
        )
    texts = [message["content"] for message in messages]
    return system, list(zip(texts[::2], texts[1::2], strict=True))
