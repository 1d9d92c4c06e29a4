"""Conversations in the form that templates expect; unsupported messages are refused with their position."""

from typing import Any

import pytest

from tokenmill.engine.engine import Chat
from tokenmill.errors import RequestRefused
from tokenmill.native.chat.messages import (
    TemplateCapabilities,
    adapted,
    arguments_of,
    fitted,
    messages_of,
    tools_of,
)

GOOD = {"role": "user", "content": "hi"}


def text(value: Any) -> dict[str, Any]:
    return {"type": "text", "text": value}


def nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ({"role": "user", "content": [text("a"), {"type": "refusal", "refusal": "no"}]}, "'refusal'"),
        ({"role": "user", "content": [text("a"), {"type": "image_url", "image_url": {}}]}, "'image_url'"),
        ({"role": "assistant", "content": "", "tool_calls": ["f"]}, "type is not function"),
        ({"role": "assistant", "tool_calls": [{"type": "custom", "function": {}}]}, "type is not function"),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}, "without a name"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, "without arguments"),
        ({"role": "assistant", "tool_calls": [{"id": 1, "function": {"name": "f", "arguments": ""}}]}, "an id"),
    ],
)
def test_a_bad_message_is_named(bad: Any, expected: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        messages_of(Chat((GOOD, GOOD, bad)))
    assert refused.value.message.startswith("messages[2] ")
    assert expected in refused.value.message
    assert refused.value.hint


@pytest.mark.parametrize(
    ("given_message", "expected"),
    [
        (GOOD, GOOD),
        ({"role": "user", "content": None}, {"role": "user", "content": ""}),
        ({"role": "user", "content": []}, {"role": "user", "content": ""}),
        ({**GOOD, "partial": True, "tools": [1]}, GOOD),
        ({**GOOD, "name": None, "tool_call_id": "", "reasoning_content": None, "tool_calls": None}, GOOD),
        ({"role": "user", "content": (text("a"),)}, {"role": "user", "content": [text("a")]}),
        (
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {"ä": [1, None]}}}],
            },
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"type": "function", "function": {"name": "f", "arguments": '{"ä":[1,null]}'}, "id": "1"}
                ],
            },
        ),
    ],
)
def test_the_form_of_a_message(given_message: dict[str, Any], expected: dict[str, Any]) -> None:
    assert messages_of(Chat((given_message,))) == [expected]


@pytest.mark.parametrize(
    ("can", "content", "expected"),
    [
        (TemplateCapabilities(True, False), [text("a"), text(""), text("b")], "a\n\nb"),
        (TemplateCapabilities(True, False), [text(""), text("a")], "a"),
        (TemplateCapabilities(False, True), "a", [text("a")]),
        (TemplateCapabilities(True, True), [text("a")], [text("a")]),
        (TemplateCapabilities(True, True), "a", "a"),
    ],
)
def test_content_takes_the_form_a_template_reads(can: TemplateCapabilities, content: Any, expected: Any) -> None:
    assert fitted([{"role": "user", "content": content}], can)[0]["content"] == expected


@pytest.mark.parametrize(
    ("roles", "can", "developers", "expected"),
    [
        ("developer user", TemplateCapabilities(), False, ["system:0", "user:1"]),
        ("developer user", TemplateCapabilities(), True, ["developer:0", "user:1"]),
        ("system user user", TemplateCapabilities(system_role=False), False, ["user:0\n1", "user:2"]),
        ("developer user", TemplateCapabilities(system_role=False), False, ["user:0\n1"]),
        ("user system user", TemplateCapabilities(system_role=False), False, ["user:0", "system:1", "user:2"]),
        ("system", TemplateCapabilities(system_role=False), False, []),
    ],
)
def test_roles_a_template_does_not_know(
    roles: str, can: TemplateCapabilities, developers: bool, expected: list[str]
) -> None:
    messages = [{"role": role, "content": str(place)} for place, role in enumerate(roles.split())]
    changed = adapted(messages, can, developers=developers)
    assert [f"{message['role']}:{message['content']}" for message in changed] == expected


def test_arguments_that_are_no_json_are_named_by_their_first_place() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{city: Bern}"}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": ""},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    with pytest.raises(RequestRefused, match=r"messages\[1\]"):
        adapted(messages, TemplateCapabilities(system_role=False, object_arguments=True), developers=False)


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ({"name": "f", "description": 7}, "tools[1] has a description"),
        ({"name": "f", "parameters": nested(100)}, "tools[1] is nested deeper than 64"),
    ],
)
def test_a_bad_tool_is_named(bad: Any, expected: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        tools_of(Chat((GOOD,), tuple({"type": "function", "function": function} for function in ({"name": "f"}, bad))))
    assert expected in refused.value.message


def test_the_form_of_a_tool() -> None:
    given_tool = {"type": "function", "function": {"name": "f", "strict": True}, "cache": 1}
    expected = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
    assert tools_of(Chat((GOOD,), (given_tool,))) == [expected]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"messages": []}, "'messages' is reserved"),
        ({"bos_token": "x"}, "'bos_token' is reserved"),
        ({"enable_thinking": "false"}, "enable_thinking is 'false'"),
        ({"x": nested(100)}, "template arguments is nested deeper than 64"),
    ],
)
def test_bad_template_arguments(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        arguments_of(Chat((GOOD,), (), None, arguments))
    assert expected in refused.value.message
