"""Where two jobs differ: shown side by side around the first byte, with everything visible that a terminal would hide.

`Families` groups texts that are equal apart from what varies in them, and keeps one example for every kind of change.
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

BEFORE, BEHIND = 28, 24  # characters of text shown before and behind the place
_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_HIDDEN = frozenset(("Cc", "Cf", "Zs", "Zl", "Zp", "Mn", "Cs", "Co", "Cn"))


@dataclass(frozen=True, slots=True)
class Side:
    """One job's text around the place."""

    line: int
    where: str  # message 1 (system)
    byte: int  # there
    before: str  # made visible, as what follows
    behind: str


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two jobs part."""

    first: Side
    second: Side


def side(text: str, at: int, *, line: int, where: str, byte: int, dots: bool) -> Side:
    """What stands around one place of a text; `dots`: the difference is in blanks, so they are shown."""
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
    """Blanks at the beginning made visible."""
    blanks = next((index for index, character in enumerate(shown) if character != " "), len(shown))
    return ["·"] * blanks + shown[blanks:]


def _fitting(shown: list[str], columns: int) -> list[str]:
    """As many as have room; an escape takes more than one column, and so do the characters of some languages."""
    used = 0
    for index, character in enumerate(shown):
        used += sum(2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in character)
        if used > columns:
            return shown[:index]
    return shown


def visible(character: str) -> str:
    """A character, or an escape for one that a terminal would hide: control, odd blanks, combining marks."""
    if character in _NAMED:
        return _NAMED[character]
    if character < " " or character == "\x7f" or (character > "~" and unicodedata.category(character) in _HIDDEN):
        return f"\\u{ord(character):04x}" if ord(character) < 0x10000 else f"\\U{ord(character):08x}"
    return character


MOST_FAMILIES = 4096
MOST_TEXT = 32 * MIB  # characters of all of them; families that come later have no examples


@dataclass(frozen=True, slots=True)
class Member:
    """A text, where it stands and where it was cut."""

    line: int
    parts: tuple[Part, ...]
    segments: Sequence[Segment]
    tools: tuple[Mapping[str, Any], ...] = ()


class Families:
    """The first member of each family, and one example for every kind of change."""

    def __init__(self) -> None:
        self._first: dict[object, Member] = {}
        self._room = MOST_TEXT
        self.examples: dict[Changing, Difference] = {}

    def join(self, key: object, member: Member) -> frozenset[Changing]:
        """Add a text to its family; what it differs in from the first."""
        first = self._first.get(key)
        if first is None:
            size = sum(len(part.text) for part in member.parts)
            if len(self._first) < MOST_FAMILIES and size <= self._room:
                self._room -= size
                self._first[key] = member
            return frozenset()
        found: set[Changing] = set()
        for kind, there, here in differing(first.segments, member.segments):
            if kind not in found:
                found.add(kind)
                if kind not in self.examples:
                    self.examples[kind] = between(first.line, first.parts, there, member.line, member.parts, here)
        if repr(member.tools) != repr(first.tools):  # dicts that are equal may be in another order
            at = common_length(first.parts[0].text, member.parts[0].text)
            for order in orders(member.tools, first.tools):
                found.add(order)
                if order not in self.examples:
                    self.examples[order] = between(first.line, first.parts, at, member.line, member.parts, at)
        return frozenset(found)


def between(
    line: int, parts: tuple[Part, ...], at: int, other: int, others: tuple[Part, ...], there: int
) -> Difference:
    """Two jobs around the place where they part, each in the part that holds it."""
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
