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


def side(text: str, at: int, *, line: int, where: str, byte: int) -> Side:
    """What stands around one place of a text."""
    blanks = _touches_blank(text, at)
    before = visible(text[max(0, at - BEFORE) : at], dots=False)
    behind = visible(text[at : at + BEHIND], dots=blanks)
    if blanks and before.endswith(" "):
        kept = before.rstrip(" ")
        before = kept + "·" * (len(before) - len(kept))
    if at > BEFORE:
        before = "…" + before
    return Side(line, where, byte, before, behind + ("…" if at + BEHIND < len(text) else ""))


def visible(text: str, *, dots: bool = False) -> str:
    """Control characters, odd blanks and combining marks as escapes; spaces as dots on request, up to the first word."""
    shown, leading = list[str](), dots
    for character in text:
        if character == " ":
            shown.append("·" if leading else " ")
        elif character in _NAMED:
            shown.append(_NAMED[character])
        elif ord(character) > 126 and unicodedata.category(character) in _HIDDEN or character < " " or character == "\x7f":
            shown.append(f"\\u{ord(character):04x}" if ord(character) < 0x10000 else f"\\U{ord(character):08x}")
        else:
            leading = False
            shown.append(character)
    return "".join(shown)


def _touches_blank(text: str, at: int) -> bool:
    return text[at : at + 1].isspace() or not text[at:] or text[at - 1 : at].isspace()
