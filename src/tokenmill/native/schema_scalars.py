"""Strings, numbers and listed values of JSON schemas as grammars."""

import math
from decimal import Decimal
from typing import Any

from tokenmill.native.gbnf import Node, Rules
from tokenmill.native.gbnf_numbers import MOST_DIGITS, integers, numbers
from tokenmill.native.gbnf_pattern import Unsupported, string_like
from tokenmill.native.gbnf_strings import string
from tokenmill.native.schema_merge import (
    KEYS_OF,
    Plain,
    count,
    is_of_numbers,
    number,
    of_type,
    refuse,
    type_of,
)

_DATE = (
    r"(\d{4}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
    r"|(\d\d(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)"
)
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_LABEL = r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,30}[a-zA-Z0-9])?"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,5}}",
    "email": rf"[a-zA-Z0-9_+-]{{1,30}}(\.[a-zA-Z0-9_+-]{{1,20}}){{0,3}}@{_LABEL}(\.{_LABEL}){{1,4}}",
}
_SIZES = ("minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_INTEGERS = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
}


def string_of(rules: Rules, schema: Plain, path: str) -> Node:
    """A string with its quotes."""
    least = count(schema, "minLength", path) or 0
    most = count(schema, "maxLength", path)
    pattern = schema.get("pattern")
    form = schema.get("format")
    if is_of_numbers(form):
        form = None
    if form is not None:
        if form not in FORMATS:
            refuse(path, f"format {str(form)[:40]!r} is not supported", f"{', '.join(FORMATS)} are")
        if pattern is not None:
            refuse(path, "pattern beside format is not supported", "leave one of them out")
        pattern = f"^({FORMATS[form]})$"
    if pattern is None:
        return string(rules, least, most)
    if not isinstance(pattern, str):
        refuse(path, "pattern must be a string", "correct the schema")
    try:
        return string_like(rules, pattern, least, most)
    except Unsupported as error:
        hint = "anchors at the ends, classes, groups, | and counts are supported"
        refuse(path, f"pattern {pattern[:60]!r} has {error}", hint)


def _bounds(schema: Plain, path: str) -> tuple[Decimal | None, bool, Decimal | None, bool]:
    """Least, whether more than it, most, whether less than it."""
    found: dict[str, Decimal] = {}
    for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        if key in schema:
            value = found[key] = number(schema[key], key, path)
            if max(abs(value.adjusted()), len(value.as_tuple().digits)) > MOST_DIGITS:
                refuse(path, f"{key} has more than {MOST_DIGITS} digits", "use a smaller bound, or none")
    low = found.get("minimum")
    above = found.get("exclusiveMinimum")
    high = found.get("maximum")
    below = found.get("exclusiveMaximum")
    more = above is not None and (low is None or above >= low)
    less = below is not None and (high is None or below <= high)
    return above if more else low, more, below if less else high, less


def integer_of(rules: Rules, schema: Plain, path: str) -> Node:
    """An integer."""
    if number(schema.get("multipleOf", 1), "multipleOf", path) != 1:
        refuse(path, "multipleOf is not supported")
    low, above, high, below = _bounds(schema, path)
    least = None if low is None else math.floor(low) + 1 if above else math.ceil(low)
    most = None if high is None else math.ceil(high) - 1 if below else math.floor(high)
    form = schema.get("format")
    if form in _INTEGERS:
        first, last = _INTEGERS[form]
        least = max(first, first if least is None else least)
        most = min(last, last if most is None else most)
    return rules.add("integer", integers(least, most))


def number_of(rules: Rules, schema: Plain, path: str) -> Node:
    """A number."""
    if "multipleOf" in schema or schema.get("format") in _INTEGERS:
        return integer_of(rules, schema, path)
    low, above, high, below = _bounds(schema, path)
    return rules.add("number", numbers(low, high, above=above, below=below))


def _fits(value: Any, schema: Plain, path: str) -> bool:
    """Whether a listed value is within the bounds that stand beside the list."""
    if isinstance(value, str):
        least = count(schema, "minLength", path) or 0
        most = count(schema, "maxLength", path)
        return least <= len(value) and (most is None or len(value) <= most)
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        return True
    low, above, high, below = _bounds(schema, path)
    return (low is None or value > low or (value == low and not above)) and (
        high is None or value < high or (value == high and not below)
    )


def allowed_values(schema: Plain, path: str) -> list[Any]:
    """The values of an enum that the keys beside it allow."""
    values = [one for one in schema["enum"] if "type" not in schema or of_type(one, schema["type"])]
    for kind in dict.fromkeys(map(type_of, values)):
        keys = KEYS_OF.get("number" if kind == "integer" else kind, ())
        if key := next((key for key in keys if key in schema and key not in _SIZES), None):
            refuse(path, f"{key} beside enum or const is not supported", "list only the values that are allowed")
    return [one for one in values if _fits(one, schema, path)]
