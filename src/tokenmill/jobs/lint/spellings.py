"""Spellings of a prompt: unchanged, without any variable text, and with only one kind of variable text.

Each spelling is a bit of a mask. What two jobs share in the spelling without variable text, but not in the one that
keeps only times, is the cost of times after everything else has been fixed.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from tokenmill.jobs.lint.parts import Prompt, with_tools
from tokenmill.jobs.lint.variable_text import VOLATILE, Segment, Volatile, segment, segments, spelled

Changing = Volatile | Literal["key_order", "tool_order"]
CHANGING: tuple[Changing, ...] = (*VOLATILE, "key_order", "tool_order")
AS_IS = 1
WITHOUT = 2
KEPT: Mapping[Changing, int] = {kind: 4 << index for index, kind in enumerate(CHANGING)}
EVERY = AS_IS | WITHOUT | sum(KEPT.values())
SCANNED = 256  # characters of a last message that are examined; nothing is shared after later differences


class Spelling(NamedTuple):
    """A text, and the bits of the spellings that produce it."""

    mask: int
    text: str


class Spelled(NamedTuple):
    """All spellings of a text, and its segments."""

    spellings: list[Spelling]  # the unchanged text first
    segments: Sequence[Segment]  # of the text with sorted keys and tools

    @property
    def without(self) -> str:
        """The text without variable text."""
        return next(text for mask, text in self.spellings if mask & WITHOUT)


def spell_prefix(prompt: Prompt, text: str) -> Spelled:
    """All spellings of a prefix, given with its text."""
    if not prompt.tools:
        return _spelled(text, segments(text), "")
    keys = [_sorted(tool) for tool in prompt.tools]
    by_name = sorted(prompt.tools, key=_name)
    cut = segments(with_tools(prompt.prefix, prompt.tools, sorted(keys, key=_name)))
    texts = _texts(text, cut, "")
    orders: tuple[tuple[Changing, Sequence[Mapping[str, Any]]], ...] = (("key_order", by_name), ("tool_order", keys))
    for kind, tools in orders:
        texts[KEPT[kind]] = spelled(segments(with_tools(prompt.prefix, prompt.tools, tools)))
    return Spelled(_grouped(texts), cut)


def spell_tail(text: str) -> Spelled:
    """All spellings of a last message."""
    beginning = segment(text[:SCANNED])
    if not beginning.marked.marks:
        return Spelled([Spelling(EVERY, text)], ())
    return _spelled(text, (beginning,), text[SCANNED:])


def _spelled(text: str, cut: Sequence[Segment], rest: str) -> Spelled:
    return Spelled(_grouped(_texts(text, cut, rest)), cut)


def _texts(text: str, cut: Sequence[Segment], rest: str) -> dict[int, str]:
    """The text of every spelling by its bit, leaving the order of keys and tools as it is."""
    kinds: set[Volatile | None] = {kind for segment in cut for kind in segment.spelled}
    without = spelled(cut) + rest
    texts = {AS_IS: text, WITHOUT: without} | dict.fromkeys(KEPT.values(), without)
    for kind in VOLATILE:
        if kind in kinds:
            texts[KEPT[kind]] = spelled(cut, kind) + rest
    return texts


def _grouped(texts: Mapping[int, str]) -> list[Spelling]:
    """Combine the bits of equal texts."""
    masks: dict[str, int] = {}
    for bit, text in texts.items():
        masks[text] = masks.get(text, 0) | bit
    return [Spelling(mask, text) for text, mask in masks.items()]


def orders(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> list[Changing]:
    """Whether two equivalent lists of tools differ in the order of keys or of tools."""
    one = [_spelling(tool) for tool in ours]
    other = [_spelling(tool) for tool in theirs]
    found: list[Changing] = []
    if sorted(one) != sorted(other):
        found.append("key_order")
    if [_name(tool) for tool in ours] != [_name(tool) for tool in theirs]:
        found.append("tool_order")
    return found


def _spelling(value: Any) -> str:
    return repr(value)  # dicts keep their order


def _name(tool: Mapping[str, Any]) -> str:
    name: str = tool["function"]["name"]
    return name


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value
