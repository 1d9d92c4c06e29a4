"""A job's prompt in the parts that people know: tools, messages by number and role, a bare prompt.

The parts joined are the canonical prompt of `identity.prompt_text`, which decides what is shared; a place in it can be
told as "message 1 (system), byte 34". A test holds the two together.
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
    """A part of a prompt, and its name for people."""

    label: str
    text: str
    skip: int = 0  # characters before what the person wrote: the role and a line feed


class Prompt(NamedTuple):
    """A job's prompt: what stands before its last message, and that message. Token numbers have no text to look at."""

    head: tuple[Part, ...]
    tail: tuple[Part, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    tokens: bytes | None = None  # four for each, where the prompt was given as numbers


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
    """The text of parts whose tools are spelled in another way."""
    text = "".join(part.text for part in parts)
    if not tools or parts[0].label != TOOLS:
        return text
    return text.replace(compact_json(list(tools)), compact_json(list(spelled)), 1)


def shortened(parts: Sequence[Part], most: int) -> tuple[Part, ...]:
    """The leading parts up to a number of characters, to be stored."""
    kept = list[Part]()
    for part in parts:
        if most <= 0:
            break
        kept.append(part if len(part.text) <= most else part._replace(text=part.text[:most]))
        most -= len(part.text)
    return tuple(kept)


def located(parts: Sequence[Part], character: int) -> tuple[Part, int]:
    """The part that holds a character, and its place there; the end of the last part for what is beyond it."""
    for part in parts:
        if character < len(part.text):
            return part, character
        character -= len(part.text)
    return parts[-1], len(parts[-1].text)


def _preamble(call: Call) -> str:
    """What templates place first; empty for most."""
    if not {"tools", "tool_choice", "template_arguments"} & call.values.keys():
        return ""
    return prompt_text(Call("chat", {**call.values, "messages": ()})).removesuffix("\n")


def _alone(call: Call, message: Mapping[str, Any]) -> str:
    return prompt_text(Call("chat", {"messages": (message,)})).removeprefix("\n")
