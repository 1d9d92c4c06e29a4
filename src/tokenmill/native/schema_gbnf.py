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
from decimal import Decimal
from functools import lru_cache
from typing import Any

from tokenmill.engine.schema_bounds import bounded
from tokenmill.errors import RequestRefused
from tokenmill.native.gbnf import EMPTY, NEVER, Endless, Lit, Node, Ref, Rep, Rules, TooLarge, alt, seq
from tokenmill.native.gbnf_strings import none_of, one_of
from tokenmill.native.grammar import MOST_SCHEMA_BYTES, check_size
from tokenmill.native.schema_merge import (
    KEYS_OF,
    MIXED,
    Plain,
    Refs,
    count,
    is_of_numbers,
    listed,
    mapping,
    members,
    plain,
    refuse,
)
from tokenmill.native.schema_scalars import allowed_values, integer_of, number_of, string_of

DEEPEST = 60
MOST_SCHEMAS = 20_000


@lru_cache(maxsize=64)
def gbnf_of(schema: str, context_tokens: int | None = None) -> str:
    """The grammar of documents that a schema allows.

    RequestRefused for what cannot be followed and for bounds that are too large (see schema_bounds.py).
    """
    if len(schema) > MOST_SCHEMA_BYTES:
        raise RequestRefused(
            f"a JSON schema of {len(schema)} characters is too long", hint=f"{MOST_SCHEMA_BYTES} are allowed"
        )
    try:
        text = _Grammar(bounded(_loaded(schema), context_tokens)).text()
        text.encode()
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


def _loaded(schema: str) -> Any:
    try:
        return json.loads(schema, parse_float=Decimal, parse_constant=_no_number)
    except (ValueError, ArithmeticError) as error:  # numbers of thousands of digits are among them
        raise RequestRefused(f"the JSON schema is no JSON: {error}") from error


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
        try:
            return alt([self._typed(name, schema, path, depth) for name in types])
        except TooLarge as error:
            refuse(path, f"{error} are too many for llama.cpp's grammars", "use smaller bounds, or none")

    def _typed(self, name: str, schema: Plain, path: str, depth: int) -> Node:
        if name == "object":
            return self._object(schema, path, depth)
        if name == "array":
            return self._array(schema, path, depth)
        if scalar := {"string": string_of, "number": number_of, "integer": integer_of}.get(name):
            return scalar(self._rules, schema, path)
        return alt((Lit("true"), Lit("false"))) if name == "boolean" else Lit("null")

    def _anything(self) -> Node:
        if self._any is None:
            self._any = self._rules.reserve("value")
            kinds = [self._plain({"type": (name,)}, "#", 0) for name in ("object", "array", "string", "number")]
            words = (Lit("true"), Lit("false"), Lit("null"))
            self._rules.tell(self._any, alt([*kinds, *words]))
        return self._any

    # ---- values

    def _enum(self, schema: Plain, path: str) -> Node:
        values = allowed_values(schema, path)
        simple = [_dumped(one) for one in values if not isinstance(one, dict | list)]
        return alt([one_of(self._rules, simple), *(self._const(one) for one in values if isinstance(one, dict | list))])

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

    # ---- containers

    def _array(self, schema: Plain, path: str, depth: int) -> Node:
        for key in ("contains", "unevaluatedItems"):
            if key in schema:
                refuse(path, f"{key} is not supported")
        least = count(schema, "minItems", path) or 0
        most = count(schema, "maxItems", path)
        if schema.get("uniqueItems") not in (None, False) and (most is None or most > 1):
            refuse(path, "uniqueItems is not supported")
        given = listed(schema, path)
        prefix = [
            self._node(one, f"{path}/prefixItems/{at}", depth + 1)
            for at, one in enumerate(given)
            if most is None or at < most
        ]
        rest: Node = NEVER
        if most is None or most > len(prefix):
            rest = self._node(schema.get("items", True), f"{path}/items", depth + 1)
        if NEVER in prefix:
            prefix = prefix[: prefix.index(NEVER)]
            rest = NEVER
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
        patterns = mapping(schema, "patternProperties", path)
        further = schema.get("additionalProperties", True)
        listed = bool(mapping(schema, "properties", path))
        if patterns:
            if listed or further is not False or len(patterns) > 1 or "propertyNames" in schema:
                refuse(
                    path,
                    "patternProperties beside other properties is not supported",
                    "one pattern with additionalProperties: false is",
                )
            ((pattern, value),) = patterns.items()
            names = string_of(self._rules, {"pattern": pattern}, f"{path}/patternProperties")
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
        rules = self._rules
        needed = sum(needed for _, needed in parts)
        least = count(schema, "minProperties", path) or 0
        most = count(schema, "maxProperties", path)
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
