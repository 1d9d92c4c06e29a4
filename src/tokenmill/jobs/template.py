"""Prompt templates: text with `{column}` fields, and `{*}` for all columns that are not named elsewhere.

`{*}` becomes one `name: value` line per column; only there may the column order be changed. `{{` and `}}` are literal
braces. Pure.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tokenmill.errors import UsageError

REST = "*"
_TOKEN = re.compile(r"\{\{|\}\}|\{([^{}\n]*)\}|[{}]")


@dataclass(frozen=True, slots=True)
class Field:
    """A field for a column."""

    name: str


TemplatePiece = str | Field


@dataclass(frozen=True, slots=True)
class JobTemplate:
    """Templates of the user message and, optionally, of a system message."""

    user: tuple[TemplatePiece, ...]
    system: tuple[TemplatePiece, ...] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The named columns, without duplicates."""
        fields = (piece.name for piece in (*(self.system or ()), *self.user) if isinstance(piece, Field))
        return tuple(dict.fromkeys(name for name in fields if name != REST))

    @property
    def rest_in(self) -> Literal["system", "user"] | None:
        """The message that contains `{*}`, if any."""
        for where, pieces in (("system", self.system or ()), ("user", self.user)):
            if Field(REST) in pieces:
                return "system" if where == "system" else "user"
        return None


def read_template(user: str, system: str | None = None) -> JobTemplate:
    """Parse a template; raises UsageError for an unmatched brace."""
    template = JobTemplate(
        tuple(_pieces(user, "the template")), None if system is None else tuple(_pieces(system, "the system template"))
    )
    places = [piece for piece in (*(template.system or ()), *template.user) if piece == Field(REST)]
    if len(places) > 1:
        raise UsageError("the template contains {*} more than once", hint="keep one of them")
    return template


def _pieces(text: str, what: str) -> Iterator[TemplatePiece]:
    """Yield texts and fields; adjacent texts are joined."""
    held = ""
    end = 0
    for match in _TOKEN.finditer(text):
        held += text[end : match.start()]
        end = match.end()
        if match[0] in ("{{", "}}"):
            held += match[0][0]
        elif match[1] is None or not match[1].strip():
            line = text.count("\n", 0, match.start()) + 1
            raise UsageError(f"{what} has an unmatched {match[0]} in line {line}", hint="write {{ and }} for braces")
        else:
            if held:
                yield held
            held = ""
            yield Field(match[1])
    if held + text[end:]:
        yield held + text[end:]
