"""A server that was unreachable when the gateway started."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from support.fake_engine import CAPABILITIES, FakeEngine
from tokenmill.engine.engine import Capabilities, Engine
from tokenmill.errors import EngineDied, EngineError
from tokenmill.gateway.backends.late_server import LateServer


class Embedding(FakeEngine):
    @property
    def capabilities(self) -> Capabilities:
        return replace(CAPABILITIES, embeddings=True)

    async def embed(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {"data": [body["input"]]}


def test_it_is_unreachable_until_it_is_reached_and_then_that_server() -> None:
    async def scene() -> None:
        there: list[Engine] = []

        async def attach() -> Engine:
            if not there:
                raise EngineError("still nobody answers")
            return there[0]

        late = LateServer(attach, model="m", address="http://there", error=EngineError("nobody answers"))
        assert (late.liveness, late.identity.address) == ("unreachable", "http://there")
        assert str(late.last_error) == "nobody answers"
        with pytest.raises(EngineDied, match="still nobody answers"):
            await late.tokenize("x")
        assert not await late.reconnect()
        assert (await late.status()).state == "failed"
        there.append(Embedding())
        assert await late.embed({"input": "x"}) == {"data": ["x"]}
        assert (late.liveness, late.identity.model, late.last_error) == ("up", "fake", None)
        assert await late.reconnect()

    asyncio.run(scene())
