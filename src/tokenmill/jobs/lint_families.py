"""Texts that are one without what changes in them: the first of each family, and where others differ from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.jobs.forest import common_length
from tokenmill.jobs.lint_diff import Difference, side
from tokenmill.jobs.lint_parts import Part, located
from tokenmill.jobs.lint_spellings import Changing, orders
from tokenmill.jobs.lint_text import Segment, differing
from tokenmill.units import MIB

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
