"""JSON schemas made plain: references found, keys of all drafts in one form, and several schemas made one.

Plain here: only keys that change which documents are allowed; `type` is a tuple, `const` an `enum` of one, tuples are
`prefixItems`, exclusive bounds are numbers. What cannot be said that way is refused with its place.
"""

from collections.abc import Mapping
from decimal import Decimal
from itertools import product
from typing import Any, NoReturn
from urllib.parse import unquote

from tokenmill.errors import RequestRefused

Plain = dict[str, Any]
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
MOST_BRANCHES = 64  # that several anyOf together may make
_DEEPEST_REFS = 32
_MOST_STEPS = 20_000
MIXED = ("$ref", "allOf", "anyOf", "oneOf")
KEYS_OF = {
    "object": (
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "unevaluatedProperties",
    ),
    "array": (
        "items",
        "prefixItems",
        "minItems",
        "maxItems",
        "uniqueItems",
        "contains",
        "minContains",
        "maxContains",
        "unevaluatedItems",
    ),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "format"),
}
_EVERYWHERE = ("if", "not", "$dynamicRef", "$recursiveRef", "extends", "disallow", "divisibleBy")
ASSERTING = frozenset({*MIXED, "type", "enum", *_EVERYWHERE, *(key for keys in KEYS_OF.values() for key in keys)})
_NAMED = frozenset({"properties", "additionalProperties", "patternProperties", "propertyNames"})
_NO_BOUND = 2**30  # no answer is that long
_OF_NUMBERS = ("int32", "int64", "uint32", "uint64", "float", "double")
_HINT = "leave it out and check answers yourself, or send a GBNF grammar"


def refuse(path: str, why: str, hint: str = _HINT) -> NoReturn:
    """RequestRefused with the place in the schema."""
    raise RequestRefused(f"the JSON schema cannot be followed: {path}: {why}"[:400], hint=hint)


def plain(schema: Any, path: str) -> Plain | bool:
    """A schema's keys in one form; True where it allows everything."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        refuse(path, "a schema must be an object, true or false", "correct the schema")
    found: Plain = {key: value for key, value in schema.items() if key in ASSERTING}
    for key in _EVERYWHERE:
        if key in found and not (key == "if" and "then" not in schema and "else" not in schema):
            refuse(path, f"{key} is not supported")
        found.pop(key, None)
    if path != "#" and "$id" in schema:
        refuse(path, "$id inside of a schema is not supported")
    _check_shapes(found, path)
    if "const" in schema:
        found["enum"] = [one for one in found.get("enum", [schema["const"]]) if same(one, schema["const"])]
    if "type" in found:
        found["type"] = _types(found["type"], path)
    _older_drafts(found, schema, path)
    if schema.get("nullable") is True:
        _allow_null(found)
    return found or True


def _check_shapes(found: Plain, path: str) -> None:
    required = found.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        refuse(path, "required must be a list of names", "correct the schema")
    if not isinstance(found.get("enum", []), list):
        refuse(path, "enum must be a list", "correct the schema")
    if not isinstance(found.get("format", ""), str):
        refuse(path, "format must be a string", "correct the schema")


def _types(given: Any, path: str) -> tuple[str, ...]:
    types = given if isinstance(given, list) else [given]
    for one in types:
        if one not in TYPES:
            refuse(path, f"type {str(one)[:40]!r} is not known", f"types are {', '.join(TYPES)}")
    return tuple(one for one in dict.fromkeys(types) if not (one == "integer" and "number" in types))


def _older_drafts(found: Plain, schema: Mapping[str, Any], path: str) -> None:
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(found.get(exclusive), bool) and found.pop(exclusive) and bound in found:
            found[exclusive] = found.pop(bound)
    if isinstance(found.get("items"), list):
        if "prefixItems" in found:
            refuse(path, "items is a list beside prefixItems", "correct the schema")
        found["prefixItems"] = found.pop("items")
        if "additionalItems" in schema:
            found["items"] = schema["additionalItems"]


def _allow_null(found: Plain) -> None:
    """OpenAPI's `nullable`."""
    if "enum" in found:
        found["enum"] = [*found["enum"], *([] if None in found["enum"] else [None])]
    if "type" in found:
        found["type"] = tuple(dict.fromkeys((*found["type"], "null")))
    elif "enum" not in found:
        rest = dict(found)
        found.clear()
        if rest:
            found["anyOf"] = [rest, {"type": "null"}]


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal: 1 is 1.0, and not true."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def type_of(value: Any) -> str:
    """A JSON value's type; integers by their value."""
    for kind, name in ((bool, "boolean"), (str, "string"), (dict, "object"), (list, "array")):
        if isinstance(value, kind):
            return name
    if value is None:
        return "null"
    return "integer" if isinstance(value, int) or value == value.to_integral_value() else "number"


def of_type(value: Any, types: tuple[str, ...]) -> bool:
    """Whether a value has one of these types."""
    found = type_of(value)
    return found in types or (found == "integer" and "number" in types)


class Refs:
    """The whole schema, for what `$ref` points at."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps = 0

    def target(self, ref: Any, path: str) -> Any:
        """What a reference points at."""
        if not (isinstance(ref, str) and (ref == "#" or ref.startswith("#/"))):
            refuse(path, f"$ref {str(ref)[:80]!r} is not supported", 'references inside of the schema: "#/$defs/..."')
        here = self._root
        for step in ref.split("/")[1:]:
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(here, dict) and key in here:
                here = here[key]
            elif isinstance(here, list) and key.isdecimal() and int(key) < len(here):
                here = here[int(key)]
            else:
                refuse(path, f"$ref {ref[:80]!r} points at nothing", "correct the schema")
        return here

    def branches(self, schema: Any, path: str, seen: tuple[str, ...] = ()) -> list[Plain]:
        """Plain schemas without references and mixtures: what one of them allows is allowed."""
        self._steps += 1
        if self._steps > _MOST_STEPS:
            refuse(path, "too many schemas stand in one another", "use fewer allOf and anyOf")
        given = plain(schema, path)
        if isinstance(given, bool):
            return [{}] if given else []
        found: list[Plain] = [{key: value for key, value in given.items() if key not in MIXED}]
        if "$ref" in given:
            ref = given["$ref"]
            if ref in seen or len(seen) > _DEEPEST_REFS:
                refuse(path, f"$ref {str(ref)[:80]!r} leads back to itself", "correct the schema")
            found = _each(found, self.branches(self.target(ref, path), path, (*seen, ref)), path)
        for at, one in enumerate(members(given, "allOf", path)):
            found = _each(found, self.branches(one, f"{path}/allOf/{at}", seen), path)
        for key in ("anyOf", "oneOf"):
            if key in given:
                choices = members(given, key, path)
                if key == "oneOf":
                    self.check_apart(choices, path)
                each = [self.branches(one, f"{path}/{key}/{at}", seen) for at, one in enumerate(choices)]
                found = _each(found, [branch for branches in each for branch in branches], path)
        return found

    def check_apart(self, choices: list[Any], path: str) -> None:
        """Refuse a oneOf unless no document can be in two of its schemas."""
        each = [self.branches(one, f"{path}/oneOf/{at}") for at, one in enumerate(choices)]
        for at, ones in enumerate(each):
            for others in each[at + 1 :]:
                if not all(self._apart(one, other, path, 4) for one, other in product(ones, others)):
                    refuse(path, "oneOf whose schemas may overlap is not supported", "use anyOf")

    def _apart(self, one: Plain, other: Plain, path: str, depth: int) -> bool:
        if "enum" in one and "enum" in other:
            return not any(same(a, b) for a in one["enum"] for b in other["enum"])
        for this, that in ((one, other), (other, one)):
            if "enum" in this and "type" in that:
                return not any(of_type(value, that["type"]) for value in this["enum"])
        types = _all_types(one)
        others = _all_types(other)
        both = (types & others) | ({"number"} if "number" in types | others and types & others & {"integer"} else set())
        if not both:
            return True
        if both != {"object"} or depth == 0:
            return False
        shared = set(one.get("required", ())) & set(other.get("required", ()))
        return any(
            all(
                self._apart(a, b, path, depth - 1)
                for a, b in product(
                    self.branches(mapping(one, "properties", path).get(name, True), path),
                    self.branches(mapping(other, "properties", path).get(name, True), path),
                )
            )
            for name in shared
        )


def _all_types(schema: Plain) -> set[str]:
    types = set(schema.get("type", TYPES))
    return types | {"integer"} if "number" in types else types


def members(schema: Plain, key: str, path: str) -> list[Any]:
    """The schemas of allOf, anyOf or oneOf."""
    found = schema.get(key, [])
    if not isinstance(found, list) or (key in schema and not found):
        refuse(path, f"{key} must be a list of schemas", "correct the schema")
    return found


def _each(ones: list[Plain], others: list[Plain], path: str) -> list[Plain]:
    if len(ones) * len(others) > MOST_BRANCHES:
        refuse(path, f"more than {MOST_BRANCHES} combinations of anyOf", "split the schema")
    return [merged(one, other, path) for one, other in product(ones, others)]


def merged(one: Plain, other: Plain, path: str) -> Plain:
    """A schema that allows what both allow; both plain and without mixtures."""
    types = _both_types(one.get("type", TYPES), other.get("type", TYPES))
    one = _only(one, types)
    other = _only(other, types)
    found = {**one, **other}
    for key in one.keys() & other.keys():
        a = one[key]
        b = other[key]
        if key == "type":
            found[key] = _both_types(a, b)
        elif key == "enum":
            found[key] = [value for value in a if any(same(value, each) for each in b)]
        elif key == "required":
            found[key] = list(dict.fromkeys([*a, *b]))
        elif key in ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"):
            found[key] = max(number(a, key, path), number(b, key, path))
        elif key in ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"):
            found[key] = min(number(a, key, path), number(b, key, path))
        elif key in ("items", "additionalProperties", "propertyNames"):
            found[key] = _both(a, b)
        elif key not in ("properties", "prefixItems") and not same(a, b):
            refuse(path, f"two schemas with different {key} cannot be made one")
    if "patternProperties" in found and all(_NAMED & each.keys() for each in (one, other)):
        refuse(path, "patternProperties of two schemas cannot be made one")
    if "properties" in found:
        found["properties"] = _properties(one, other, path)
    if "prefixItems" in found:
        found["prefixItems"] = _prefix(one, other, path)
    return found


def _only(schema: Plain, types: tuple[str, ...]) -> Plain:
    """A schema without keys of types that it can no longer have."""
    kinds = {"number" if name == "integer" else name for name in types}
    kept = {key for kind in kinds for key in KEYS_OF.get(kind, ())}
    gone = {key for keys in KEYS_OF.values() for key in keys} - kept
    return {key: value for key, value in schema.items() if key not in gone}


def _prefix(one: Plain, other: Plain, path: str) -> list[Any]:
    """Items by their places, each as both schemas want it."""
    sides = [(listed(schema, path), schema.get("items", True)) for schema in (one, other)]
    longest = max(len(prefix) for prefix, _ in sides)
    return [_both(*(prefix[at] if at < len(prefix) else rest for prefix, rest in sides)) for at in range(longest)]


def _both_types(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    wide = [set(types) | ({"integer"} if "number" in types else set()) for types in (one, other)]
    both = wide[0] & wide[1]
    return tuple(name for name in TYPES if name in both and not (name == "integer" and "number" in both))


def _both(one: Any, other: Any) -> Any:
    if one is False or other is False:
        return False
    if one is True or one == {}:
        return other
    return one if other in (True, {}, one) else {"allOf": [one, other]}


def _properties(one: Plain, other: Plain, path: str) -> dict[str, Any]:
    """Each schema's own properties must also be what the other says of further ones."""
    found: dict[str, Any] = {}
    mine, theirs = (mapping(schema, "properties", path) for schema in (one, other))
    for name in {**mine, **theirs}:
        sides = (
            mine.get(name, one.get("additionalProperties", True)),
            theirs.get(name, other.get("additionalProperties", True)),
        )
        found[name] = _both(*sides)
    return found


def mapping(schema: Plain, key: str, path: str) -> dict[str, Any]:
    """A key's schemas by their names."""
    found = schema.get(key, {})
    if not isinstance(found, dict):
        refuse(path, f"{key} must be an object", "correct the schema")
    return found


def listed(schema: Plain, path: str) -> list[Any]:
    """The schemas of prefixItems."""
    found = schema.get("prefixItems", [])
    if not isinstance(found, list):
        refuse(path, "prefixItems must be a list", "correct the schema")
    return found


def number(value: Any, key: str, path: str) -> Decimal:
    """A key's number."""
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        refuse(path, f"{key} must be a number", "correct the schema")
    return Decimal(value)


def count(schema: Plain, key: str, path: str) -> int | None:
    """A key's whole number, 0 or more; None where it binds no answer."""
    if key not in schema:
        return None
    value = number(schema[key], key, path)
    if value < 0 or value != value.to_integral_value():
        refuse(path, f"{key} must be a whole number", "correct the schema")
    if value < _NO_BOUND:
        return int(value)
    if key.startswith("min"):
        refuse(path, f"{key} is more than any answer has", "use a smaller bound")
    return None


def is_of_numbers(form: Any) -> bool:
    """Whether a format speaks of numbers."""
    return form in _OF_NUMBERS
