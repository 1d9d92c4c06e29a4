"""Messages with content blocks as chat messages.

A tool result is a block in a message of the user; in a chat it is a message of its own, before the rest of the user's
message. Blocks that a client sends back from other providers and that carry nothing for the model are dropped.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from tokenmill.errors import RequestRefused
from tokenmill.storage.json_text import compact_json, shown

Block = Mapping[str, Any]
Message = dict[str, Any]
_DROPPED = frozenset(("redacted_thinking",))
_BILLING = re.compile(r"^(x-anthropic-billing-header:.*?\bcch=)[^;]*(?=;)", re.DOTALL)


def system_message(system: str | Sequence[Block] | None) -> list[Message]:
    """The system prompt as a message; empty without one.

    Claude Code begins it with a checksum that changes with every request. It is made constant, so that the prompt stays
    cached.
    """
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system or ()
    texts = [_BILLING.sub(r"\1", _text(f"system[{index}]", block)) for index, block in enumerate(blocks)]
    text = "\n\n".join(filter(None, texts))
    return [{"role": "system", "content": text}] if text else []


def chat_messages(messages: Sequence[Message]) -> list[Message]:
    """The conversation as chat messages; raises RequestRefused, which names the block."""
    made: list[Message] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = message.get("role")
        content = message.get("content")
        if role not in ("user", "assistant", "system"):
            _refuse(f"{where}.role", f"must be user, assistant or system, not {shown(role)}")
        if isinstance(content, str):
            made.append({"role": role, "content": content})
        elif not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
            _refuse(f"{where}.content", f"must be a string or a list of blocks, not {shown(content)}")
        elif role == "assistant":
            made.append(_assistant(where, content))
        else:
            made += _user(where, role, content)
    return made


def _assistant(where: str, blocks: Sequence[Block]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        kind = block.get("type")
        if kind == "text":
            texts.append(_text(place, block))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "tool_use":
            calls.append(_call(place, block))
        elif kind not in _DROPPED:
            _refuse(place, f"blocks of type {shown(kind)} are not supported")
    message: Message = {"role": "assistant", "content": "\n".join(texts) or (None if calls else "")}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user(where: str, role: str, blocks: Sequence[Block]) -> list[Message]:
    results: list[Message] = []
    parts: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        if block.get("type") == "tool_result":
            results.append(_result(place, block))
        else:
            parts.append(_part(place, block))
    return [*results, *([{"role": role, "content": _joined(parts)}] if parts or not results else [])]


def _result(where: str, block: Block) -> Message:
    name = block.get("tool_use_id")
    if not isinstance(name, str):
        _refuse(f"{where}.tool_use_id", f"must be a string, not {shown(name)}")
    content = block.get("content") or ""
    if isinstance(content, list):
        content = _joined([_part(f"{where}.content[{index}]", part) for index, part in enumerate(content)])
    elif not isinstance(content, str):
        _refuse(f"{where}.content", f"must be a string or a list of blocks, not {shown(content)}")
    if block.get("is_error") and isinstance(content, str):
        content = f"Error: {content}"
    return {"role": "tool", "tool_call_id": name, "content": content}


def _part(where: str, block: Any) -> dict[str, Any]:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind == "text":
        return {"type": "text", "text": _text(where, block)}
    if kind != "image":
        _refuse(where, f"blocks of type {shown(kind)} are not supported")
    source = block.get("source")
    source = source if isinstance(source, Mapping) else {}
    if source.get("type") == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    elif source.get("type") == "url" and isinstance(source.get("url"), str):
        url = source["url"]
    else:
        _refuse(where, "the source of an image must be base64 or a URL")
    return {"type": "image_url", "image_url": {"url": url}}


def _call(where: str, block: Block) -> dict[str, Any]:
    for key in ("id", "name"):
        if not isinstance(block.get(key), str):
            _refuse(f"{where}.{key}", f"must be a string, not {shown(block.get(key))}")
    function = {"name": block["name"], "arguments": compact_json(block.get("input") or {})}
    return {"id": block["id"], "type": "function", "function": function}


def _text(where: str, block: Block) -> str:
    text = block.get("text") if isinstance(block, Mapping) else None
    if not isinstance(text, str):
        _refuse(f"{where}.text", f"must be a string, not {shown(text)}")
    return text


def _joined(parts: Sequence[dict[str, Any]]) -> Any:
    """Parts as a text, or as a list if there are images."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return list(parts)


def _refuse(where: str, problem: str) -> NoReturn:
    raise RequestRefused(f"{where}: {problem}", param=where.partition("[")[0])
