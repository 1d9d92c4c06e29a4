"""Streams of servers, captured or from their source code, become pieces and one answer."""

from typing import Any

import pytest

from support.http_answers import captured
from tokenmill.engine.engine import Answer, EngineKind, Piece, Usage
from tokenmill.engine.server.response import Collector, data_of, logprobs_of, object_of
from tokenmill.errors import EngineError


def collected(
    chunks: list[dict[str, Any]],
    kind: EngineKind = "llama-server",
    *,
    chat: bool = True,
    top: int | None = None,
    most: int | None = None,
) -> tuple[list[Piece], Answer]:
    collector = Collector(kind, chat, top, most)
    pieces = [piece for piece in map(collector.take, chunks) if piece is not None]
    assert collector.finished
    return pieces, collector.answer()


@pytest.mark.parametrize(
    ("name", "kind", "chat", "text", "usage"),
    [
        ("llama-chat-stream", "llama-server", True, None, Usage(32, 4, 0)),
        ("llama-chat-stream-cached", "llama-server", True, None, Usage(32, 1, 31)),
        ("llama-completion-stream-logprobs", "llama-server", False, " the scene", Usage(2, 2, 0)),
        ("vllm-chat-stream", "vllm", True, " speaksInternal ripple ripple ripple ripple ripple ripple", None),
        ("vllm-completion-stream", "vllm", False, None, Usage(4, 8, 0)),
    ],
)
def test_captured_streams(name: str, kind: EngineKind, chat: bool, text: str | None, usage: Usage | None) -> None:
    pieces, answer = collected(captured(name).chunks, kind, chat=chat)
    assert "".join(piece.text for piece in pieces) == answer.text != ""
    assert text is None or answer.text == text
    assert usage is None or answer.usage == usage
    assert answer.usage.cached_tokens is not None
    assert answer.finish_reason == "length"
    assert sum(piece.tokens for piece in pieces) == answer.usage.completion_tokens
    assert (answer.message == {"role": "assistant", "content": answer.text}) is chat
    assert (answer.timings.decode_s is not None) is (kind == "llama-server")


def test_probabilities_in_the_form_of_chats() -> None:
    pieces, answer = collected(captured("llama-chat-stream-logprobs").chunks, top=2)
    first = pieces[0].logprobs[0]
    assert (first.text, first.token, first.raw) == ("I", 57, b"I")
    assert first.top[0].text == "I"
    assert len(first.top) == 2
    assert first.top[0].logprob >= first.top[1].logprob
    assert answer.logprobs == tuple(entry for piece in pieces for entry in piece.logprobs)
    assert len(answer.logprobs) == 2


def test_probabilities_of_the_chosen_token_alone() -> None:
    _, answer = collected(captured("llama-chat-stream-logprobs").chunks, top=0)
    assert answer.logprobs is not None
    assert all(entry.top == () for entry in answer.logprobs)


def test_vllm_has_no_token_numbers_and_no_order_for_completions() -> None:
    pieces, answer = collected(captured("vllm-completion-stream-logprobs").chunks, "vllm", chat=False, top=2)
    first = pieces[0].logprobs[0]
    assert (first.text, first.token, first.raw) == ("nering", None, b"nering")
    assert [other.text for other in first.top] == ["nering", "budget"]
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 4


def test_bytes_that_are_no_character() -> None:
    entry = {"token": "", "bytes": [0xF0, 0x9F], "logprob": -1.0, "id": 7, "top_logprobs": []}
    assert logprobs_of({"content": [entry]}, 1)[0].raw == b"\xf0\x9f"


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    choices = [] if delta is None and finish is None else [{"index": 0, "delta": delta or {}, "finish_reason": finish}]
    return {"choices": choices, **more}


USED = {"prompt_tokens": 9, "completion_tokens": 3}


def test_ik_llama_counts_what_it_computed() -> None:
    # the form is that of examples/server/server-task.cpp at 46c4057: usage in every chunk, no cache_n, n_past instead;
    # its chats end with `stop` even where the number of tokens ended them
    timings = {"prompt_n": 4, "prompt_ms": 20.0, "predicted_n": 3, "predicted_ms": 30.0, "n_ctx": 512, "n_past": 12}
    chunks = [
        chunk({"role": "assistant", "content": None}, usage={**USED, "completion_tokens": 1}),
        chunk({"content": "a"}, usage={**USED, "completion_tokens": 1}, timings={**timings, "predicted_n": 1}),
        chunk({"content": "b"}, usage={**USED, "completion_tokens": 2}, timings={**timings, "predicted_n": 2}),
        chunk({}, "stop"),
        chunk(usage=USED, timings=timings),
    ]
    _, answer = collected(chunks, "ik_llama", most=3)
    assert answer.usage == Usage(9, 3, 5)
    assert answer.finish_reason == "length"
    assert (answer.timings.prefill_s, answer.timings.decode_s) == (0.02, 0.03)
    assert collected(chunks, "ik_llama", most=4)[1].finish_reason == "stop"
    assert collected(chunks, "llama-server", most=3)[1].finish_reason == "stop"


def test_tool_calls_and_reasoning_are_put_together() -> None:
    chunks = [
        chunk({"reasoning_content": "Let me "}),
        chunk({"reasoning": "see."}),
        chunk(
            {"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "add", "arguments": ""}}]}
        ),
        chunk({"tool_calls": [{"index": 1, "id": "b", "function": {"name": "mul", "arguments": "{}"}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"x":'}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]}),
        chunk({}, "stop"),
        chunk(usage=USED),
    ]
    _, answer = collected(chunks)
    assert answer.finish_reason == "tool_calls"
    assert answer.message == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Let me see.",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x":1}'}},
            {"id": "b", "type": "function", "function": {"name": "mul", "arguments": "{}"}},
        ],
    }


def test_a_server_that_counts_nothing_on_the_way() -> None:
    pieces, answer = collected([chunk({"content": "x"}), chunk({"content": "y"}), chunk({}, "stop", usage=USED)], "url")
    assert [piece.tokens for piece in pieces] == [1, 1, 1], "what a chunk leaves open, the last count closes"
    assert answer.usage == Usage(9, 3, None)


def test_usage_may_come_from_timings_alone() -> None:
    timings = {"cache_n": 5, "prompt_n": 4, "predicted_n": 3}
    assert collected([chunk({}, "stop", timings=timings)])[1].usage == Usage(9, 3, 5)


def test_a_server_that_does_not_tell_its_usage() -> None:
    with pytest.raises(EngineError, match="usage"):
        collected([chunk({"content": "x"}, "stop")], "url")


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_server_that_gave_up(reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        collected([chunk({}, reason, usage=USED)], "vllm")


def test_an_unknown_reason_is_kept() -> None:
    answer = collected([chunk({}, "content_filter", usage=USED)], "url")[1]
    assert answer.finish_reason == "stop"
    [note] = answer.notes
    assert "'content_filter'" in note


@pytest.mark.parametrize(
    ("line", "data"),
    [
        ("data: {}", "{}"),
        ("data:{}", "{}"),
        ("data: [DONE]", "[DONE]"),
        (": ping", None),
        ("", None),
        ("event: x", None),
        ('error: {"code":500}', '{"code":500}'),
        ("retry: 10", None),
    ],
)
def test_lines_of_a_stream(line: str, data: str | None) -> None:
    assert data_of(line) == data


@pytest.mark.parametrize("text", ["{", "[]", "null", "<html>"])
def test_what_is_no_object(text: str) -> None:
    with pytest.raises(EngineError, match="JSON"):
        object_of(text)
