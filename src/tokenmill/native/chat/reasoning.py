"""How a template marks reasoning, found by comparing renderings with and without it.

The comparisons are llama.cpp's. The marks decide whether `enable_thinking` is true by default, and what is written
between the header of an answer and its beginning that the caller gives. Texts that differ in more than marks give none.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.native.chat.messages import ChatMessage

_THOUGHT = "REASON_PART I am thinking END_R"
_USER: ChatMessage = {"role": "user", "content": "U_USER_MSG Hello END_U"}
_ANSWER: ChatMessage = {"role": "assistant", "content": "A_ASST_MSG I can help END_A"}
_MARK = r"(?:<[^>]*>|\[[^\]]*\])"
_WRAPPED = re.compile(rf"({_MARK}\s*){_THOUGHT}(\s*{_MARK}\s*)")
_ENDED = re.compile(rf"{_THOUGHT}\s*({_MARK}\s*)")
_TAIL = 64  # characters of one text's end that are searched for in the other
_ARGUMENTS = {"AA_ARG_FST_AA": "VVVV", "BB_ARG_SND_BB": "XXXX"}
_PARAMETERS = {"type": "object", "properties": {name: {"type": "string"} for name in _ARGUMENTS}, "required": []}
_TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Test function", "parameters": _PARAMETERS}}
    for name in ("FFF_FIRST_FUN_F", "SSS_SECOND_FUN_S")
]
_CALL = {"id": "call00001", "type": "function", "function": {"name": "FFF_FIRST_FUN_F", "arguments": _ARGUMENTS}}

# Renders messages with tools, with or without the answer's header, with thinking on or off; None if that fails.
Render = Callable[[list[ChatMessage], list[dict[str, Any]], bool, bool], str | None]


@dataclass(frozen=True, slots=True)
class Marks:
    """The text before and after reasoning; may be empty. `thinks`: the template supports reasoning."""

    start: str = ""
    end: str = ""
    thinks: bool = False


# Templates whose marks a comparison does not find: parts of their source, and the marks.
_KNOWN: tuple[tuple[tuple[str, ...], Marks], ...] = (
    (
        ("Write your thoughts between <think></think> and write your response between <response></response>",),
        Marks("<think>", "</think>", True),
    ),  # Granite 3.3
    (("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<TOOL_RESPONSE>"), Marks("<think>\n", "</think>", True)),
)


def marks(render: Render, source: str, *, tools: bool) -> Marks:
    """The marks of a template; `tools`: it supports tool calls."""
    for parts, known in _KNOWN:
        if all(part in source for part in parts):
            return known
    start, end = _around_reasoning(render)
    thinks = bool(end)
    start, end, changes = _by_thinking(render, start, end)
    thinks |= changes
    if tools:
        start, end, with_calls = _with_calls(render, start, end)
        thinks |= with_calls
    if not thinks and "content.split('</think>')" in source and "reasoning_content" not in source:
        return Marks("<think>", "</think>", True)  # older than the field for reasoning: Qwen, DeepSeek
    if "laguna_glm_thinking" in source:
        start = start.strip()
        end = end.strip()
    return Marks(start, end, thinks)


def _around_reasoning(render: Render) -> tuple[str, str]:
    """The marks around the reasoning of an earlier answer."""
    plain = render([_USER, _ANSWER], [], False, True)
    written = render([_USER, {**_ANSWER, "reasoning_content": _THOUGHT}], [], False, True)
    if plain is None or written is None or _THOUGHT not in written:
        return "", ""
    return _found(written)


def _found(written: str) -> tuple[str, str]:
    if match := _WRAPPED.search(written):
        return match[1], match[2]
    if match := _ENDED.search(written):
        return "", match[1]
    return "", ""


def _by_thinking(render: Render, start: str, end: str) -> tuple[str, str, bool]:
    """The marks that turning thinking off adds to an answer's header or removes from it."""
    off = render([_USER], [], True, False)
    on = render([_USER], [], True, True)
    if off is None or on is None or off == on:
        return start, end, False
    only_off, only_on = _difference(off, on)
    if not only_off.strip() and only_on.strip() and on.endswith(only_on.strip()):
        return (start or only_on), end, not start
    if not only_on.strip() and only_off.strip() and off.endswith(only_off.strip()):
        if end:
            return start, end, False
        before = _segments(off)
        if len(before) > 1 and before[-1] == only_off.strip() and re.fullmatch(_MARK, before[-2]):
            start = before[-2]
        return start, only_off, True
    if only_off.strip() and only_on.strip():
        for base, longer in ((on, off), (off, on)):
            tail = base[-_TAIL:]
            place = longer.rfind(tail)
            extra = _segments(longer[place + len(tail) :]) if place >= 0 else []
            if len(extra) == 2 and all(re.fullmatch(_MARK, part) for part in extra):
                return (start or extra[0]), (end or extra[1]), True
    return start, end, False


def _with_calls(render: Render, start: str, end: str) -> tuple[str, str, bool]:
    """The marks of a template that writes reasoning only next to tool calls."""
    answered = render([_USER, {**_ANSWER, "reasoning_content": _THOUGHT}], _TOOLS, False, True)
    called = {"role": "assistant", "content": None, "reasoning_content": _THOUGHT, "tool_calls": [_CALL]}
    written = render([_USER, called], _TOOLS, False, True)
    if answered is None or written is None or _THOUGHT in answered or _THOUGHT not in written:
        return start, end, False
    found = _found(written)
    return (*found, True) if found != ("", "") else (start, end, False)


def _difference(left: str, right: str) -> tuple[str, str]:
    """The parts in which two texts differ, with marks kept whole."""
    if right.startswith(left):
        return "", right[len(left) :]
    if left.startswith(right):
        return left[len(right) :], ""
    lefts = _pieces(left)
    rights = _pieces(right)
    ahead = common_length(lefts, rights)
    behind = common_length(lefts[ahead:][::-1], rights[ahead:][::-1])
    return "".join(lefts[ahead : len(lefts) - behind]), "".join(rights[ahead : len(rights) - behind])


def common_length(left: Sequence[str], right: Sequence[str]) -> int:
    """The length of the common beginning of two texts or lists."""
    low = 0
    high = min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[low:middle] == right[low:middle] else (low, middle - 1)
    return low


def _pieces(text: str) -> list[str]:
    """The marks, and the single characters between them."""
    return re.findall(rf"{_MARK}|.", text, re.DOTALL)


def _segments(text: str) -> list[str]:
    """The marks and the texts between them, without white space."""
    return [part.strip() for part in re.split(rf"({_MARK})", text) if part.strip()]
