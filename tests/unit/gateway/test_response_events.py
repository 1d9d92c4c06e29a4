"""Events of a streamed response: their order, numbers and contents."""

import json
from typing import Any

from tokenmill.engine.answer_parts import AnswerText
from tokenmill.engine.engine import Answer, FinishReason, TokenLogprob, Usage
from tokenmill.engine.output_parser import ReasoningPart
from tokenmill.engine.tool_formats import ToolCall
from tokenmill.errors import EngineDied
from tokenmill.gateway.responses.events import ResponseEncoder

USAGE = Usage(10, 4, 3)


def encoder(**request: Any) -> ResponseEncoder:
    given = {"input": "Hi.", **request}
    return ResponseEncoder(given, id="x", created_s=1, model="m", fingerprint="native 1")


def read(data: bytes) -> list[dict[str, Any]]:
    events = []
    for block in data.decode().split("\n\n")[:-1]:
        name, line = block.split("\n")
        events.append(json.loads(line.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def streamed(one: ResponseEncoder, *parts: Any, reason: FinishReason = "stop") -> list[dict[str, Any]]:
    data = one.opening(0) + b"".join(one.parts(0, [part]) for part in parts) + one.end(0, reason) + one.closing(USAGE)
    events = read(data)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_text() -> None:
    events = streamed(encoder(), AnswerText("So"), AnswerText(" it is."))
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["delta"] for event in events if "delta" in event] == ["So", " it is."]
    assert events[6]["text"] == "So it is."
    last = events[-1]["response"]
    assert last["output"] == [events[8]["item"]]
    assert (last["status"], last["usage"]["total_tokens"], events[0]["response"]["status"]) == (
        "completed",
        14,
        "in_progress",
    )


def test_reasoning_text_and_calls_are_items_in_order() -> None:
    call = ToolCall("f", '{"a":1}', "c1")
    events = streamed(encoder(), ReasoningPart("Hm"), ReasoningPart("."), AnswerText("So."), call, reason="tool_calls")
    assert kinds(events)[2:] == [
        "output_item.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert [event["output_index"] for event in events if "item" in event] == [0, 0, 1, 1, 2, 2]


def test_a_stream_ends_with_the_same_output_as_a_whole_answer() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "patch", "arguments": '{"input": "x"}'}}
    message = {"content": "So.", "reasoning_content": "Hm.", "tool_calls": [call]}
    tools = [{"type": "custom", "name": "patch"}]
    whole = encoder(tools=tools).whole([Answer("So.", "tool_calls", USAGE, message=message)], USAGE)
    parts = (ReasoningPart("Hm."), AnswerText("So."), ToolCall("patch", '{"input": "x"}', "c1"))
    events = streamed(encoder(tools=tools), *parts, reason="tool_calls")
    assert "custom_tool_call_input.delta" in kinds(events)
    assert events[-1]["response"] == whole


def test_probabilities_without_text_open_no_message() -> None:
    token = TokenLogprob("<", 1, -0.5, b"<")
    call = ToolCall("f", "{}", "c1")
    events = streamed(encoder(), AnswerText("", (token,)), call, AnswerText("", (token,)), reason="tool_calls")
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["function_call"]
    text = streamed(encoder(), AnswerText("a", (token,)), AnswerText("", (token,)))[-1]["response"]["output"][0]
    assert len(text["content"][0]["logprobs"]) == 2


def test_an_empty_answer_has_an_empty_message() -> None:
    events = streamed(encoder(), reason="length")
    last = events[-1]
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")
    assert last["response"]["output"][0]["content"][0]["text"] == ""
    assert last["response"]["output"][0]["status"] == "incomplete"


def test_a_failed_stream_says_why() -> None:
    one = encoder()
    one.opening(0)
    (event,) = read(one.failure(EngineDied("it died")))
    assert (event["type"], event["response"]["status"]) == ("response.failed", "failed")
    assert event["response"]["error"] == {"code": "engine_died", "message": "it died"}
