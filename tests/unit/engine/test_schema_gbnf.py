"""JSON schemas as grammars: what they allow, what they refuse to follow, and that they stay small."""

import json
import random
import re
import time
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from support.gbnf import Gbnf
from support.schema_cases import CASES, Case
from support.schema_check import satisfies
from tokenmill.errors import RequestRefused
from tokenmill.native.gbnf import Rules
from tokenmill.native.gbnf_numbers import integers, numbers
from tokenmill.native.schema_gbnf import gbnf_of
from tokenmill.native.schema_merge import ASSERTING


def grammar(schema: Any) -> Gbnf:
    return Gbnf(gbnf_of(json.dumps(schema)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_documents_of_a_schema(case: Case) -> None:
    made = grammar(case.schema)
    assert [document for document in case.allowed if not made.allows(document)] == []
    assert [document for document in case.refused if made.allows(document)] == []


INNER = {"type": "object", "properties": {"x": {"type": "string"}}}
DEEP: Any = {"type": "null"}
for _ in range(100):
    DEEP = {"type": "array", "items": DEEP}
DOUBLING = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]} for n in range(25)}


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "nonsense"}, "#: type 'nonsense'"),
        ({"properties": {"a": {"not": {}}}}, "#/properties/a: not is not supported"),
        ({"if": {}, "then": {}}, "if is not supported"),
        ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, "#/items: uniqueItems"),
        ({"type": "array", "contains": {}}, "contains"),
        ({"type": "array", "unevaluatedItems": False}, "unevaluatedItems"),
        ({"type": "integer", "multipleOf": 5}, "multipleOf"),
        ({"type": "number", "multipleOf": 0.01}, "multipleOf"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({**INNER, "maxProperties": 2}, "maxProperties"),
        ({**INNER, "patternProperties": {"^y": {}}}, "patternProperties"),
        ({**INNER, "propertyNames": {"maxLength": 3}}, "propertyNames"),
        ({**INNER, "dependentRequired": {"x": ["y"]}}, "dependentRequired"),
        ({**INNER, "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"type": "string", "format": "iri"}, "format 'iri'"),
        ({"type": "string", "pattern": "("}, "a ( without its )"),
        ({"type": "string", "pattern": "^a)$"}, "a ) without its ("),
        ({"type": "string", "pattern": "^(?=a)"}, "(?="),
        ({"type": "string", "pattern": "^(a)\\1$"}, "\\1"),
        ({"type": "string", "pattern": "\\bword"}, "\\b"),
        ({"type": "string", "pattern": "a^b"}, "^ or $ elsewhere"),
        ({"type": "string", "pattern": "^\\p{L}$"}, "\\p"),
        ({"type": "string", "pattern": "^(a*)*$"}, "may be empty"),
        ({"type": "string", "pattern": "^(a{50}){50}$"}, "more than 2000"),
        ({"type": "string", "pattern": "^a*b*$", "maxLength": 5}, "maxLength would have to cut"),
        ({"type": "string", "maxLength": 1_000_000}, "1000000 repetitions"),
        ({"type": "string", "maxLength": -1}, "maxLength must be"),
        ({"type": "string", "maxLength": "5"}, "maxLength must be a number"),
        ({"type": "integer", "minimum": 10**70}, "more than 60 digits"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "no document at all"),
        ({"enum": []}, "no document at all"),
        ({"enum": ["abc"], "maxLength": 2}, "no document at all"),
        ({"enum": ["abc"], "pattern": "b"}, "pattern beside enum"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "no document at all"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf whose schemas may overlap"),
        ({"oneOf": [INNER, INNER]}, "oneOf whose schemas may overlap"),
        ({"allOf": [{"pattern": "^a"}, {"pattern": "b$"}], "type": "string"}, "different pattern"),
        ({"anyOf": []}, "anyOf must be a list"),
        ({"$ref": "other.json#/x"}, "$ref 'other.json#/x' is not supported"),
        ({"$ref": "#/$defs/x"}, "points at nothing"),
        ({"$ref": "#"}, "leads back to itself"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {}]}}}, "#/$defs/a: "),
        ({"$ref": "#", "type": "object"}, "leads back to itself"),
        ({"type": "object", "required": ["n"], "properties": {"n": {"$ref": "#"}}}, "no document of this can end"),
        ({"type": "object", "properties": {"a": {"$id": "x"}}}, "$id"),
        ({"properties": {"x" * 300: {}}}, "a name of more than 200"),
        ({"properties": []}, "properties must be an object"),
        ({"type": "object", "required": "a"}, "required must be"),
        ({"items": 5}, "#/items: a schema must be"),
        (DEEP, "deep are not supported"),
        ({"$ref": "#/$defs/d0", "$defs": {**DOUBLING, "d25": {"type": "null"}}}, "too many schemas"),
        (
            {"anyOf": [{"const": n} for n in range(9)], "allOf": [{"anyOf": [{"const": n} for n in range(9)]}]},
            "more than 64 combinations",
        ),
        (
            {"properties": {f"p{n}": {"type": "string", "maxLength": 1900 + n} for n in range(40)}},
            "50000 repetitions in all",
        ),
        ([], "a schema must be an object"),
    ],
)
def test_what_cannot_be_followed_is_told_with_its_place(schema: Any, told: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        gbnf_of(json.dumps(schema))
    assert told in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    "text", ["{", '{"minimum": NaN}', "[" * 100_000, '{"const": "\\ud800"}', " " * (256 << 10) + "{}"]
)
def test_what_is_no_schema_is_refused(text: str) -> None:
    with pytest.raises(RequestRefused):
        gbnf_of(text)


def test_the_order_is_the_schemas_and_blanks_are_few() -> None:
    made = grammar({"properties": {"b": {"type": "null"}, "a": {"type": "null"}}, "additionalProperties": False})
    assert made.allows('{"b":null,"a":null}')
    for wrong in ('{"a":null,"b":null}', '{  "b":null}', '{"b":  null}', '{"b" :null}', ' {"b":null}', '{"b":null}\n'):
        assert not made.allows(wrong)
    assert made.allows('{\n\t"b": null,\n\t"a": null\n}')
    assert not made.allows("{\n\n}")


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"type": "string", "nullable": True}, "null", "1"),
        ({"enum": ["a"], "nullable": True}, "null", '"b"'),
        ({"allOf": [{"type": "string"}], "nullable": True}, "null", "1"),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, "4", "3"),
        ({"type": "array", "items": [{"type": "null"}], "additionalItems": False}, "[null]", "[null,1]"),
        ({"type": "integer", "format": "int32"}, "2147483647", "2147483648"),
        (
            {"type": "object", "propertyNames": {"enum": ["x"]}, "additionalProperties": {"type": "null"}},
            '{"x":null}',
            '{"y":null}',
        ),
        (
            {"type": "object", "patternProperties": {"^x\\d$": {"type": "null"}}, "additionalProperties": False},
            '{"x1":null}',
            '{"x":null}',
        ),
        ({"type": "object", "minProperties": 1}, '{"a":1}', "{}"),
        ({"type": "object", "maxProperties": 1}, '{"a":1}', '{"a":1,"b":2}'),
        ({"type": "string", "pattern": "^[a-z][a-z0-9]*$", "maxLength": 3}, '"ab1"', '"abcd"'),
        (
            {
                "type": "object",
                "properties": {"a": {}, "b": {}},
                "additionalProperties": False,
                "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
            },
            '{"b":1}',
            "{}",
        ),
        (
            {"$ref": "#/$defs/p", "required": ["q"], "$defs": {"p": {"properties": {"q": {"type": "null"}}}}},
            '{"q":null}',
            "{}",
        ),
        (
            {"type": "array", "allOf": [{"prefixItems": [{"type": "integer"}]}, {"items": {"minimum": 3}}]},
            "[3,4]",
            "[2]",
        ),
        ({"type": "string", "format": "ipv4"}, '"127.0.0.1"', '"256.0.0.1"'),
        ({"type": "string", "format": "email"}, '"a.b@example.org"', '"a@b"'),
        ({"type": "string", "format": "date"}, '"2024-02-29"', '"2023-02-29"'),
        ({"minLength": 2}, '"ab"', "5"),
        ({}, '[1,{"a":null}]', "[1,]"),
    ],
)
def test_other_drafts_and_corners(schema: Any, allowed: str, refused: str) -> None:
    made = grammar(schema)
    assert made.allows(allowed)
    assert not made.allows(refused)


@given(st.integers(-3000, 3000), st.integers(0, 2500), st.integers(-7000, 7000))
def test_integers_are_exact(least: int, more: int, tried: int) -> None:
    made = Gbnf(Rules().text(integers(least, least + more)))
    for value in (tried, least, least - 1, least + more, least + more + 1):
        assert made.allows(str(value)) == (least <= value <= least + more)


TWO = st.decimals(-50, 50, places=2)


@given(TWO, TWO, st.decimals(-60, 60, places=3), st.booleans(), st.booleans())
@example(Decimal("0.00"), Decimal("0.10"), Decimal("0.100"), True, True)
def test_numbers_are_exact(low: Decimal, high: Decimal, tried: Decimal, above: bool, below: bool) -> None:
    def within(value: Decimal) -> bool:
        return (low < value if above else low <= value) and (value < high if below else value <= high)

    assume(low < high)
    made = Gbnf(Rules().text(numbers(low, high, above=above, below=below)))
    for value in (tried, low, high, (low + high) / 2, low + Decimal("0.001"), high - Decimal("0.001")):
        if not (value == 0 and value.is_signed()):
            assert made.allows(f"{value:f}") == within(value), value


PIECES = st.recursive(
    st.sampled_from(["a", "b", "[ab]", "[^a]", "\\d", "\\w", ".", "\\.", '"', "\\\\", "\\n"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"({two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["?", "{2}", "{1,3}"])).map(lambda two: f"(?:{two[0]}){two[1]}"),
    ),
    max_leaves=5,
)


@given(PIECES, st.sampled_from(["^", ""]), st.sampled_from(["$", ""]), st.text('ab1."\\\n', max_size=5))
@settings(max_examples=200)
def test_patterns_are_pythons(piece: str, begin: str, end: str, tried: str) -> None:
    pattern = begin + piece + end
    made = grammar({"type": "string", "pattern": pattern})
    found = re.search(pattern.replace("$", "\\Z"), tried, re.ASCII)
    assert made.allows(json.dumps(tried)) == (found is not None)
    drawn = json.loads(made.draw(random.Random(len(tried))))
    assert re.search(pattern.replace("$", "\\Z"), drawn, re.ASCII) or "." in pattern


NAMES = st.sampled_from(["a", "ab", "b", "", "é", '"', "a b"])
LEAVES = st.one_of(
    st.sampled_from(
        [{"type": "string"}, {"type": "number"}, {"type": "boolean"}, {"type": "null"}, True, {"const": 5}]
    ),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-99, 99),
        st.integers(0, 200),
    ),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    st.builds(lambda values: {"enum": values}, st.lists(st.one_of(NAMES, st.integers(-5, 5), st.none()), min_size=1)),
    st.just({"$ref": "#"}),
)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        lambda properties, required, further: {
            "type": "object",
            "properties": properties,
            "additionalProperties": further,
            "required": [name for name in properties if name in required and properties[name] != {"$ref": "#"}],
        },
        st.dictionaries(NAMES, inner, max_size=4),
        st.sets(NAMES),
        st.one_of(st.booleans(), inner),
    )


def mixtures(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    arrays = st.builds(
        lambda prefix, items, least, more: {
            "type": "array",
            "prefixItems": prefix,
            "items": items,
            "minItems": least,
            "maxItems": least + more,
        },
        st.lists(inner, max_size=2),
        inner,
        st.integers(0, 2),
        st.integers(0, 3),
    )
    both = st.tuples(objects(inner), objects(inner)).map(lambda two: {"allOf": list(two)})
    return st.one_of(
        objects(inner), arrays, both, st.lists(inner, min_size=1, max_size=3).map(lambda one: {"anyOf": one})
    )


@given(st.recursive(LEAVES, mixtures, max_leaves=6), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_whatever_is_drawn_satisfies_the_schema(inner: Any, seed: int) -> None:
    schema = {"anyOf": [inner, {"type": "null"}]}
    try:
        made = grammar(schema)
    except RequestRefused as error:  # only for what no document, or no finite one, can be, or what grows without end
        assert any(why in error.message for why in ("no document", "leads back", "combinations of anyOf")), (
            error.message
        )
        return
    chance = random.Random(seed)
    for _ in range(3):
        text = made.draw(chance)
        assert satisfies(schema, json.loads(text)), text


JUNK = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-5, 9),
        st.floats(-9, 9),
        st.text("a#/^$[", max_size=3),
        st.sampled_from(["string", "object", "array", "#", "date", 10**30]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(sorted(ASSERTING | {"const", "nullable", "$defs", "a"})), inner, max_size=4),
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(sorted(ASSERTING)), JUNK, max_size=5))
@example({"enum": 5, "const": 5})
@example({"type": "array", "maxItems": 2**31 - 1})
@example({"allOf": [{"required": 5}, {"required": 6}]})
@example({"oneOf": [{"required": ["a"], "properties": []}, {"required": ["a"]}]})
@example({"format": []})
@settings(max_examples=300, deadline=None)
def test_junk_is_refused_and_nothing_worse(schema: Any) -> None:
    try:
        Gbnf(gbnf_of(json.dumps(schema)))
    except RequestRefused as error:
        assert error.hint


@pytest.mark.parametrize(
    "text",
    [
        '{"const": 1e400}',
        '{"minimum": 1e99999}',
        '{"minLength": 1e99999}',
        "9" * 5000,
        '{"minimum": 1e99999999999999999999}',
    ],
)
def test_large_numbers_do_no_harm(text: str) -> None:
    try:
        assert "root ::=" in gbnf_of(text)
    except RequestRefused as error:
        assert len(error.message) < 500


def test_a_pattern_of_names_is_never_widened_by_another_schema() -> None:
    patterns = {"type": "object", "patternProperties": {"^x$": {"type": "null"}}}
    with pytest.raises(RequestRefused, match="patternProperties of two"):
        gbnf_of(json.dumps({"allOf": [patterns, {"additionalProperties": False}]}))


def test_the_time_for_a_schema_grows_with_its_size() -> None:
    """Compared in one run: an absolute limit failed on a busy machine. Quadratic growth would be a factor of 16."""

    def compiled(fields: int) -> tuple[float, str]:
        properties = {
            f"field_{n}": {"type": "string", "maxLength": 200}
            if n % 2
            else {"type": "integer", "minimum": n, "maximum": 9999}
            for n in range(fields)
        }
        schema = {"properties": properties, "required": list(properties)[::3], "additionalProperties": False}
        times = []
        for turn in range(7):
            began = time.process_time()
            text = gbnf_of(json.dumps({"type": "object", **schema, "title": str(turn)}))
            times.append(time.process_time() - began)
        return min(times), text

    small_s, _ = compiled(10)
    large_s, text = compiled(40)
    assert large_s < 10 * small_s
    assert len(text) < 20_000
