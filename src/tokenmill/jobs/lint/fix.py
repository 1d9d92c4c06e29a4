"""Makes equivalent tools and system messages identical, where that cannot change the meaning of a job.

- Tool definitions that differ only in the order of keys get the order that most lines have: JSON objects have no order.
- System messages that differ only in line endings or trailing whitespace get the spelling that most lines have.

Only spellings that occur in the file are written. Not changed: dates, ids and numbers; indentation and whitespace
inside lines; the order of tools and messages; user and assistant messages; answer schemas, where the order of keys
matters.

The file is read three times: `Survey` counts spellings, `Choices.learn` reads the chosen ones, and `rewrite` replaces
the others, leaving all other bytes of a line unchanged. Memory is bounded; values beyond the limits stay unchanged.
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

MAX_MEANINGS = 100_000
MAX_TEXT_BYTES = 64 * MIB
SYSTEM_ROLES = frozenset(("system", "developer"))

CanonicalChange = Literal["tools", "system"]
_value = json.JSONDecoder().raw_decode


@dataclass(slots=True)
class _Spelling:
    line: int  # the first line with it
    count: int = 0


class Survey:
    """Counts the spellings of equivalent values."""

    def __init__(self, most: int = MAX_MEANINGS) -> None:
        self._meanings: dict[bytes, dict[bytes, _Spelling]] = {}
        self._most = most
        self.complete = True  # False: values were ignored because of the limit

    def add(self, number: int, text: str) -> None:
        """Add a line of the file; lines that cannot be run are ignored."""
        for _, meaning, spelling, _ in _values(text):
            known = self._meanings.get(meaning)
            if known is None:
                if len(self._meanings) >= self._most:
                    self.complete = False
                    continue
                known = self._meanings[meaning] = {}
            known.setdefault(spelling, _Spelling(number)).count += 1

    def choices(self) -> "Choices":
        """Choose the most frequent spelling of every value that has several, the first of equally frequent ones."""
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
    """The chosen spellings."""

    replaced: Mapping[bytes, bytes]  # spelling -> chosen spelling
    wanted: Mapping[int, set[bytes]]  # chosen spellings by the line that contains them
    _texts: dict[bytes, str] = field(default_factory=dict)  # JSON text by spelling
    _free_bytes: int = MAX_TEXT_BYTES

    def learn(self, number: int, text: str) -> None:
        """Store the chosen spellings that this line contains."""
        wanted = self.wanted.get(number, ())
        places = _places(text) if wanted else {}
        for change, _, spelling, index in _values(text) if wanted else ():
            start, end = places[change, index]
            if spelling in wanted and spelling not in self._texts and end - start <= self._free_bytes:
                self._free_bytes -= end - start
                self._texts[spelling] = text[start:end]

    def rewrite(self, text: str) -> tuple[str, set[CanonicalChange]]:
        """The line with the chosen spellings, and the kinds of changes made."""
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
    """Yield tools and system messages of a line: kind, digest of the meaning, digest of the spelling, index."""
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
    """Start and end of each tool and of the content of each message in a line."""
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
    """Start and end of the values of an object; the last of duplicate keys counts, as in a JSON parser."""
    found: dict[str, tuple[int, int]] = {}
    at = _skip_whitespace(text, start + 1)
    while text[at] != "}":
        key, at = _value(text, at)
        value = _skip_whitespace(text, _skip_whitespace(text, at) + 1)
        end = _value(text, value)[1]
        found[key] = value, end
        at = _skip_whitespace(text, end)
        at = _skip_whitespace(text, at + 1) if text[at] == "," else at
    return found


def _items(text: str, start: int) -> list[tuple[int, int]]:
    """Start and end of the items of a list."""
    found: list[tuple[int, int]] = []
    at = _skip_whitespace(text, start + 1)
    while text[at] != "]":
        end = _value(text, at)[1]
        found.append((at, end))
        at = _skip_whitespace(text, end)
        at = _skip_whitespace(text, at + 1) if text[at] == "," else at
    return found


def _skip_whitespace(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at
