"""Recognition of numbers, JSON and code in answers."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.tuner.qualify.judge import code_in, has_number, is_code, is_json, spoken
from tokenmill.tuner.qualify.tasks import Language

SHAPE = {"name": "string", "items": [{"amount": "integer"}], "paid": "boolean"}
RIGHT = '{"name": "a", "items": [{"amount": 1}, {"amount": 2}], "paid": true}'


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("48213", None),
        ("The number is 48,213.", None),
        ("<think>12345?</think>48213", None),
        ("482130", "answered 482130 instead of 48213"),
        ("I do not know.", "answered without a number; expected 48213"),
        ("<think>It is 48213, but", "answered without a number; expected 48213"),
    ],
)
def test_a_number_stands_on_its_own(answer: str, why: str | None) -> None:
    assert has_number(answer, "48213") == why


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (RIGHT, None),
        (f"```json\n{RIGHT}\n```\nThis object has {{three}} keys.", None),
        (f"{RIGHT}\n```\n\nThe fence was never opened.", None),
        (f"Here it is: {RIGHT} That is all.", None),
        (RIGHT.replace("true", "1"), "paid must be of type boolean"),
        (RIGHT.replace('"a"', "null"), "name must be of type string"),
        (RIGHT.replace("2}", "true}"), "items[1].amount must be of type integer"),
        (RIGHT.replace("2}", "2.5}"), "items[1].amount must be of type integer"),
        (RIGHT.replace('"paid"', '"payed"'), "the value lacks 'paid'"),
        (RIGHT.replace("true", 'true, "more": 1'), "the value has an unexpected key 'more'"),
        ('{"name": "a", "items": [], "paid": true}', "items has 0 items"),
        ('{"name": "a", "items": {}, "paid": true}', "items must be a list"),
        ("[1, 2]", "the answer has no JSON"),
        ('{"name": "a}', "does not parse: Unterminated string starting at: line 1 column 10 (char 9)"),
        ('{"name": "a" "paid": true}', "does not parse: Expecting ',' delimiter: line 1 column 14 (char 13)"),
    ],
)
def test_json_of_a_shape(answer: str, why: str | None) -> None:
    assert is_json(answer, SHAPE) == why


@pytest.mark.parametrize(
    ("value", "why"), [("[1, 2]", None), ("[1]", "rows has 1 items"), ('[1, "a"]', "rows[1] must be of type number")]
)
def test_a_list_of_several_shapes_has_exactly_these(value: str, why: str | None) -> None:
    assert is_json(f'{{"rows": {value}}}', {"rows": ["number", "number"]}) == why


@pytest.mark.parametrize(
    ("language", "answer", "why"),
    [
        ("Python", "```python\ndef f(a):\n    return a\n```", None),
        ("Python", "def f(a):\n    return a\n\nThis function returns what it gets.", None),
        ("Python", "def f(a):\n    return a\n```\n\nSome words.", None),
        ("Python", "Sure! Here it is:\n\ndef f(a):\n    return '\\d'\n", None),
        ("Python", "```python\ndef f(a)\n    return a\n```", "line 1: expected ':'"),
        ("Python", 'def f():\n    return "a\n', "line 2: unterminated string literal (detected at line 2)"),
        ("Python", "print(1)", "the answer has no code"),
        ("Python", "```python\nprint(1)\n```", "the code has no function"),
        ("Python", "I cannot.", "the answer has no code"),
        ("C", "```c\nint f(void) {\n  return 1;\n}\n```", None),
        ("C", "#include <stdio.h>\nint main() {\n  return 0;\n}\n```\nIt isn't long.", None),
        ("C", "```c\nint f(void) {\n  return 1\n}\n```", "line 2: a semicolon is missing"),
        ("Java", '```java\nString f() {\n  return "a;\n}\n```', "line 2: a double quote is not closed"),
        ("C", "```c\nint f(int a) {\n  g(a\n  h(a\n}\n```", "line 2: 'g(a' does not parse"),
        ("C", "```c\nint a;\n```", "the code has no function"),
        ("JavaScript", "```js\nfunction f(a) {\n  return a\n}\n```", None),
    ],
)
def test_code_is_whole(language: Language, answer: str, why: str | None) -> None:
    assert is_code(answer, language) == why


@given(st.text())
def test_no_answer_breaks_a_judge(answer: str) -> None:
    languages: tuple[Language, ...] = ("Python", "C", "JavaScript")
    for language in languages:
        is_code(answer, language)
    is_json(answer, SHAPE)
    assert len(code_in(answer)) <= len(answer)
    assert len(spoken(answer)) <= len(answer)


@given(
    st.recursive(
        st.none() | st.booleans() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_json_of_another_shape_is_reported(value: object) -> None:
    assert is_json(json.dumps({"name": value}), SHAPE) is not None
