"""Relayed request bodies, relayed responses, and the usage read from them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.engine.engine import HttpApi, Usage
from tokenmill.gateway.backends.passthrough import (
    ObservedAnswer,
    has_content,
    hides_usage,
    relayed_body,
    relayed_headers,
    usage_in,
)
from tokenmill.gateway.http.request import parsed_request
from tokenmill.gateway.monitoring.recorder import PriorityClass

LLAMA, VLLM, ANY = HttpApi("llama-server", "m"), HttpApi("vllm", "m"), HttpApi("url", "m")
HELLO = [{"role": "user", "content": "hello"}]


def sent(
    body: dict[str, Any], api: HttpApi, *, lane: PriorityClass = "interactive", text: bytes | None = None
) -> bytes | None:
    data = json.dumps(body).encode() if text is None else text
    endpoint: Any = "chat" if "messages" in body else "completion"
    return relayed_body(parsed_request(endpoint, body, lane, max_choices=8, raw=data), api)


def test_bytes_stay_as_they_came() -> None:
    text = b'{ "model" : "m",\n "messages": [{"role": "user", "content": "h\\u00e9llo"}], "temperature": 0.10 }\n'
    assert sent(json.loads(text), LLAMA, text=text) == text


def test_only_the_model_is_changed() -> None:
    text = b'{ "messages": [{"role": "user", "content": "hi"}],\n "model" :\t"alias", "seed": 3 }'
    assert sent(json.loads(text), LLAMA, text=text) == text.replace(b'"alias"', b'"m"')


@pytest.mark.parametrize("content", ['"model": "alias"', "model", '\\"model\\"', '{"model": "alias"}'])
def test_a_model_in_the_text_is_not_the_model(content: str) -> None:
    body = {"messages": [{"role": "user", "content": content}], "model": "alias"}
    made = sent(body, LLAMA)
    assert made is not None
    assert json.loads(made) == body | {"model": "m"}


@given(st.text(), st.text(min_size=1).filter(lambda name: name.isprintable()))
def test_whatever_the_text_the_rest_is_kept(content: str, model: str) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": content}], "stream": True}
    made = sent(body, ANY)
    assert made is not None
    assert json.loads(made) == body | {"model": "m", "stream_options": {"include_usage": True}}


def test_a_body_without_a_model_gets_one() -> None:
    made = sent({"messages": HELLO}, LLAMA)
    assert made is not None
    assert json.loads(made) == {"messages": HELLO, "model": "m"}


@pytest.mark.parametrize(("lane", "priority"), [("interactive", 0), ("batch", 1)])
def test_priority_is_passed_to_vllm(lane: PriorityClass, priority: int) -> None:
    body = {"model": "m", "messages": HELLO}
    made = sent(body, HttpApi("vllm", "m", priorities=True), lane=lane)
    assert made is not None
    assert json.loads(made) == body | {"priority": priority}


@pytest.mark.parametrize(
    ("body", "api"),
    [
        ({"messages": HELLO, "n": 2}, VLLM),  # several choices share a prefix
        ({"messages": HELLO, "timeout": 5}, LLAMA),  # ours to keep
        ({"messages": HELLO, "logprobs": True}, LLAMA),  # with none on top it gives none at all
        ({"messages": HELLO, "top_k": 5}, ANY),
        ({"messages": HELLO}, HttpApi("ik_llama", "m")),  # does not say truly why it stopped
        ({"prompt": "a"}, VLLM),  # would stop after 16 tokens
        ({"prompt": ["a", "b"], "max_tokens": 5}, VLLM),
        (
            {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]},
            HttpApi("vllm", "m", tools=False),
        ),
    ],
)
def test_what_the_engine_protocol_must_say(body: dict[str, Any], api: HttpApi) -> None:
    assert sent({"model": "m"} | body, api) is None


def test_connection_headers_are_removed() -> None:
    given_ = [
        (b"content-type", b"application/json"),
        (b"connection", b"keep-alive, X-Odd"),
        (b"x-odd", b"1"),
        (b"transfer-encoding", b"chunked"),
        (b"set-cookie", b"a=b"),
        (b"access-control-allow-origin", b"*"),
        (b"x-tokenmill-engine", b"liar"),
        (b"openai-processing-ms", b"5"),
        (b"content-length", b"5"),
    ]
    assert relayed_headers(given_) == [(b"content-type", b"application/json"), (b"openai-processing-ms", b"5")]


CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}],"usage":null}\n\n'
USED = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":3}}}\n\n'
DONE = b"data: [DONE]\n\n"


@given(st.lists(st.integers(1, 40)))
def test_usage_that_only_we_asked_for_is_taken_out(sizes: list[int]) -> None:
    """However the bytes are cut."""
    stream, observed, out = CHUNK * 2 + USED + DONE, ObservedAnswer(hide_usage=True), b""
    for size in sizes:
        out += observed.take(stream[:size]) if stream[:size] else b""
        stream = stream[size:]
    out += observed.take(stream) + observed.end()
    assert out == CHUNK * 2 + DONE
    assert observed.usage().usage == Usage(7, 2, 3)
    assert observed.ended_well


def test_carriage_returns_are_kept() -> None:
    observed = ObservedAnswer(hide_usage=True)
    stream = (CHUNK + USED + DONE).replace(b"\n", b"\r\n")
    assert observed.take(stream) + observed.end() == (CHUNK + DONE).replace(b"\n", b"\r\n")


def test_usage_that_was_asked_for_goes_by() -> None:
    observed = ObservedAnswer()
    assert observed.take(CHUNK + USED + DONE) == CHUNK + USED + DONE
    assert observed.usage().usage == Usage(7, 2, 3)
    body = {"model": "m", "messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
    assert not hides_usage(parsed_request("chat", body, "interactive", max_choices=8), ANY)


@pytest.mark.parametrize(
    ("text", "usage"),
    [
        (b'{"usage":{"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}}', Usage(7, 2, None)),
        (b'{"timings":{"cache_n":5,"prompt_n":2,"prompt_ms":1.5,"predicted_n":3,"predicted_ms":6e1}}', Usage(7, 3, 5)),
        (b'{"choices":[{"text":"\\"usage\\": {\\"prompt_tokens\\": 1}"}]}', None),
        (b"{}", None),
        (b'{"usage":null}', None),
    ],
)
def test_what_was_used(text: bytes, usage: Usage | None) -> None:
    assert usage_in(text).usage == usage


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":null}}]}\n\n', False),
        (b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n', False),
        (b": ping\n\n", False),
        (b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n', True),
        (b'data: {"choices":[{"index":0,"delta":{"reasoning_content":"a"}}]}\n\n', True),
        (b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n', True),
        (b'data: {"choices":[{"index":0,"text":"a"}]}\n\n', True),
        (b"data: [DONE]\n\n", True),
    ],
)
def test_when_an_answer_has_begun(data: bytes, said: bool) -> None:
    assert has_content(data) is said


@pytest.mark.parametrize("count", ["maxItems", "minItems"])
def test_a_schema_with_huge_counts_is_not_relayed(count: str) -> None:
    schema = {"name": "a", "schema": {"type": "array", count: 2**31 - 1}}
    assert sent({"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": schema}}, LLAMA) is None
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "array", count: 2**31 - 1}}}
    assert sent({"messages": HELLO, "tools": [tool]}, LLAMA) is None
    schema["schema"] = {"type": "array", count: 3}
    assert sent({"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": schema}}, LLAMA)
