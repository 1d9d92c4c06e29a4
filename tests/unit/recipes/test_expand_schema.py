"""Schemas of answers: unsupported ones are refused, the others are checked as the specification says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support.schema_cases import CASES, LINKED, Case
from tokenmill.errors import UsageError
from tokenmill.recipes.expansion.schema import (
    KEYWORDS,
    answer_schema,
    document,
    read_schema,
    response_format,
    schema_error,
)
from tokenmill.recipes.expansion.seeds import Shape

PAIR = Shape("output", "instruction", parts=("instruction", "output"))


def read(tmp_path: Path, schema: Any) -> dict[str, Any]:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(schema))
    return read_schema(path)


def is_followed(schema: Any, text: str) -> bool:
    try:
        value = document(text)
    except ValueError:
        return False
    return schema_error(schema, value) is None


@pytest.mark.parametrize("case", [case for case in CASES if isinstance(case.schema, dict)], ids=lambda case: case.name)
def test_documents_are_checked_correctly_or_the_schema_is_refused(tmp_path: Path, case: Case) -> None:
    try:
        schema = read(tmp_path, case.schema)
    except UsageError as error:
        keyword = re.search(r'"(.+?)"', error.message)
        assert keyword is not None, error.message
        assert keyword[1] not in KEYWORDS
        return
    assert [text for text in case.allowed if not is_followed(schema, text)] == []
    assert [text for text in case.refused if is_followed(schema, text)] == []


def test_few_cases_are_refused(tmp_path: Path) -> None:
    refused = 0
    for case in CASES:
        try:
            read(tmp_path, case.schema)
        except UsageError:
            refused += 1
    assert refused < len(CASES) / 3


@pytest.mark.parametrize(
    ("schema", "value", "why"),
    [
        ({"type": "integer"}, 1.5, "answer: 1.5 "),
        ({"type": "integer"}, True, "answer: True "),
        ({"type": "number"}, 10**400, None),
        ({"type": "integer"}, 10**400, None),
        ({"enum": [1, 2]}, True, "answer: True "),
        ({"const": 0}, False, "answer: 0 "),
        ({"minLength": 2}, "x", "answer: 'x' "),
        ({"pattern": "^a+$"}, "b", "answer: 'b' "),
        ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, 4, "answer: 4 "),
        ({"properties": {"a": {"items": {"type": "null"}}}}, {"a": [None, 1]}, "answer.a[1]: 1 "),
        ({"required": ["a"]}, {}, "answer: 'a' "),
        ({"required": ["a"]}, [], None),
        (LINKED, {"v": 1, "next": {"v": 2, "next": {}}}, "answer.next.next: 'v' "),
        ({"$ref": "#"}, 1, "answer is nested too deeply"),
        ({"allOf": [{"$ref": "#"}, {"$ref": "#"}]}, 1, "answer is nested too deeply"),
    ],
)
def test_a_reason_names_the_place_and_the_value(schema: Any, value: Any, why: str | None) -> None:
    found = schema_error(schema, value)
    if why is None:
        assert found is None
    else:
        assert found is not None
        assert found.startswith(why)


def test_a_reason_is_short_whatever_the_value() -> None:
    found = schema_error({"type": "integer"}, "x" * 100_000)
    assert found is not None
    assert found.startswith("answer: 'xxx")
    assert len(found) < 200


def test_references_are_never_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("urllib.request.urlopen", lambda *_: pytest.fail("it was fetched"))
    for ref in ("http://127.0.0.1:1/schema.json", "other.json", "#/$defs/x", "file:///etc/hostname"):
        with pytest.raises(UsageError):
            schema_error({"$ref": ref}, 1)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"patternProperties": {}}, '#: the keyword "patternProperties"'),
        ({"properties": {"a": {"uniqueItems": True}}}, '#/properties/a: the keyword "uniqueItems"'),
        ({"type": "text"}, "#/type: 'text'"),
        ({"pattern": "("}, "#/pattern: '('"),
        ({"$ref": "#/$defs/x"}, '#/$ref: "#/$defs/x"'),
        ({"$ref": "#/type", "type": "object"}, '#/$ref: "#/type"'),
        ({"$ref": "other.json"}, '#/$ref: "other.json"'),
        ({"$ref": "http://127.0.0.1:1/schema.json"}, "#/$ref: "),
        ({"anyOf": [1]}, "#/anyOf/0: 1"),
        ({"minimum": "1"}, "#/minimum: '1'"),
        ({"type": {"a": 1}}, "#/type: "),
        ({"properties": []}, "#/properties: []"),
        ({"required": "a"}, "#/required: 'a'"),
        ({"anyOf": {}}, "#/anyOf: {}"),
        ([], "[]"),
    ],
)
def test_unsupported_schemas_are_refused(tmp_path: Path, schema: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, schema)
    assert message in caught.value.message


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="none.json"):
        read_schema(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(UsageError, match="bad.json"):
        read_schema(tmp_path / "bad.json")


def test_references_lead_into_the_answers_schema() -> None:
    whole = answer_schema(PAIR, LINKED)
    assert whole is not None
    assert schema_error(whole, {"instruction": "x", "output": {"v": 1, "next": {"v": 2}}}) is None
    assert (
        schema_error(whole, {"instruction": "x", "output": {"v": 1, "next": {}}})
        == "answer.output.next: 'v' is a required property"
    )
    assert (schema_error(whole, {"instruction": "", "output": {"v": 1}}) or "").startswith("answer.instruction: ''")


def test_a_schema_with_an_id_can_be_embedded() -> None:
    whole = answer_schema(PAIR, {"$id": "https://example.com/linked", **LINKED})
    assert whole is not None
    assert schema_error(whole, {"instruction": "x", "output": {"v": 1, "next": {"v": 2}}}) is None


def test_plain_texts_have_the_schema_itself() -> None:
    assert answer_schema(Shape("text"), None) is None
    assert answer_schema(Shape("text"), LINKED) == LINKED
    assert response_format("x", None) is None
    made = response_format("x", LINKED)
    assert made is not None
    assert made["json_schema"]["schema"] == LINKED


@pytest.mark.parametrize("text", ["", "{", "NaN", '{"a": Infinity}', "1e999", "[1e999]", "{} {}"])
def test_invalid_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  the message is json's
        document(text)
