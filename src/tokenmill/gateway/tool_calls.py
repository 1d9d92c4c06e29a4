"""Tool calls found in a model's own words, for engines that give text alone.

Known forms: `<tool_call>{...}</tool_call>` (Hermes, Qwen), the section and call tokens of Kimi, and Llama's bare JSON
object with a name and parameters, with or without `<|python_tag|>` before it. A bare object counts only if it names a
tool that was offered. What is not a call after all is text again. Text is held back only while it may be one.
"""

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.engine.engine import Answer, Capabilities, Chat, Request
from tokenmill.errors import RequestRefused

_PYTHON_TAG = "<|python_tag|>"
_ENDS = {"<tool_call>": "</tool_call>", "<|tool_calls_section_begin|>": "<|tool_calls_section_end|>"}
_MARKS = (*_ENDS, _PYTHON_TAG)
_KIMI = re.compile(
    r"<\|tool_call_begin\|>\s*(?P<id>[^<]*?)\s*"
    r"<\|tool_call_argument_begin\|>(?P<args>.*?)<\|tool_call_end\|>",
    re.DOTALL,
)
_KIMI_ID = re.compile(r"(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?")
_FIRST_KEY = re.compile(r'\s*\{\s*"([^"]*)"')
_CALL_KEYS = frozenset(("name", "type", "function", "parameters", "arguments", "id"))
_decode = json.JSONDecoder().raw_decode


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: str  # JSON, as OpenAI has it
    id: str

    def body(self) -> dict[str, Any]:
        """In OpenAI's form."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


Part = str | Call


def fitted(request: Request, can: Capabilities) -> Request:
    """The request for an engine that does not parse tool calls: what was chosen is held by other means."""
    prompt = request.prompt
    if can.tools_parsed or not isinstance(prompt, Chat) or not prompt.tools:
        return request
    choice, extra = prompt.tool_choice, {k: v for k, v in request.extra.items() if k != "parallel_tool_calls"}
    if choice == "none":
        return replace(request, prompt=replace(prompt, tools=(), tool_choice=None), extra=extra)
    if choice in (None, "auto"):
        return replace(request, extra=extra)
    if request.sampling.json_schema is not None or request.sampling.grammar is not None:
        raise RequestRefused("tool_choice: a call that must be made and a format of the answer exclude each other")
    if not can.json_schema:
        raise RequestRefused("tool_choice: this engine cannot be held to a call", hint='leave it at "auto"')
    wanted = choice["function"]["name"] if isinstance(choice, Mapping) else None
    schema = _schema_of([tool for tool in prompt.tools if wanted in (None, tool["function"]["name"])])
    sampling = replace(request.sampling, json_schema=json.dumps(schema, ensure_ascii=False))
    return replace(request, prompt=replace(prompt, tool_choice=None), sampling=sampling, extra=extra)


def _schema_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": tool["function"].get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def parsed(answer: Answer, names: frozenset[str], *, several: bool = True) -> Answer:
    """An answer with the calls in its text made calls."""
    reader = Reader(names, several=several)
    parts = [*reader.feed(answer.text), *reader.end()]
    calls = [part for part in parts if isinstance(part, Call)]
    if not calls:
        return answer
    text = "".join(part for part in parts if isinstance(part, str)).strip()
    message = {"role": "assistant", "content": text or None, "tool_calls": [call.body() for call in calls]}
    return replace(answer, message=message, finish_reason="tool_calls")


class Reader:
    """Reads an answer as it comes: text in, text and calls out."""

    def __init__(self, names: frozenset[str], *, several: bool = True) -> None:
        """`names` of the tools that were offered; not `several`: only the first call counts."""
        self._names, self._several = names, several
        self._held = ""
        self._end: str | None = None  # what ends the call that is being read; "": the answer's end does
        self._began = False  # something other than space has gone out
        self.calls = 0

    def feed(self, text: str) -> list[Part]:
        """What is certain after this text."""
        self._held += text
        out: list[Part] = []
        while self._step(out):
            pass
        return [part for part in out if part]

    def end(self) -> list[Part]:
        """What was held back, when no more comes."""
        held, self._held = self._held, ""
        calls = self._calls_in(held) if self._end is not None or not self._began else []
        self._end = None
        return list(self._taken(calls)) if calls else [text for text in (self._text(held),) if text]

    def _step(self, out: list[Part]) -> bool:
        """Take one thing from what is held; whether there may be another."""
        if self._end is not None:
            return self._inside(out, self._end)
        if not self._began and self._may_be_bare():
            return False
        start, mark = min(((at, mark) for mark in _MARKS if (at := self._held.find(mark)) >= 0), default=(-1, ""))
        if start >= 0:
            out.append(self._text(self._held[:start]))
            self._held = self._held[start:]
            self._end = _ENDS.get(mark, "")
            return True
        free = len(self._held) - _begun_mark(self._held)
        out.append(self._text(self._held[:free]))
        self._held = self._held[free:]
        return False

    def _inside(self, out: list[Part], end: str) -> bool:
        at = self._held.find(end) if end else -1
        if at < 0:
            return False
        whole, self._held, self._end = self._held[: at + len(end)], self._held[at + len(end) :], None
        calls = self._calls_in(whole)
        out.extend(self._taken(calls) if calls else [self._text(whole)])
        return True

    def _may_be_bare(self) -> bool:
        """Whether what is held may be a call without marks: a JSON object from the first character on."""
        start = self._held.lstrip()
        if not start:
            return True
        if not start.startswith("{"):
            return False
        key = _FIRST_KEY.match(start)
        return key is None or key[1] in _CALL_KEYS

    def _text(self, text: str) -> str:
        if self.calls and not text.strip():
            return ""  # between calls
        self._began = self._began or bool(text.strip())
        return text

    def _taken(self, calls: Sequence[Call]) -> Iterator[Call]:
        for call in calls:
            if self._several or not self.calls:
                self.calls += 1
                yield call

    def _calls_in(self, text: str) -> list[Call]:
        text = text.strip()
        if text.startswith("<tool_call>"):
            inner = text.removeprefix("<tool_call>").removesuffix("</tool_call>")
            return list(_objects(inner, None)) or []
        if text.startswith("<|tool_calls_section_begin|>"):
            return [call for found in _KIMI.finditer(text) if (call := _kimi(found)) is not None]
        return list(_objects(text.removeprefix(_PYTHON_TAG), self._names))


def _begun_mark(text: str) -> int:
    """How many characters at the end may be the beginning of a mark."""
    longest = max(map(len, _MARKS))
    for size in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in _MARKS):
            return size
    return 0


def _objects(text: str, names: frozenset[str] | None) -> Iterator[Call]:
    """Calls as JSON objects, with semicolons, commas or space between them; none if there is anything else."""
    found, at = [], 0
    while at < len(text):
        if text[at] in " \t\r\n;,":
            at += 1
            continue
        try:
            value, at = _decode(text, at)
        except (ValueError, RecursionError):
            return
        for one in value if isinstance(value, list) else [value]:
            call = _call(one)
            if call is None or (names is not None and call.name not in names):
                return
            found.append(call)
    yield from found


def _call(value: Any) -> Call | None:
    if not isinstance(value, Mapping):
        return None
    inner = value.get("function")
    if isinstance(inner, Mapping):
        value = inner
    name = value.get("name", inner)
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not isinstance(arguments, Mapping | str):
        return None
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return Call(name, text, f"call_{secrets.token_hex(12)}")


def _kimi(found: re.Match[str]) -> Call | None:
    # Its own templates want its own ids back: functions.NAME:NUMBER.
    named = _KIMI_ID.fullmatch(found["id"])
    return None if named is None else Call(named["name"], found["args"].strip() or "{}", found["id"])
