"""/v1/messages with Anthropic's own client, on a real engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from support.gateway import LIMIT_S, Served, config_in, native_engine, served
from tokenmill.gateway.http import keys

WEATHER: dict[str, Any] = {
    "name": "weather",
    "input_schema": {
        "type": "object",
        "properties": {"town": {"enum": ["Oslo", "Rome"]}},
        "required": ["town"],
        "additionalProperties": False,
    },
}
SHORT: dict[str, Any] = {"model": "smollm2", "max_tokens": 12, "system": "Be brief.", "extra_body": {"temperature": 0}}
HELLO: list[Any] = [{"role": "user", "content": "Say hello."}]


@pytest.fixture(scope="module")
def gateway(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(native_engine(smollm2_path), config_in(tmp_path_factory.mktemp("state"))) as one:
        yield one


def client_of(gateway: Served, key: str = "none") -> Any:
    return anthropic.Anthropic(base_url=gateway.url, api_key=key, max_retries=0, timeout=LIMIT_S)


def error_of(error: anthropic.APIStatusError) -> dict[str, Any]:
    body: Any = error.body
    found: dict[str, Any] = body["error"]
    return found


@pytest.fixture(scope="module")
def client(gateway: Served) -> Iterator[Any]:
    with client_of(gateway) as one:
        yield one


def test_the_same_text_whole_streamed_and_as_a_chat(gateway: Served, client: Any) -> None:
    whole = client.messages.create(messages=HELLO, **SHORT)
    with client.messages.stream(messages=HELLO, **SHORT) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    chat = gateway.client().chat.completions.create(model="smollm2", messages=messages, temperature=0, max_tokens=12)
    assert whole.content[0].text == text == chat.choices[0].message.content
    assert (whole.stop_reason, whole.model, whole.usage.output_tokens) == ("max_tokens", "smollm2", 12)
    usage = final.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens
    counted = client.messages.count_tokens(model="smollm2", messages=HELLO, system="Be brief.")
    assert counted.input_tokens == chat.usage.prompt_tokens


def test_a_tool_and_its_result(client: Any) -> None:
    options = SHORT | {"max_tokens": 100}
    asked = [{"role": "user", "content": "The weather?"}]
    with client.messages.stream(messages=asked, tools=[WEATHER], tool_choice={"type": "any"}, **options) as stream:
        calls = stream.get_final_message()
    (call,) = calls.content
    assert (call.type, call.name, calls.stop_reason) == ("tool_use", "weather", "tool_use")
    assert call.input["town"] in ("Oslo", "Rome")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    turn = [*asked, {"role": "assistant", "content": calls.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(messages=turn, **SHORT)
    assert answer.content[0].type == "text"


def test_stop_sequences_end_the_turn(client: Any) -> None:
    answer = client.messages.create(messages=HELLO, stop_sequences=["e", "l"], **SHORT)
    assert answer.stop_reason == "end_turn"
    assert "e" not in answer.content[0].text


def test_errors_have_anthropics_classes(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(messages=HELLO, **SHORT | {"model": "claude"})
    with pytest.raises(anthropic.BadRequestError) as long:
        client.messages.create(messages=[{"role": "user", "content": "word " * 3000}], **SHORT)
    assert error_of(long.value)["code"] == "context_length_exceeded"
    with pytest.raises(anthropic.BadRequestError) as odd:
        client.messages.create(messages=HELLO, **SHORT | {"extra_body": {"tempratur": 1}})
    assert error_of(odd.value)["type"] == "invalid_request_error"


def test_keys_in_anthropics_header(smollm2_path: Path, tmp_path: Path) -> None:
    config = config_in(tmp_path)
    key = keys.add(config.state_path, "one")
    with served(native_engine(smollm2_path), config) as gateway:
        with client_of(gateway, key) as known:
            assert known.messages.create(messages=HELLO, **SHORT).content
        with client_of(gateway, "wrong") as unknown, pytest.raises(anthropic.AuthenticationError) as refused:
            unknown.messages.create(messages=HELLO, **SHORT)
        assert error_of(refused.value)["type"] == "authentication_error"
