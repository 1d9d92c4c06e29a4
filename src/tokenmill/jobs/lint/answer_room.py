"""Finds jobs whose max_tokens is too small for any answer that follows their JSON schema.

`shortest_answer` is a lower bound, not a validator: it ignores keywords that only make answers longer.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from tokenmill.jobs.lint.report import BYTES_PER_TOKEN
from tokenmill.jobs.lint.tokens import TokenCount, TooMany

_MAX_DEPTH = 16
_MAX_CHARACTERS = 100_000
_MAX_SCHEMAS = 256  # different ones in a file whose answers are remembered
_SHORTEST = {"string": '""', "boolean": "true", "null": "null"}  # other types: 0


class AnswerRoom:
    """Jobs with a schema and a max_tokens, compared."""

    def __init__(self, count: TokenCount | None) -> None:
        self._count = count
        self._needed = lru_cache(_MAX_SCHEMAS)(self._tokens_of)
        self._jobs = 0
        self._worst = (0, 0, 0)  # missing tokens, max_tokens, negative line

    def add(self, number: int, schema: str | None, max_tokens: int | None) -> None:
        """Add a job."""
        if schema is None or max_tokens is None:
            return
        needed = self._needed(schema)
        if needed > max_tokens:
            self._jobs += 1
            self._worst = max(self._worst, (needed - max_tokens, max_tokens, -number))

    def too_small(self) -> TooMany | None:
        """The jobs without room for an answer."""
        if not self._jobs:
            return None
        missing, max_tokens, line = self._worst
        about = "" if self._count else "about "
        needed = missing + max_tokens
        detail = f"the schema of line {-line} needs {about}{needed:,} tokens at least, max_tokens is {max_tokens:,}"
        return TooMany(self._jobs, detail)

    def _tokens_of(self, schema: str) -> int:
        text = shortest_answer(json.loads(schema))
        return self._count(text) if self._count else round(len(text.encode()) / BYTES_PER_TOKEN)


def shortest_answer(schema: Any) -> str:
    """The shortest JSON text that a schema requires, without spaces; cut at `_MAX_CHARACTERS`."""
    return _Shortest(schema).text(schema, 0)


class _Shortest:
    """Remembers parts of a schema, which may refer to themselves."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[tuple[int, int], str] = {}

    def text(self, schema: Any, depth: int) -> str:
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return "0"
        place = id(schema), depth
        if place not in self._known:
            self._known[place] = self._text_of(schema, depth + 1)[:_MAX_CHARACTERS]
        return self._known[place]

    def _text_of(self, schema: Mapping[str, Any], depth: int) -> str:
        if "$ref" in schema:
            return self.text(_resolved(schema["$ref"], self._root), depth)
        if "const" in schema:
            return _json(schema["const"])
        if "enum" in schema:
            return min(map(_json, _list(schema["enum"])), key=len, default="0")
        for name, choose in (("anyOf", min), ("oneOf", min), ("allOf", max)):
            if options := _list(schema.get(name)):
                return choose((self.text(option, depth) for option in options), key=len)
        return min((self._of_type(kind, schema, depth) for kind in _types(schema)), key=len)

    def _of_type(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        if kind == "object":
            properties = schema.get("properties")
            parts = properties if isinstance(properties, Mapping) else {}
            names = [name for name in _list(schema.get("required")) if isinstance(name, str)]
            return "{" + ",".join(f"{_json(name)}:{self.text(parts.get(name), depth)}" for name in names) + "}"
        if kind == "array":
            item = self.text(schema.get("items"), depth)
            return f"[{','.join([item] * _number(schema.get('minItems'), len(item)))}]"
        if kind == "string":
            return '"' + "x" * _number(schema.get("minLength"), 1) + '"'
        return _SHORTEST.get(kind, "0")


def _resolved(reference: Any, root: Any) -> Any:
    """The schema that a reference names within the document; None for any other."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found = root
    for part in filter(None, reference[1:].split("/")):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _types(schema: Mapping[str, Any]) -> list[str]:
    named = schema.get("type")
    if named is None:
        named = "object" if "required" in schema else "any"
    return [str(kind) for kind in _list(named) or [named]]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: Any, size: int) -> int:
    """A count of things of this size, limited so that all of them have `_MAX_CHARACTERS` at most."""
    return min(value, _MAX_CHARACTERS // size) if isinstance(value, int) and value > 0 else 0
