"""The formats in which models write tool calls, as text between two marks.

    <tool_call>                     JSON (Hermes, Qwen3, Ling), XML parameters (Qwen3-Coder, Nemotron 3),
                                    keys and values (GLM, Ling 3)
    <|tool_calls_section_begin|>    Kimi K2           <|open|>tools<|sep|>           Kimi K3
    <｜tool▁calls▁begin｜>            DeepSeek to V3.1  <｜DSML｜...>                    DeepSeek V3.2, V4
    <minimax:tool_call>             MiniMax M2        ]<]minimax[>[<tool_call>       MiniMax M3
    [TOOL_CALLS]                    Mistral           <tool_calls>                   Hunyuan
    <TOOLCALL>                      Nemotron 2        <|python_start|>, <|python_tag|>  Llama

`calls_in` parses one such text. Values without JSON types are converted by the parameters' schemas.
"""

import ast
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

PYTHON_TAG = "<|python_tag|>"
ENDS = {
    "<tool_call>": "</tool_call>",
    "<|tool_calls_section_begin|>": "<|tool_calls_section_end|>",
    "<|open|>tools<|sep|>": "<|close|>tools<|sep|>",
    "<｜tool▁calls▁begin｜>": "<｜tool▁calls▁end｜>",
    "<｜DSML｜function_calls>": "</｜DSML｜function_calls>",
    "<｜DSML｜tool_calls>": "</｜DSML｜tool_calls>",
    "<minimax:tool_call>": "</minimax:tool_call>",
    "]<]minimax[>[<tool_call>": "]<]minimax[>[</tool_call>",
    "<tool_calls>": "</tool_calls>",
    "<TOOLCALL>": "</TOOLCALL>",
    "<function=": "</function>",
    "[TOOL_CALLS]": "",
    "<|python_start|>": "<|python_end|>",
    PYTHON_TAG: "",
}
"""Begin and end marks; "": the calls end with the answer."""
INNER_MARKS = (
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "｜DSML｜"),
    *("<|open|>", "<|close|>", "<|sep|>", "]<]minimax[>[", "[ARGS]", "[CALL_ID]", "<|message|>", "<|constrain|>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
"""Marks inside of calls."""
Tools = Mapping[str, Mapping[str, Any]]
"""The schema of the parameters of every tool, by the tool's name."""
_KIMI = re.compile(
    r"<\|tool_call_begin\|>\s*(?P<id>[^<]*?)\s*"
    r"<\|tool_call_argument_begin\|>(?P<args>.*?)<\|tool_call_end\|>",
    re.DOTALL,
)
_KIMI_ID = re.compile(r"(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?")
_K3_CALL = re.compile(r'<\|open\|>call tool="([^"]+)"[^<]*?<\|sep\|>(.*?)<\|close\|>call<\|sep\|>', re.DOTALL)
_K3_ARGUMENT = re.compile(
    r'<\|open\|>argument key="([^"]+)"(?: type="(\w+)")?[^<]*?<\|sep\|>(.*?)<\|close\|>argument<\|sep\|>', re.DOTALL
)
_DEEPSEEK = re.compile(r"<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>", re.DOTALL)
_FENCED = re.compile(r"\s*([\w.-]+)\s*```(?:json)?\s*(.*?)```\s*", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_INVOKE = re.compile(r'<(?:｜DSML｜)?invoke name="([^"]+)">(.*?)</(?:｜DSML｜)?invoke>', re.DOTALL)
_NAMED = re.compile(
    r'<(?:｜DSML｜)?parameter name="([^"]+)"(?: string="(true|false)")?>(.*?)</(?:｜DSML｜)?parameter>', re.DOTALL
)
_M3_PARAMETER = re.compile(r"<([\w.-]+)>(.*?)</\1>", re.DOTALL)
_ARG_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_MISTRAL = re.compile(r"\[TOOL_CALLS\]\s*([\w.-]+)(?:\[CALL_ID\]([\w-]+))?(?:\[ARGS\])?\s*(?=\{)")
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


def calls_in(text: str, tools: Tools) -> list[ToolCall]:
    """The calls of a text that starts with one of the marks, or without mark with a JSON object; none if malformed."""
    text = text.strip()
    mark = next((mark for mark in ENDS if text.startswith(mark)), "")
    inner = text.removeprefix(mark).removesuffix(ENDS.get(mark) or "\0").strip()
    return list(_PARSERS.get(mark, _bare)(text, inner, tools))


def parameters_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The properties of a tool's parameters, by name."""
    parameters = tool["function"].get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def make_call(name: str, arguments: Mapping[str, Any] | str, id: str | None = None) -> ToolCall:
    """A call with a new id unless the model wrote one."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(name, text, id or f"call_{secrets.token_hex(12)}")


# ---- JSON


def _bare(_text: str, inner: str, tools: Tools) -> Iterator[ToolCall]:
    """Llama: JSON objects, or a Python list of calls with keyword arguments."""
    found = list(_objects(inner, tools))
    yield from found or _python_list(inner, tools)


def _listed(_text: str, inner: str, _tools: Tools) -> Iterator[ToolCall]:
    return _objects(inner, None)


def _python_list(text: str, tools: Tools) -> Iterator[ToolCall]:
    try:
        nodes = ast.parse(text, mode="eval").body
        found = [
            make_call(ast.unparse(node.func), {word.arg or "": ast.literal_eval(word.value) for word in node.keywords})
            for node in (nodes.elts if isinstance(nodes, ast.List) else ())
            if isinstance(node, ast.Call)
        ]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return
    if all(call.name in tools for call in found):
        yield from found


def _objects(text: str, tools: Tools | None) -> Iterator[ToolCall]:
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
            if call is None or (tools is not None and call.name not in tools):
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
    return make_call(name, arguments)


def _kimi(text: str, _inner: str, _tools: Tools) -> Iterator[ToolCall]:
    for found in _KIMI.finditer(text):
        # Kimi's chat templates require the ids that the model generated: functions.NAME:NUMBER.
        if named := _KIMI_ID.fullmatch(found["id"]):
            yield ToolCall(named["name"], found["args"].strip() or "{}", found["id"])


def _deepseek(text: str, _inner: str, _tools: Tools) -> Iterator[ToolCall]:
    """NAME, separator, JSON; in R1 and V3 `function`, separator, NAME and a fenced block of JSON."""
    for name, rest in _DEEPSEEK.findall(text):
        fenced = _FENCED.fullmatch(rest)
        if fenced:
            yield make_call(fenced[1], fenced[2].strip() or "{}")
        else:
            yield make_call(name.strip(), rest.strip() or "{}")


def _mistral(text: str, inner: str, _tools: Tools) -> Iterator[ToolCall]:
    """A JSON list, or a mark, a name and a JSON object for every call."""
    if inner.startswith("["):
        yield from _objects(inner, None)
        return
    at = 0
    while found := _MISTRAL.match(text, at):
        try:
            arguments, at = _decode(text, found.end())
        except (ValueError, RecursionError):
            return
        yield make_call(found[1], arguments, found[2])
        while at < len(text) and text[at].isspace():
            at += 1


# ---- names and values as text


def _tool_call(text: str, inner: str, tools: Tools) -> Iterator[ToolCall]:
    if "<function=" in inner:
        yield from _functions(text, inner, tools)
    elif inner.startswith(("{", "[")):
        yield from _objects(inner, None)
    else:
        name = inner.partition("<arg_key>")[0].strip()
        if name in tools:
            yield make_call(
                name, {key.strip(): _typed(tools, name, key, value) for key, value in _ARG_PAIR.findall(inner)}
            )


def _functions(text: str, _inner: str, tools: Tools) -> Iterator[ToolCall]:
    for name, body in _FUNCTION.findall(text):
        values = _PARAMETER.findall(body)
        yield make_call(name.strip(), {key.strip(): _typed(tools, name, key, value) for key, value in values})


def _invokes(text: str, _inner: str, tools: Tools) -> Iterator[ToolCall]:
    for name, body in _INVOKE.findall(text):
        arguments = {}
        for key, is_string, value in _NAMED.findall(body):
            arguments[key] = value if is_string == "true" else _typed(tools, name, key, value)
        yield make_call(name, arguments)


def _minimax_m3(text: str, _inner: str, tools: Tools) -> Iterator[ToolCall]:
    """Every tag has a prefix, and parameters are tags of their own; nested values are only read as JSON."""
    for name, body in _INVOKE.findall(text.replace("]<]minimax[>[", "")):
        values = _M3_PARAMETER.findall(body)
        yield make_call(name, {key: _typed(tools, name, key, value) for key, value in values})


def _kimi_k3(text: str, _inner: str, tools: Tools) -> Iterator[ToolCall]:
    for name, body in _K3_CALL.findall(text):
        arguments = {}
        for key, kind, value in _K3_ARGUMENT.findall(body):
            arguments[key] = value if kind == "string" else _typed(tools, name, key, value)
        yield make_call(name, arguments)


def _typed(tools: Tools, name: str, key: str, text: str) -> Any:
    """A value as its parameter's schema says: text for strings, else JSON; text if it is not JSON."""
    text = text.removeprefix("\n").removesuffix("\n")
    schema = tools.get(name.strip(), {}).get(key.strip(), {})
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    if kinds == "string" or (isinstance(kinds, list) and "string" in kinds and text.strip() != "null"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


_PARSERS: Mapping[str, Callable[[str, str, Tools], Iterator[ToolCall]]] = {
    "<tool_call>": _tool_call,
    "<|tool_calls_section_begin|>": _kimi,
    "<|open|>tools<|sep|>": _kimi_k3,
    "<｜tool▁calls▁begin｜>": _deepseek,
    "<｜DSML｜function_calls>": _invokes,
    "<｜DSML｜tool_calls>": _invokes,
    "<minimax:tool_call>": _invokes,
    "]<]minimax[>[<tool_call>": _minimax_m3,
    "<tool_calls>": _listed,
    "<TOOLCALL>": _listed,
    "<function=": _functions,
    "[TOOL_CALLS]": _mistral,
    "<|python_start|>": _bare,
    PYTHON_TAG: _bare,
}
