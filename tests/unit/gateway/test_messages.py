"""Anthropic's Messages API: requests as chats, answers as messages, their streams, and errors."""

import json
from typing import Any

import pytest

from tokenmill.engine.answer_parts import AnswerText
from tokenmill.engine.engine import Answer, FinishReason, Usage
from tokenmill.engine.output_parser import ReasoningPart
from tokenmill.engine.tool_formats import ToolCall
from tokenmill.errors import EngineDied, RequestRefused, TokenmillError, TooLong, UnknownModel
from tokenmill.gateway.http.faults import Busy, GatewayFault, anthropic_error
from tokenmill.gateway.messages.events import MessageEncoder
from tokenmill.gateway.messages.request import chat_body, check_message, hosted_tools

USAGE = Usage(10, 4, 3)
WEATHER = {"name": "weather", "description": "The weather.", "input_schema": {"type": "object"}}
BASH = {"type": "bash_20250124", "name": "bash"}


def body(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(messages) or [{"role": "user", "content": "Hi."}], "max_tokens": 9, **more}


def translated(given: dict[str, Any]) -> dict[str, Any]:
    check_message(given)
    return chat_body(given)


def read(data: bytes) -> list[dict[str, Any]]:
    events = []
    for block in data.decode().split("\n\n")[:-1]:
        name, line = block.split("\n")
        events.append(json.loads(line.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def streamed(*parts: Any, reason: FinishReason = "stop") -> list[dict[str, Any]]:
    one = MessageEncoder("msg_1", "m")
    data = one.opening(0) + b"".join(one.parts(0, [part]) for part in parts) + one.end(0, reason) + one.closing(USAGE)
    return read(data)


def test_text_and_options() -> None:
    given = body(system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}], stop_sequences=["x"])
    given |= {"temperature": 0, "top_k": 3, "stream": True, "model": "m"}
    check_message(given)
    assert chat_body(given) == {
        "messages": [{"role": "system", "content": "Be\n\nbrief."}, {"role": "user", "content": "Hi."}],
        "max_tokens": 9,
        "stop": ["x"],
        "temperature": 0,
        "top_k": 3,
        "stream": True,
        "model": "m",
    }


def test_a_turn_with_tools() -> None:
    assistant = [
        {"type": "thinking", "thinking": "Look.", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "c1", "name": "weather", "input": {"town": "Oslo"}},
    ]
    user = [
        {"type": "text", "text": "Go on."},
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "rain"}]},
        {"type": "tool_result", "tool_use_id": "c2", "content": "broken", "is_error": True},
    ]
    given = body({"role": "assistant", "content": assistant}, {"role": "user", "content": user})
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"town":"Oslo"}'}}
    assert chat_body(given)["messages"] == [
        {"role": "assistant", "content": "I look.", "reasoning_content": "Look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "Error: broken"},
        {"role": "user", "content": "Go on."},
    ]


def test_images_become_data_urls() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
    (message,) = chat_body(body({"role": "user", "content": [image]}))["messages"]
    assert message["content"] == [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}),
    ],
)
def test_tool_choices(choice: dict[str, Any], expected: Any) -> None:
    chat = chat_body(body(tools=[WEATHER, BASH], tool_choice=choice | {"disable_parallel_tool_use": True}))
    assert (chat["tool_choice"], chat["parallel_tool_calls"]) == (expected, False)
    function = {"name": "weather", "description": "The weather.", "parameters": {"type": "object"}}
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert hosted_tools([WEATHER, BASH]) == ["bash_20250124"]


def test_a_schema_and_thinking() -> None:
    schema = {"type": "object"}
    chat = chat_body(
        body(output_config={"format": {"type": "json_schema", "schema": schema}}, thinking={"type": "disabled"})
    )
    assert chat["response_format"] == {"type": "json_schema", "json_schema": {"schema": schema}}
    assert chat["reasoning_effort"] == "none"
    assert chat_body(body(output_config={"effort": "low"}))["reasoning_effort"] == "low"


def test_the_checksum_of_claude_code_does_not_change_the_prompt() -> None:
    one, other = (
        chat_body(body(system=[{"type": "text", "text": f"x-anthropic-billing-header: v=2; cch={checksum}; x"}]))
        for checksum in ("a1b2c", "00fff")
    )
    assert one == other
    kept = chat_body(body(system="Say cch=a1b2c; twice"))
    assert kept["messages"][0]["content"] == "Say cch=a1b2c; twice"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}]}, "max_tokens"),
        (body({"role": "robot", "content": "x"}), "messages"),
        (body({"role": "user", "content": [{"type": "document"}]}), "messages"),
        (
            body({"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}),
            "messages",
        ),
        (body({"role": "user", "content": [{"type": "tool_result", "content": "x"}]}), "messages"),
        (body({"role": "assistant", "content": [{"type": "tool_use", "id": "c"}]}), "messages"),
        (body(tools=[{"description": "x", "input_schema": {}}]), "tools"),
        (body(tools=[BASH], tool_choice={"type": "any"}), "tool_choice"),
        (body(tools=[WEATHER], tool_choice={"type": "odd"}), "tool_choice"),
        (body(tempratur=1), "tempratur"),
    ],
)
def test_refused(given: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        translated(given)
    assert refused.value.param == param


def test_a_stream_of_thinking_text_and_a_call() -> None:
    events = streamed(
        ReasoningPart("Hm"), AnswerText("S"), AnswerText("o."), ToolCall("f", '{"a":1}', "c"), reason="tool_calls"
    )
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert [event["index"] for event in events if event["type"] == "content_block_start"] == [0, 1, 2]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert [delta["type"] for delta in deltas] == [
        "thinking_delta",
        "signature_delta",
        "text_delta",
        "text_delta",
        "input_json_delta",
    ]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"] == {"input_tokens": 7, "output_tokens": 4, "cache_read_input_tokens": 3}


def test_an_empty_answer_and_a_whole_one() -> None:
    events = streamed(reason="length")
    assert events[1]["content_block"] == {"type": "text", "text": ""}
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":'}}
    message = {"content": None, "reasoning_content": "Hm.", "tool_calls": [call]}
    whole = MessageEncoder("msg_1", "m").whole([Answer("", "tool_calls", USAGE, message=message)], USAGE)
    assert whole["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "tool_use", "id": "c1", "name": "f", "input": {}},
    ]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TooLong("x", needed_tokens=2, context_tokens=1), "invalid_request_error"),
        (GatewayFault("x", status=401), "authentication_error"),
        (UnknownModel("x"), "not_found_error"),
        (Busy("x", retry_after_s=1.0), "rate_limit_error"),
        (EngineDied("x"), "overloaded_error"),
        (TokenmillError("x"), "api_error"),
    ],
)
def test_errors(error: TokenmillError, kind: str) -> None:
    detail = anthropic_error(error)["error"]
    assert (detail["type"], detail["code"]) == (kind, error.code)
    (event,) = read(MessageEncoder("msg_1", "m").failure(error))
    assert event["error"]["type"] == kind
