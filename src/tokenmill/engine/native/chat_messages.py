"""Conversations as OpenAI's API has them, checked and put into the form that templates expect.

The form is llama.cpp's: each message has role and content; reasoning_content, name, tool_call_id and tool_calls where
they were given; nothing else. Tools have name, description and parameters. Only text is known here: an image in a
conversation is refused, naming its message. Nothing given is ever changed: templates get copies.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from tokenmill.engine.engine import Chat
from tokenmill.errors import RequestRefused

Message = dict[str, Any]
_DEEPEST = 64
_RESERVED = frozenset({"messages", "tools", "bos_token", "eos_token", "add_generation_prompt"})
_TOOL_CHOICES = ("auto", "none", "required")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a template can do with a conversation."""

    text_content: bool = True
    typed_content: bool = False  # content as a list of parts
    system_role: bool = True
    tool_calls: bool = True
    object_arguments: bool = False  # a call's arguments as a mapping, not as JSON text


def messages_of(chat: Chat) -> list[Message]:
    """The conversation's messages, checked; content is a text or a list of text parts."""
    if not chat.messages:
        raise RequestRefused("the conversation has no messages", hint="give at least one, with role and content")
    return [_message(index, given) for index, given in enumerate(chat.messages)]


def tools_of(chat: Chat) -> list[dict[str, Any]]:
    """The tools the model may call, checked."""
    choice = chat.tool_choice
    if choice is not None and not isinstance(choice, Mapping) and choice not in _TOOL_CHOICES:
        hint = f'give one of {", ".join(_TOOL_CHOICES)}, or {{"type": "function", "function": {{"name": ...}}}}'
        raise RequestRefused(f"tool_choice {choice!r} is not known", hint=hint)
    return [_tool(index, given) for index, given in enumerate(chat.tools)]


def arguments_of(chat: Chat) -> dict[str, Any]:
    """The template arguments, checked."""
    for name in chat.template_arguments:
        if name in _RESERVED:
            message = f"template argument {name!r} is not free to choose"
            raise RequestRefused(message, hint=f"the conversation itself sets {', '.join(sorted(_RESERVED))}")
    thinking = chat.template_arguments.get("enable_thinking")
    if thinking is not None and not isinstance(thinking, bool):
        raise RequestRefused(f"enable_thinking is {thinking!r}", hint="give true or false, without quotes")
    refuse = _refuser("template arguments")
    return {name: _plain(value, refuse, 0) for name, value in chat.template_arguments.items()}


def fitted(messages: Sequence[Message], can: Capabilities) -> list[Message]:
    """The messages with content in the form a template can read."""
    if can.text_content == can.typed_content:
        return [dict(message) for message in messages]
    if can.text_content:
        return [{**message, "content": _as_text(message["content"])} for message in messages]
    return [{**message, "content": _as_parts(message["content"])} for message in messages]


def adapted(messages: list[Message], can: Capabilities, *, developers: bool) -> list[Message]:
    """The messages with what a template cannot read put otherwise, as llama.cpp does.

    A developer speaks as the system (unless the template knows developers); a system message the template would
    refuse goes in front of the next message; arguments of calls become mappings where the template walks through them.
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
    """Content as one text; nothing stands between parts before the first that is not empty."""
    if isinstance(content, str):
        return content
    text = ""
    for part in content:
        text += (between if text else "") + part["text"]
    return text


def unreadable(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Which message holds text that is no text: half of a surrogate pair. None: none does."""
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


def _with_objects(index: int, message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    refuse = _refuser(f"messages[{index}]")
    return {**message, "tool_calls": [_with_object(call, refuse) for call in message["tool_calls"]]}


def _with_object(call: dict[str, Any], refuse: Callable[[str, str], NoReturn]) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError) as error:
        refuse(f"has a tool call with arguments that are not JSON ({error})", "give the arguments as a JSON object")
    return {**call, "function": {**function, "arguments": arguments}}


def _refuser(where: str) -> Callable[[str, str], NoReturn]:
    def refuse(problem: str, hint: str) -> NoReturn:
        raise RequestRefused(f"{where} {problem}", hint=hint)

    return refuse


def _message(index: int, given: Any) -> Message:
    refuse = _refuser(f"messages[{index}]")
    if not isinstance(given, Mapping):
        refuse(f"is {_kind(given)}, not an object", 'a message is {"role": ..., "content": ...}')
    role = given.get("role")
    if not isinstance(role, str) or not role:
        refuse("has no role", "give one of system, user, assistant, tool")
    calls = given.get("tool_calls")
    if "content" not in given and not (role == "assistant" and calls):
        refuse("has no content", "give a text; only an assistant message with tool_calls may be without")
    message: Message = {"role": role, "content": _content(given.get("content"), refuse)}
    for name in ("reasoning_content", "name", "tool_call_id"):
        value = given.get(name)
        if value is not None and not isinstance(value, str):
            refuse(f"has {_kind(value)} as {name}", "give a text")
        if value:
            message[name] = value
    if calls is not None and not isinstance(calls, list | tuple):
        refuse(f"has {_kind(calls)} as tool_calls", "give a list of calls")
    if calls:
        message["tool_calls"] = [_call(call, refuse) for call in calls]
    return message


def _content(content: Any, refuse: Callable[[str, str], NoReturn]) -> str | list[dict[str, Any]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        refuse(f"has {_kind(content)} as content", "give a text or a list of text parts")
    return [_part(part, refuse) for part in content] or ""


def _part(part: Any, refuse: Callable[[str, str], NoReturn]) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind is None:
        refuse("has a content part without a type", 'a part is {"type": "text", "text": ...}')
    if kind != "text":
        refuse(f"has a content part of type {kind!r}, and this engine reads text alone", "give text parts only")
    text = part.get("text")
    if not isinstance(text, str):
        refuse(f"has a text part with {_kind(text)} as text", 'a part is {"type": "text", "text": ...}')
    return {"type": "text", "text": text}


def _call(given: Any, refuse: Callable[[str, str], NoReturn]) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, Mapping) else None
    hint = 'a call is {"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
    if not isinstance(function, Mapping) or given.get("type", "function") != "function":
        refuse("has a tool call that is not of a function", hint)
    name, arguments, id_ = function.get("name"), function.get("arguments"), given.get("id")
    if not isinstance(name, str) or not name:
        refuse("has a tool call without a name", hint)
    if arguments is None or not isinstance(id_, str | None):
        refuse("has a tool call without arguments or with an id that is not a text", hint)
    if not isinstance(arguments, str):
        arguments = json.dumps(_plain(arguments, refuse, 0), ensure_ascii=False, separators=(",", ":"))
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {**call, "id": id_} if id_ else call


def _tool(index: int, given: Any) -> dict[str, Any]:
    refuse = _refuser(f"tools[{index}]")
    hint = 'a tool is {"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}'
    if not isinstance(given, Mapping) or given.get("type") != "function":
        refuse("is not a function", hint)
    function = given.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        refuse("has no name", hint)
    description = function.get("description", "")
    if not isinstance(description, str | None):
        refuse(f"has {_kind(description)} as description", hint)
    parameters = _plain(function.get("parameters", {}), refuse, 0)
    return {
        "type": "function",
        "function": {"name": function["name"], "description": description or "", "parameters": parameters},
    }


def _plain(value: Any, refuse: Callable[[str, str], NoReturn], depth: int) -> Any:
    """A copy of a JSON value."""
    if depth > _DEEPEST:
        refuse(f"is nested deeper than {_DEEPEST} levels", "give a flatter value")
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_plain(part, refuse, depth + 1) for part in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(part, refuse, depth + 1) for name, part in value.items()}
    return refuse(f"holds {_kind(value)}", "give JSON values only")


def _kind(value: object) -> str:
    """A value's kind in JSON's words."""
    if value is None:
        return "null"
    kinds = {
        str: "a text",
        bool: "true or false",
        int: "a number",
        float: "a number",
        dict: "an object",
        list: "a list",
    }
    return kinds.get(type(value), f"a {type(value).__name__}")
