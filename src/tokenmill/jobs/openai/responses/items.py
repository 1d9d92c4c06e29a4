"""Input items as chat messages.

Consecutive items of the model (reasoning, message, calls) become one assistant message, because chat templates expect
the calls next to the text. Instructions and leading system and developer messages become one system message, because
many templates accept only one, at the beginning.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from tokenmill.errors import RequestRefused
from tokenmill.storage.json_text import compact_json, shown

Item = Mapping[str, Any]
Message = dict[str, Any]
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "summary_text": "text", "refusal": "refusal"}
_CALL_OUTPUTS = ("function_call_output", "custom_tool_call_output")
CUSTOM_INPUT = "input"  # the only parameter of the function that stands for a custom tool


def items_of(given: str | Sequence[Item]) -> list[Item]:
    """The `input` of a request as items."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return list(given)


def messages_of(items: Sequence[Item], instructions: str | None = None) -> list[Message]:
    """The conversation of input items; raises RequestRefused, which names the item."""
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    for index, item in enumerate(items):
        where = f"input[{index}]"
        kind = item.get("type", "message")
        convert = _CONVERSIONS.get(kind)
        if convert is None:
            _refuse(where, f"items of type {shown(kind)} are not supported", "remove the item")
        _add(messages, convert(where, item))
    if not any(message["role"] != "system" for message in messages):
        _refuse("input", "has no message", "add a message of the user")
    return [_finished(message) for message in messages]


def _add(messages: list[Message], message: Message) -> None:
    """Append a message, or merge it into the last one."""
    last = messages[-1] if messages else None
    if last is not None and last["role"] == message["role"] == "assistant":
        _merge(last, message)
    elif message["role"] == "system" and all(each["role"] == "system" for each in messages):
        if last is None:
            messages.append(message)
        else:
            last["content"] = f"{_plain(last['content'])}\n\n{_plain(message['content'])}"
    else:
        messages.append(message)


def _merge(into: Message, message: Message) -> None:
    """Add the text, reasoning and calls of an assistant message to another one."""
    for key in ("content", "reasoning_content"):
        if message.get(key):
            into[key] = f"{into[key]}\n{message[key]}" if into.get(key) else message[key]
    if message.get("tool_calls"):
        into["tool_calls"] = [*into.get("tool_calls", ()), *message["tool_calls"]]


def _finished(message: Message) -> Message:
    """An assistant message without anything, such as reasoning alone, has an empty text."""
    if message["role"] == "assistant" and not message.get("content"):
        return {**message, "content": None if message.get("tool_calls") else ""}
    return message


def _message(where: str, item: Item) -> Message:
    role = item.get("role")
    if role not in _ROLES:
        _refuse(f"{where}.role", f"must be one of {', '.join(_ROLES)}, not {shown(role)}", None)
    content = _content(f"{where}.content", item.get("content"))
    if role == "assistant":
        return {"role": role, "content": _plain(content)}
    return {"role": "system" if role == "developer" else role, "content": content}


def _reasoning(_where: str, item: Item) -> Message:
    parts = item.get("content") or item.get("summary") or ()
    text = "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
    return {"role": "assistant", "content": "", "reasoning_content": text}


def _function_call(where: str, item: Item) -> Message:
    return _call(where, item, item.get("arguments"))


def _custom_call(where: str, item: Item) -> Message:
    return _call(where, item, compact_json({CUSTOM_INPUT: item.get("input")}))


def _call(where: str, item: Item, arguments: Any) -> Message:
    for key in ("call_id", "name"):
        if not isinstance(item.get(key), str):
            _refuse(f"{where}.{key}", f"must be a string, not {shown(item.get(key))}", None)
    if not isinstance(arguments, str):
        _refuse(f"{where}.arguments", f"must be JSON text, not {shown(arguments)}", None)
    function = {"name": item["name"], "arguments": arguments}
    call = {"id": item["call_id"], "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _call_output(where: str, item: Item) -> Message:
    if not isinstance(item.get("call_id"), str):
        _refuse(f"{where}.call_id", f"must be a string, not {shown(item.get('call_id'))}", None)
    content = _content(f"{where}.output", item.get("output"))
    return {"role": "tool", "tool_call_id": item["call_id"], "content": content}


def _reference(where: str, item: Item) -> NoReturn:
    _refuse(where, f"{shown(item.get('id'))} is not part of a stored response", "use previous_response_id")


def _content(where: str, content: Any) -> Any:
    """Content as a text, or as a list of parts if there are images or files."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        _refuse(where, f"must be a string or a list, not {shown(content)}", None)
    parts = [_part(f"{where}[{index}]", part) for index, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(where: str, part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "input_image":
        url = part.get("image_url")
        if not isinstance(url, str):
            _refuse(where, "has no image_url; images by file_id are not supported", "send the image as a data: URL")
        detail = part.get("detail")
        return {"type": "image_url", "image_url": {"url": url} | ({"detail": detail} if detail else {})}
    if kind == "input_audio":
        return {"type": "input_audio", "input_audio": part.get("input_audio")}
    key = _TEXTS.get(kind) if isinstance(kind, str) else None
    if key is None or not isinstance(part.get(key), str):
        _refuse(where, f"parts of type {shown(kind)} are not supported", "send text or images")
    return {"type": "text", "text": part[key]}


def _plain(content: Any) -> str:
    """The text of content."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def _refuse(where: str, problem: str, hint: str | None) -> NoReturn:
    raise RequestRefused(f"{where}: {problem}", param="input", hint=hint)


_CONVERSIONS: Mapping[Any, Callable[[str, Item], Message]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _function_call,
    "custom_tool_call": _custom_call,
    **dict.fromkeys(_CALL_OUTPUTS, _call_output),
    "item_reference": _reference,
}
