"""JSON schemas as GBNF grammars, for libraries of llama.cpp that do not hold llguidance.

Every document the grammar allows is one the schema allows; what cannot be said is refused with its place. Narrower
than the schema, so that no answer wanders on for ever:

    blanks       none or one space, or a new line with at most 40 spaces or 10 tabs, around brackets and after a comma;
                 at most one space after a colon; nothing before or after the document
    properties   in the order of the schema; further ones (unless additionalProperties is false) after them
    numbers      20 digits, 16 decimals, an exponent of two digits; none where there is a minimum or a maximum
    no type      the types that the other keys speak of
"""

import json
import math
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache
from typing import Any

from tokenmill.engine.native.gbnf import EMPTY, NEVER, Endless, Lit, Node, Ref, Rep, Rules, TooLarge, alt, seq
from tokenmill.engine.native.gbnf_numbers import MOST_DIGITS, integers, numbers
from tokenmill.engine.native.gbnf_pattern import Unsupported, string_like
from tokenmill.engine.native.gbnf_strings import none_of, one_of, string
from tokenmill.engine.native.grammar import MOST_SCHEMA_BYTES, check_size
from tokenmill.engine.native.schema_merge import (
    KEYS_OF,
    MIXED,
    Plain,
    Refs,
    count,
    is_of_numbers,
    mapping,
    members,
    number,
    of_type,
    plain,
    refuse,
    type_of,
)  # fmt: skip
from tokenmill.errors import RequestRefused

DEEPEST = 60
MOST_SCHEMAS = 20_000
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
_INTEGERS = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1), "uint32": (0, 2**32 - 1),
             "uint64": (0, 2**64 - 1)}  # fmt: skip


@lru_cache(maxsize=64)
def gbnf_of(schema: str) -> str:
    """The grammar of documents that a schema allows; RequestRefused for what cannot be followed."""
    if len(schema) > MOST_SCHEMA_BYTES:
        raise RequestRefused(
            f"a JSON schema of {len(schema)} characters is too long", hint=f"{MOST_SCHEMA_BYTES} are allowed"
        )
    try:
        root = json.loads(schema, parse_float=Decimal, parse_constant=_no_number)
        text = _Grammar(root).text()
        text.encode()
    except json.JSONDecodeError as error:
        raise RequestRefused(f"the JSON schema is no JSON: {error}") from error
    except RecursionError as error:
        raise RequestRefused("the JSON schema is too deep", hint="use $defs") from error
    except UnicodeEncodeError as error:
        raise RequestRefused("the JSON schema holds half of a surrogate pair", hint="send valid UTF-8") from error
    except TooLarge as error:
        raise RequestRefused(
            f"the JSON schema makes too large a grammar: {error}", hint="use smaller bounds"
        ) from error
    check_size(text)
    return text


def _no_number(word: str) -> Any:
    raise RequestRefused(f"the JSON schema is no JSON: {word} is no number")


class _Grammar:
    """One schema's rules."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._refs = Refs(root)
        self._rules = rules = Rules()
        self._known: dict[str, Ref] = {}
        self._paths: dict[str, str] = {}
        indent = seq(Lit("\n"), alt((Rep(Lit(" "), 0, 40), Rep(Lit("\t"), 1, 10))))
        self._blank = rules.add("blank", alt((EMPTY, Lit(" "), indent)))
        self._colon = seq(Lit(":"), Rep(Lit(" "), 0, 1))
        self._comma = seq(Lit(","), self._blank)
        self._any: Ref | None = None
        self._visits = 0

    def text(self) -> str:
        """The grammar."""
        root = self._node(self._root, "#", 0)
        if root == NEVER:
            refuse("#", "it allows no document at all", "correct the schema")
        try:
            return self._rules.text(root)
        except Endless as error:
            path = next((self._paths[name] for name in error.args if name in self._paths), "#")
            refuse(path, "no document of this can end, or it leads back to itself", "make one of its parts optional")

    # ---- mixtures

    def _node(self, schema: Any, path: str, depth: int) -> Node:
        if depth > DEEPEST:
            refuse(path[:60] + "...", f"schemas more than {DEEPEST} deep are not supported", "use $defs")
        self._visits += 1
        if self._visits > MOST_SCHEMAS:
            raise TooLarge(f"more than {MOST_SCHEMAS} schemas in it")
        given = plain(schema, path)
        if isinstance(given, bool):
            return self._anything() if given else NEVER
        if len(given) == 1:
            ((key, value),) = given.items()
            if key == "$ref":
                return self._referred(value, path, depth)
            if key == "allOf" and len(members(given, key, path)) == 1:
                return self._node(value[0], f"{path}/allOf/0", depth + 1)
            if key in ("anyOf", "oneOf"):
                choices = members(given, key, path)
                if key == "oneOf":
                    self._refs.check_apart(choices, path)
                return alt([self._node(one, f"{path}/{key}/{at}", depth + 1) for at, one in enumerate(choices)])
        if any(key in given for key in MIXED):
            return self._mixed(schema, path, depth)
        return self._plain(given, path, depth)

    def _mixed(self, schema: Any, path: str, depth: int) -> Node:
        """Several schemas at once; the same ones again, perhaps inside of themselves, are one rule."""
        key = json.dumps(schema, default=str)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._rules.reserve("mix")
            self._paths[found.name] = path
            node = alt([self._plain(one, path, depth) for one in self._refs.branches(schema, path)])
            self._rules.tell(found, node)
        return found

    def _referred(self, ref: Any, path: str, depth: int) -> Node:
        target = self._refs.target(ref, path)
        found = self._known.get(ref)
        if found is None:
            found = self._known[ref] = self._rules.reserve("def")
            self._paths[found.name] = ref
            node = self._node(target, ref, depth + 1)
            self._rules.tell(found, node)
        return found

    def _plain(self, schema: Plain, path: str, depth: int) -> Node:
        if "enum" in schema:
            return self._enum(schema, path)
        types = schema.get("type")
        if types is None:
            types = tuple(name for name, keys in KEYS_OF.items() if any(key in schema for key in keys))
            if "format" in schema and {"string", "number"} <= set(types):
                types = tuple(name for name in types if (name == "number") == is_of_numbers(schema["format"]))
            if not types:
                return self._anything()
        makers: dict[str, Callable[[Plain, str, int], Node]] = {
            "object": self._object, "array": self._array, "string": self._string, "number": self._number,
            "integer": self._integer, "boolean": lambda *_: alt((Lit("true"), Lit("false"))),
            "null": lambda *_: Lit("null"),
        }  # fmt: skip
        try:
            return alt([makers[name](schema, path, depth) for name in types])
        except TooLarge as error:
            refuse(path, f"{error} are too many for llama.cpp's grammars", "use smaller bounds, or none")

    def _anything(self) -> Node:
        if self._any is None:
            self._any = self._rules.reserve("value")
            kinds = [self._plain({"type": (name,)}, "#", 0) for name in ("object", "array", "string", "number")]
            words = (Lit("true"), Lit("false"), Lit("null"))
            self._rules.tell(self._any, alt([*kinds, *words]))
        return self._any

    # ---- values

    def _enum(self, schema: Plain, path: str) -> Node:
        values = [one for one in schema["enum"] if "type" not in schema or of_type(one, schema["type"])]
        for kind in dict.fromkeys(map(type_of, values)):
            keys = KEYS_OF.get("number" if kind == "integer" else kind, ())
            if key := next((key for key in keys if key in schema and key not in _SIZES), None):
                refuse(path, f"{key} beside enum or const is not supported", "list only the values that are allowed")
        values = [one for one in values if self._fits(one, schema, path)]
        simple = [_dumped(one) for one in values if not isinstance(one, dict | list)]
        return alt([one_of(self._rules, simple), *(self._const(one) for one in values if isinstance(one, dict | list))])

    def _fits(self, value: Any, schema: Plain, path: str) -> bool:
        """Whether a listed value is within the bounds that stand beside the list."""
        if isinstance(value, str):
            least, most = count(schema, "minLength", path) or 0, count(schema, "maxLength", path)
            return least <= len(value) and (most is None or len(value) <= most)
        if isinstance(value, bool) or not isinstance(value, int | Decimal):
            return True
        low, above, high, below = self._bounds(schema, path)
        return (low is None or value > low or (value == low and not above)) and (
            high is None or value < high or (value == high and not below)
        )

    def _const(self, value: Any) -> Node:
        if isinstance(value, dict):
            parts = [seq(Lit(_dumped(name)), self._colon, self._const(one)) for name, one in value.items()]
            return self._enclosed("{", parts, "}")
        if isinstance(value, list):
            return self._enclosed("[", [self._const(one) for one in value], "]")
        return Lit(_dumped(value))

    def _enclosed(self, begin: str, parts: list[Node], end: str) -> Node:
        inner = [node for part in parts for node in (self._comma, part)][1:]
        return seq(Lit(begin), self._blank, *inner, *([self._blank] if parts else []), Lit(end))

    def _string(self, schema: Plain, path: str, _depth: int) -> Node:
        least, most = count(schema, "minLength", path) or 0, count(schema, "maxLength", path)
        pattern, form = schema.get("pattern"), schema.get("format")
        if is_of_numbers(form):
            form = None
        if form is not None:
            if form not in FORMATS:
                refuse(path, f"format {str(form)[:40]!r} is not supported", f"{', '.join(FORMATS)} are")
            if pattern is not None:
                refuse(path, "pattern beside format is not supported", "leave one of them out")
            pattern = f"^({FORMATS[form]})$"
        if pattern is None:
            return string(self._rules, least, most)
        if not isinstance(pattern, str):
            refuse(path, "pattern must be a string", "correct the schema")
        try:
            return string_like(self._rules, pattern, least, most)
        except Unsupported as error:
            hint = "anchors at the ends, classes, groups, | and counts are supported"
            refuse(path, f"pattern {pattern[:60]!r} has {error}", hint)

    def _bounds(self, schema: Plain, path: str) -> tuple[Decimal | None, bool, Decimal | None, bool]:
        """Least, whether more than it, most, whether less than it."""
        found: dict[str, Decimal] = {}
        for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
            if key in schema:
                value = found[key] = number(schema[key], key, path)
                if max(abs(value.adjusted()), len(value.as_tuple().digits)) > MOST_DIGITS:
                    refuse(path, f"{key} has more than {MOST_DIGITS} digits", "use a smaller bound, or none")
        low, above = found.get("minimum"), found.get("exclusiveMinimum")
        high, below = found.get("maximum"), found.get("exclusiveMaximum")
        more, less = (
            above is not None and (low is None or above >= low),
            below is not None and (high is None or below <= high),
        )
        return above if more else low, more, below if less else high, less

    def _integer(self, schema: Plain, path: str, _depth: int) -> Node:
        if number(schema.get("multipleOf", 1), "multipleOf", path) != 1:
            refuse(path, "multipleOf is not supported")
        low, above, high, below = self._bounds(schema, path)
        least = None if low is None else math.floor(low) + 1 if above else math.ceil(low)
        most = None if high is None else math.ceil(high) - 1 if below else math.floor(high)
        form = schema.get("format")
        if form in _INTEGERS:
            first, last = _INTEGERS[form]
            least, most = max(first, first if least is None else least), min(last, last if most is None else most)
        return self._rules.add("integer", integers(least, most))

    def _number(self, schema: Plain, path: str, depth: int) -> Node:
        if "multipleOf" in schema or schema.get("format") in _INTEGERS:
            return self._integer(schema, path, depth)
        low, above, high, below = self._bounds(schema, path)
        return self._rules.add("number", numbers(low, high, above=above, below=below))

    # ---- containers

    def _array(self, schema: Plain, path: str, depth: int) -> Node:
        for key in ("contains", "unevaluatedItems"):
            if key in schema:
                refuse(path, f"{key} is not supported")
        least, most = count(schema, "minItems", path) or 0, count(schema, "maxItems", path)
        if schema.get("uniqueItems") not in (None, False) and (most is None or most > 1):
            refuse(path, "uniqueItems is not supported")
        given = schema.get("prefixItems", [])
        if not isinstance(given, list):
            refuse(path, "prefixItems must be a list", "correct the schema")
        prefix = [
            self._node(one, f"{path}/prefixItems/{at}", depth + 1)
            for at, one in enumerate(given)
            if most is None or at < most
        ]
        rest: Node = NEVER
        if most is None or most > len(prefix):
            rest = self._node(schema.get("items", True), f"{path}/items", depth + 1)
        if NEVER in prefix:
            prefix, rest = prefix[: prefix.index(NEVER)], NEVER
        if rest == NEVER:
            most = len(prefix) if most is None else min(most, len(prefix))
        if most is not None and most < least:
            return NEVER
        close = seq(self._blank, Lit("]"))
        if not prefix and rest != NEVER:
            prefix = [rest]
        written = len(prefix)
        more = self._rules.repeat(
            seq(self._comma, rest), max(0, least - written), None if most is None else most - written
        )
        tail = seq(more, close)
        for at in range(written - 1, -1, -1):  # `tail` follows the element `at`
            begun = seq(prefix[at], tail) if at == 0 else seq(self._comma, prefix[at], tail)
            done = Lit("]") if at == 0 else close
            tail = self._rules.add("rest", alt((begun, done if least <= at else NEVER)))
        return self._rules.add("array", seq(Lit("["), self._blank, tail if written else Lit("]")))

    def _object(self, schema: Plain, path: str, depth: int) -> Node:
        for key in ("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"):
            if schema.get(key):
                refuse(path, f"{key} is not supported")
            if schema.get(key) is False:
                refuse(path, f"{key} is not supported", "additionalProperties: false is")
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            refuse(path, "required must be a list of names", "correct the schema")
        properties = dict(mapping(schema, "properties", path))
        key_node, further, at = self._further(schema, path, depth)
        for name in required:
            if name not in properties:
                if "propertyNames" in schema or "patternProperties" in schema:
                    refuse(path, f"required {name[:60]!r} is not in properties", "name it there")
                properties[name] = further
        parts: list[tuple[Node, bool]] = []
        for name, one in properties.items():
            where = f"{path}/properties/{name}"
            value = self._node(one, where, depth + 1)
            if value == NEVER and name in required:
                return NEVER
            if value != NEVER:
                parts.append((seq(Lit(_dumped(name)), self._colon, value), name in required))
        extra: Node = NEVER
        if further is not False and key_node != NEVER:
            value = self._node(further, at, depth + 1)
            extra = NEVER if value == NEVER else self._extra(key_node, properties, value, path)
        return self._members(schema, parts, extra, path)

    def _further(self, schema: Plain, path: str, depth: int) -> tuple[Node | None, Any, str]:
        """Names (None: any) and the schema of properties that are not listed, and where it stands."""
        patterns, further = mapping(schema, "patternProperties", path), schema.get("additionalProperties", True)
        listed = bool(mapping(schema, "properties", path))
        if patterns:
            if listed or further is not False or len(patterns) > 1 or "propertyNames" in schema:
                refuse(
                    path, "patternProperties beside other properties is not supported",
                    "one pattern with additionalProperties: false is",
                )  # fmt: skip
            ((pattern, value),) = patterns.items()
            names = self._string({"pattern": pattern}, f"{path}/patternProperties", depth)
            return names, value, f"{path}/patternProperties/{pattern}"
        if "propertyNames" in schema:
            if listed:
                refuse(path, "propertyNames beside properties is not supported")
            branches = self._refs.branches(
                {"allOf": [schema["propertyNames"], {"type": "string"}]}, f"{path}/propertyNames"
            )
            names = alt([self._plain(one, f"{path}/propertyNames", depth) for one in branches])
            return names, further, f"{path}/additionalProperties"
        return None, further, f"{path}/additionalProperties"

    def _extra(self, names: Node | None, properties: dict[str, Any], value: Node, path: str) -> Node:
        if names is None:
            try:
                names = none_of(self._rules, properties)
            except ValueError as error:
                if isinstance(error, TooLarge):
                    raise
                refuse(path, f"{error} beside additionalProperties", "set additionalProperties to false")
        return self._rules.add("more", seq(names, self._colon, value))

    def _members(self, schema: Plain, parts: list[tuple[Node, bool]], extra: Node, path: str) -> Node:
        """An object of these, in this order: `after` follows a member, `first` the bracket."""
        rules, needed = self._rules, sum(needed for _, needed in parts)
        least, most = count(schema, "minProperties", path) or 0, count(schema, "maxProperties", path)
        if least > max(1, needed):
            refuse(path, f"minProperties {least} is not supported", "list properties as required")
        if most is not None and (parts if extra != NEVER else most < len(parts)):
            refuse(path, "maxProperties beside properties is not supported")
        close = seq(self._blank, Lit("}"))
        further = None if most is None else max(0, most - 1)
        extras = rules.repeat(seq(self._comma, extra), 0, further) if extra != NEVER else EMPTY
        after = rules.add("rest", seq(extras, close))
        tail = seq(extra, after)  # what a comma is followed by, from here on
        first = alt((tail if most != 0 else NEVER, Lit("}") if least == 0 else NEVER))
        may_close = True
        for member, must in reversed(parts):
            begun = rules.add("member", seq(member, after))
            first = rules.add("first", begun if must else alt((begun, first)))
            tail = rules.add("next", begun if must else alt((begun, tail)))
            following = seq(self._comma, tail)
            may_close = may_close and not must
            after = rules.add("rest", alt((following, close if may_close else NEVER)))
        return NEVER if first == NEVER else rules.add("object", seq(Lit("{"), self._blank, first))


def _dumped(value: Any) -> str:
    if isinstance(value, Decimal):
        return str(value)
    return json.dumps(value, ensure_ascii=False)
