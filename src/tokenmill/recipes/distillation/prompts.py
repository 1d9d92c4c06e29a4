"""Reads a teacher's prompts from files and turns them into batch lines.

A prompt is a conversation that ends before an answer. Files have `messages`, a `prompt`, a column of texts, or OpenAI
batch lines. Other body keys of a line (temperature, max_tokens, ...) override the options for all lines. A file with
an invalid line is rejected as a whole.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenmill.errors import RequestRefused, UsageError
from tokenmill.jobs.ingest.line import MAX_CUSTOM_ID_LENGTH, body_of
from tokenmill.jobs.openai.call import checked
from tokenmill.recipes.runner import Line, chat_line
from tokenmill.storage.json_text import compact_json, shown
from tokenmill.storage.rows import read_rows

SAMPLING_TEMPERATURE = 0.7  # default temperature for several samples
_NAMES = ("custom_id", "id", "prompt_id")
_TEXTS = ("prompt", "text", "question", "instruction")  # columns that hold a user's message
_BATCH_KEYS = frozenset(("body", "url", "method"))
_ROLES = frozenset(("system", "developer", "user", "assistant"))
_LONGEST_ID = MAX_CUSTOM_ID_LENGTH - 8  # leaves space for the sample number
REFUSED = {
    "tools": "rows have no column for tool calls",
    "functions": "rows have no column for tool calls",
    "stream": "answers are not streamed",
    "n": "use --samples instead",
    "prompt": "text completions are not supported; use tokenmill run",
    "logprobs": "use --top-logprobs, so that all rows have the same columns",
    "top_logprobs": "use --top-logprobs, so that all rows have the same columns",
}
"""Body keys that are rejected in a line, with the reason."""


@dataclass(frozen=True, slots=True)
class TeacherPrompt:
    """One conversation that ends before an answer."""

    id: str
    messages: tuple[Mapping[str, str], ...]
    own: Mapping[str, Any] = field(default_factory=dict)  # body keys of this line


@dataclass(frozen=True, slots=True)
class DistillOptions:
    """Options that apply to all prompts."""

    samples: int = 1
    temperature: float | None = None  # None: 0 for one sample, else `SAMPLING_TEMPERATURE`
    top_p: float | None = None
    seed: int = 0  # another seed samples other answers
    max_tokens: int = 2048
    top_logprobs: int | None = 0  # None: no probabilities and no tokens; 0: only of the chosen token
    stop: tuple[str, ...] = ()
    body: Mapping[str, Any] = field(default_factory=dict)  # more keys

    @property
    def effective_temperature(self) -> float:
        """The temperature for lines that set none."""
        return self.temperature if self.temperature is not None else SAMPLING_TEMPERATURE if self.samples > 1 else 0.0


@dataclass(frozen=True, slots=True)
class DistillPrompts:
    """A file of prompts, read again at each iteration; raises UsageError if it has changed."""

    path: Path
    column: str | None = None  # column of texts; None: the only one
    system: str | None = None  # system message for prompts without one
    _seen: list[tuple[int, int]] = field(default_factory=list)

    def __iter__(self) -> Iterator[TeacherPrompt]:
        self._check_unchanged()
        names: dict[str, int] = {}
        number = 0
        for number, row in enumerate(read_rows(self.path), 1):
            where = f"line {number} of {self.path}"
            prompt = _prompt(row, number, where, self.column, self.system)
            if (before := names.setdefault(prompt.id, number)) != number:
                raise UsageError(
                    f"lines {before} and {number} of {self.path} have the same id {shown(prompt.id)}",
                    hint="make the ids unique, or remove them",
                )
            yield prompt
        if not number:
            raise UsageError(
                f"{self.path} has no prompts", hint='write lines such as {"prompt": "..."} or {"messages": [...]}'
            )

    def _check_unchanged(self) -> None:
        try:
            info = self.path.stat()
        except OSError as error:
            raise UsageError(f"cannot read {self.path}: {error.strerror}", hint="check the path") from error
        if not self.path.is_file():
            raise UsageError(
                f"{self.path} is not a regular file", hint="prompts are read twice: use a file, not a pipe"
            )
        now = info.st_size, info.st_mtime_ns
        if self._seen and self._seen[0] != now:
            raise UsageError(
                f"{self.path} changed during the run",
                hint="run the same command again; existing answers are reused",
            )
        self._seen[:] = [now]


def bodies(prompt: TeacherPrompt, ask: DistillOptions) -> Iterator[Line]:
    """A prompt's lines, one per sample; deterministic. Raises UsageError if they are invalid."""
    settings: dict[str, Any] = {
        "max_tokens": ask.max_tokens,
        "temperature": ask.effective_temperature,
        "top_p": ask.top_p,
    }
    settings |= {"stop": list(ask.stop) or None, **ask.body}
    if ask.top_logprobs is not None:
        settings |= {"logprobs": True, "top_logprobs": ask.top_logprobs}
    own = {key: value for key, value in prompt.own.items() if value is not None}
    if "max_completion_tokens" in own:
        settings.pop("max_tokens", None)
    settings |= own
    random = bool(settings["temperature"])
    if ask.samples > 1 and not random:
        raise UsageError(
            f"{prompt.id}: all {ask.samples} samples would be equal at temperature 0",
            hint="set a temperature above 0, or --samples 1",
        )
    for sample in range(ask.samples):
        if random:
            settings["seed"] = seed_of(prompt, sample, ask.seed if own.get("seed") is None else own["seed"])
        yield chat_line(f"{prompt.id}/{sample}", prompt.messages, **settings)


def seed_of(prompt: TeacherPrompt, sample: int, base: int) -> int:
    """A seed from the prompt's content and the sample number, independent of its position in the file."""
    text = compact_json([base, sample, [[message["role"], message["content"]] for message in prompt.messages]])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def check_prompts(prompts: DistillPrompts, ask: DistillOptions) -> int:
    """Check every prompt and count the lines; raises UsageError for the first invalid prompt."""
    count = 0
    for number, prompt in enumerate(prompts, 1):
        for line in bodies(prompt, ask):
            count += 1
            try:
                checked("chat", line["body"])
            except RequestRefused as error:
                raise UsageError(f"line {number} of {prompts.path}: {error.message}", hint=error.hint) from error
    return count


def _prompt(row: Mapping[str, Any], number: int, where: str, column: str | None, system: str | None) -> TeacherPrompt:
    name = _name(row, number, where)
    if "body" in row and "url" in row:
        messages, own = _of_batch_line(row, where)
    elif column is None and row.get("messages") is not None:
        messages = _list(row["messages"], where)
        own = _own(row, ("messages", *_NAMES), where)
    else:
        text = _column(row, column, where)
        messages = [{"role": "user", "content": row[text]}]
        # Other columns of a table are ignored; a line with a prompt is a request body, whose other keys are options.
        own = _own(row, (text, *_NAMES), where) if text == "prompt" and column is None else {}
    checked_messages = _checked_messages(messages, where)
    if system is not None and checked_messages[0]["role"] not in ("system", "developer"):
        checked_messages = ({"role": "system", "content": system}, *checked_messages)
    return TeacherPrompt(name, checked_messages, own)


def _name(row: Mapping[str, Any], number: int, where: str) -> str:
    given = next((row[key] for key in _NAMES if row.get(key) not in (None, "")), None)
    if given is None:
        return f"prompt-{number}"
    name = str(given) if isinstance(given, str | int) and not isinstance(given, bool) else ""
    if not 0 < len(name) <= _LONGEST_ID:
        raise UsageError(f"{where}: invalid id {shown(given)}", hint=f"use a string of 1 to {_LONGEST_ID} characters")
    return name


def _of_batch_line(row: Mapping[str, Any], where: str) -> tuple[list[Any], dict[str, Any]]:
    line = {key: row[key] for key in ("custom_id", *_BATCH_KEYS) if key in row}
    if isinstance(line["body"], str):
        line["body"] = _json(line["body"], f"{where}: body")
    try:
        endpoint, body = body_of(line)
    except RequestRefused as error:
        raise UsageError(f"{where}: {error.message}", hint=error.hint) from error
    if endpoint != "chat" or "messages" not in body:
        raise UsageError(
            f"{where} is not a chat request", hint="use /v1/chat/completions with messages, or tokenmill run"
        )
    return _list(body["messages"], where), _own(body, ("messages",), where)


def _own(row: Mapping[str, Any], besides: tuple[str, ...], where: str) -> dict[str, Any]:
    own = {key: value for key, value in row.items() if key not in besides and value is not None}
    own.pop("model", None)  # the run chooses the model
    for key in own:
        if key in REFUSED:
            raise UsageError(f"{where}: {key!r} is not supported: {REFUSED[key]}", hint=f"remove {key!r}")
    return own


def _list(value: Any, where: str) -> list[Any]:
    found = _json(value, f"{where}: messages") if isinstance(value, str) else value
    if not isinstance(found, list) or not found:
        raise UsageError(f"{where}: messages must be a non-empty list (got {shown(found)})")
    return found


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}") from None


def _column(row: Mapping[str, Any], column: str | None, where: str) -> str:
    if column is not None:
        if column not in row:
            raise UsageError(
                f"{where} has no column {column!r}", hint=f"its columns: {', '.join(map(str, row)) or 'none'}"
            )
        return column
    for name in _TEXTS:
        if row.get(name) is not None:
            return name
    columns = ", ".join(map(str, row)) or "none"
    raise UsageError(f"{where} has no messages and no prompt", hint=f"set --column to one of its columns: {columns}")


def _plain(message: Mapping[str, Any]) -> bool:
    return all(value is None for key, value in message.items() if key not in ("role", "content"))


def _checked_messages(messages: list[Any], where: str) -> tuple[dict[str, str], ...]:
    found = []
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        content = message.get("content") if isinstance(message, Mapping) else None
        if role not in _ROLES or not isinstance(content, str) or not _plain(message):
            hint = f"a message has a role ({', '.join(sorted(_ROLES))}) and a string as content, and no other keys"
            raise UsageError(f"{where}: invalid message messages[{index}]: {shown(message)}", hint=hint)
        found.append({"role": role, "content": content})
    if found[-1]["role"] == "assistant":
        raise UsageError(
            f"{where}: the last message has the role assistant, so there is nothing to answer",
            hint="remove that message; the teacher writes its own answer",
        )
    if not found[-1]["content"].strip():
        raise UsageError(f"{where}: the last message is empty", hint="remove the line, or add text to the message")
    return tuple(found)
