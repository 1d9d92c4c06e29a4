"""JSON schemas that answers must follow: put into a request, and checked again when the answer is there.

The engine's grammar does the work; the check is for engines that take a schema as advice. Keys that are not checked
here are refused by name before anything runs: an answer is never called valid for want of a look. Pure but for reading
the file.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import date, time
from pathlib import Path
from typing import Any

from tokenmill.errors import UsageError
from tokenmill.jobs.openai_schema import TEXT, shown
from tokenmill.recipes.expand_seeds import Shape

Schema = Mapping[str, Any] | bool
_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_ONE = ("additionalProperties", "items")
_SEVERAL = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "$defs", "definitions")
_LIMITS: Mapping[str, tuple[type, Callable[[Any], float], Callable[[float, float], bool], str]] = {
    "minLength": (str, len, lambda has, limit: has >= limit, "is shorter than"),
    "maxLength": (str, len, lambda has, limit: has <= limit, "is longer than"),
    "minItems": (list, len, lambda has, limit: has >= limit, "has fewer items than"),
    "maxItems": (list, len, lambda has, limit: has <= limit, "has more items than"),
    "minimum": (float, float, lambda has, limit: has >= limit, "is less than"),
    "maximum": (float, float, lambda has, limit: has <= limit, "is more than"),
    "exclusiveMinimum": (float, float, lambda has, limit: has > limit, "is not more than"),
    "exclusiveMaximum": (float, float, lambda has, limit: has < limit, "is not less than"),
}
_SAYING = ("$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated")
_DATE = "[0-9]{4}-[0-9]{2}-[0-9]{2}"
_TIME = "[0-9]{2}:[0-9]{2}:[0-9]{2}(?:[.][0-9]+)?(?:Z|[+-][0-9]{2}:[0-9]{2})"
_FORMATS = {
    "date": re.compile(_DATE),
    "time": re.compile(_TIME),
    "date-time": re.compile(f"{_DATE}T{_TIME}"),
    "uuid": re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"),
}
_KNOWN = {
    "type",
    "enum",
    "const",
    "$ref",
    "required",
    "pattern",
    "format",
    *_ONE,
    *_SEVERAL,
    *_NAMED,
    *_LIMITS,
    *_SAYING,
}


def read_schema(path: Path) -> dict[str, Any]:
    """A schema from a file; UsageError says what in it cannot be followed."""
    try:
        schema = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint="check the path and who may read it") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON: {error}", hint="--schema wants a file with a JSON schema") from error
    if not isinstance(schema, dict):
        raise UsageError(f"{path} is no JSON schema: it is {shown(schema)}", hint='such as {"type": "object", ...}')
    for problem in _problems(schema, schema, "#"):
        raise UsageError(f"{path}: {problem}", hint=f"known are {', '.join(sorted(_KNOWN - set(_SAYING)))}")
    return schema


def _problems(schema: Any, root: Any, where: str) -> Iterator[str]:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        yield f"{where} must be a schema, not {shown(schema)}"
        return
    if unknown := next((key for key in schema if key not in _KNOWN), None):
        yield f"{where} has the key {shown(unknown)}, which is not checked"
    types = schema.get("type", [])
    listed = types if isinstance(types, list) else [types]
    if any(not isinstance(kind, str) or kind not in _TYPES for kind in listed):
        yield f"{where}/type is {shown(types)}"
    try:
        re.compile(schema.get("pattern", ""))
    except (re.error, TypeError):
        yield f"{where}/pattern is {shown(schema['pattern'])}, which is no regular expression"
    if "$ref" in schema and _target(root, schema["$ref"]) is None:
        yield f"{where}/$ref leads to {shown(schema['$ref'])}, which is not in the file"
    for key in _LIMITS:
        if key in schema and (isinstance(schema[key], bool) or not isinstance(schema[key], int | float)):
            yield f"{where}/{key} must be a number, not {shown(schema[key])}"
    for keys, kind, words in ((_NAMED, dict, "an object"), ((*_SEVERAL, "enum", "required"), list, "a list")):
        for key in keys:
            if not isinstance(schema.get(key, kind()), kind):
                yield f"{where}/{key} must be {words}, not {shown(schema[key])}"
    for name, inner in _inner(schema):
        yield from _problems(inner, root, f"{where}/{name}")


def _inner(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas inside one, with their places."""
    for key, value in schema.items():
        if key in _ONE:
            yield key, value
        elif key in _SEVERAL and isinstance(value, list):
            yield from ((f"{key}/{at}", one) for at, one in enumerate(value))
        elif key in _NAMED and isinstance(value, dict):
            yield from ((f"{key}/{name}", one) for name, one in value.items())


def _target(root: Any, ref: Any) -> Any:
    """What a reference leads to; None: nowhere in this document."""
    if not isinstance(ref, str) or not ref.startswith("#"):
        return None
    for step in ref.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(root, dict) and name in root:
            root = root[name]
        elif isinstance(root, list) and name.isdigit() and int(name) < len(root):
            root = root[int(name)]
        else:
            return None
    return root


def wrong(schema: Schema, value: Any, root: Any = None, where: str = "it") -> str | None:
    """Why a document is none of a schema's; None: it is one."""
    if isinstance(schema, bool):
        return None if schema else f"{where} must not be there"
    root = schema if root is None else root
    if "$ref" in schema and (why := wrong(_target(root, schema["$ref"]), value, root, where)):
        return why
    return (
        _wrong_itself(schema, value, where)
        or _wrong_choice(schema, value, root, where)
        or _wrong_inside(schema, value, root, where)
    )


def _wrong_itself(schema: Mapping[str, Any], value: Any, where: str) -> str | None:
    if "enum" in schema and not any(_same(one, value) for one in schema["enum"]):
        return f"{where} is {shown(value)}, none of {shown(schema['enum'])}"
    if "const" in schema and not _same(schema["const"], value):
        return f"{where} is {shown(value)}, not {shown(schema['const'])}"
    kinds = schema.get("type", list(_TYPES))
    if not any(_is(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        return f"{where} is {shown(value)}, which is not of the type {shown(kinds)}"
    for key, (kind, size, holds, words) in _LIMITS.items():
        if key in schema and _sized(value, kind) and not holds(size(value), schema[key]):
            return f"{where} {words} {schema[key]:g}"
    return _wrong_text(schema, value, where) if isinstance(value, str) else None


def _wrong_text(schema: Mapping[str, Any], value: str, where: str) -> str | None:
    if re.search(schema.get("pattern", ""), value) is None:
        return f"{where} does not match {schema['pattern']}"
    return None if _formed(schema.get("format"), value) else f"{where} is no {schema['format']}"


def _formed(format: str | None, text: str) -> bool:
    """Whether a text has its format; all but a few say something to people only, as the specification has it."""
    if format not in _FORMATS:
        return True
    if not _FORMATS[format].fullmatch(text):
        return False
    day, clock = (text[:10], text[11:]) if format == "date-time" else (text, text)
    try:
        if format in ("date", "date-time"):
            date.fromisoformat(day)
        if format in ("time", "date-time"):
            time.fromisoformat(clock.replace("Z", "+00:00"))
    except ValueError:
        return False
    return True


def _wrong_choice(schema: Mapping[str, Any], value: Any, root: Any, where: str) -> str | None:
    for one in schema.get("allOf", ()):
        if why := wrong(one, value, root, where):
            return why
    if "anyOf" in schema and all(wrong(one, value, root, where) for one in schema["anyOf"]):
        return f"{where} is none of anyOf"
    if "oneOf" in schema:
        fit = sum(wrong(one, value, root, where) is None for one in schema["oneOf"])
        return None if fit == 1 else f"{where} is {fit} of oneOf"
    return None


def _wrong_inside(schema: Mapping[str, Any], value: Any, root: Any, where: str) -> str | None:
    inside: list[tuple[Any, Any, str]] = []
    if isinstance(value, dict):
        if missing := next((name for name in schema.get("required", ()) if name not in value), None):
            return f"{where} lacks {missing!r}"
        known = schema.get("properties", {})
        further = schema.get("additionalProperties", True)
        inside = [(known.get(name, further), one, f"{where}.{name}") for name, one in value.items()]
    elif isinstance(value, list):
        prefix = schema.get("prefixItems", [])
        rest = schema.get("items", True)
        inside = [(prefix[at] if at < len(prefix) else rest, one, f"{where}[{at}]") for at, one in enumerate(value)]
    return next((why for one in inside if (why := wrong(one[0], one[1], root, one[2]))), None)


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind])


def _sized(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind)


def _same(one: Any, other: Any) -> bool:
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


# -- requests ----------------------------------------------------------------------------------------------------------


def answer_schema(shape: Shape, schema: dict[str, Any] | None) -> dict[str, Any] | None:
    """What an answer must look like; None: it is a plain text."""
    if not shape.parts:
        return schema
    given: Schema = {"type": "string", "minLength": 1} if schema is None else _moved(schema, "#/properties/output")
    parts: dict[str, Any] = {
        "instruction": {"type": "string", "minLength": 1},
        "input": {"type": "string"},
        "output": given,
    }
    return {
        "type": "object",
        "properties": {part: parts[part] for part in shape.parts},
        "required": list(shape.parts),
        "additionalProperties": False,
    }


def _moved(value: Any, place: str) -> Any:
    """A schema that stands inside another from now on: its references lead there."""
    if isinstance(value, list):
        return [_moved(one, place) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        key: place + one[1:] if key == "$ref" and isinstance(one, str) and one.startswith("#") else _moved(one, place)
        for key, one in value.items()
    }


def response_format(name: str, schema: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A schema as a request has it."""
    if schema is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": True}}


def document(text: str) -> Any:
    """JSON that a model wrote; ValueError where it is none, or holds what JSON does not have."""

    def none(word: str) -> Any:
        raise ValueError(word)

    value = json.loads(text, parse_constant=none)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number beyond all bounds")
    TEXT(value)  # allow_nan is off: 1e999 inside is refused
    return value
