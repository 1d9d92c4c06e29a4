"""Prompt templates: text with `{column}` in it, and `{*}` for all columns that are named nowhere else.

`{*}` is written as one `name: value` line for each of them, and it is the only place whose order may be chosen: columns
that stand in prose stay where they are. `{{` and `}}` are braces. Pure.
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
    """A column's place in a template."""

    name: str


TemplatePiece = str | Field


@dataclass(frozen=True, slots=True)
class JobTemplate:
    """What a row is written into: the user's message, and a system message where one is wanted."""

    user: tuple[TemplatePiece, ...]
    system: tuple[TemplatePiece, ...] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Columns that are named, each once."""
        fields = (piece.name for piece in (*(self.system or ()), *self.user) if isinstance(piece, Field))
        return tuple(dict.fromkeys(name for name in fields if name != REST))

    @property
    def rest_in(self) -> Literal["system", "user"] | None:
        """The message that holds `{*}`."""
        for where, pieces in (("system", self.system or ()), ("user", self.user)):
            if Field(REST) in pieces:
                return "system" if where == "system" else "user"
        return None


def read_template(user: str, system: str | None = None) -> JobTemplate:
    """A template from its texts; UsageError says where a brace is wrong."""
    template = JobTemplate(
        tuple(_pieces(user, "the template")), None if system is None else tuple(_pieces(system, "the system template"))
    )
    places = [piece for piece in (*(template.system or ()), *template.user) if piece == Field(REST)]
    if len(places) > 1:
        raise UsageError("{*} stands twice in the template", hint="all other columns are written once")
    return template


def _pieces(text: str, what: str) -> Iterator[TemplatePiece]:
    """Texts and fields by turns; texts that touch are one."""
    held = ""
    end = 0
    for match in _TOKEN.finditer(text):
        held += text[end : match.start()]
        end = match.end()
        if match[0] in ("{{", "}}"):
            held += match[0][0]
        elif match[1] is None or not match[1].strip():
            line = text.count("\n", 0, match.start()) + 1
            raise UsageError(f"{what} has a lone {match[0]} in line {line}", hint="write {{ and }} for braces")
        else:
            if held:
                yield held
            held = ""
            yield Field(match[1])
    if held + text[end:]:
        yield held + text[end:]
