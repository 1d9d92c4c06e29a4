"""Shows where two jobs differ: excerpts around the first difference, with invisible characters escaped.

`Families` groups texts that are equal except for variable text, and keeps an example of every kind of change.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.jobs.lint.parts import Part, located
from tokenmill.jobs.lint.spellings import Changing, orders
from tokenmill.jobs.lint.variable_text import Segment, differing
from tokenmill.jobs.scheduler.prefix_groups import common_length
from tokenmill.units import MIB

BEFORE, BEHIND = 28, 24  # characters shown before and after the position
_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_HIDDEN = frozenset(("Cc", "Cf", "Zs", "Zl", "Zp", "Mn", "Cs", "Co", "Cn"))


@dataclass(frozen=True, slots=True)
class Side:
    """An excerpt of one job's prompt around the position."""

    line: int
    where: str  # the part, such as "message 1 (system)"
    byte: int  # position in the part
    before: str  # with invisible characters escaped
    behind: str


@dataclass(frozen=True, slots=True)
class Difference:
    """The position at which two jobs diverge."""

    first: Side
    second: Side


def side(text: str, at: int, *, line: int, where: str, byte: int, dots: bool) -> Side:
    """An excerpt around a position of a text; `dots` shows spaces as dots."""
    before = [*map(visible, text[max(0, at - BEFORE) : at])]
    behind = [*map(visible, text[at : at + BEHIND])]
    if dots:
        before = _dotted(before[::-1])[::-1]
        behind = _dotted(behind)
    left = _fitting(before[::-1], BEFORE)[::-1]
    right = _fitting(behind, BEHIND)
    return Side(
        line,
        where,
        byte,
        ("…" if at > len(left) else "") + "".join(left),
        "".join(right) + ("…" if at + len(right) < len(text) else ""),
    )


def _dotted(shown: list[str]) -> list[str]:
    """Show leading spaces as dots."""
    blanks = next((index for index, character in enumerate(shown) if character != " "), len(shown))
    return ["·"] * blanks + shown[blanks:]


def _fitting(shown: list[str], columns: int) -> list[str]:
    """The leading items that fit; escapes and East Asian characters take more than one column."""
    used = 0
    for index, character in enumerate(shown):
        used += sum(2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in character)
        if used > columns:
            return shown[:index]
    return shown


def visible(character: str) -> str:
    """The character, or an escape if it is a control character, unusual space or combining mark."""
    if character in _NAMED:
        return _NAMED[character]
    if character < " " or character == "\x7f" or (character > "~" and unicodedata.category(character) in _HIDDEN):
        return f"\\u{ord(character):04x}" if ord(character) < 0x10000 else f"\\U{ord(character):08x}"
    return character


MAX_FAMILIES = 4096
MAX_TEXT = 32 * MIB  # characters of all families; later families have no examples


@dataclass(frozen=True, slots=True)
class Member:
    """A text with its line, parts and segments."""

    line: int
    parts: tuple[Part, ...]
    segments: Sequence[Segment]
    tools: tuple[Mapping[str, Any], ...] = ()


class Families:
    """The first member of each family, and one example for every kind of change."""

    def __init__(self) -> None:
        self._first: dict[object, Member] = {}
        self._free_characters = MAX_TEXT
        self.examples: dict[Changing, Difference] = {}

    def join(self, key: object, member: Member) -> frozenset[Changing]:
        """Add a text to a family; returns the kinds of variable text in which it differs from the first member."""
        first = self._first.get(key)
        if first is None:
            size = sum(len(part.text) for part in member.parts)
            if len(self._first) < MAX_FAMILIES and size <= self._free_characters:
                self._free_characters -= size
                self._first[key] = member
            return frozenset()
        found: set[Changing] = set()
        for kind, there, here in differing(first.segments, member.segments):
            if kind not in found:
                found.add(kind)
                if kind not in self.examples:
                    self.examples[kind] = between(first.line, first.parts, there, member.line, member.parts, here)
        if repr(member.tools) != repr(first.tools):  # equal dicts may have different orders
            at = common_length(first.parts[0].text, member.parts[0].text)
            for order in orders(member.tools, first.tools):
                found.add(order)
                if order not in self.examples:
                    self.examples[order] = between(first.line, first.parts, at, member.line, member.parts, at)
        return frozenset(found)


def between(
    line: int, parts: tuple[Part, ...], at: int, other: int, others: tuple[Part, ...], there: int
) -> Difference:
    """Excerpts of two jobs around the position at which they diverge."""
    found = [(line, *located(parts, at)), (other, *located(others, there))]
    dots = any(not part.text[place : place + 1].strip() for _, part, place in found)
    first, second = (
        side(
            part.text[part.skip :],
            max(0, place - part.skip),
            line=number,
            where=part.label,
            byte=len(part.text[part.skip : max(part.skip, place)].encode()),
            dots=dots,
        )
        for number, part, place in found
    )
    return Difference(first, second)
