"""Files and batches with OpenAI's own client, sync and async, on a real engine."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from support import gateway_process, patient
from support.batches import CHAT, chat_line, created, events, lines_of, until, uploaded
from support.gateway import LIMIT_S, Served, config_in, native_engine, served
from tokenmill.gateway import app
from tokenmill.gateway.batches import routes
from tokenmill.gateway.batches.service import BatchService
from tokenmill.gateway.http.openapi import RouteGroup
from tokenmill.gateway.responses import routes as responses
from tokenmill.gateway.state import GatewayState
from tokenmill.jobs.store.reader import StoreReader


def _groups(state: GatewayState) -> tuple[RouteGroup, ...]:
    service = BatchService(state, 0.1)
    return routes.route_group(state, service), responses.route_group(state, service)


@pytest.fixture(scope="module")
def gateway(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    state = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(app, "extra_groups", _groups)
        with served(native_engine(smollm2_path), config_in(state)) as one:
            yield one


def test_a_batch_from_file_to_files(gateway: Served) -> None:
    client = gateway.client()
    lines = [chat_line(f"r{number}", f"Say {number}.") for number in range(4)]
    file = uploaded(client, *lines, chat_line("odd", "Hi.", temprature=1), chat_line("long", "word " * 3000))
    assert (file.object, file.purpose, file.filename, file.status) == ("file", "batch", "jobs.jsonl", "processed")
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint=CHAT,
        completion_window="24h",
        metadata={"night": "one"},
        output_expires_after={"anchor": "created_at", "seconds": 7200},
    )
    assert batch.status == "validating"
    assert batch.expires_at - batch.created_at == 86400
    done = until(client, batch, "completed")
    assert events(gateway, batch.id) == ["in_progress", "finalizing", "completed"]
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (6, 4, 2)
    assert (done.model, done.metadata, done.errors) == ("smollm2", {"night": "one"}, None)
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
    assert done.usage.output_tokens == 24
    assert done.usage.input_tokens_details.cached_tokens > 0
    answers = lines_of(client, done.output_file_id)
    assert [line["custom_id"] for line in answers] == ["r0", "r1", "r2", "r3"]
    assert all(line["response"]["status_code"] == 200 and line["error"] is None for line in answers)
    assert all(line["response"]["body"]["choices"][0]["message"]["content"] for line in answers)
    odd, long = lines_of(client, done.error_file_id)
    assert (odd["custom_id"], odd["response"]) == ("odd", None)
    assert "did you mean 'temperature'?" in odd["error"]["message"]
    assert (long["custom_id"], long["error"]["code"]) == ("long", "too_long")
    output = client.files.retrieve(done.output_file_id)
    assert (output.purpose, output.expires_at - output.created_at) == ("batch_output", 7200)
    assert output.bytes == len(client.files.content(output.id).content)


TOWN = {"type": "object", "properties": {"town": {"enum": ["Oslo", "Rome"]}}, "required": ["town"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": TOWN | {"additionalProperties": False}}},
    {"type": "function", "function": {"name": "clock"}},
]


def test_a_batch_and_a_chat_give_the_same_message_for_the_same_tools(gateway: Served) -> None:
    client = gateway.client()
    asked: dict[str, dict[str, Any]] = {
        "required": {"tool_choice": "required"},
        "named": {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        "one": {"tool_choice": "required", "parallel_tool_calls": False},
        "none": {"tool_choice": "none", "max_tokens": 6},
    }
    lines = [
        chat_line(name, "Is it hot in Rome?", **{"tools": TOOLS, "max_tokens": 60, **body})
        for name, body in asked.items()
    ]
    done = until(client, created(client, *lines, endpoint=CHAT), "completed")
    answers = {
        line["custom_id"]: line["response"]["body"]["choices"][0] for line in lines_of(client, done.output_file_id)
    }
    assert set(answers) == set(asked)
    for line in map(json.loads, lines):
        chat = client.chat.completions.create(**line["body"]).choices[0].model_dump(exclude_unset=True)
        batch = answers[line["custom_id"]]
        for choice in (chat, batch):
            for call in choice["message"].get("tool_calls", ()):
                assert call.pop("id")  # drawn for each call
        assert chat == batch
        assert (batch["finish_reason"] == "tool_calls") == (line["custom_id"] != "none")


def test_the_same_lines_are_not_computed_again(gateway: Served) -> None:
    client = gateway.client()
    lines = [chat_line(f"twice{number}", "Name a colour.", seed=7) for number in range(2)]
    first = until(client, created(client, *lines, endpoint=CHAT), "completed")
    again = until(client, created(client, *lines, endpoint=CHAT), "completed")
    assert again.usage.output_tokens == 0
    assert first.usage.output_tokens == 6  # equal lines of one file, too
    before, after = (lines_of(client, each.output_file_id) for each in (first, again))
    assert [line["response"] for line in before] == [line["response"] for line in after]


def test_the_command_line_sees_it(gateway: Served) -> None:
    client = gateway.client()
    batch = until(client, created(client, chat_line("a", "Say a."), endpoint=CHAT), "completed")
    folder = gateway.state.state_path / "batches"
    command = [sys.executable, "-m", "tokenmill", "status", batch.id, "--store", str(folder), "--json"]
    shown = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S).stdout)
    assert (shown["name"], shown["state"], shown["succeeded"]) == (batch.id, "done", 1)
    assert shown["filename"] == client.files.retrieve(batch.input_file_id).filename


def test_the_asynchronous_client(gateway: Served) -> None:
    async def use() -> tuple[Any, bytes]:
        async with gateway.asynchronous() as client, asyncio.timeout(LIMIT_S):
            data = chat_line("a", "Say one.").encode()
            file = await client.files.create(file=("a.jsonl", data), purpose="batch")
            batch = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
            while batch.status != "completed":
                await asyncio.sleep(0.02)
                batch = await client.batches.retrieve(batch.id)
            listed = [each.id async for each in client.batches.list(limit=1)]
            assert batch.id in listed
            return batch, (await client.files.content(batch.output_file_id)).content

    batch, content = asyncio.run(use())
    assert json.loads(content)["custom_id"] == "a"
    assert batch.request_counts.completed == 1


def test_lists_go_on_after_a_part(gateway: Served) -> None:
    client = gateway.client()
    made = [uploaded(client, f"{number}", name=f"n{number}").id for number in range(3)]
    page = client.files.list(limit=2, order="desc", purpose="batch")
    assert [file.id for file in page.data] == made[:0:-1]
    assert page.has_more
    assert next(iter(client.files.list(limit=1, after=made[1], order="asc", purpose="batch"))).id == made[2]
    assert made[0] in [file.id for file in client.files.list(limit=2)]  # the client asks for part after part
    assert all(file.purpose == "batch_output" for file in client.files.list(purpose="batch_output"))
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.list(after="file-none")
    assert caught.value.param == "after"
    for file in made:
        assert client.files.delete(file).deleted


def test_cancelling_keeps_finished_answers(gateway: Served) -> None:
    client = gateway.client()
    quick = chat_line("quick", "Say quick.", max_tokens=1, priority=9)
    slow = [chat_line(f"slow{n}", f"Tell a story of {n} mills.", max_tokens=400, ignore_eos=True) for n in range(24)]
    batch = until(client, created(client, quick, *slow, endpoint=CHAT), "in_progress", done=1)
    assert client.batches.cancel(batch.id).status == "cancelling"
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    done = until(client, batch, "cancelled")
    assert done.cancelling_at <= done.cancelled_at
    assert done.request_counts.completed >= 1
    assert done.request_counts.completed + done.request_counts.failed == 25
    assert lines_of(client, done.output_file_id)[0]["custom_id"] == "quick"
    errors = lines_of(client, done.error_file_id)
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
    assert gateway.running() == 0
    other = until(client, created(client, chat_line("a", "Say a."), endpoint=CHAT), "completed")
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(other.id)


def test_a_window_that_is_too_short(gateway: Served) -> None:
    client = gateway.client()
    lines = [chat_line(f"r{n}", f"Tell of {n} rivers.", max_tokens=200, ignore_eos=True) for n in range(24)]
    batch = until(client, created(client, *lines, endpoint=CHAT, window="1s"), "expired")
    assert batch.expired_at >= batch.expires_at
    errors = lines_of(client, batch.error_file_id)
    assert {line["error"]["code"] for line in errors} == {"batch_expired"}
    assert batch.request_counts.failed == len(errors)
    assert batch.request_counts.completed + batch.request_counts.failed == 24


@pytest.mark.parametrize(
    ("lines", "code", "line"),
    [
        (["{"], "invalid_json_line", 1),
        ([chat_line("a", "x"), chat_line("a", "y")], "duplicate_custom_id", 2),
        ([chat_line("a", "x").replace(CHAT, "/v1/completions")], "mismatched_endpoint", 1),
        ([chat_line("a", "x", model="gpt-5")], "model_not_found", 1),
        ([""], "empty_file", None),
    ],
)
def test_a_bad_file_is_refused_with_reasons(gateway: Served, lines: list[str], code: str, line: int | None) -> None:
    client = gateway.client()
    batch = until(client, created(client, *lines, endpoint=CHAT), "failed")
    (error,) = batch.errors.data
    assert (error.code, error.line) == (code, line)
    assert batch.failed_at is not None
    assert (batch.output_file_id, batch.error_file_id, batch.request_counts.total) == (None, None, 0)
    assert client.files.delete(batch.input_file_id).deleted  # nothing needs it any more


def test_invalid_requests(gateway: Served) -> None:
    client = gateway.client()
    file = uploaded(client, chat_line("a", "x"))
    with pytest.raises(openai.BadRequestError) as caught:
        client.batches.create(input_file_id=file.id, endpoint="/v1/images", completion_window="24h")
    assert caught.value.param == "endpoint"
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id="file-none", endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.create(file=b"x", purpose="nonsense")
    assert caught.value.param == "purpose"
    other = client.files.create(file=b"x", purpose="user_data")
    with pytest.raises(openai.BadRequestError) as caught:
        client.batches.create(input_file_id=other.id, endpoint=CHAT, completion_window="24h")
    assert (caught.value.code, caught.value.param) == ("invalid_value", "input_file_id")
    for ask in (
        client.files.retrieve,
        client.files.delete,
        client.files.content,
        client.batches.retrieve,
        client.batches.cancel,
    ):
        for name in ("file-none", "../store.db", "%2e%2e%2fstore.db", "batch_none"):
            with pytest.raises((openai.NotFoundError, ValueError)):  # the client itself refuses some
                ask(name)
    assert patient.get(f"{gateway.url}/v1/files/..%2fstore.db/content").status_code == 404


def test_killed_in_the_middle_and_started_again(smollm2_path: Path, tmp_path: Path) -> None:
    lines = [chat_line(f"r{n}", f"Tell a tale of {n} towers.", max_tokens=16, ignore_eos=True) for n in range(8)]
    with gateway_process.started(tmp_path, smollm2_path) as (process, url):
        client: Any = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        batch = created(client, *lines, endpoint=CHAT)
        until(client, batch, "in_progress", done=1)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(LIMIT_S)
    with StoreReader(tmp_path / "batches") as reader:
        stored = reader.named(batch.id)
        kept = {one.number: one.body for one in reader.results(stored.id, 0, 100) if one.body is not None}
    assert 1 <= len(kept) < 8
    with gateway_process.started(tmp_path, smollm2_path) as (process, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        done = until(client, client.batches.retrieve(batch.id), "completed")
        content = client.files.content(done.output_file_id).content
    assert (done.request_counts.completed, done.request_counts.failed) == (8, 0)
    assert [json.loads(line)["custom_id"] for line in content.splitlines()] == [f"r{n}" for n in range(8)]
    assert all(body in content for body in kept.values())
    with StoreReader(tmp_path / "batches") as reader:
        assert reader.named(batch.id).totals.computed == 8  # each once, over both lives


def test_a_batch_of_responses(gateway: Served) -> None:
    client = gateway.client()

    def line(name: str, **body: Any) -> str:
        given = {"model": "smollm2", "max_output_tokens": 6, "temperature": 0, **body}
        return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/responses", "body": given})

    tool = {"type": "function", "name": "weather", "parameters": TOWN | {"additionalProperties": False}}
    file = uploaded(
        client,
        line("text", input="Say one.", instructions="Be brief."),
        line("call", input="Weather?", tools=[tool], tool_choice="required", max_output_tokens=60),
        line("later", input="Say one.", background=True),
    )
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/responses", completion_window="24h")
    done = until(client, batch, "completed")
    text, call = (answer["response"]["body"] for answer in lines_of(client, done.output_file_id))
    now = client.responses.create(
        model="smollm2", input="Say one.", instructions="Be brief.", max_output_tokens=6, temperature=0
    )
    assert (text["object"], text["status"], text["model"]) == ("response", "incomplete", "smollm2")
    assert text["output"][0]["content"][0]["text"] == now.output_text
    assert (call["output"][0]["type"], call["output"][0]["name"]) == ("function_call", "weather")
    (refused,) = lines_of(client, done.error_file_id)
    assert (refused["custom_id"], refused["error"]["code"]) == ("later", "invalid_line")


def test_a_batch_and_a_chat_name_the_same_model_and_engine(gateway: Served) -> None:
    client = gateway.client()
    messages: Any = [{"role": "user", "content": "Say six."}]
    chat = client.chat.completions.create(model="smollm2", messages=messages, max_tokens=4)
    done = until(client, created(client, chat_line("a", "Say six."), endpoint=CHAT), "completed")
    (line,) = lines_of(client, done.output_file_id)
    body = line["response"]["body"]
    assert (body["model"], body["system_fingerprint"]) == (chat.model, chat.system_fingerprint)
