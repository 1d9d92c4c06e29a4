"""Gives tools and system messages that mean the same one spelling, where that is safe.

What is changed, and why it cannot change the meaning of a job:

- a tool definition whose keys come in several orders in the file gets the order that most lines have: JSON objects have
  no order;
- system messages that differ only in line ends, in whitespace before line ends or at the end get the spelling that most
  lines have.

Only spellings that occur in the file are written. Dates, ids and numbers, indentation and whitespace inside lines, the
order of tools and messages, user and assistant messages, and answer schemas (where the order of keys matters) stay.

Three passes over the file: `Survey` counts spellings, `Choices.learn` reads the chosen ones, `rewrite` puts them in
place and leaves every other byte of a line alone. Memory is bounded; whatever exceeds the bounds stays as it is.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Literal

from tokenmill.errors import RequestRefused
from tokenmill.jobs.ingest.line import body_of
from tokenmill.jobs.lint.variable_text import line_ends_unified
from tokenmill.jobs.openai.call import checked
from tokenmill.storage.json_text import compact_json, parse
from tokenmill.units import MIB

MOST_MEANINGS = 100_000
MOST_TEXT_BYTES = 64 * MIB
SYSTEM_ROLES = frozenset(("system", "developer"))

CanonicalChange = Literal["tools", "system"]
_value = json.JSONDecoder().raw_decode


@dataclass(slots=True)
class _Spelling:
    line: int  # the first that has it
    count: int = 0


class Survey:
    """Counts how values that mean the same are spelled."""

    def __init__(self, most: int = MOST_MEANINGS) -> None:
        self._meanings: dict[bytes, dict[bytes, _Spelling]] = {}
        self._most = most
        self.complete = True  # no value was left out for want of room

    def add(self, number: int, text: str) -> None:
        """One line of the file; lines that cannot be run are passed over."""
        for _, meaning, spelling, _ in _values(text):
            known = self._meanings.get(meaning)
            if known is None:
                if len(self._meanings) >= self._most:
                    self.complete = False
                    continue
                known = self._meanings[meaning] = {}
            known.setdefault(spelling, _Spelling(number)).count += 1

    def choices(self) -> "Choices":
        """For every meaning with several spellings the one that most lines have, the first of equals."""
        replaced: dict[bytes, bytes] = {}
        lines: dict[int, set[bytes]] = {}
        for spellings in self._meanings.values():
            if len(spellings) < 2:
                continue
            best = max(spellings, key=lambda key: (spellings[key].count, -spellings[key].line))
            lines.setdefault(spellings[best].line, set()).add(best)
            replaced |= {other: best for other in spellings if other != best}
        return Choices(replaced, lines)


@dataclass(slots=True)
class Choices:
    """What is to be spelled how."""

    replaced: Mapping[bytes, bytes]  # a spelling -> the one to use
    wanted: Mapping[int, set[bytes]]  # where those to use stand, by line
    _texts: dict[bytes, str] = field(default_factory=dict)  # as JSON
    _room: int = MOST_TEXT_BYTES

    def learn(self, number: int, text: str) -> None:
        """Keep the chosen spellings that this line has."""
        wanted = self.wanted.get(number, ())
        places = _places(text) if wanted else {}
        for change, _, spelling, index in _values(text) if wanted else ():
            start, end = places[change, index]
            if spelling in wanted and spelling not in self._texts and end - start <= self._room:
                self._room -= end - start
                self._texts[spelling] = text[start:end]

    def rewrite(self, text: str) -> tuple[str, set[CanonicalChange]]:
        """A line with the chosen spellings, and what was changed in it."""
        edits = list[tuple[int, int, str]]()
        changes = set[CanonicalChange]()
        places: dict[tuple[str, int], tuple[int, int]] | None = None
        for change, _, spelling, index in _values(text):
            written = self._texts.get(self.replaced.get(spelling, b""))
            if written is not None:
                places = _places(text) if places is None else places
                edits.append((*places[change, index], written))
                changes.add(change)
        for start, end, written in sorted(edits, reverse=True):
            text = text[:start] + written + text[end:]
        return text, changes


def _values(text: str) -> Iterator[tuple[CanonicalChange, bytes, bytes, int]]:
    """What may be spelled in several ways in a line: its meaning, its spelling and its index among its like."""
    try:
        endpoint, body = body_of(parse(text))
        checked(endpoint, body)
    except (RequestRefused, ValueError, RecursionError):
        return
    for index, tool in enumerate(body.get("tools") or ()):
        spelling = compact_json(tool)
        yield "tools", _tool_meaning(spelling), _digest("tool", spelling), index
    for index, message in enumerate(body.get("messages") or ()):
        content = message.get("content")
        if message.get("role") in SYSTEM_ROLES and isinstance(content, str):
            meaning, spelling_of = _system_meaning(content)
            yield "system", meaning, spelling_of, index


@lru_cache(256)
def _tool_meaning(spelling: str) -> bytes:
    return _digest("tool", json.dumps(json.loads(spelling), sort_keys=True))


@lru_cache(64)
def _system_meaning(content: str) -> tuple[bytes, bytes]:
    return _digest("system", line_ends_unified(content)), _digest("system", content)


def _digest(kind: str, text: str) -> bytes:
    return blake2b(f"{kind}\n{text}".encode(errors="surrogatepass"), digest_size=16).digest()


def _places(text: str) -> dict[tuple[str, int], tuple[int, int]]:
    """Where a line's tools and the contents of its messages begin and end."""
    line = _members(text, 0)
    body = _members(text, line["body"][0]) if "body" in line else line
    places: dict[tuple[str, int], tuple[int, int]] = {}
    if "tools" in body and text[body["tools"][0]] == "[":
        places |= {("tools", index): place for index, place in enumerate(_items(text, body["tools"][0]))}
    if "messages" in body:
        for index, (start, _) in enumerate(_items(text, body["messages"][0])):
            message = _members(text, start)
            if "content" in message:
                places["system", index] = message["content"]
    return places


def _members(text: str, start: int) -> dict[str, tuple[int, int]]:
    """Where the values of an object stand; of equal keys the last one counts, as it does when it is read."""
    found: dict[str, tuple[int, int]] = {}
    at = _behind_blanks(text, start + 1)
    while text[at] != "}":
        key, at = _value(text, at)
        value = _behind_blanks(text, _behind_blanks(text, at) + 1)
        end = _value(text, value)[1]
        found[key] = value, end
        at = _behind_blanks(text, end)
        at = _behind_blanks(text, at + 1) if text[at] == "," else at
    return found


def _items(text: str, start: int) -> list[tuple[int, int]]:
    """Where the items of a list stand."""
    found: list[tuple[int, int]] = []
    at = _behind_blanks(text, start + 1)
    while text[at] != "]":
        end = _value(text, at)[1]
        found.append((at, end))
        at = _behind_blanks(text, end)
        at = _behind_blanks(text, at + 1) if text[at] == "," else at
    return found


def _behind_blanks(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at
