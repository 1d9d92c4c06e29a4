"""The OpenAI-compatible part of llama.cpp's server tests (tools/server/tests/unit of build 11549) against the gateway.

Each test does what the test of the same name does there, on SmolLM2 instead of their model, so texts are not compared.
Where the gateway differs on purpose, `DIFFERENCES` and docs/api.md give the reason.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from support import patient
from support.gateway import Served, config_in, native_engine, served
from support.gateway_clients import until
from tokenmill.gateway.http import keys

BOOK: list[Any] = [{"role": "system", "content": "Book"}, {"role": "user", "content": "What is the best book"}]
TEST: list[Any] = [{"role": "user", "content": "test"}]


@pytest.fixture(scope="module")
def gateway(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(native_engine(smollm2_path, context=512), config_in(tmp_path_factory.mktemp("state"))) as one:
        yield one


@pytest.fixture(scope="module")
def client(gateway: Served) -> Any:
    return gateway.client()


def post(gateway: Served, path: str, **body: Any) -> httpx.Response:
    return patient.post(f"{gateway.url}/v1{path}", json=body)


def chat(gateway: Served, **body: Any) -> dict[str, Any]:
    answer = post(gateway, "/chat/completions", **{"messages": BOOK, "max_tokens": 8, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


# ---- test_chat_completion.py


@pytest.mark.parametrize("content", ["Hey", [{"type": "text", "text": "What is"}, {"type": "text", "text": "it"}]])
def test_chat_completion(gateway: Served, content: Any) -> None:
    answer = chat(gateway, messages=[BOOK[0], {"role": "user", "content": content}])
    assert "cmpl" in answer["id"]
    assert answer["system_fingerprint"]
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["choices"][0]["finish_reason"] == "length"


def test_chat_completion_cached_tokens(gateway: Served) -> None:
    def cached(text: str) -> tuple[int, int]:
        usage = chat(gateway, messages=[{"role": "system", "content": "Cached"}, {"role": "user", "content": text}])[
            "usage"
        ]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    length, _ = cached("1 2 3 4 5 6")
    assert cached("1 2 3 4 5 6") == (length, length - 1)
    _, most = cached("1 2 3 4 5 9")
    _, least = cached("1 2 3 9 9 9")
    assert 0 < least < most < length - 1


def test_chat_completion_stream(client: Any) -> None:
    options = {"include_usage": True}
    events = list(
        client.chat.completions.create(
            model="smollm2", messages=BOOK, max_tokens=8, stream=True, stream_options=options
        )
    )
    assert events[0].choices[0].delta.role == "assistant"
    assert len({event.id for event in events}) == 1
    assert {event.model for event in events} == {"smollm2"}
    assert all(event.choices[0].delta.role is None for event in events[1:-1])
    assert events[-2].choices[0].finish_reason == "length"
    assert events[-2].choices[0].delta.content is None
    assert events[-1].choices == []
    assert events[-1].usage.completion_tokens == 8


def test_chat_completion_with_openai_library(client: Any) -> None:
    answer = client.chat.completions.create(model="smollm2", messages=BOOK, max_tokens=8, seed=42, temperature=0.8)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"type": "json_object", "schema": {"const": "42"}}, "42"),
        ({"type": "json_schema", "json_schema": {"schema": {"const": "foooooo"}}}, "foooooo"),
        ({"type": "json_object", "schema": {"type": "array", "items": {"type": "boolean"}, "maxItems": 1}}, list),
    ],
)
def test_completion_with_response_format(gateway: Served, form: Any, expected: Any) -> None:
    found = json.loads(chat(gateway, response_format=form, max_tokens=40)["choices"][0]["message"]["content"])
    assert isinstance(found, list) if expected is list else found == expected


@pytest.mark.parametrize(
    "form",
    [
        {"type": "sound"},
        {"type": "json_object", "schema": 123},
        {"type": "json_object", "schema": {"type": 123}},
        {"type": "json_object", "schema": {"type": "hiccup"}},
    ],
)
def test_completion_with_invalid_response_format(gateway: Served, form: Any) -> None:
    answer = post(gateway, "/chat/completions", messages=BOOK, response_format=form, max_tokens=8)
    assert (answer.status_code, "error" in answer.json()) == (400, True)


def test_completion_with_json_schema(gateway: Served) -> None:
    assert chat(gateway, json_schema={"const": "42"})["choices"][0]["message"]["content"] == '"42"'


def test_completion_with_grammar(gateway: Served) -> None:
    assert chat(gateway, grammar='root ::= "a"{5,5}')["choices"][0]["message"]["content"] == "aaaaa"


def test_completion_with_invalid_grammar(gateway: Served) -> None:
    answer = post(gateway, "/chat/completions", messages=BOOK, grammar="root ::= this is (not valid GBNF")
    assert answer.status_code == 400


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "string",
        [123],
        [{}],
        [{"role": 123}],
        [{"role": "system", "content": 123}],
        [{"role": "system", "content": "test"}, {}],
    ],
)
def test_invalid_chat_completion_req(gateway: Served, messages: Any) -> None:
    answer = post(gateway, "/chat/completions", messages=messages)
    assert (answer.status_code, "error" in answer.json()) == (400, True)


def test_logprobs(client: Any) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=BOOK, temperature=0.0, max_tokens=5, logprobs=True, top_logprobs=10
    )
    tokens = answer.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == answer.choices[0].message.content
    assert all(token.logprob <= 0 and token.bytes and len(token.top_logprobs) == 10 for token in tokens)


def test_logprobs_stream(client: Any) -> None:
    events = client.chat.completions.create(
        model="smollm2", messages=BOOK, temperature=0.0, max_tokens=5, logprobs=True, top_logprobs=10, stream=True
    )
    choices = [event.choices[0] for event in events]
    listed = [token.token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    assert "".join(listed) == "".join(choice.delta.content or "" for choice in choices)


def test_logit_bias(client: Any) -> None:
    plain = client.completions.create(model="smollm2", prompt="The", max_tokens=4, temperature=0, logprobs=0)
    first = client.chat.completions.create(
        model="smollm2", messages=BOOK, max_tokens=1, temperature=0, logprobs=True, top_logprobs=1
    )
    token = first.choices[0].logprobs.content[0].id
    other = client.chat.completions.create(
        model="smollm2", messages=BOOK, max_tokens=1, temperature=0, logit_bias={str(token): -100}
    )
    assert plain.choices[0].text
    assert other.choices[0].message.content != first.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_context_size_exceeded(gateway: Served, *, stream: bool) -> None:
    answer = post(gateway, "/chat/completions", messages=BOOK * 100, stream=stream)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_chat_completions_multiple_choices(gateway: Served) -> None:
    for _ in range(2):
        choices = chat(gateway, n=2)["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["length", "length"]


# ---- test_completion.py


def test_completion_stream_vs_non_stream(client: Any) -> None:
    options = {"model": "smollm2", "prompt": "I believe the meaning of life is", "max_tokens": 8, "seed": 1}
    whole = client.completions.create(**options)
    events = client.completions.create(stream=True, **options)
    assert "".join(event.choices[0].text for event in events) == whole.choices[0].text


def test_completion_stream_with_openai_library_stops(client: Any) -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    events = client.completions.create(
        model="smollm2", prompt="System: none", max_tokens=32, stream=True, extra_body={"json_schema": schema}
    )
    choices = [event.choices[0] for event in events]
    assert choices[-1].finish_reason == "stop"
    assert json.loads("".join(choice.text for choice in choices)) == {}


def test_consistent_result_same_seed(client: Any) -> None:
    options = {"model": "smollm2", "prompt": "The meaning of life", "max_tokens": 8, "temperature": 1.0}
    answers = {client.completions.create(seed=42, **options).choices[0].text for _ in range(3)}
    assert len(answers) == 1
    assert len({client.completions.create(seed=seed, **options).choices[0].text for seed in range(4)}) > 1


def test_completion_with_tokens_input(gateway: Served, client: Any) -> None:
    tokens = [504, 260, 357]
    one = client.completions.create(model="smollm2", prompt=tokens, max_tokens=4)
    assert one.usage.prompt_tokens == 3
    both = client.completions.create(model="smollm2", prompt=[tokens, "The sky"], max_tokens=4)
    assert [choice.index for choice in both.choices] == [0, 1]
    wrong = post(gateway, "/completions", prompt=[99_999_999], max_tokens=4)
    assert wrong.status_code == 400


def test_completion_parallel_slots(gateway: Served) -> None:
    many = gateway.asynchronous()

    async def run() -> list[str]:
        async with many:
            jobs = [
                many.completions.create(model="smollm2", prompt="Once", max_tokens=8, temperature=0) for _ in range(6)
            ]
            return [answer.choices[0].text for answer in await asyncio.gather(*jobs)]

    assert len(set(gateway.call(run()))) == 1


def test_cancel_request(gateway: Served) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{gateway.url}/v1/completions",
            json={"prompt": "I", "max_tokens": 400, "ignore_eos": True},
            timeout=httpx.Timeout(60, read=0.05),
        )
    until(lambda: gateway.running() == 0)


# ---- test_basic.py, test_security.py, test_compat_oai_responses.py, test_compat_anthropic.py


def test_server_models(client: Any) -> None:
    assert "smollm2" in [model.id for model in client.models.list()]


def test_responses_with_openai_library(client: Any) -> None:
    events = list(client.responses.create(model="smollm2", input=BOOK, max_output_tokens=8, stream=True))
    ids = {event.item_id for event in events if hasattr(event, "item_id")}
    last = events[-1].response
    assert (last.id[:5], last.output[0].id[:4], len(ids)) == ("resp_", "msg_", 1)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == last.output_text


def test_anthropic_vs_openai_different_response_format(gateway: Served) -> None:
    message = post(gateway, "/messages", messages=TEST, max_tokens=4).json()
    assert (message["type"], message["role"], message["content"][0]["type"]) == ("message", "assistant", "text")
    assert "choices" not in message


@pytest.mark.parametrize("body", [{"max_tokens": 4}, {"messages": [], "max_tokens": 4}])
def test_anthropic_missing_messages(gateway: Served, body: Any) -> None:
    answer = post(gateway, "/messages", **body)
    assert (answer.status_code, answer.json()["type"]) == (400, "error")


def test_anthropic_thinking_history_in_count_tokens(gateway: Served) -> None:
    def count(*content: Any) -> int:
        messages = [*TEST, {"role": "assistant", "content": list(content)}, *TEST]
        tokens: int = post(gateway, "/messages/count_tokens", messages=messages).json()["input_tokens"]
        return tokens

    assert count({"type": "text", "text": "It is a test."}) > count({"type": "text", "text": "It."}) > 0


def test_api_keys(smollm2_path: Path, tmp_path: Path) -> None:
    config = config_in(tmp_path)
    key = keys.add(config.state_path, "one")
    with served(native_engine(smollm2_path), config) as gateway:
        url = f"{gateway.url}/v1/completions"
        body = {"prompt": "I", "max_tokens": 1}
        assert patient.get(f"{gateway.url}/health").status_code == 200
        for given in ({}, {"Authorization": "Bearer wrong"}):
            assert patient.post(url, json=body, headers=given).status_code == 401
        for given in ({"Authorization": f"Bearer {key}"}, {"X-Api-Key": key}):
            assert patient.post(url, json=body, headers=given).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            gateway.client("wrong").models.list()


# ---- differences; docs/api.md gives the reasons

DIFFERENCES: list[tuple[str, dict[str, Any], int]] = [
    ("/chat/completions", {"messages": TEST, "timings_per_token": True}, 400),
    ("/chat/completions", {"messages": TEST, "return_progress": True}, 400),
    ("/chat/completions", {"messages": TEST, "verbose": True}, 400),
    ("/chat/completions", {"messages": TEST, "id_slot": 0}, 400),
    ("/chat/completions", {"messages": TEST, "model": "gpt-4.1"}, 404),
    ("/chat/completions", {"messages": TEST, "chat_template": "x"}, 400),
    ("/chat/completions", {"messages": [{"role": "assistant"}]}, 400),
    ("/completions", {"prompt": "I", "n_predict": 4}, 400),
    ("/completions", {"prompt": "I", "n_probs": 4}, 400),
    ("/completions", {"prompt": "I", "response_fields": ["content"]}, 400),
    ("/completions", {"prompt": ["I", [1], 2]}, 400),
    ("/completions", {"prompt": {"prompt_string": "I", "multimodal_data": []}}, 400),
    ("/messages", {"messages": TEST}, 400),
    ("/chat/completions/input_tokens", {"messages": TEST}, 404),
    ("/infill", {"input_prefix": "a"}, 404),
    ("/apply-template", {"messages": TEST}, 404),
    ("/tokenize", {"content": "a"}, 404),
    ("/lora-adapters", {}, 404),
]


@pytest.mark.parametrize(("path", "body", "status"), DIFFERENCES)
def test_what_the_gateway_refuses(gateway: Served, path: str, body: dict[str, Any], status: int) -> None:
    answer = post(gateway, path, **body)
    assert (answer.status_code, "error" in answer.json()) == (status, True)
