"""Limits on the counts in a JSON schema, checked before any engine compiles it.

Engines unroll `minItems` and `maxItems` into grammar rules, so `"maxItems": 2147483647`, which schema generators write
for "no limit", exhausts memory. Upper bounds that no answer can reach are removed; other counts above the limits are
refused. Entry point: `bounded`, which does not check whether a schema is valid.
"""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from tokenmill.errors import RequestRefused

MAX_ITEMS = 10_000
"""Maximum `minItems`, `maxItems`, `minContains` and `maxContains` that is compiled."""
CONTEXT_TOKENS = 1 << 20
"""Assumed context of an engine that does not report one."""
CHARACTERS_PER_TOKEN = 256
"""Upper bound for the length of a token."""

_UNROLLED = frozenset({"Items", "Contains"})
_COUNTS = {f"{bound}{what}": (bound, what) for bound in ("min", "max") for what in ("Items", "Contains", "Properties")}
_LENGTHS = {"minLength": ("min", "Length"), "maxLength": ("max", "Length")}
_BOUNDS = _COUNTS | _LENGTHS
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
_DATA = frozenset({"const", "enum", "default", "example", "examples"})


def bounded(schema: Any, context_tokens: int | None = None) -> Any:
    """Return a copy of the schema without upper bounds that an answer of `context_tokens` tokens cannot reach.

    Raises RequestRefused for a lower bound that such an answer cannot reach, and for item counts above MAX_ITEMS.
    """
    try:
        return _schema(schema, "#", context_tokens or CONTEXT_TOKENS)
    except RecursionError as error:
        raise RequestRefused("the JSON schema is nested too deeply", hint="move inner schemas to $defs") from error


def _schema(schema: Any, path: str, context_tokens: int) -> Any:
    if isinstance(schema, list):
        return [_schema(each, f"{path}/{index}", context_tokens) for index, each in enumerate(schema)]
    if not isinstance(schema, Mapping):
        return schema
    copy: dict[str, Any] = {}
    for key, value in schema.items():
        here = f"{path}/{key}"
        if key in _NAMED and isinstance(value, Mapping):
            copy[key] = {name: _schema(each, f"{here}/{name}", context_tokens) for name, each in value.items()}
        elif key in _DATA:
            copy[key] = value
        elif key not in _BOUNDS or isinstance(value, bool) or not isinstance(value, int | float | Decimal):
            copy[key] = _schema(value, here, context_tokens)
        elif _is_reachable(key, value, here, context_tokens):
            copy[key] = value
    return copy


def _is_reachable(key: str, value: float | Decimal, path: str, context_tokens: int) -> bool:
    """Whether an answer can reach a bound; RequestRefused for a bound that cannot be compiled or met."""
    bound, what = _BOUNDS[key]
    limit = context_tokens * (CHARACTERS_PER_TOKEN if what == "Length" else 1)
    if value > limit:
        if bound == "max":
            return False
        raise RequestRefused(
            f"JSON schema {path}: {value} cannot be reached in a context of {context_tokens} tokens",
            hint=f"use a smaller {key}",
        )
    if what in _UNROLLED and value > MAX_ITEMS:
        hint = f"use at most {MAX_ITEMS}, or omit {key}"
        raise RequestRefused(f"JSON schema {path}: {value} is above the limit of {MAX_ITEMS}", hint=hint)
    return True
