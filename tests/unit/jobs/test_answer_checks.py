"""Answers that are cut off, or not the JSON that their job asked for."""

import json
from typing import Any

import pytest

from tokenmill.engine.engine import Answer, Usage
from tokenmill.jobs.ingest.line import call_from
from tokenmill.jobs.openai.call import Call
from tokenmill.jobs.worker.answer_checks import AnswerChecks, checked, follows

SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["bug", "bill"]}}, "required": ["kind"]}


def call(**body: Any) -> Call:
    return call_from({"messages": [{"role": "user", "content": "Say it."}], **body})


def answer(text: str, reason: Any = "stop", tokens: int = 5, **more: Any) -> Answer:
    return Answer(text, reason, Usage(10, tokens, None), **more)


def asking(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}


@pytest.mark.parametrize(
    ("body", "given", "expected"),
    [
        ({}, answer("Yes."), AnswerChecks()),
        ({"max_tokens": 5}, answer("Yes", "length"), AnswerChecks(cut_by_max_tokens=1)),
        ({"max_tokens": 9}, answer("Yes", "length"), AnswerChecks(cut_by_context=1)),
        ({}, answer("Yes", "length"), AnswerChecks(cut_by_context=1)),
        (asking(SCHEMA), answer('{"kind": "bug"}'), AnswerChecks(json=1)),
        (asking(SCHEMA), answer('{"kind": "rain"}'), AnswerChecks(json=1, invalid_json=1)),
        (
            {**asking(SCHEMA), "max_tokens": 5},
            answer('{"kind": "b', "length"),
            AnswerChecks(cut_by_max_tokens=1, json=1, invalid_json=1),
        ),
        (
            {"response_format": {"type": "json_object"}},
            answer("Sure! {}"),
            AnswerChecks(json=1, invalid_json=1),
        ),
        (asking(SCHEMA), answer("", message={"tool_calls": [{"id": "1"}]}), AnswerChecks()),
    ],
)
def test_one_answer(body: dict[str, Any], given: Answer, expected: AnswerChecks) -> None:
    assert checked(call(**body), given) == expected


def test_counts_add_up() -> None:
    total = AnswerChecks(1, 2, 3, 2) + AnswerChecks(1, 0, 1, 0)
    assert (total.cut_by_max_tokens, total.cut_by_context, total.json, total.invalid_json, total.cut) == (2, 2, 4, 2, 4)


@pytest.mark.parametrize("schema", [{"$ref": "http://127.0.0.1:9/other.json"}, {"type": "no such type"}])
def test_a_schema_that_cannot_be_used_accepts_any_json(schema: dict[str, Any]) -> None:
    assert follows(json.dumps(schema), "{}")
    assert not follows(json.dumps(schema), "{")
