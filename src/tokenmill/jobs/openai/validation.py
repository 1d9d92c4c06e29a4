"""Validates JSON objects with msgspec models; errors name the key, the value and the expected type."""

import difflib
import re
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, TypeVar, get_args

import msgspec

from tokenmill.errors import RequestRefused
from tokenmill.storage.json_text import shown

M = TypeVar("M", bound=msgspec.Struct)
_EXPECTED = re.compile(r"`([a-z |]+)`")
_STEP = re.compile(r"\[(\d+)\]|\.?(\w+)|(.+)")
_KINDS = {
    "float": "a number",
    "int": "an integer",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
_NO_HINTS: Mapping[str, str] = MappingProxyType({})


def validate(
    model: type[M],
    body: Mapping[str, Any],
    hints: Mapping[str, str] = _NO_HINTS,
    *,
    code: str = RequestRefused.code,
    missing_code: str = RequestRefused.code,
) -> M:
    """Convert a body to a model. Raises RequestRefused, whose `param` is the invalid key.

    Floats such as 2.0 are accepted as integers, because many clients send them. `hints` are by key.
    """
    try:
        return msgspec.convert(body, model)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        reason: Exception = error
    if any(map(_is_whole, body.values())):
        try:
            return msgspec.convert(_with_integers(model, body), model)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            reason = error
    unknown = next((name for name in body if name not in model.__struct_fields__), None)
    if unknown is not None:
        hint = _nearest(model, str(unknown)) or hints.get(str(unknown)) or "remove it; unknown keys are not ignored"
        raise RequestRefused(f"unknown key {shown(unknown)}", param=unknown, hint=hint, code="unknown_parameter")
    if isinstance(reason, UnicodeEncodeError):
        raise RequestRefused("unpaired surrogate (\\ud800 to \\udfff)")
    text, path, missing = _explained(str(reason), body)
    param = re.split(r"[.\[]", path)[0]
    raise RequestRefused(text, param=param, hint=hints.get(param), code=missing_code if missing else code)


def number_type(annotation: Any) -> type[int] | type[float] | None:
    """The number type, `int` or `float`, that an annotation describes, possibly optional or with limits; else None."""
    if annotation in (int, float):
        return annotation  # type: ignore[no-any-return]
    return next(filter(None, map(number_type, get_args(annotation))), None)


def _is_whole(value: Any) -> bool:
    return type(value) is float and value.is_integer()


def _with_integers(model: type[msgspec.Struct], body: Mapping[str, Any]) -> Mapping[str, Any]:
    integers = {field.name for field in msgspec.structs.fields(model) if number_type(field.type) is int}
    return {name: int(value) if _is_whole(value) and name in integers else value for name, value in body.items()}


def _explained(error: str, body: Mapping[str, Any]) -> tuple[str, str, bool]:
    """The error message, the path of the value, and whether the value is missing."""
    what, _, where = error.rpartition(" - at ")
    if not what:
        what, where = where, ""
    path = where.rpartition("`$")[2].strip("`.")
    if what.startswith("Object missing required field"):
        path = f"{path}.{what.split('`')[1]}".lstrip(".")
        return f"{path} is missing", path, "." not in path
    if what.startswith("Object contains unknown field"):
        return f"{path} has the unknown key {shown(what.partition('`')[2][:-1])}", path, False
    if what.startswith("Expected "):
        expected = _EXPECTED.sub(_kinds, what.partition(", got ")[0].removeprefix("Expected "))
        subject = f"{path}: a key" if where.startswith("`key`") else f"{path}:"
        return f"{subject} must be {expected}, not {shown(_at(body, path))}", path, False
    if what.startswith("Invalid "):
        return f"{path}: {shown(_at(body, path))} is not supported", path, False
    return f"{path} {what}", path, False


def _kinds(found: re.Match[str]) -> str:
    names = [name for name in found[1].split(" | ") if name != "null"]
    return " or ".join(_KINDS.get(name, name) for name in names)


def _at(body: Any, path: str) -> Any:
    """The value at a path such as messages[0].role; for values of a dict, which have no path, the dict."""
    for index, name, other in _STEP.findall(path):
        if other:
            break
        body = body[int(index)] if index else body.get(name)
    return body


@lru_cache(4096)  # a file with a wrong key has it on every line
def _nearest(model: type[msgspec.Struct], key: str) -> str | None:
    near = difflib.get_close_matches(key[:80], model.__struct_fields__, n=1)
    return f"did you mean {near[0]!r}?" if near else None
