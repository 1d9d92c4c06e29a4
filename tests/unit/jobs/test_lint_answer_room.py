"""Answers of a JSON schema that do not fit max_tokens."""

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tokenmill.jobs.lint.answer_room import shortest_answer
from tokenmill.jobs.lint.run import Lint

TICKET = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["question", "bug", "praise"]},
        "urgent": {"type": "boolean"},
        "steps": {"type": "array", "items": {"$ref": "#/$defs/step"}, "minItems": 2},
        "note": {"type": "string"},
    },
    "required": ["kind", "urgent", "steps"],
    "$defs": {"step": {"type": "object", "properties": {"do": {"type": "string", "minLength": 4}}, "required": ["do"]}},
}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (TICKET, '{"kind":"bug","urgent":true,"steps":[{"do":"xxxx"},{"do":"xxxx"}]}'),
        ({"type": ["string", "null"]}, '""'),
        ({"anyOf": [{"type": "string", "minLength": 9}, {"const": None}]}, "null"),
        ({"type": "array"}, "[]"),
        ({}, "0"),
        ({"properties": {"a": {}}, "required": ["a"]}, '{"a":0}'),
    ],
)
def test_the_shortest_answer_follows_its_schema(schema: dict[str, Any], text: str) -> None:
    assert shortest_answer(schema) == text
    Draft202012Validator(schema).validate(json.loads(text))


def test_a_schema_that_refers_to_itself_ends() -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
    assert shortest_answer(schema).startswith('{"next":{"next":')
    both = {"anyOf": [{"$ref": "#/$defs/a"}] * 20, "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 20}}}
    assert shortest_answer(both) == "0"
    nested: dict[str, Any] = {"type": "string"}
    for _ in range(9):
        nested = {"type": "array", "items": nested, "minItems": 10**9}
    assert len(shortest_answer(nested)) == 100_000


def line(max_tokens: int) -> str:
    form = {"type": "json_schema", "json_schema": {"name": "ticket", "schema": TICKET}}
    messages = [{"role": "user", "content": "Sort this ticket."}]
    return json.dumps({"messages": messages, "max_tokens": max_tokens, "response_format": form})


def test_max_tokens_below_the_shortest_answer_is_an_error() -> None:
    lint = Lint(count=len)  # a token per character
    lint.add(1, line(66))
    assert lint.report().clean
    lint.add(2, line(65))
    lint.add(3, line(9))
    report = lint.report()
    (found,) = [finding for finding in report.findings if finding.kind == "answer_room"]
    assert (found.jobs, found.fatal, report.clean) == (2, True, False)
    assert found.detail is not None
    assert "line 3" in found.detail
