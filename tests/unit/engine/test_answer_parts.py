"""Parts of an answer: streamed and complete answers have the same, in the order of their arrival."""

from typing import Any

from tokenmill.engine.answer_parts import AnswerReader, AnswerText, parts_of
from tokenmill.engine.engine import Answer, Piece, Usage
from tokenmill.engine.output_parser import OutputParser, ReasoningPart, ToolCallParser
from tokenmill.engine.server.response import Collector
from tokenmill.engine.tool_formats import ToolCall

USAGE = {"prompt_tokens": 5, "completion_tokens": 4}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], "usage": USAGE}


def test_reasoning_of_a_server_arrives_before_the_text() -> None:
    collector = Collector("llama-server", chat=True, top_logprobs=None, max_tokens=None)
    chunks = [
        chunk(role="assistant", content=None),
        chunk(reasoning_content="Hm"),
        chunk(reasoning_content="."),
        chunk(content="So."),
        chunk(tool_calls=[{"index": 0, **CALL}]),
        chunk("tool_calls"),
    ]
    reader = AnswerReader(None)
    parts = [part for one in chunks if (piece := collector.take(one)) is not None for part in reader.piece(piece)]
    rest, reason = reader.end(collector.answer())
    assert parts == [ReasoningPart("Hm"), ReasoningPart("."), AnswerText("So.")]
    assert (rest, reason) == ([ToolCall("f", "{}", "c")], "tool_calls")
    assert parts_of(collector.answer()) == [ReasoningPart("Hm."), AnswerText("So."), ToolCall("f", "{}", "c")]


def test_reasoning_that_was_not_streamed_is_in_the_end() -> None:
    answer = Answer("So.", "stop", Usage(5, 4, 0), message={"content": "So.", "reasoning_content": "Hm."})
    reader = AnswerReader(None)
    assert reader.piece(Piece("So.", 1)) == [AnswerText("So.")]
    assert reader.end(answer) == ([ReasoningPart("Hm.")], "stop")


def test_calls_in_the_text_are_parsed() -> None:
    reader = AnswerReader(OutputParser(ToolCallParser({"f": {}})))
    assert reader.piece(Piece('<tool_call>{"name": "f", "arguments"', 5)) == []
    (call,) = reader.piece(Piece(': {"a": 1}}</tool_call>', 5))
    assert isinstance(call, ToolCall)
    assert (call.name, call.arguments) == ("f", '{"a": 1}')
    assert reader.end(Answer("", "stop", Usage(5, 4, 0))) == ([], "tool_calls")
