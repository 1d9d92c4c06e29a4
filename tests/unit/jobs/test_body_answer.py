"""Answers out, as OpenAI's clients read them."""

import json
from math import inf

import pytest

from tokenmill.engine.engine import Answer, FinishReason, TokenLogprob, Usage
from tokenmill.jobs.openai.answers import answer_body, finish_reason_of, is_cut, text_of
from tokenmill.jobs.openai.call import Endpoint
from tokenmill.recipes.runner import Answered, AnswerOrigin, origin_of_answer
from tokenmill.storage.json_text import encode

USAGE = Usage(prompt_tokens=10, completion_tokens=2, cached_tokens=8)
TOKENS = (
    TokenLogprob("he", 1, -0.5, b"he", (TokenLogprob("he", 1, -0.5, b"he"), TokenLogprob("a", 2, -inf, b"a"))),
    TokenLogprob("llo", 3, -1.5, b"llo"),
)


def test_chat() -> None:
    body = answer_body("chat", Answer("hello", "stop", USAGE), id="x", model="m", created_s=12.9)
    assert body == {
        "id": "chatcmpl-x",
        "object": "chat.completion",
        "created": 12,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 10,
            "completion_tokens": 2,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 8},
        },
    }


def test_who_made_it_stays_with_it() -> None:
    body = answer_body("chat", Answer("a", "stop", USAGE), id="x", model="m", created_s=1, made_by="native llama.cpp 1")
    assert body["system_fingerprint"] == "native llama.cpp 1"
    answered = Answered("c", body)
    here = AnswerOrigin("m", "sha", "vllm", "0.9", 512)
    assert origin_of_answer(answered, here) == AnswerOrigin("m", "sha", "native", "llama.cpp 1", 512)
    assert origin_of_answer(Answered("c", {}), here) == here


def test_completion() -> None:
    body = answer_body("completion", Answer("hello", "length", Usage(1, 2, None)), id="x", model="m", created_s=1)
    assert body["id"] == "cmpl-x"
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "length"}]
    assert body["usage"] == {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}


def test_parsed_message_is_kept() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    answer = Answer("<tool>", "tool_calls", USAGE, message={"tool_calls": calls, "reasoning_content": "hm"})
    message = answer_body("chat", answer, id="x", model="m", created_s=1)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "hm"}
    thought = Answer("text", "stop", USAGE, message={"reasoning_content": "hm"})
    assert answer_body("chat", thought, id="x", model="m", created_s=1)["choices"][0]["message"]["content"] == "text"


def test_chat_logprobs() -> None:
    answer = Answer("hello", "stop", USAGE, logprobs=TOKENS)
    found = answer_body("chat", answer, id="x", model="m", created_s=1)["choices"][0]["logprobs"]
    assert [token["token"] for token in found["content"]] == ["he", "llo"]
    assert found["content"][0]["bytes"] == [104, 101]
    assert [top["logprob"] for top in found["content"][0]["top_logprobs"]] == [-0.5, -9999.0]
    assert found["content"][1]["top_logprobs"] == []


def test_completion_logprobs() -> None:
    answer = Answer("hello", "stop", USAGE, logprobs=TOKENS)
    found = answer_body("completion", answer, id="x", model="m", created_s=1)["choices"][0]["logprobs"]
    assert found == {
        "tokens": ["he", "llo"],
        "token_logprobs": [-0.5, -1.5],
        "text_offset": [0, 2],
        "top_logprobs": [{"he": -0.5, "a": -9999.0}, {}],
    }


def test_bytes_are_one_line_of_utf8() -> None:
    raw = encode(answer_body("chat", Answer("ü\n\u2028\ud800", "stop", USAGE), id="x", model="m", created_s=1))
    assert b"\n" not in raw
    assert "ü".encode() in raw
    assert json.loads(raw)["choices"][0]["message"]["content"] == "ü\n\u2028?"


@pytest.mark.parametrize("endpoint", ["chat", "completion", "responses"])
def test_text_and_cut_of_a_stored_answer(endpoint: Endpoint) -> None:
    whole, cut = (
        answer_body(endpoint, Answer("So.", reason, USAGE), id="x", model="m", created_s=1)
        for reason in ("stop", "length")
    )
    assert (text_of(whole), is_cut(whole)) == ("So.", False)
    assert (text_of(cut), is_cut(cut)) == ("So.", True)


def test_a_stored_call_has_no_text() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = Answer("", "tool_calls", USAGE, message={"content": None, "tool_calls": [call]})
    for endpoint in ("chat", "responses"):
        assert text_of(answer_body(endpoint, answer, id="x", model="m", created_s=1)) is None


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls"])
@pytest.mark.parametrize("endpoint", ["chat", "completion", "responses"])
def test_the_finish_reason_of_a_stored_answer(endpoint: Endpoint, reason: FinishReason) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"content": None, "tool_calls": [call]} if reason == "tool_calls" else None
    body = answer_body(endpoint, Answer("", reason, USAGE, message=message), id="x", model="m", created_s=1)
    assert finish_reason_of(json.loads(encode(body))) == reason


def test_an_embedding_is_never_cut() -> None:
    answer = Answer("", "stop", USAGE, message={"object": "list", "data": []})
    assert finish_reason_of(answer_body("embeddings", answer, id="x", model="m", created_s=1)) == "stop"
