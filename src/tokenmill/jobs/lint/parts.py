"""Splits a job's prompt into labelled parts: tools, messages by number and role, or a plain prompt.

Joined, the parts are the canonical prompt of `identity.prompt_text`, which determines what is shared (a test checks
this). A position in the prompt can thus be displayed as "message 1 (system), byte 34".
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenmill.jobs.ingest.identity import prompt_text
from tokenmill.jobs.openai.call import Call
from tokenmill.storage.json_text import compact_json

TOOLS = "tools"
ARGUMENTS = "template arguments"
PROMPT = "prompt"


class Part(NamedTuple):
    """A part of a prompt with its displayed name."""

    label: str
    text: str
    skip: int = 0  # characters before the content: the role and a line feed


class Prompt(NamedTuple):
    """A job's prompt: the parts before its last message, and that message. A prompt of token numbers has no parts."""

    prefix: tuple[Part, ...]
    tail: tuple[Part, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    tokens: bytes | None = None  # a prompt of token numbers, four bytes each


def prompt_of(call: Call) -> Prompt:
    """The parts of a call's prompt."""
    values = call.values
    if call.endpoint == "completion":
        given = values["prompt"]
        if isinstance(given, tuple):
            return Prompt((), (), tokens=b"".join(token.to_bytes(4, "little") for token in given))
        return Prompt((), (Part(PROMPT, given),))
    messages: Sequence[Mapping[str, Any]] = values["messages"]
    preamble = _preamble(call)
    parts = [Part(TOOLS if "tools" in values else ARGUMENTS, preamble + "\n")]
    for index, message in enumerate(messages):
        content = message.get("content")
        if len(message) == 2 and type(content) is str:  # nearly every message
            text = f"{message['role']}\n{content}\n"
        else:
            text = _alone(call, message)
        role: str = message["role"]
        if index + 1 < len(messages):
            text += "\n"
        parts.append(Part(f"message {index + 1} ({role})", text, len(role) + 1))
    tools = tuple(values.get("tools", ()))
    if len(messages) == 1 and not preamble:
        return Prompt((), tuple(parts), tools)
    return Prompt(tuple(parts[:-1]), (parts[-1],), tools)


def with_tools(parts: Sequence[Part], tools: Sequence[Mapping[str, Any]], spelled: Sequence[Mapping[str, Any]]) -> str:
    """The text of some parts with their tools replaced by an equivalent spelling."""
    text = "".join(part.text for part in parts)
    if not tools or parts[0].label != TOOLS:
        return text
    return text.replace(compact_json(list(tools)), compact_json(list(spelled)), 1)


def shortened(parts: Sequence[Part], most: int) -> tuple[Part, ...]:
    """The leading parts up to a number of characters."""
    kept = list[Part]()
    for part in parts:
        if most <= 0:
            break
        kept.append(part if len(part.text) <= most else part._replace(text=part.text[:most]))
        most -= len(part.text)
    return tuple(kept)


def located(parts: Sequence[Part], character: int) -> tuple[Part, int]:
    """The part that contains a character, and its position in it; the end of the last part for a later one."""
    for part in parts:
        if character < len(part.text):
            return part, character
        character -= len(part.text)
    return parts[-1], len(parts[-1].text)


def _preamble(call: Call) -> str:
    """Tools and template arguments, which templates place first; empty for most prompts."""
    if not {"tools", "tool_choice", "template_arguments"} & call.values.keys():
        return ""
    return prompt_text(Call("chat", {**call.values, "messages": ()})).removesuffix("\n")


def _alone(call: Call, message: Mapping[str, Any]) -> str:
    return prompt_text(Call("chat", {"messages": (message,)})).removeprefix("\n")
