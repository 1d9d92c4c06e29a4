"""Tool calls and reasoning on engines that return plain text; used by the chat endpoint and by batches.

`adapt` prepares a request for an engine and returns a `ToolUse`, which parses the answer. A forced call (`tool_choice`
"required" or a function) becomes a JSON schema that the output must match. Other output is searched for the formats of
`tool_formats`, and for Llama's bare JSON object, which is a call only if it names one of the request's tools. Requests
to engines that parse tool calls themselves are not changed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.engine.engine import Answer, Capabilities, Chat, Request
from tokenmill.engine.output_parser import OutputParser, ReasoningPart, ToolCallParser
from tokenmill.engine.tool_formats import ToolCall, Tools, parameters_of
from tokenmill.errors import RequestRefused

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}  # OpenAI's default
_LITERALS = frozenset(("const", "enum", "default", "examples"))  # JSON Schema keywords whose values are not schemas
_SCHEMAS_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How an engine handles the tools of one request."""

    request: Request  # what to send to the engine
    tools: Tools | None = None  # tools whose calls are parsed from the text; None: no calls are parsed
    parallel: bool = True  # False: only the first call counts
    forced: bool = False  # the output must be a call
    hidden: bool = False  # the chat template ignores tools, so the model does not see them

    parses: bool = False  # reasoning and calls are separated from the text here, because the engine does not

    def reader(self) -> "OutputParser | None":
        """Return a parser for one answer; None if the text needs no parsing."""
        if not self.parses:
            return None
        return OutputParser(None if self.tools is None else ToolCallParser(self.tools, parallel=self.parallel))

    def parse(self, answer: Answer) -> Answer:
        """Move reasoning and calls from the answer's text to `message`; answers without either are unchanged."""
        reader = self.reader()
        if reader is None:
            return answer
        parts = [*reader.feed(answer.text), *reader.end()]
        calls = [part.body() for part in parts if isinstance(part, ToolCall)]
        reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
        if not calls and not reader.separated:
            return answer
        text = "".join(part for part in parts if isinstance(part, str)).strip()
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
        if reasoning.strip():
            message["reasoning_content"] = reasoning.strip()
        if calls:
            message["tool_calls"] = calls
        return replace(answer, message=message, finish_reason=reader.finish_reason(answer.finish_reason))


def adapt(request: Request, capabilities: Capabilities) -> ToolUse:
    """Prepare a request for an engine; RequestRefused if the engine does not support its `tool_choice`."""
    prompt = request.prompt
    if not isinstance(prompt, Chat):
        return ToolUse(request)
    if not prompt.tools:
        return ToolUse(request, parses=not capabilities.tools_parsed)
    hidden = capabilities.shows_tools is False and prompt.tool_choice != "none"
    if capabilities.tools_parsed:
        return ToolUse(request, hidden=hidden)
    parallel = request.extra.get("parallel_tool_calls") is not False
    request = replace(request, extra={k: v for k, v in request.extra.items() if k != "parallel_tool_calls"})
    if prompt.tool_choice == "none":
        return ToolUse(replace(request, prompt=replace(prompt, tools=(), tool_choice=None)), parses=True)
    tools = {tool["function"]["name"]: parameters_of(tool) for tool in prompt.tools}
    forced = prompt.tool_choice not in (None, "auto")
    if forced:
        request = _constrained(request, prompt, capabilities)
    return ToolUse(request, tools, parallel, forced, hidden, parses=True)


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
