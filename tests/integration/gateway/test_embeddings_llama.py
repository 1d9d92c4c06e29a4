"""Embeddings of a real llama-server behind the gateway, with OpenAI's client."""

import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import openai
import pytest

from support import patient
from support.batches import lines_of, until, uploaded
from support.gateway import LIMIT_S, Served, config_in, served
from tokenmill.config import Config, EngineConfig
from tokenmill.engine.process.ports import free_port
from tokenmill.engine.start import attach
from tokenmill.gateway.serving import EngineSpec, state_for
from tokenmill.gateway.state import GatewayState

WIDTH = 576  # of SmolLM2-135M


@pytest.fixture(scope="module")
def server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port("127.0.0.1", 0)
    words = [
        "--model",
        str(smollm2_path),
        "--port",
        str(port),
        "--embeddings",
        "--pooling",
        "mean",
        "--threads",
        "1",
        "--ctx-size",
        "512",
        "--parallel",
        "1",
        "--device",
        "none",
    ]
    with (tmp_path_factory.mktemp("server") / "log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "tokenmill.engine.server.embedded", *words], stdout=log, stderr=log
        )
        try:
            end = time.monotonic() + LIMIT_S
            while not _healthy(port):
                assert child.poll() is None
                assert time.monotonic() < end
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            child.terminate()
            child.wait(LIMIT_S)


def _healthy(port: int) -> bool:
    try:
        return patient.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def gateway(server: str, tmp_path: Path) -> Iterator[Served]:
    @asynccontextmanager
    async def up(config: Config) -> AsyncIterator[GatewayState]:
        engine = await attach(server, EngineConfig(kind=server))
        try:
            yield state_for(config, [(EngineSpec("words", ("smollm2",), EngineConfig()), engine)], {})
        finally:
            await engine.close()

    with served(up, config_in(tmp_path, tokens_per_minute=40)) as one:
        yield one


def test_embeddings(gateway: Served) -> None:
    asked = gateway.client().embeddings.with_raw_response.create(
        model="smollm2", input=["A red fox.", "A red fox.", "Tax law."], encoding_format="float"
    )
    answer = asked.parse()
    first, same, other = (one.embedding for one in answer.data)
    assert [one.index for one in answer.data] == [0, 1, 2]
    assert len(first) == WIDTH
    assert first == pytest.approx(same, abs=1e-3)
    assert first != pytest.approx(other, abs=1e-3)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    assert asked.headers["x-tokenmill-engine"] == "words"


def test_their_tokens_count_against_the_limit(gateway: Served) -> None:
    gateway.client().embeddings.create(model="smollm2", input=["word " * 60], encoding_format="float")
    with pytest.raises(openai.RateLimitError) as caught:
        gateway.client().embeddings.create(model="smollm2", input="more", encoding_format="float")
    assert float(caught.value.response.headers["retry-after"]) > 0


def test_what_the_client_packs_by_itself(gateway: Served) -> None:
    """Without a format it asks for base64 and unpacks it."""
    (one,) = gateway.client().embeddings.create(model="smollm2", input="A red fox.").data
    assert len(one.embedding) == WIDTH
    assert all(isinstance(number, float) for number in one.embedding[:3])


def test_a_batch_of_embeddings(gateway: Served) -> None:
    client = gateway.client()
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/embeddings", "body": {"model": "smollm2", "input": given}}
        for name, given in (("one", "A red fox."), ("two", ["A red fox.", "Tax law."]), ("bad", {}))
    ]
    file = uploaded(client, *map(json.dumps, lines))
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    done = until(client, batch, "completed")
    one, two = (line["response"]["body"] for line in lines_of(client, done.output_file_id))
    assert (one["object"], one["model"], len(one["data"][0]["embedding"])) == ("list", "smollm2", WIDTH)
    assert [entry["index"] for entry in two["data"]] == [0, 1]
    assert one["data"][0]["embedding"] == pytest.approx(two["data"][0]["embedding"], abs=1e-3)
    assert [line["custom_id"] for line in lines_of(client, done.error_file_id)] == ["bad"]
    assert done.usage.input_tokens == one["usage"]["prompt_tokens"] + two["usage"]["prompt_tokens"]
