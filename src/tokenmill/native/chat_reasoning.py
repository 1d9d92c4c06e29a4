"""How a template marks reasoning, found by comparing what it writes with and without some.

llama.cpp finds the marks in this way; they decide two things here: whether a template is told to think when nobody
says otherwise, and what stands between an answer begun by the caller and the header of its message. The comparisons
are the same; where the texts differ in more than marks, none are found.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.native.chat_messages import Message

_THOUGHT = "REASON_PART I am thinking END_R"
_USER: Message = {"role": "user", "content": "U_USER_MSG Hello END_U"}
_ANSWER: Message = {"role": "assistant", "content": "A_ASST_MSG I can help END_A"}
_MARK = r"(?:<[^>]*>|\[[^\]]*\])"
_WRAPPED = re.compile(rf"({_MARK}\s*){_THOUGHT}(\s*{_MARK}\s*)")
_ENDED = re.compile(rf"{_THOUGHT}\s*({_MARK}\s*)")
_TAIL = 64  # characters of one text's end that are looked for in the other
_ARGUMENTS = {"AA_ARG_FST_AA": "VVVV", "BB_ARG_SND_BB": "XXXX"}
_PARAMETERS = {"type": "object", "properties": {name: {"type": "string"} for name in _ARGUMENTS}, "required": []}
_TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Test function", "parameters": _PARAMETERS}}
    for name in ("FFF_FIRST_FUN_F", "SSS_SECOND_FUN_S")
]
_CALL = {"id": "call00001", "type": "function", "function": {"name": "FFF_FIRST_FUN_F", "arguments": _ARGUMENTS}}

# Render messages with tools, with or without the header of an answer, thinking or not; None where that fails.
Render = Callable[[list[Message], list[dict[str, Any]], bool, bool], str | None]


@dataclass(frozen=True, slots=True)
class Marks:
    """What stands before and after reasoning; empty where nothing does. `thinks`: the template knows of reasoning."""

    start: str = ""
    end: str = ""
    thinks: bool = False


# Templates whose marks comparing does not show: parts of their text, and the marks.
_KNOWN: tuple[tuple[tuple[str, ...], Marks], ...] = (
    (
        ("Write your thoughts between <think></think> and write your response between <response></response>",),
        Marks("<think>", "</think>", True),
    ),  # Granite 3.3
    (("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<TOOL_RESPONSE>"), Marks("<think>\n", "</think>", True)),
)


def marks(render: Render, source: str, *, tools: bool) -> Marks:
    """The marks of the template; `tools`: it can write tool calls."""
    for parts, known in _KNOWN:
        if all(part in source for part in parts):
            return known
    start, end = _around_reasoning(render)
    thinks = bool(end)
    start, end, told = _by_thinking(render, start, end)
    thinks |= told
    if tools:
        start, end, with_calls = _beside_calls(render, start, end)
        thinks |= with_calls
    if not thinks and "content.split('</think>')" in source and "reasoning_content" not in source:
        return Marks("<think>", "</think>", True)  # written before there was a field for reasoning: Qwen, DeepSeek
    if "laguna_glm_thinking" in source:
        start = start.strip()
        end = end.strip()
    return Marks(start, end, thinks)


def _around_reasoning(render: Render) -> tuple[str, str]:
    """What stands around the reasoning of an earlier answer."""
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
    """What an answer's header gains or loses when thinking is turned off."""
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


def _beside_calls(render: Render, start: str, end: str) -> tuple[str, str, bool]:
    """Marks of templates that keep reasoning only beside tool calls."""
    answered = render([_USER, {**_ANSWER, "reasoning_content": _THOUGHT}], _TOOLS, False, True)
    called = {"role": "assistant", "content": None, "reasoning_content": _THOUGHT, "tool_calls": [_CALL]}
    written = render([_USER, called], _TOOLS, False, True)
    if answered is None or written is None or _THOUGHT in answered or _THOUGHT not in written:
        return start, end, False
    found = _found(written)
    return (*found, True) if found != ("", "") else (start, end, False)


def _difference(left: str, right: str) -> tuple[str, str]:
    """What each text has alone, its marks kept whole."""
    if right.startswith(left):
        return "", right[len(left) :]
    if left.startswith(right):
        return left[len(right) :], ""
    lefts = _pieces(left)
    rights = _pieces(right)
    ahead = alike(lefts, rights)
    behind = alike(lefts[ahead:][::-1], rights[ahead:][::-1])
    return "".join(lefts[ahead : len(lefts) - behind]), "".join(rights[ahead : len(rights) - behind])


def alike(left: Sequence[str], right: Sequence[str]) -> int:
    """How far two texts or lists are the same from their beginning."""
    low = 0
    high = min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[low:middle] == right[low:middle] else (low, middle - 1)
    return low


def _pieces(text: str) -> list[str]:
    """Marks and single letters between them."""
    return re.findall(rf"{_MARK}|.", text, re.DOTALL)


def _segments(text: str) -> list[str]:
    """Marks and the texts between them, without those that are only space."""
    return [part.strip() for part in re.split(rf"({_MARK})", text) if part.strip()]
