"""/v1/responses with OpenAI's own client, on a real engine."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from support import gateway_process, patient
from support.gateway import Served, config_in, native_engine, served
from support.gateway_clients import until
from tokenmill.gateway.http import keys

TOWN = {"type": "object", "properties": {"town": {"enum": ["Oslo", "Rome"]}}, "required": ["town"]}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": TOWN | {"additionalProperties": False},
    "strict": True,
}
SHORT = {"model": "smollm2", "temperature": 0, "max_output_tokens": 12}
LONG = {"max_output_tokens": 100}


@pytest.fixture(scope="module")
def gateway(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(native_engine(smollm2_path), config_in(tmp_path_factory.mktemp("state"))) as one:
        yield one


def finished(client: Any, response: Any) -> Any:
    """A background response in its final state."""
    box = [response]

    def over() -> bool:
        box[0] = client.responses.retrieve(response.id)
        return box[0].status not in ("queued", "in_progress")

    until(over)
    return box[0]


def test_the_same_text_whole_streamed_and_as_a_chat(gateway: Served) -> None:
    client = gateway.client()
    whole = client.responses.create(input="Say hello.", instructions="Be brief.", **SHORT)
    events = list(client.responses.create(input="Say hello.", instructions="Be brief.", stream=True, **SHORT))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello."}]
    chat = client.chat.completions.create(model="smollm2", messages=messages, temperature=0, max_tokens=12)
    assert whole.output_text == chat.choices[0].message.content
    assert whole.output_text == "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (chat.usage.prompt_tokens, 12)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert events[0].type == "response.created"
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == whole.output_text
    assert (whole.model, whole.system_fingerprint) == (chat.model, chat.system_fingerprint)


def test_a_conversation_by_previous_response_id(gateway: Served) -> None:
    client = gateway.client()
    first = client.responses.create(input="My name is Ada.", instructions="Be brief.", **SHORT)
    second = client.responses.create(input="And I am 36.", previous_response_id=first.id, **SHORT)
    third = client.responses.input_tokens.count(
        model="smollm2", input="Who am I?", previous_response_id=second.id, instructions="Be kind."
    )
    said = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And I am 36."},
        {"role": "assistant", "content": second.output_text},
        {"role": "user", "content": "Who am I?"},
    ]
    chat = client.chat.completions.create(model="smollm2", messages=said, max_tokens=1)
    assert third.input_tokens == chat.usage.prompt_tokens
    assert client.responses.retrieve(second.id).previous_response_id == first.id
    assert [item.content for item in client.responses.input_items.list(second.id)] == ["And I am 36."]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as unknown:
        client.responses.create(input="Who?", previous_response_id=second.id, **SHORT)
    assert unknown.value.code == "previous_response_not_found"


def test_nothing_is_kept_without_store(gateway: Served) -> None:
    client = gateway.client()
    response = client.responses.create(input="Hi.", store=False, **SHORT)
    with pytest.raises(openai.NotFoundError) as unknown:
        client.responses.retrieve(response.id)
    assert unknown.value.code == "response_not_found"


def test_a_function_call_and_its_output(gateway: Served) -> None:
    client = gateway.client()
    calls = client.responses.create(input="Weather?", tools=[WEATHER], tool_choice="required", **SHORT | LONG)
    (call,) = calls.output
    assert (call.type, call.name) == ("function_call", "weather")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    answer = client.responses.create(input=[output], previous_response_id=calls.id, **SHORT)
    assert answer.output[0].type == "message"
    raw = client.responses.with_raw_response.create(input="Hi.", tools=[{"type": "web_search"}], **SHORT)
    assert raw.headers["x-tokenmill-not-told"] == "web_search"


def test_structured_output(gateway: Served) -> None:
    form = {"type": "json_schema", "name": "town", "schema": TOWN | {"additionalProperties": False}, "strict": True}
    response = gateway.client().responses.create(model="smollm2", input="A town.", text={"format": form})
    assert json.loads(response.output_text)["town"] in ("Oslo", "Rome")


def test_a_background_response(gateway: Served) -> None:
    client = gateway.client()
    first = client.responses.create(input="My name is Ada.", **SHORT)
    queued = client.responses.create(
        input="Who am I?", previous_response_id=first.id, background=True, metadata={"a": "b"}, **SHORT
    )
    assert queued.status == "queued"
    done = finished(client, queued)
    now = client.responses.create(input="Who am I?", previous_response_id=first.id, **SHORT)
    assert (done.output_text, done.usage.input_tokens) == (now.output_text, now.usage.input_tokens)
    assert (done.id, done.status, done.background, done.metadata) == (queued.id, "incomplete", True, {"a": "b"})
    assert (done.previous_response_id, done.model) == (first.id, "smollm2")
    assert not any(batch.id == done.id for batch in client.batches.list())
    assert list(client.files.list()) == []
    client.responses.delete(done.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(done.id)


def test_background_responses_can_fail_and_be_cancelled(gateway: Served) -> None:
    client = gateway.client()
    failed = finished(client, client.responses.create(input="word " * 3000, background=True, **SHORT))
    assert (failed.status, failed.error.code) == ("failed", "too_long")
    queued = client.responses.create(model="smollm2", input="Count.", background=True, extra_body={"ignore_eos": True})
    assert client.responses.cancel(queued.id).status == "cancelled"
    assert client.responses.retrieve(queued.id).status == "cancelled"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"input": "Hi.", "background": True, "stream": True}, "invalid_request"),
        ({"input": "Hi.", "background": True, "store": False}, "invalid_request"),
        ({"input": "Hi.", "background": True, "model": "gpt-9"}, "model_not_found"),
        ({"input": "Hi.", "model": "gpt-9"}, "model_not_found"),
        ({"input": "word " * 3000}, "context_length_exceeded"),
        ({"input": "Hi.", "previous_response_id": "file-1"}, "previous_response_not_found"),
        ({"input": "Hi.", "verbosity": "high"}, "unknown_parameter"),
    ],
)
def test_refused(gateway: Served, body: dict[str, Any], code: str) -> None:
    response = patient.post(f"{gateway.url}/v1/responses", json={"model": "smollm2", **body})
    assert (response.status_code in (400, 404), response.json()["error"]["code"]) == (True, code)


def test_responses_belong_to_the_key(smollm2_path: Path, tmp_path: Path) -> None:
    config = config_in(tmp_path)
    first, second = (keys.add(config.state_path, name) for name in ("one", "two"))
    with served(native_engine(smollm2_path), config) as gateway:
        response = gateway.client(first).responses.create(input="Hi.", **SHORT)
        with pytest.raises(openai.NotFoundError):
            gateway.client(second).responses.retrieve(response.id)
        with pytest.raises(openai.NotFoundError):
            gateway.client(second).responses.create(input="And?", previous_response_id=response.id, **SHORT)
        assert gateway.client(first).responses.retrieve(response.id).id == response.id


def test_a_background_response_survives_a_kill(smollm2_path: Path, tmp_path: Path) -> None:
    with (
        gateway_process.started(tmp_path, smollm2_path) as (process, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        queued = client.responses.create(input="Hi.", background=True, **SHORT)  # type: ignore[call-overload]
        process.send_signal(signal.SIGKILL)
        process.wait()
    with (
        gateway_process.started(tmp_path, smollm2_path) as (_, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        done = finished(client, queued)
    assert done.status == "incomplete"
    assert done.output_text
