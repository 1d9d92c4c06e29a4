"""A tiny checker of documents against JSON schemas, for tests: says no to keys it does not know."""

import re
from decimal import Decimal
from typing import Any

TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float, Decimal),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}
KNOWN = {
    "type",
    "enum",
    "const",
    "anyOf",
    "oneOf",
    "allOf",
    "$ref",
    "$defs",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "prefixItems",
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "pattern",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "description",
}


def satisfies(schema: Any, value: Any, root: Any = None) -> bool:
    """Whether a document is one of a schema's."""
    if isinstance(schema, bool):
        return schema
    root = schema if root is None else root
    assert set(schema) <= KNOWN, set(schema) - KNOWN
    if "$ref" in schema and not satisfies(_target(root, schema["$ref"]), value, root):
        return False
    if "enum" in schema and not any(_same(one, value) for one in schema["enum"]):
        return False
    if "const" in schema and not _same(schema["const"], value):
        return False
    kinds = schema.get("type", list(TYPES))
    if not any(_is(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        return False
    if "anyOf" in schema and not any(satisfies(one, value, root) for one in schema["anyOf"]):
        return False
    if "oneOf" in schema and sum(satisfies(one, value, root) for one in schema["oneOf"]) != 1:
        return False
    if not all(satisfies(one, value, root) for one in schema.get("allOf", ())):
        return False
    if isinstance(value, dict):
        return _object(schema, value, root)
    if isinstance(value, list):
        return _array(schema, value, root)
    return _text(schema, value) if isinstance(value, str) else _number(schema, value)


def _target(root: Any, ref: str) -> Any:
    for step in ref.split("/")[1:]:
        root = root[step]
    return root


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _object(schema: Any, value: dict[str, Any], root: Any) -> bool:
    known = schema.get("properties", {})
    further = schema.get("additionalProperties", True)
    return set(schema.get("required", ())) <= set(value) and all(
        satisfies(known.get(name, further), one, root) for name, one in value.items()
    )


def _array(schema: Any, value: list[Any], root: Any) -> bool:
    prefix = schema.get("prefixItems", [])
    return schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)) and all(
        satisfies(prefix[at] if at < len(prefix) else schema.get("items", True), one, root)
        for at, one in enumerate(value)
    )


def _text(schema: Any, value: str) -> bool:
    value.encode()  # no half of a surrogate pair
    return schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)) and (
        re.search(schema.get("pattern", ""), value, re.ASCII) is not None
    )


def _number(schema: Any, value: Any) -> bool:
    if value is None or isinstance(value, bool):
        return True
    return bool(
        schema.get("minimum", value) <= value <= schema.get("maximum", value)
        and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
        and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
    )
