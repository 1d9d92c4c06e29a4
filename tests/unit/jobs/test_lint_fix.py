"""--fix changes spellings that mean the same, and not one other byte."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.jobs.lint.fix import Survey

TOOL = '{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}'
TURNED = '{"function": {"parameters": {"type": "object"}, "name": "f"}, "type": "function"}'


def fixed(*lines: str) -> list[str]:
    survey = Survey()
    for number, line in enumerate(lines, 1):
        survey.add(number, line)
    choices = survey.choices()
    for number, line in enumerate(lines, 1):
        choices.learn(number, line)
    return [choices.rewrite(line)[0] for line in lines]


def with_tool(tool: str, text: str = "hi") -> str:
    return f'{{"messages": [ {{"role":"user", "content": "{text}"}} ], "tools" :[{tool}] , "seed": 1.0}}'


def with_system(content: str) -> str:
    messages = (
        f'[{{"role": "system", "content": {json.dumps(content)}}}, {{"role": "user", "content": "caf\\u00e9 \\r\\n"}}]'
    )
    return f'{{"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body":{{ "messages":{messages} }}}}'


def test_tools_get_the_spelling_that_most_lines_have() -> None:
    lines = with_tool(TURNED), with_tool(TOOL, "a"), with_tool(TOOL, "b")
    assert fixed(*lines) == [with_tool(TOOL), lines[1], lines[2]]


def test_of_equally_many_the_first_counts() -> None:
    lines = with_tool(TURNED), with_tool(TOOL)
    assert fixed(*lines) == [lines[0], with_tool(TURNED)]


@pytest.mark.parametrize("other", ["Be brief.\r\nBe right.", "Be brief. \nBe right.", "Be brief.\nBe right.\n\n"])
def test_line_ends_of_system_messages_are_made_one(other: str) -> None:
    wanted = with_system("Be brief.\nBe right.")
    assert fixed(wanted, with_system(other), wanted) == [wanted] * 3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (with_system("a\nb"), with_system("a\n  b")),  # indentation may be code
        (with_system("a b"), with_system("a  b")),
        (with_system("At 04:05"), with_system("At 04:06")),
        (with_tool(TOOL), with_tool(TOOL.replace('"f"', '"g"'))),
        (with_tool(f"{TOOL}, {TOOL.replace('f', 'g')}"), with_tool(f"{TOOL.replace('f', 'g')}, {TOOL}")),
        ('{"prompt": "a\\n"}', '{"prompt": "a\\r\\n"}'),
        (
            '{"messages": [{"role": "user", "content": "a\\n"}]}',
            '{"messages": [{"role": "user", "content": "a\\r\\n"}]}',
        ),
        ('{"prompt": "a", "json_schema": {"a": 1, "b": 2}}', '{"prompt": "a", "json_schema": {"b": 2, "a": 1}}'),
        ("not json", "{"),
    ],
)
def test_what_may_matter_is_left_alone(one: str, other: str) -> None:
    assert fixed(one, other, one) == [one, other, one]


def test_several_places_in_one_line() -> None:
    def line(first: str, second: str, tools: str) -> str:
        return (
            f'{{"tools": {tools}, "messages": [{{"content": {json.dumps(first)}, "role": "system"}}, '
            f'{{"role": "developer", "content": {json.dumps(second)}}}, {{"role": "user", "content": "\u00e9"}}]}}'
        )

    good = line("a\nb", "c", f"[{TOOL}]")
    assert fixed(good, line("a\r\nb", "c\n", f"[{TURNED}]"), good) == [good] * 3


def test_a_survey_that_is_full_says_so() -> None:
    survey = Survey(most=1)
    for number, line in enumerate((with_system("a"), with_system("b"), with_system("a\n")), 1):
        survey.add(number, line)
    assert not survey.complete
    assert len(survey.choices().replaced) == 1


BLANKS = st.text(st.sampled_from(" \t"), max_size=2)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(st.sampled_from('ab"\\{}[],:\n é'), max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab"]}', max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES, st.text(st.sampled_from('ab"\\{}[]\né'), max_size=8), BLANKS, st.booleans())
def test_only_the_content_changes_whatever_stands_around_it(
    metadata: Any, system: str, blank: str, ascii_only: bool
) -> None:
    def line(content: str) -> str:
        written = json.dumps(content)
        around = json.dumps(metadata, ensure_ascii=ascii_only)
        return (
            f'{{{blank}"metadata":{blank}{around},"messages":[{{"role":"system"{blank},"content":{blank}{written}}},'
            f'{{"role":"user","content":"u"}}]{blank}}}'
        )

    good, other = line(system + "x"), line(system.replace("\n", "\r\n") + "x \n")
    assert fixed(good, other, good) == [good] * 3
