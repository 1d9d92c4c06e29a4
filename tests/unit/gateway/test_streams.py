"""Events of a stream: valid JSON for any text, with OpenAI's fields."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.engine.engine import TokenLogprob, Usage
from tokenmill.errors import EngineDied
from tokenmill.gateway.streaming import Chunks, Heading, failure
from tokenmill.jobs.openai.call import Endpoint


def read(event: bytes) -> dict[str, object]:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert b"\n" not in event[:-2]
    found: dict[str, object] = json.loads(event.removeprefix(b"data: "))
    return found


def heading(endpoint: Endpoint, model: str = "m") -> Heading:
    return Heading(endpoint, "id-1", 5, model, "fp_1")


@given(st.text(alphabet=st.characters(exclude_categories=())), st.text())
def test_any_text(text: str, model: str) -> None:
    chat = read(Chunks(heading("chat", model), include_usage=False).text(2, text))
    assert chat["choices"] == [{"index": 2, "delta": {"content": text}, "logprobs": None, "finish_reason": None}]
    assert (chat["object"], chat["model"], chat["id"]) == ("chat.completion.chunk", model, "id-1")
    plain = read(Chunks(heading("completion"), include_usage=False).text(0, text))
    assert plain["choices"] == [{"index": 0, "text": text, "logprobs": None, "finish_reason": None}]
    assert plain["object"] == "text_completion"


@pytest.mark.parametrize("endpoint", ["chat", "completion"])
def test_usage_is_null_until_the_end(endpoint: Endpoint) -> None:
    chunks = Chunks(heading(endpoint), include_usage=True)
    assert read(chunks.text(0, "a"))["usage"] is None
    assert read(chunks.end(0, "stop"))["choices"][0]["finish_reason"] == "stop"  # type: ignore[index]
    last = read(chunks.usage(Usage(10, 2, 7)))
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 2,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 7},
    }
    assert "usage" not in read(Chunks(heading(endpoint), include_usage=False).text(0, "a"))


def test_openings_and_calls() -> None:
    chunks = Chunks(heading("chat"), include_usage=False)
    assert read(chunks.opening(1))["choices"][0]["delta"]["role"] == "assistant"  # type: ignore[index]
    assert Chunks(heading("completion"), include_usage=False).opening(0) == b""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert read(chunks.tool_call(0, 1, call))["choices"][0]["delta"]["tool_calls"] == [{"index": 1, **call}]  # type: ignore[index]
    assert read(chunks.reasoning(0, "hm"))["choices"][0]["delta"] == {"reasoning_content": "hm"}  # type: ignore[index]


def test_offsets_go_on_from_piece_to_piece() -> None:
    chunks = Chunks(heading("completion"), include_usage=False)
    token = TokenLogprob("ab", 1, -0.5, b"ab")
    offsets = [read(chunks.text(0, "ab", (token,)))["choices"][0]["logprobs"]["text_offset"] for _ in range(3)]  # type: ignore[index]
    assert offsets == [[0], [2], [4]]
    chat = read(Chunks(heading("chat"), include_usage=False).text(0, "ab", (token,)))
    assert chat["choices"][0]["logprobs"]["content"][0]["token"] == "ab"  # type: ignore[index]


def test_an_error_is_an_event() -> None:
    assert read(failure(EngineDied("it died")))["error"]["code"] == "engine_died"  # type: ignore[index]
