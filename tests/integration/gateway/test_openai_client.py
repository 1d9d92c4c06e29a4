"""OpenAI's own client, sync and async, against the gateway on a real engine."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from support import patient
from support.gateway import LIMIT_S, Served, config_in, native_engine, served
from tokenmill.engine.engine import Chat
from tokenmill.engine.pinned_prefixes import PinnedPrefix

RULES = " ".join(f"Rule {number}: a report names its author, its date and mill {number}." for number in range(20))
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a town.",
            "parameters": {
                "type": "object",
                "properties": {"town": {"enum": ["Oslo", "Rome"]}},
                "required": ["town"],
                "additionalProperties": False,
            },
        },
    }
]


@pytest.fixture(scope="module")
def gateway(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    head = PinnedPrefix("rules", Chat(({"role": "system", "content": RULES},)))
    state = tmp_path_factory.mktemp("state")
    with served(native_engine(smollm2_path, heads=[head]), config_in(state)) as one:
        yield one


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_chat(gateway: Served) -> None:
    raw = gateway.client().chat.completions.with_raw_response.create(
        model="smollm2",
        messages=user("Say hi."),
        max_completion_tokens=5,
        temperature=0,
        user="u",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
    )
    answer = raw.parse()
    assert raw.headers["x-tokenmill-engine"] == "here"
    assert raw.headers["x-request-id"].startswith("req-")
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "smollm2"
    assert (answer.system_fingerprint or "").startswith("native ")
    choice, usage = answer.choices[0], answer.usage
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert usage is not None
    assert usage.completion_tokens == 5
    assert usage.total_tokens == usage.prompt_tokens + 5
    assert gateway.lines[-1]["completion_tokens"] == 5
    assert gateway.lines[-1]["backend"] == "here"
    assert "Say hi" not in str(gateway.lines)


def test_a_stream_says_the_same_as_the_whole(gateway: Served) -> None:
    client = gateway.client()
    settings = {"model": "smollm2", "messages": user("Count to five."), "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**settings)
    chunks = list(client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_bytes_of_a_stream(gateway: Served) -> None:
    body = {"messages": user("Hi."), "max_tokens": 2, "stream": True}
    with patient.stream("POST", f"{gateway.url}/v1/chat/completions", json=body) as answer:
        text = answer.read().decode()
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") for event in events[:-2])
    assert all("usage" not in json.loads(event.removeprefix("data: ")) for event in events[:-2])


def test_choices_share_one_prompt(gateway: Served) -> None:
    def ask(**more: object) -> Any:
        return gateway.client().chat.completions.create(
            model="smollm2",
            messages=user("Name a colour of the sky at dawn."),
            max_tokens=6,
            temperature=1.0,
            seed=5,
            n=3,
            **more,
        )

    first, again = ask(), ask()
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert len(set(texts)) > 1
    assert first.usage is not None
    assert first.usage.completion_tokens == 18
    assert first.usage.prompt_tokens < 60
    streamed: dict[int, str] = {0: "", 1: "", 2: ""}
    for chunk in ask(stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert list(streamed.values()) == texts


def test_stop_and_logit_bias(gateway: Served) -> None:
    client = gateway.client()
    answer = client.completions.create(
        model="smollm2", prompt="One, two, three, four,", max_tokens=20, temperature=0, stop=[","]
    )
    assert "," not in answer.choices[0].text
    assert answer.choices[0].finish_reason == "stop"
    token = gateway.call(gateway.state.backends[0].engine.tokenize("Z"))[-1]
    banned = client.completions.create(
        model="smollm2", prompt="a", max_tokens=2, temperature=0, logit_bias={str(token): 100}
    )
    assert banned.choices[0].text.startswith("Z")


def test_logprobs(gateway: Served) -> None:
    client = gateway.client()
    chat = client.chat.completions.create(
        model="smollm2", messages=user("Hi."), max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 3
    assert len(logprobs.content[0].top_logprobs) == 2
    assert logprobs.content[0].logprob <= 0
    text = client.completions.create(model="smollm2", prompt="The sky is", max_tokens=3, temperature=0, logprobs=1)
    chunks = list(
        client.completions.create(
            model="smollm2", prompt="The sky is", max_tokens=3, temperature=0, logprobs=1, stream=True
        )
    )
    odds = text.choices[0].logprobs
    assert odds is not None
    assert odds.text_offset is not None
    offsets = [
        offset
        for chunk in chunks
        if chunk.choices[0].logprobs
        for offset in chunk.choices[0].logprobs.text_offset or ()
    ]
    assert offsets == odds.text_offset


def test_json_is_followed(gateway: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    answer = gateway.client().chat.completions.create(
        model="smollm2",
        messages=user("Is water wet?"),
        max_tokens=30,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}},
    )
    assert set(json.loads(answer.choices[0].message.content or "")) == {"ok"}


def test_several_prompts(gateway: Served) -> None:
    answer = gateway.client().completions.create(model="smollm2", prompt=["One", "Two"], max_tokens=2, n=2, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_must_be_called(gateway: Served, stream: bool) -> None:
    settings = {
        "model": "smollm2",
        "messages": user("How is the weather in Rome?"),
        "tools": TOOLS,
        "max_tokens": 40,
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "temperature": 0,
    }
    if not stream:
        message = gateway.client().chat.completions.create(**settings).choices[0].message
        assert message.content is None
        (call,) = message.tool_calls
        reason = "tool_calls"
    else:
        chunks = list(gateway.client().chat.completions.create(**settings, stream=True))
        (call,) = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        assert not "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["town"] in ("Oslo", "Rome")
    assert reason == "tool_calls"


def test_tools_that_the_template_cannot_show_are_reported(gateway: Served) -> None:
    asked = {"model": "smollm2", "messages": user("Rome?"), "max_tokens": 1}
    raw = gateway.client().chat.completions.with_raw_response
    assert raw.create(**asked, tools=TOOLS).headers["x-tokenmill-not-told"] == "tools"
    assert "x-tokenmill-not-told" not in raw.create(**asked).headers


def test_a_digest_is_reused(gateway: Served) -> None:
    answer = gateway.client().chat.completions.create(
        model="smollm2",
        max_tokens=2,
        messages=[{"role": "system", "content": RULES}, {"role": "user", "content": "Who?"}],
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    cached = answer.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert cached > 0.9 * answer.usage.prompt_tokens


def test_models(gateway: Served) -> None:
    client = gateway.client()
    assert client.models.list().data[0].id == "smollm2"
    assert client.models.retrieve("smollm2").id == "smollm2"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-5", messages=user("Hi."))
    assert caught.value.code == "model_not_found"


def test_embeddings_are_not_supported(gateway: Served) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        gateway.client().embeddings.create(model="smollm2", input="Hi.")
    assert caught.value.status_code == 501
    assert caught.value.code == "embeddings_not_supported"


def test_unknown_keys_are_refused_by_name(gateway: Served) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        gateway.client().chat.completions.create(model="smollm2", messages=user("Hi."), extra_body={"temprature": 1})
    assert caught.value.param == "temprature"
    assert "did you mean 'temperature'?" in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        gateway.client().completions.create(model="smollm2", prompt="long " * 3000, max_tokens=5)
    assert caught.value.code == "context_length_exceeded"


def test_many_at_once(gateway: Served) -> None:
    async def ask() -> list[Any]:
        async with gateway.asynchronous() as client:

            async def one(number: int) -> Any:
                lane = {"X-Tokenmill-Priority": "batch" if number % 2 else "interactive"}
                answer = await client.chat.completions.create(
                    model="smollm2", messages=user(f"Say {number}."), max_tokens=4, temperature=0, extra_headers=lane
                )
                return answer.choices[0].message.content

            async with asyncio.timeout(LIMIT_S):
                return await asyncio.gather(*map(one, range(8)))

    assert all(asyncio.run(ask()))
    assert {line["lane"] for line in gateway.lines[-8:]} == {"interactive", "batch"}


def test_leaving_frees_the_slot(gateway: Served) -> None:
    stream = gateway.client().completions.create(
        model="smollm2", prompt="Once", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert gateway.running() == 1
    stream.close()

    async def until_free() -> int | None:
        engine = gateway.state.backends[0].engine
        async with asyncio.timeout(LIMIT_S):
            while gateway.state.backends[0].gate.running or (await engine.status()).counters.running:
                await asyncio.sleep(0.01)
        return (await engine.status()).counters.running

    assert gateway.call(until_free()) == 0
    assert gateway.lines[-1]["error"] == "client_left"


def test_a_schema_with_huge_counts_is_answered_or_refused(gateway: Served) -> None:
    def asked_for(**counts: int) -> dict[str, Any]:
        schema = {"type": "array", "items": {"type": "integer"}, **counts}
        return {"type": "json_schema", "json_schema": {"name": "numbers", "schema": schema}}

    def ask(response_format: Any) -> str:
        made = gateway.client().chat.completions.create(
            model="smollm2",
            messages=user("Three numbers."),
            max_completion_tokens=40,
            temperature=0,
            response_format=response_format,
        )
        return made.choices[0].message.content or ""

    assert isinstance(json.loads(ask(asked_for(maxItems=2**31 - 1))), list)
    for counts in ({"minItems": 10**9}, {"minItems": 5, "maxItems": 3}):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(asked_for(**counts))
        assert caught.value.code == "invalid_request"
    assert ask({"type": "text"})
