"""Counts in JSON schemas are limited before an engine compiles them."""

import json
from typing import Any

import pytest

from tokenmill.engine.schema_bounds import MAX_ITEMS, bounded
from tokenmill.errors import RequestRefused

UNLIMITED = [10**9, 2**31 - 1, 1e18, 10**400]


@pytest.mark.parametrize("value", UNLIMITED)
@pytest.mark.parametrize("key", ["maxItems", "maxLength", "maxProperties", "maxContains"])
def test_an_upper_bound_that_no_answer_reaches_is_removed(key: str, value: float) -> None:
    assert bounded({"type": "array", key: value}, 4096) == {"type": "array"}
    inner = {"$defs": {"a": {key: value}}, "properties": {key: {"items": {key: value}}}, "anyOf": [{key: value}]}
    assert bounded(inner) == {"$defs": {"a": {}}, "properties": {key: {"items": {}}}, "anyOf": [{}]}


@pytest.mark.parametrize("value", UNLIMITED)
@pytest.mark.parametrize("key", ["minItems", "minLength", "minProperties", "minContains"])
def test_a_lower_bound_that_no_answer_reaches_is_refused(key: str, value: float) -> None:
    with pytest.raises(RequestRefused) as caught:
        bounded({"properties": {"rows": {key: value}}}, 4096)
    assert (caught.value.code, f"#/properties/rows/{key}" in caught.value.message) == ("invalid_request", True)
    assert caught.value.hint


@pytest.mark.parametrize("key", ["minItems", "maxItems"])
def test_item_counts_within_reach_have_a_limit(key: str) -> None:
    assert bounded({key: MAX_ITEMS}, 131072) == {key: MAX_ITEMS}
    with pytest.raises(RequestRefused, match=str(MAX_ITEMS)):
        bounded({key: MAX_ITEMS + 1}, 131072)


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [{"maxItems": 10**9}], "const": {"maxItems": 10**9}, "default": {"minItems": 10**9}},
        {"properties": {"maxItems": {"type": "integer"}}, "required": ["maxItems"]},
        {"type": "string", "maxLength": 5000, "minLength": 3, "pattern": "^a{0,1000000000}$"},
        {"maxItems": True, "minItems": None, "items": False},
        True,
    ],
)
def test_everything_else_is_left_as_it_is(schema: Any) -> None:
    before = json.dumps(schema)
    assert bounded(schema, 1024) == json.loads(before)
    assert json.dumps(schema) == before


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(RequestRefused, match="too deeply"):
        bounded(deep)
