"""Seeds: the examples that a dataset grows from, and the format of their file.

Files differ (instruction, input and output; prompt and response; messages; one column of text), but an `Example`
always has a task, an input and an answer, each of which may be empty. New examples get the seeds' format, so that
both fit in one dataset.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tokenmill.errors import UsageError
from tokenmill.storage.json_text import compact_json, shown
from tokenmill.storage.rows import read_rows

_CHATS = {"messages": ("role", "content"), "conversations": ("from", "value")}
_TASKS = ("instruction", "prompt", "question", "query", "problem")
_INPUTS = ("input", "context")
_ANSWERS = ("output", "response", "completion", "answer", "solution")
_TEXTS = ("text", "content")
_ROLES = {"human": "user", "gpt": "assistant"}
_HINT = "set --column to the column of the tasks or texts, and --answer-column to that of the answers"

SeedPart = Literal["instruction", "input", "output"]


@dataclass(frozen=True, slots=True)
class Example:
    """One row as shown to the model; a plain text is an answer without a task."""

    task: str = ""
    input: str = ""
    answer: str = ""
    before: tuple[Mapping[str, Any], ...] = ()  # messages before the last question, unchanged


@dataclass(frozen=True, slots=True)
class Shape:
    """The columns of an example; None: missing."""

    answer: str | None = None
    task: str | None = None
    input: str | None = None
    chat: str | None = None  # column of messages, used instead of all others
    turn: tuple[str, str] = ("role", "content")  # keys of a message
    roles: tuple[str, str] = ("user", "assistant")
    parts: tuple[SeedPart, ...] = ()  # parts of a new example as a JSON object; empty: a plain text
    new_task: str | None = None  # column for the task of plain texts

    @property
    def types(self) -> dict[str, str]:
        """The columns with their types, in order."""
        if self.chat is not None:
            return {self.chat: "json"}
        return dict.fromkeys([name for name in (self.new_task, self.task, self.input, self.answer) if name], "string")

    def row(self, example: Example) -> dict[str, Any]:
        """An example as a row of the seeds' file."""
        if self.chat is not None:
            pairs = zip(self.roles, (example.task, example.answer), strict=True)
            turns = [dict(zip(self.turn, pair, strict=True)) for pair in pairs if pair[1]]
            return {self.chat: [*map(dict, example.before), *turns]}
        parts = (
            (self.new_task, example.task or None),
            (self.task, example.task),
            (self.input, example.input),
            (self.answer, example.answer),
        )
        return {name: value for name, value in parts if name is not None}

    def with_task(self) -> "Shape":
        """This shape with a task column for plain texts."""
        if self.parts or self.chat is not None:
            return self
        return replace(self, new_task="instruction" if self.answer != "instruction" else "task")


@dataclass(frozen=True, slots=True)
class Parent:
    """The origin of new examples: a seed, or an earlier new example."""

    id: str
    root: str  # the original seed
    depth: int  # 0: a seed
    example: Example
    carried: Mapping[str, Any] = field(default_factory=dict)  # columns copied from the seed


@dataclass(frozen=True, slots=True)
class Seeds:
    """The examples of a file."""

    path: Path
    shape: Shape
    parents: tuple[Parent, ...]
    carried: Mapping[str, str] = field(default_factory=dict)  # copied columns and their types


def read_seeds(
    path: Path, *, column: str | None = None, answer_column: str | None = None, carry: Sequence[str] = ()
) -> Seeds:
    """Read a file of examples; raises UsageError with the existing columns or the invalid row."""
    rows = list(read_rows(path))
    if not rows:
        raise UsageError(f"{path} has no rows", hint="each row is an example to start from")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    shape = _shape(path, columns, column, answer_column)
    for name in carry:
        _known(path, columns, name, "--carry")
    if clash := sorted(set(carry) & set(shape.types)):
        raise UsageError(
            f"--carry cannot copy the column {clash[0]!r}, because new rows have their own values",
            hint="remove it from --carry",
        )
    examples = [_example(path, number, row, shape) for number, row in enumerate(rows, 1)]
    names = _names(rows)
    parents = tuple(
        Parent(name, name, 0, example, {key: row.get(key) for key in carry})
        for name, row, example in zip(names, rows, examples, strict=True)
    )
    types = {key: "string" if _all_text(row.get(key) for row in rows) else "json" for key in carry}
    return Seeds(path, _with_parts(shape, examples), parents, types)


def _shape(path: Path, columns: list[str], column: str | None, answer_column: str | None) -> Shape:
    if column is not None or answer_column is not None:
        return _named(path, columns, column, answer_column)
    lower = {name.casefold(): name for name in reversed(columns)}
    chat = next((name for name in _CHATS if name in lower), None)
    if chat is not None:
        return _chat(lower[chat], chat)
    task, given, answer, text = (
        next((lower[name] for name in names if name in lower), None) for names in (_TASKS, _INPUTS, _ANSWERS, _TEXTS)
    )
    if answer is not None and (task or given) is not None:
        return Shape(answer, task, given) if task is not None else Shape(answer, given)
    rest = [name for name in columns if name.casefold() != "id"]
    only = text or task or (rest[0] if len(rest) == 1 else None)
    if only is None:
        raise UsageError(f"cannot tell which column of {path} to expand: {', '.join(columns)}", hint=_HINT)
    return Shape(only)


def _named(path: Path, columns: list[str], column: str | None, answer_column: str | None) -> Shape:
    if column is None:
        raise UsageError("--answer-column needs --column", hint="--column QUESTION --answer-column ANSWER")
    _known(path, columns, column, "--column")
    if answer_column is None:
        return _chat(column, column.casefold()) if column.casefold() in _CHATS else Shape(column)
    _known(path, columns, answer_column, "--answer-column")
    if answer_column == column:
        raise UsageError(f"--column and --answer-column both name {column!r}", hint="leave --answer-column out")
    given = next((name for name in columns if name.casefold() in _INPUTS and name not in (column, answer_column)), None)
    return Shape(answer_column, column, given if column.casefold() == "instruction" else None)


def _chat(column: str, kind: str) -> Shape:
    roles = ("user", "assistant") if kind == "messages" else ("human", "gpt")
    return Shape(chat=column, turn=_CHATS[kind], roles=roles)


def _known(path: Path, columns: list[str], name: str, option: str) -> None:
    if name not in columns:
        raise UsageError(f"{option}: {path} has no column {name!r}", hint=f"its columns: {', '.join(columns)}")


def _with_parts(shape: Shape, examples: list[Example]) -> Shape:
    """Remove parts that no seed has."""
    if shape.task is None and shape.chat is None:
        return shape
    has_input = shape.input is not None and any(example.input for example in examples)
    has_answer = any(example.answer for example in examples)
    parts: tuple[SeedPart, ...] = (
        "instruction",
        *(("input",) if has_input else ()),
        *(("output",) if has_answer else ()),
    )
    return replace(shape, parts=parts)


def _example(path: Path, number: int, row: Mapping[str, Any], shape: Shape) -> Example:
    where = f"row {number} of {path}"
    if shape.chat is not None:
        return _from_chat(where, row.get(shape.chat), shape)
    task, given, answer = (
        "" if name is None else _text(where, name, row.get(name)) for name in (shape.task, shape.input, shape.answer)
    )
    if not (task or given or answer):
        raise UsageError(f"{where} is empty in {', '.join(shape.types)}", hint="remove the row, or fill it")
    return Example(task, given, answer)


def _text(where: str, column: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, bool | int | float | dict | list):
        return compact_json(value)
    raise UsageError(f"{where}: the value of {column!r} is not text: {shown(str(value))}", hint=_HINT)


def _from_chat(where: str, value: Any, shape: Shape) -> Example:
    turns = _turns(where, value, shape)
    role, content = shape.turn
    questions = [at for at, turn in enumerate(turns) if _ROLES.get(turn[role], turn[role]) == "user"]
    if not questions:
        raise UsageError(f"{where} has no user message in {shape.chat!r}", hint="remove or correct the row")
    last = questions[-1]
    after = turns[last + 1 :]
    if len(after) > 1 or (after and _ROLES.get(after[0][role], after[0][role]) != "assistant"):
        raise UsageError(
            f"{where}: the last user message is followed by {len(after)} messages instead of one answer",
            hint="conversations with tool calls are not supported: remove the row",
        )
    answer = after[0][content].strip() if after else ""
    return Example(turns[last][content].strip(), "", answer, tuple(turns[:last]))


def _turns(where: str, value: Any, shape: Shape) -> list[Mapping[str, Any]]:
    if isinstance(value, str):  # serialized in CSV and some Parquet files
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    fine = isinstance(value, list) and all(
        isinstance(turn, Mapping) and all(isinstance(turn.get(key), str) for key in shape.turn) for turn in value
    )
    if not fine:
        example = compact_json([dict(zip(shape.turn, (shape.roles[0], "..."), strict=True))])
        raise UsageError(
            f"{where}: {shape.chat!r} is not a list of messages with text", hint=f"write a list such as {example}"
        )
    return list(value)


def _names(rows: list[dict[str, Any]]) -> list[str]:
    """The rows' ids if they are unique, else their numbers."""
    own = [row.get("id") for row in rows]
    texts = [str(name) for name in own if isinstance(name, str | int) and not isinstance(name, bool) and str(name)]
    if len(set(texts)) == len(rows):
        return texts
    return [f"seed-{number}" for number in range(1, len(rows) + 1)]


def _all_text(values: Iterable[Any]) -> bool:
    return all(value is None or isinstance(value, str) for value in values)
