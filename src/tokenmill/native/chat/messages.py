"""Converts OpenAI conversations into the form that templates expect.

The form is llama.cpp's: each message has role and content; reasoning_content, name, tool_call_id and tool_calls if they
were given; nothing else. Tools have name, description and parameters. Templates get copies of everything.
The request body was validated before; this module refuses only what is left to the engine: content parts other
than text, malformed tool calls, reserved template arguments.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from tokenmill.engine.engine import Chat
from tokenmill.engine.media import NO_AUDIO, NO_IMAGES
from tokenmill.errors import RequestRefused

ChatMessage = dict[str, Any]
_DEEPEST = 64
_RESERVED = frozenset({"messages", "tools", "bos_token", "eos_token", "add_generation_prompt"})


@dataclass(frozen=True, slots=True)
class TemplateCapabilities:
    """What a template supports."""

    text_content: bool = True
    typed_content: bool = False  # content may be a list of parts
    system_role: bool = True
    tool_calls: bool = True
    object_arguments: bool = False  # reads a call's arguments as a mapping, not as JSON text


def messages_of(chat: Chat) -> list[ChatMessage]:
    """The conversation's messages; content is a text or a list of text parts."""
    return [_message(f"messages[{index}]", given) for index, given in enumerate(chat.messages)]


def tools_of(chat: Chat) -> list[dict[str, Any]]:
    """The tools the model may call."""
    return [_tool(f"tools[{index}]", given["function"]) for index, given in enumerate(chat.tools)]


def arguments_of(chat: Chat) -> dict[str, Any]:
    """The template arguments, checked."""
    for name in chat.template_arguments:
        if name in _RESERVED:
            message = f"template argument {name!r} is reserved"
            raise RequestRefused(message, hint=f"the request itself sets {', '.join(sorted(_RESERVED))}")
    thinking = chat.template_arguments.get("enable_thinking")
    if thinking is not None and not isinstance(thinking, bool):
        raise RequestRefused(f"enable_thinking is {thinking!r}", hint="give true or false, without quotes")
    return {name: _copied(value, "template arguments") for name, value in chat.template_arguments.items()}


def fitted(messages: Sequence[ChatMessage], can: TemplateCapabilities) -> list[ChatMessage]:
    """The messages with content in the form that the template reads."""
    if can.text_content == can.typed_content:
        return [dict(message) for message in messages]
    if can.text_content:
        return [{**message, "content": _as_text(message["content"])} for message in messages]
    return [{**message, "content": _as_parts(message["content"])} for message in messages]


def adapted(messages: list[ChatMessage], can: TemplateCapabilities, *, developers: bool) -> list[ChatMessage]:
    """The messages changed, as llama.cpp does, to what the template supports.

    The role developer becomes system, unless `developers`; a system message that the template would refuse is put in
    front of the next message; call arguments become mappings if the template reads them so.
    """
    if can.object_arguments:
        messages = [_with_objects(index, message) for index, message in enumerate(messages)]
    if not developers:
        messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
    if not can.system_role and messages and messages[0]["role"] == "system":
        first, *messages = messages
        if messages:
            text = f"{_as_text(first['content'])}\n{_as_text(messages[0]['content'])}"
            messages[0] = {**messages[0], "content": text}
    return messages


def joined(content: str | list[dict[str, Any]], between: str) -> str:
    """Content as one text, with `between` between the parts after the first that is not empty."""
    if isinstance(content, str):
        return content
    text = ""
    for part in content:
        text += (between if text else "") + part["text"]
    return text


def unreadable(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """The first message with half of a surrogate pair, as `messages[N]`; None if there is no such message."""
    for index, message in enumerate(messages):
        try:
            json.dumps(message, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:
            return f"messages[{index}]"
    return None


def _as_text(content: Any) -> Any:
    return joined(content, "\n") if isinstance(content, list) else content


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _with_objects(index: int, message: ChatMessage) -> ChatMessage:
    if "tool_calls" not in message:
        return message
    return {**message, "tool_calls": [_with_object(f"messages[{index}]", call) for call in message["tool_calls"]]}


def _with_object(where: str, call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError) as error:
        problem = f"has a tool call with arguments that are not JSON ({error})"
        _refuse(where, problem, "give the arguments as a JSON object")
    return {**call, "function": {**function, "arguments": arguments}}


def _refuse(where: str, problem: str, hint: str) -> NoReturn:
    raise RequestRefused(f"{where} {problem}", hint=hint)


def _message(where: str, given: Mapping[str, Any]) -> ChatMessage:
    content = given.get("content") or ""
    if not isinstance(content, str):
        content = [_part(where, part) for part in content]
    message: ChatMessage = {"role": given["role"], "content": content}
    for name in ("reasoning_content", "name", "tool_call_id"):
        if value := given.get(name):
            message[name] = value
    if calls := given.get("tool_calls"):
        message["tool_calls"] = [_call(where, call) for call in calls]
    return message


def _part(where: str, part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] != "text":
        message = f"{where} has a content part of type {part['type']!r}; the native engine reads text only"
        code = NO_AUDIO if part["type"] == "input_audio" else NO_IMAGES if part["type"] == "image_url" else None
        raise RequestRefused(message, param="messages", code=code, hint="route the model to a server that reads it")
    return {"type": "text", "text": part["text"]}


def _call(where: str, given: Any) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, Mapping) else None
    hint = 'a call is {"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
    if not isinstance(function, Mapping) or given.get("type", "function") != "function":
        _refuse(where, "has a tool call whose type is not function", hint)
    name = function.get("name")
    arguments = function.get("arguments")
    id_ = given.get("id")
    if not isinstance(name, str) or not name:
        _refuse(where, "has a tool call without a name", hint)
    if arguments is None or not isinstance(id_, str | None):
        _refuse(where, "has a tool call without arguments or with an id that is not a string", hint)
    if not isinstance(arguments, str):
        arguments = json.dumps(_copied(arguments, where), ensure_ascii=False, separators=(",", ":"))
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {**call, "id": id_} if id_ else call


def _tool(where: str, function: Mapping[str, Any]) -> dict[str, Any]:
    description = function.get("description")
    if not isinstance(description, str | None):
        _refuse(where, "has a description that is not a string", "give a string, or leave it out")
    parameters = _copied(function.get("parameters", {}), where)
    return {
        "type": "function",
        "function": {"name": function["name"], "description": description or "", "parameters": parameters},
    }


def _copied(value: Any, where: str, depth: int = 0) -> Any:
    """A copy of a JSON value; RequestRefused if it is nested too deeply for a template."""
    if depth > _DEEPEST:
        _refuse(where, f"is nested deeper than {_DEEPEST} levels", "give a flatter value")
    if isinstance(value, list | tuple):
        return [_copied(part, where, depth + 1) for part in value]
    if isinstance(value, Mapping):
        return {name: _copied(part, where, depth + 1) for name, part in value.items()}
    return value
