"""One prompt in several spellings: as it is, without all that changes by itself, and without all of that but one kind.

Each spelling is a bit. What two jobs would share in the spelling without everything, and do not in the one that keeps
times, is what times cost, even when all the rest is repaired.
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
SCANNED = 256  # characters of a last message; what changes further behind stands before nothing that is shared


class Spelling(NamedTuple):
    """A text, and the bits of all spellings that have it."""

    mask: int
    text: str


class Spelled(NamedTuple):
    """All spellings of a text, and where it was cut."""

    spellings: list[Spelling]  # the first one as it is
    segments: Sequence[Segment]  # of the spelling without key and tool order

    @property
    def without(self) -> str:
        """The spelling without everything that changes."""
        return next(text for mask, text in self.spellings if mask & WITHOUT)


def spell_head(prompt: Prompt, text: str) -> Spelled:
    """All spellings of a prefix whose text is given."""
    if not prompt.tools:
        return _spelled(text, segments(text), "")
    keys = [_sorted(tool) for tool in prompt.tools]
    by_name = sorted(prompt.tools, key=_name)
    cut = segments(with_tools(prompt.head, prompt.tools, sorted(keys, key=_name)))
    texts = _texts(text, cut, "")
    orders: tuple[tuple[Changing, Sequence[Mapping[str, Any]]], ...] = (("key_order", by_name), ("tool_order", keys))
    for kind, tools in orders:
        texts[KEPT[kind]] = spelled(segments(with_tools(prompt.head, prompt.tools, tools)))
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
    """Every spelling by its bit, for tools that are spelled in one way."""
    kinds: set[Volatile | None] = {kind for segment in cut for kind in segment.spelled}
    without = spelled(cut) + rest
    texts = {AS_IS: text, WITHOUT: without} | dict.fromkeys(KEPT.values(), without)
    for kind in VOLATILE:
        if kind in kinds:
            texts[KEPT[kind]] = spelled(cut, kind) + rest
    return texts


def _grouped(texts: Mapping[int, str]) -> list[Spelling]:
    """Equal texts once, with all their bits."""
    masks: dict[str, int] = {}
    for bit, text in texts.items():
        masks[text] = masks.get(text, 0) | bit
    return [Spelling(mask, text) for text, mask in masks.items()]


def orders(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> list[Changing]:
    """How two lists of tools that mean the same are written differently."""
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
