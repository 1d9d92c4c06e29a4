"""Requests of the Responses API as chats, and answers as response objects."""

from typing import Any

import pytest

from tokenmill.engine.engine import Answer, Usage
from tokenmill.errors import RequestRefused
from tokenmill.jobs.openai.answers import answer_body
from tokenmill.jobs.openai.call import check, stored_call
from tokenmill.jobs.openai.responses.request import chat_body

WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}
PATCH = {"type": "custom", "name": "patch", "description": "Applies a patch."}
USAGE = Usage(10, 4, 3)


def messages(given: Any, **more: Any) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = chat_body({"input": given, **more})["messages"]
    return made


def test_a_text_is_a_message_of_the_user() -> None:
    assert messages("Hi.", instructions="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi."},
    ]


def test_instructions_and_developer_messages_become_one_system_message() -> None:
    given = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Sandboxed."}]},
        {"type": "message", "role": "user", "content": "Hi."},
        {"role": "developer", "content": "Now in French."},
    ]
    assert messages(given, instructions="Be brief.") == [
        {"role": "system", "content": "Be brief.\n\nSandboxed."},
        {"role": "user", "content": "Hi."},
        {"role": "system", "content": "Now in French."},
    ]


def test_the_items_of_a_turn_become_one_assistant_message() -> None:
    given = [
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Look."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "a\nb"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "rain"}]},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
    ]
    assert messages(given)[1:] == [
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Look.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
                {"id": "c2", "type": "function", "function": {"name": "patch", "arguments": '{"input":"a\\nb"}'}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "done"},
    ]


def test_images_become_parts() -> None:
    parts = [{"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": "data:image/png;base64,AA"}]
    assert messages([{"role": "user", "content": parts}])[0]["content"] == [
        {"type": "text", "text": "What?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
    ]


def test_options_under_the_names_of_chats() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    body = {
        "input": "Hi.",
        "max_output_tokens": 7,
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": form, "verbosity": "low"},
        "top_logprobs": 2,
        "temperature": 0,
        "seed": 1,
    }
    values = check("responses", body).values
    chat = {
        "messages": [{"role": "user", "content": "Hi."}],
        "max_tokens": 7,
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}},
        "logprobs": True,
        "top_logprobs": 2,
        "temperature": 0,
        "seed": 1,
    }
    assert {key: value for key, value in values.items() if key != "response"} == check("chat", chat).values
    assert stored_call("responses", body).values == values


def test_tools() -> None:
    body = {"input": "Hi.", "tools": [WEATHER, PATCH, {"type": "web_search"}], "tool_choice": "required"}
    chat = chat_body(body)
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["weather", "patch"]
    assert chat["tools"][1]["function"]["parameters"]["required"] == ["input"]
    named = chat_body(body | {"tool_choice": {"type": "custom", "name": "patch"}})
    assert named["tool_choice"] == {"type": "function", "function": {"name": "patch"}}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    only = chat_body(body | {"tool_choice": allowed})
    assert ([tool["function"]["name"] for tool in only["tools"]], only["tool_choice"]) == (["weather"], "required")
    inside = chat_body(body | {"tools": [{"type": "namespace", "name": "mine", "tools": [WEATHER]}]})
    assert [tool["function"]["name"] for tool in inside["tools"]] == ["weather"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "web_search_call", "id": "w"}]}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input"),
        ({"input": [{"role": "system", "content": "only"}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "rs_1"}]}, "input"),
        ({"input": "x", "tools": [{"type": "teleport"}]}, "tools"),
        ({"input": "x", "tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "stream": True}, "stream"),
        ({"input": "x", "truncation": "auto"}, "truncation"),
        ({"input": "x", "messages": []}, "messages"),
    ],
)
def test_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        check("responses", body)
    assert refused.value.param == param


def test_an_answer_is_a_response() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "patch", "arguments": '{"input": "x"}'}}
    message = {"content": "So.", "reasoning_content": "Hm.", "tool_calls": [call]}
    answer = Answer("So.", "tool_calls", USAGE, message=message)
    request = {"input": "Hi.", "tools": [PATCH], "metadata": {"a": "b"}}
    body = answer_body("responses", answer, id="x", model="m", created_s=1, made_by="native 1", request=request)
    assert [item["type"] for item in body["output"]] == ["reasoning", "message", "custom_tool_call"]
    assert body["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert body["output"][1]["content"][0]["text"] == "So."
    assert body["output"][2]["input"] == "x"
    assert (body["id"], body["status"], body["metadata"], body["tools"]) == ("resp_x", "completed", {"a": "b"}, [PATCH])
    assert body["usage"] == {
        "input_tokens": 10,
        "output_tokens": 4,
        "total_tokens": 14,
        "input_tokens_details": {"cached_tokens": 3},
    }
    cut = answer_body("responses", Answer("So", "length", USAGE), id="x", model="m", created_s=1, request=request)
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert cut["output"][0]["status"] == "incomplete"
