"""JSON schemas in the real matcher: accepted documents, and refused schemas."""

import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from support.constrained import END, OTHER_END, allowed, compiled, drawn, follows
from support.schema_cases import CASES, Case
from tokenmill.errors import RequestRefused
from tokenmill.native.constraints.constraints import Masks
from tokenmill.native.constraints.grammar import MOST_GRAMMAR_BYTES, MOST_SCHEMA_BYTES, schema_grammar

# Valid, but never written: llguidance allows no escape that is not needed, and misses a few numbers within bounds.
NOT_WRITTEN = {'"\\ud83d\\ude00a"', '"\\u00e9"', '"\\/"', "-1.2"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_documents_of_a_schema(case: Case) -> None:
    made = compiled(schema=json.dumps(case.schema))
    assert [document for document in case.allowed if not follows(made, document)] == [
        document for document in case.allowed if document in NOT_WRITTEN
    ]
    assert [document for document in case.refused if follows(made, document)] == []


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": 3}, "4", "3"),
        ({"type": "integer", "multipleOf": 5}, "15", "16"),
        (
            {"type": "object", "patternProperties": {"^x\\d$": {"type": "null"}}, "additionalProperties": False},
            '{"x1":null}',
            '{"x":null}',
        ),
        ({"type": "object", "minProperties": 1}, '{"a":1}', "{}"),
        ({"type": "object", "maxProperties": 1}, '{"a":1}', '{"a":1,"b":2}'),
        ({"type": "string", "pattern": "^[a-z][a-z0-9]*$", "maxLength": 3}, '"ab1"', '"abcd"'),
        ({"allOf": [{"pattern": "^a"}, {"pattern": "b$"}], "type": "string"}, '"axb"', '"ax"'),
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
        ({"type": "string", "format": "ipv4"}, '"127.0.0.1"', '"256.0.0.1"'),
        ({"minLength": 2}, '"ab"', '"a"'),
        ({"minLength": 2}, "5", "[1,]"),
        ({"properties": {"b": {}, "a": {}}}, '{"b":1,"a":2}', '{"a":2,"b":1}'),  # the order is the schema's
    ],
)
def test_further_keywords(schema: Any, good: str, bad: str) -> None:
    made = compiled(schema=json.dumps(schema))
    assert (follows(made, good), follows(made, bad)) == (True, False)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"properties": {"a": {"not": {}}}},
        {"if": {}, "then": {}},
        {"type": "array", "uniqueItems": True},
        {"type": "array", "contains": {}},
        {"type": "array", "unevaluatedItems": False},
        {"type": "object", "propertyNames": {"maxLength": 3}},
        {"type": "object", "dependentRequired": {"x": ["y"]}},
        {"type": "object", "unevaluatedProperties": False},
        {"type": "string", "format": "iri"},
        {"type": "string", "pattern": "("},
        {"type": "string", "pattern": "^a)$"},
        {"type": "string", "pattern": "^(?=a)"},
        {"type": "string", "pattern": "^(a)\\1$"},
        {"type": "string", "maxLength": -1},
        {"type": "string", "maxLength": "5"},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"anyOf": []},
        {"$ref": "other.json#/x"},
        {"$ref": "#/$defs/x"},
        {"properties": []},
        {"type": "object", "required": "a"},
        {"items": 5},
    ],
)
def test_unsupported_keywords_are_refused(schema: Any) -> None:
    with pytest.raises(RequestRefused) as caught:
        compiled(schema=json.dumps(schema))
    assert caught.value.code == "invalid_request"
    assert caught.value.hint


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": []},
        {"type": "integer", "minimum": 5, "maximum": 4},
        {"enum": ["abc"], "maxLength": 2},
        {"type": "string", "pattern": "^a$", "enum": ["b"]},
        {"type": "object", "required": ["a"], "additionalProperties": False},
        {"type": "object", "required": ["a"], "properties": {"a": False}},
        {"$ref": "#"},
        {"$ref": "#", "type": "object"},
    ],
)
def test_what_no_document_satisfies_is_refused(schema: Any) -> None:
    with pytest.raises(RequestRefused) as caught:
        compiled(schema=json.dumps(schema))
    assert caught.value.code == "invalid_request"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        "true",
        "[" * 100_000,
        '{"minimum": NaN}',
        '{"const": "\\ud800"}',
        '{"const": 1e400}',
        '{"minimum": 1e99999}',
        '{"minLength": 1e99999}',
        "9" * 5000,
        '{"minimum": 1e99999999999999999999}',
        '{"type": "' + "x" * MOST_SCHEMA_BYTES + '"}',
    ],
)
def test_invalid_schemas_are_refused(text: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        compiled(schema=text)
    assert caught.value.code == "invalid_request"
    assert len(caught.value.message) < 500


def test_an_empty_schema_means_any_object() -> None:
    assert schema_grammar("{ }") == schema_grammar('{"type": "object"}')
    made = compiled(schema="{}")
    assert follows(made, '{"a":[1]}')
    assert not follows(made, "[1]")


def test_counts_are_limited_by_the_context() -> None:
    assert follows(compiled(schema='{"type": "array", "maxItems": 2147483647}', context=100), "[1]")
    for text in ('{"type": "array", "minItems": 101}', '{"type": "array", "maxItems": 100000}'):
        with pytest.raises(RequestRefused):
            compiled(schema=text, context=100 if "min" in text else 1 << 20)


def test_a_grammar_has_a_maximum_length() -> None:
    with pytest.raises(RequestRefused):
        compiled(grammar="x" * (MOST_GRAMMAR_BYTES + 1))


def test_every_end_token_ends_a_document() -> None:
    made = compiled(schema='{"type": "integer"}')
    made.accept(ord("7"))
    assert {END, OTHER_END} <= allowed(made)
    for end in (END, OTHER_END):
        state = made.clone()
        state.accept(end)
        assert allowed(state) == {END, OTHER_END}
    whole = compiled(schema='{"const": 1}')
    whole.accept(ord("1"))
    assert allowed(whole) == {END, OTHER_END}
    assert whole.allows(END)
    assert not whole.allows(ord("1"))


def test_a_token_that_is_not_allowed_fails_its_answer_alone() -> None:
    made = compiled(schema='{"type": "boolean"}')
    other = made.clone()
    with pytest.raises(RequestRefused):
        made.accept(ord("x"))
    with pytest.raises(RequestRefused):
        made.mask()
    assert allowed(other) >= {ord("t"), ord("f")}


def test_one_call_computes_the_masks_of_all() -> None:
    texts = ('{"type": "boolean"}', '{"type": "integer"}', '{"type": "string"}', '{"type": "boolean"}')
    together, alone = ([compiled(schema=text) for text in texts] for _ in range(2))
    masks = Masks(END + 2)
    masks.fill([])
    for turn, step in enumerate(('t5"t', "r1xr", "u2yu")):
        chosen = range(len(texts)) if turn else range(2)
        masks.fill([together[number] for number in chosen])
        for number in range(len(texts)):
            assert allowed(together[number]) == allowed(alone[number])
            together[number].accept(ord(step[number]))
            alone[number].accept(ord(step[number]))


def test_an_error_of_one_mask_is_its_own() -> None:
    good, broken = compiled(schema='{"type": "boolean"}'), compiled(schema='{"type": "boolean"}')
    with pytest.raises(RequestRefused):
        broken.accept(ord("x"))
    Masks(END + 2).fill([broken, good])
    assert good.allows(ord("t"))
    with pytest.raises(RequestRefused):
        broken.allows(END)


def test_the_mask_is_applied_to_a_copy() -> None:
    made = compiled(schema='{"type": "boolean"}')
    logits = np.arange(END + 2, dtype=np.float32)
    masked = made.apply(logits)
    assert masked.dtype == np.float32
    assert np.array_equal(logits, np.arange(END + 2))
    assert {token for token in range(END + 2) if masked[token] == logits[token]} == allowed(made)


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
    st.just({"type": "array", "items": {"$ref": "#"}}),
)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        lambda properties, required, further: {
            "type": "object",
            "properties": properties,
            "additionalProperties": further,
            "required": [name for name in properties if name in required],
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
@settings(max_examples=100, deadline=None)
def test_whatever_is_drawn_satisfies_the_schema(inner: Any, seed: int) -> None:
    schema = {"anyOf": [inner, {"type": "null"}]}
    try:
        made = compiled(schema=json.dumps(schema))
    except RequestRefused as refused:
        # a schema that refers to itself next to other keywords cannot be followed
        assert "circular references" in refused.message
        assert '"allOf"' in json.dumps(inner)
        return
    text = drawn(made, random.Random(seed))
    assert text is None or Draft202012Validator(schema).is_valid(json.loads(text)), text


KEYWORDS = [
    *("type", "enum", "const", "anyOf", "oneOf", "allOf", "not", "if", "$ref", "properties", "required", "items"),
    *("additionalProperties", "patternProperties", "propertyNames", "minProperties", "maxProperties", "prefixItems"),
    *("contains", "uniqueItems", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format", "minimum"),
    *("maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
]
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
        st.dictionaries(st.sampled_from([*KEYWORDS, "nullable", "$defs", "a"]), inner, max_size=4),
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(KEYWORDS), JUNK, max_size=5))
@example({"enum": 5, "const": 5})
@example({"type": "array", "maxItems": 2**31 - 1})
@example({"allOf": [{"required": 5}, {"required": 6}]})
@example({"oneOf": [{"required": ["a"], "properties": []}, {"required": ["a"]}]})
@example({"format": []})
@settings(max_examples=200, deadline=None)
def test_junk_is_refused_and_nothing_worse(schema: Any) -> None:
    try:
        compiled(schema=json.dumps(schema))
    except RequestRefused as error:
        assert error.hint


@pytest.mark.parametrize(
    ("document", "written"),
    [
        ('{"a": [1, 2]}', True),
        ('{\n  "a": [\n    1,\n    2\n  ]\n}', True),
        ('{"a":[1,2]}', True),
        ('{   "a": [1]}', False),
        ('{\n\n\n"a": [1]}', False),
        ('{"a": [1]\n' + 24 * " " + "}", False),
    ],
)
def test_whitespace_is_limited(document: str, *, written: bool) -> None:
    """Unlimited, a small model writes whitespace until max_tokens."""
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}
    assert follows(compiled(schema=json.dumps(schema)), document) is written
