"""Schemas that answers follow: refused where they could not be checked, and checked as the specification says."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.schema_cases import CASES, LINKED, Case
from tokenmill.errors import UsageError
from tokenmill.recipes.expand_schema import answer_schema, document, read_schema, response_format, wrong
from tokenmill.recipes.expand_seeds import Shape

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
    return wrong(schema, value) is None


@pytest.mark.parametrize("case", [case for case in CASES if isinstance(case.schema, dict)], ids=lambda case: case.name)
def test_documents_are_judged_right_or_the_schema_is_refused(tmp_path: Path, case: Case) -> None:
    try:
        schema = read(tmp_path, case.schema)
    except UsageError as error:
        assert "not checked" in error.message or "must be" in error.message, error.message
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
        ({"type": "integer"}, 1.5, "which is not of the type"),
        ({"type": "integer"}, True, "which is not of the type"),
        ({"type": "number"}, 10**400, None),
        ({"type": "integer"}, 10**400, None),
        ({"enum": [1, 2]}, True, "none of"),
        ({"const": 0}, False, "not 0"),
        ({"minLength": 2}, "x", "shorter than 2"),
        ({"pattern": "^a+$"}, "b", "does not match"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, 4, "is 2 of oneOf"),
        ({"properties": {"a": {"items": {"type": "null"}}}}, {"a": [None, 1]}, r"it.a\[1\]"),
        ({"required": ["a"]}, {}, "lacks 'a'"),
        ({"required": ["a"]}, [], None),
        (LINKED, {"v": 1, "next": {"v": 2, "next": {}}}, "lacks 'v'"),
    ],
)
def test_what_is_wrong_is_said(schema: Any, value: Any, why: str | None) -> None:
    found = wrong(schema, value)
    if why is None:
        assert found is None
    else:
        with pytest.raises(AssertionError, match=why):
            raise AssertionError(found)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"patternProperties": {}}, '# has the key "patternProperties", which is not checked'),
        ({"properties": {"a": {"uniqueItems": True}}}, '#/properties/a has the key "uniqueItems"'),
        ({"type": "text"}, '#/type is "text"'),
        ({"pattern": "("}, "no regular expression"),
        ({"$ref": "#/$defs/x"}, "which is not in the file"),
        ({"$ref": "other.json"}, "which is not in the file"),
        ({"anyOf": [1]}, "#/anyOf/0 must be a schema"),
        ({"minimum": "1"}, "#/minimum must be a number"),
        ({"type": {"a": 1}}, "#/type is"),
        ({"properties": []}, "#/properties must be an object, not []"),
        ({"required": "a"}, '#/required must be a list, not "a"'),
        ({"anyOf": {}}, "#/anyOf must be a list"),
        ([], "no JSON schema"),
    ],
)
def test_schemas_that_could_not_be_checked_are_refused(tmp_path: Path, schema: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, schema)
    assert message in caught.value.message


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_schema(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(UsageError, match="is no JSON"):
        read_schema(tmp_path / "bad.json")


def test_references_lead_into_the_answers_schema() -> None:
    whole = answer_schema(PAIR, LINKED)
    assert whole is not None
    assert wrong(whole, {"instruction": "x", "output": {"v": 1, "next": {"v": 2}}}) is None
    assert wrong(whole, {"instruction": "x", "output": {"v": 1, "next": {}}}) == "it.output.next lacks 'v'"
    assert wrong(whole, {"instruction": "", "output": {"v": 1}}) == "it.instruction is shorter than 1"


def test_plain_texts_have_the_schema_itself() -> None:
    assert answer_schema(Shape("text"), None) is None
    assert answer_schema(Shape("text"), LINKED) == LINKED
    assert response_format("x", None) is None
    made = response_format("x", LINKED)
    assert made is not None
    assert made["json_schema"]["schema"] == LINKED


@pytest.mark.parametrize("text", ["", "{", "NaN", '{"a": Infinity}', "1e999", "[1e999]", "{} {}"])
def test_what_is_no_json_is_no_document(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  json's words
        document(text)
