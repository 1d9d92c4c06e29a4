"""JSON schemas that answers must follow: sent with each request, and checked again when the answer arrives.

The engine's grammar enforces the schema; the check is for engines that do not. Keywords outside `KEYWORDS` are refused
before anything runs, because not every engine supports them. References are resolved inside the file only.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from datetime import date, time
from functools import partial
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.exceptions import SchemaError, ValidationError
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from tokenmill.errors import UsageError
from tokenmill.recipes.expansion.seeds import Shape
from tokenmill.storage.json_text import compact_json, shown

_SUBSCHEMA = ("additionalProperties", "items")
_SUBSCHEMA_LIST = ("anyOf", "oneOf", "allOf", "prefixItems")
_SUBSCHEMA_MAP = ("properties", "$defs", "definitions")
_ANNOTATIONS = ("$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated")
_ASSERTIONS = (
    *("type", "enum", "const", "$ref", "required", "pattern", "format"),
    *("minLength", "maxLength", "minItems", "maxItems"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
)
KEYWORDS = frozenset((*_SUBSCHEMA, *_SUBSCHEMA_LIST, *_SUBSCHEMA_MAP, *_ASSERTIONS))
_DATE = "[0-9]{4}-[0-9]{2}-[0-9]{2}"
_TIME = "[0-9]{2}:[0-9]{2}:[0-9]{2}(?:[.][0-9]+)?(?:Z|[+-][0-9]{2}:[0-9]{2})"
_FORMATS = {
    "date": re.compile(_DATE),
    "time": re.compile(_TIME),
    "date-time": re.compile(f"{_DATE}T{_TIME}"),
    "uuid": re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"),
}
_LONGEST_REASON = 160  # characters; the library quotes the whole value
_FORMAT_CHECKER = FormatChecker(())


def read_schema(path: Path) -> dict[str, Any]:
    """Read a schema from a file; raises UsageError if it has an unsupported keyword or an unresolvable reference."""
    try:
        schema = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint="check the path and its permissions") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}", hint="--schema takes a file with a JSON schema") from error
    if not isinstance(schema, dict):
        raise UsageError(
            f"{path} is not a JSON schema: {shown(schema)}", hint='use an object such as {"type": "object", ...}'
        )
    hint = f"supported keywords: {', '.join(sorted(KEYWORDS))}"
    try:
        Draft202012Validator.check_schema(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
        for problem in _problems(schema, schema, "#"):
            raise UsageError(f"{path}: {problem}", hint=hint)
    except SchemaError as error:
        place = "/".join(("#", *map(str, error.absolute_path)))
        raise UsageError(f"{path}: {place}: {_shortened(error.message)}", hint=hint) from None
    except RecursionError:
        raise UsageError(f"{path} is nested too deeply", hint="use $defs and $ref instead") from None
    return schema


def _problems(schema: Any, root: Any, where: str) -> Iterator[str]:
    """Unsupported keywords and unresolvable references of a valid schema."""
    if isinstance(schema, bool):
        return
    for key in schema:
        if key not in KEYWORDS and key not in _ANNOTATIONS:
            yield f"{where}: the keyword {shown(key)} is not supported"
    ref = schema.get("$ref")
    if ref is not None and not _resolves(root, ref):
        yield f"{where}/$ref: {shown(ref)} is not defined in the file"
    for name, inner in _subschemas(schema):
        yield from _problems(inner, root, f"{where}/{name}")


def _subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in schema.items():
        if key in _SUBSCHEMA:
            yield key, value
        elif key in _SUBSCHEMA_LIST:
            yield from ((f"{key}/{index}", one) for index, one in enumerate(value))
        elif key in _SUBSCHEMA_MAP:
            yield from ((f"{key}/{name}", one) for name, one in value.items())


def _resolves(root: Any, ref: str) -> bool:
    try:
        registry = Registry().with_resource("", DRAFT202012.create_resource(root))
        return ref.startswith("#") and isinstance(registry.resolver().lookup(ref).contents, dict | bool)
    except Unresolvable:
        return False


def schema_error(schema: Mapping[str, Any] | bool, value: Any, where: str = "answer") -> str | None:
    """Why a value does not follow a schema; None: it does. Raises UsageError for a reference outside the schema."""
    # An empty registry keeps the validator from fetching references over the network.
    validator = Draft202012Validator(schema, registry=Registry(), format_checker=_FORMAT_CHECKER)
    try:
        error: ValidationError | None = next(validator.iter_errors(value), None)
    except RecursionError:  # by a nested value, or a schema that refers to itself
        return f"{where} is nested too deeply"
    except Unresolvable as unresolvable:
        raise UsageError(f"the schema refers to {shown(unresolvable.ref)}, which it does not define") from None
    if error is None:
        return None
    return f"{where}{error.json_path[1:]}: {_shortened(error.message)}"


def _shortened(reason: str) -> str:
    half = _LONGEST_REASON // 2
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[:half]} ... {reason[-half:]}"


def _has_format(name: str, text: object) -> bool:
    """Whether a text has the format; other values always have it."""
    if not isinstance(text, str):
        return True
    if not _FORMATS[name].fullmatch(text):
        return False
    day, clock = (text[:10], text[11:]) if name == "date-time" else (text, text)
    try:
        if name in ("date", "date-time"):
            date.fromisoformat(day)
        if name in ("time", "date-time"):
            time.fromisoformat(clock.replace("Z", "+00:00"))
    except ValueError:
        return False
    return True


for _name in _FORMATS:  # other formats are ignored, as the specification allows
    _FORMAT_CHECKER.checks(_name)(partial(_has_format, _name))


def answer_schema(shape: Shape, schema: dict[str, Any] | None) -> dict[str, Any] | None:
    """The schema of an answer; None for plain text."""
    if not shape.parts:
        return schema
    given: Mapping[str, Any] = (
        {"type": "string", "minLength": 1} if schema is None else _moved(schema, "#/properties/output")
    )
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
    """A schema to be embedded at `place` of another one: references are adjusted, `$id` is removed."""
    if isinstance(value, list):
        return [_moved(one, place) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        key: place + one[1:] if key == "$ref" and isinstance(one, str) and one.startswith("#") else _moved(one, place)
        for key, one in value.items()
        if not (key == "$id" and isinstance(one, str))
    }


def response_format(name: str, schema: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A schema as a `response_format`."""
    if schema is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": True}}


def document(text: str) -> Any:
    """Parse JSON that a model wrote; raises ValueError for invalid JSON, NaN and infinity."""

    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    value = json.loads(text, parse_constant=refuse)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("the number is infinite")
    compact_json(value)  # raises ValueError for infinities inside, such as 1e999
    return value
