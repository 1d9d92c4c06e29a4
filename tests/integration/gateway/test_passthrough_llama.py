"""A real llama-server behind the gateway: relayed or called through the engine protocol, and skipped while it is
dead.
"""

import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from support.fake_engine import FakeEngine
from support.gateway import Served, config_in, served
from support.servers import EMBEDDED, small_plan
from tokenmill.config import Config, EngineConfig
from tokenmill.engine.restart import RestartingEngine
from tokenmill.gateway.serving import EngineSpec, state_for
from tokenmill.gateway.state import GatewayState
from tokenmill.native.launching import start_restarting

MESSAGES = [{"role": "user", "content": "Name three colours."}]


@pytest.fixture(scope="module")
def gateway(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("gateway")

    @asynccontextmanager
    async def up(config: Config) -> AsyncIterator[GatewayState]:
        server = await start_restarting(
            small_plan(smollm2_path), model_path=smollm2_path, config=EMBEDDED, state=config.state_path, name="server"
        )
        engines: list[Any] = [
            (EngineSpec("server", ("smollm2",), EMBEDDED), server),
            (EngineSpec("spare", ("smollm2",), EngineConfig()), FakeEngine()),
        ]
        try:
            yield state_for(config, engines, {})
        finally:
            await server.close()

    with served(up, config_in(folder)) as one:
        yield one


def asked(gateway: Served, **more: Any) -> Any:
    settings = {"model": "smollm2", "messages": MESSAGES, "max_tokens": 8, "temperature": 0, "seed": 1} | more
    return gateway.client().chat.completions.with_raw_response.create(**settings)


def test_relayed_and_through_the_protocol_are_alike(gateway: Served) -> None:
    relayed, spoken = asked(gateway), asked(gateway, logprobs=True)
    assert relayed.headers["x-tokenmill-engine"] == spoken.headers["x-tokenmill-engine"] == "server"
    one, other = relayed.parse(), spoken.parse()
    assert "timings" in one.model_dump()  # llama-server's own words: these bytes are its
    assert "timings" not in other.model_dump()
    assert one.choices[0].message.content == other.choices[0].message.content
    assert one.choices[0].finish_reason == other.choices[0].finish_reason == "length"
    assert (one.usage.prompt_tokens, one.usage.completion_tokens) == (
        other.usage.prompt_tokens,
        other.usage.completion_tokens,
    )
    assert int(relayed.headers["x-tokenmill-cached-tokens"]) <= one.usage.prompt_tokens


@pytest.mark.parametrize("usage", [False, True])
def test_streams(gateway: Served, usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    chunks = list(asked(gateway, stream=True, **options).parse())
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == asked(gateway).parse().choices[0].message.content
    assert any(chunk.usage for chunk in chunks) is usage
    gateway.running()
    streamed = [line for line in gateway.lines if "first_token_ms" in line][-1]
    assert streamed["completion_tokens"] == 8  # known either way
    assert streamed["prompt_tokens"] == asked(gateway).parse().usage.prompt_tokens


def test_a_dead_server_is_replaced_and_taken_back(gateway: Served) -> None:
    server = gateway.state.backends[0]
    assert isinstance(server.engine, RestartingEngine)
    engine = server.engine

    async def kill() -> None:
        """And wait until the death is known."""
        assert engine.inner is not None
        assert engine.identity.pid is not None
        died = engine.inner.ended
        os.kill(engine.identity.pid, signal.SIGKILL)
        await died

    async def back() -> None:
        await engine.tokenize("a")

    def answering() -> str:
        created = gateway.client().completions.with_raw_response.create(model="smollm2", prompt="a", max_tokens=2)
        return str(created.headers["x-tokenmill-engine"])

    gateway.call(kill())
    assert answering() == "spare"
    gateway.call(back())
    assert answering() == "server"
