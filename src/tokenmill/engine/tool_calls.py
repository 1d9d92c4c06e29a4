"""Tool calls on engines that return plain text; used by the chat endpoint and by batches.

`adapt` prepares a request for an engine and returns a `ToolUse`, which parses the answer. A forced call (`tool_choice`
"required" or a function) becomes a JSON schema that the output must match. Other output is searched for the known
formats: `<tool_call>{...}</tool_call>` (Hermes, Qwen), Kimi's section tokens, and Llama's bare JSON object, with or
without `<|python_tag|>`, which is a call only if it names one of the request's tools. Requests to engines that parse
tool calls themselves are not changed.
"""

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.engine.engine import Answer, Capabilities, Chat, FinishReason, Request
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
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}  # OpenAI's default
_LITERALS = frozenset(("const", "enum", "default", "examples"))  # JSON Schema keywords whose values are not schemas
_SCHEMAS_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_decode = json.JSONDecoder().raw_decode


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call."""

    name: str
    arguments: str  # JSON text, as in OpenAI's API
    id: str

    def body(self) -> dict[str, Any]:
        """The call as an entry of OpenAI's `tool_calls`."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


ParsedPart = str | ToolCall


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How an engine handles the tools of one request."""

    request: Request  # what to send to the engine
    names: frozenset[str] | None = None  # tools whose calls are parsed from the text; None: no parsing
    parallel: bool = True  # False: only the first call counts
    forced: bool = False  # the output must be a call
    hidden: bool = False  # the chat template ignores tools, so the model does not see them

    def reader(self) -> "ToolCallParser | None":
        """Return a parser for one answer; None if the text needs no parsing."""
        return None if self.names is None else ToolCallParser(self.names, parallel=self.parallel)

    def parse(self, answer: Answer) -> Answer:
        """Move calls from the answer's text to `message.tool_calls`; answers without calls are unchanged."""
        reader = self.reader()
        if reader is None:
            return answer
        parts = [*reader.feed(answer.text), *reader.end()]
        calls = [part for part in parts if isinstance(part, ToolCall)]
        if not calls:
            return answer
        text = "".join(part for part in parts if isinstance(part, str)).strip()
        message = {"role": "assistant", "content": text or None, "tool_calls": [call.body() for call in calls]}
        return replace(answer, message=message, finish_reason=reader.finish_reason(answer.finish_reason))


def adapt(request: Request, capabilities: Capabilities) -> ToolUse:
    """Prepare a request for an engine; RequestRefused if the engine does not support its `tool_choice`."""
    prompt = request.prompt
    if not isinstance(prompt, Chat) or not prompt.tools:
        return ToolUse(request)
    hidden = capabilities.shows_tools is False and prompt.tool_choice != "none"
    if capabilities.tools_parsed:
        return ToolUse(request, hidden=hidden)
    parallel = request.extra.get("parallel_tool_calls") is not False
    request = replace(request, extra={k: v for k, v in request.extra.items() if k != "parallel_tool_calls"})
    if prompt.tool_choice == "none":
        return ToolUse(replace(request, prompt=replace(prompt, tools=(), tool_choice=None)))
    names = frozenset(tool["function"]["name"] for tool in prompt.tools)
    forced = prompt.tool_choice not in (None, "auto")
    if forced:
        request = _constrained(request, prompt, capabilities)
    return ToolUse(request, names, parallel, forced, hidden)


def _constrained(request: Request, prompt: Chat, capabilities: Capabilities) -> Request:
    """The request with its forced call expressed as a JSON schema."""
    sampling = request.sampling
    choice = prompt.tool_choice
    if sampling.json_schema is not None or sampling.grammar is not None:
        raise RequestRefused(
            "tool_choice: a forced call cannot be combined with response_format, json_schema or grammar",
            hint='remove the format, or set tool_choice to "auto" or "none"',
        )
    if not capabilities.json_schema:
        raise RequestRefused(
            "tool_choice: this engine cannot force a call, because it does not support JSON schemas",
            hint='set tool_choice to "auto", or use an engine that supports JSON schemas',
        )
    name = choice["function"]["name"] if isinstance(choice, Mapping) else None
    try:
        schema = _call_schema([tool["function"] for tool in prompt.tools if name in (None, tool["function"]["name"])])
        text = json.dumps(schema, ensure_ascii=False)
    except RecursionError:
        raise RequestRefused("tools: parameters are nested too deeply", hint="use a flatter schema") from None
    return replace(request, prompt=replace(prompt, tool_choice=None), sampling=replace(sampling, json_schema=text))


def _call_schema(functions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A schema for one call of one of the functions."""
    if len(functions) == 1:
        return _function_schema(functions[0], "#")
    return {"anyOf": [_function_schema(one, f"#/anyOf/{index}") for index, one in enumerate(functions)]}


def _function_schema(function: Mapping[str, Any], path: str) -> dict[str, Any]:
    parameters = function.get("parameters") or _NO_PARAMETERS
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise RequestRefused(
            f"tools: the parameters of {function['name']!r} are not the JSON schema of an object",
            hint='use {"type": "object", "properties": ...}, or omit parameters',
        )
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            "arguments": {"type": "object", **_rebased(parameters, f"{path}/properties/arguments")},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _rebased(schema: Any, path: str) -> Any:
    """Rewrite local references (`#/$defs/...`) of a schema that is embedded in a larger schema at `path`."""
    if isinstance(schema, list):
        return [_rebased(item, path) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {key: _rebased_value(key, value, path) for key, value in schema.items()}


def _rebased_value(key: str, value: Any, path: str) -> Any:
    if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
        return path + value[1:]
    if key in _LITERALS:
        return value
    if key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
        return {name: _rebased(one, path) for name, one in value.items()}
    return _rebased(value, path)


class ToolCallParser:
    """Streaming parser of text into text and calls. Holds text back only while it may be part of a call."""

    def __init__(self, names: frozenset[str], *, parallel: bool = True) -> None:
        """`names`: the request's tools. Without `parallel`, calls after the first are dropped."""
        self._names = names
        self._parallel = parallel
        self._held = ""
        self._end: str | None = None  # end mark of the current call; "": it ends with the answer
        self._began = False  # non-whitespace text was returned
        self._ends_in_text = False  # the last part returned was text, not a call
        self.calls = 0

    def feed(self, text: str) -> list[ParsedPart]:
        """Add text and return the parts that are complete."""
        self._held += text
        out: list[ParsedPart] = []
        while self._step(out):
            pass
        return [part for part in out if part]

    def end(self) -> list[ParsedPart]:
        """Return the remaining parts. Call it once, after the last `feed`."""
        held = self._held
        self._held = ""
        calls = self._calls_in(held) if self._end is not None or not self._began else []
        self._end = None
        return list(self._taken(calls)) if calls else [text for text in (self._text(held),) if text]

    def finish_reason(self, reason: FinishReason) -> FinishReason:
        """The finish reason after `end`: "tool_calls" if there were calls and no text was cut off after them."""
        return reason if not self.calls or (reason == "length" and self._ends_in_text) else "tool_calls"

    def _step(self, out: list[ParsedPart]) -> bool:
        """Parse one part of the held text; returns whether there may be more."""
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

    def _inside(self, out: list[ParsedPart], end: str) -> bool:
        at = self._held.find(end) if end else -1
        if at < 0:
            return False
        whole = self._held[: at + len(end)]
        self._held = self._held[at + len(end) :]
        self._end = None
        calls = self._calls_in(whole)
        out.extend(self._taken(calls) if calls else [self._text(whole)])
        return True

    def _may_be_bare(self) -> bool:
        """Whether the held text may be a call without marks, which starts with a JSON object."""
        start = self._held.lstrip()
        if not start:
            return True
        if not start.startswith("{"):
            return False
        key = _FIRST_KEY.match(start)
        return key is None or key[1] in _CALL_KEYS

    def _text(self, text: str) -> str:
        visible = bool(text.strip())
        if self.calls and not visible:
            return ""  # whitespace between calls
        self._began = self._began or visible
        self._ends_in_text = self._ends_in_text or visible
        return text

    def _taken(self, calls: Sequence[ToolCall]) -> Iterator[ToolCall]:
        self._ends_in_text = False
        for call in calls:
            if self._parallel or not self.calls:
                self.calls += 1
                yield call

    def _calls_in(self, text: str) -> list[ToolCall]:
        text = text.strip()
        if text.startswith("<tool_call>"):
            inner = text.removeprefix("<tool_call>").removesuffix("</tool_call>")
            return list(_objects(inner, None)) or []
        if text.startswith("<|tool_calls_section_begin|>"):
            return [call for found in _KIMI.finditer(text) if (call := _kimi(found)) is not None]
        return list(_objects(text.removeprefix(_PYTHON_TAG), self._names))


def _begun_mark(text: str) -> int:
    """Length of the longest end of the text that may be the beginning of a mark."""
    longest = max(map(len, _MARKS))
    for size in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in _MARKS):
            return size
    return 0


def _objects(text: str, names: frozenset[str] | None) -> Iterator[ToolCall]:
    """Parse calls as JSON objects separated by semicolons, commas or whitespace; no calls if there is other text."""
    found: list[ToolCall] = []
    at = 0
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


def _call(value: Any) -> ToolCall | None:
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
    return ToolCall(name, text, f"call_{secrets.token_hex(12)}")


def _kimi(found: re.Match[str]) -> ToolCall | None:
    # Kimi's chat templates require the ids that the model generated: functions.NAME:NUMBER.
    named = _KIMI_ID.fullmatch(found["id"])
    return None if named is None else ToolCall(named["name"], found["args"].strip() or "{}", found["id"])
