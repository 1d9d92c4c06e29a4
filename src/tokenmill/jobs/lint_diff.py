"""Two texts side by side around the byte where they part, with everything visible that a terminal would hide."""

import unicodedata
from dataclasses import dataclass

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
