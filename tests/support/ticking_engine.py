"""A fake engine in which every slot generates a token per turn of the event loop."""

import asyncio
from collections.abc import AsyncGenerator

from support.fake_engine import CAPABILITIES
from tokenmill.engine.engine import (
    Answer,
    Capabilities,
    Counters,
    Engine,
    EngineStatus,
    Identity,
    Piece,
    Prompt,
    Request,
    Timings,
    Usage,
)
from tokenmill.errors import EngineDied


class Ticking(Engine):
    """`dies_after`: the number of requests after which the next one kills the engine."""

    def __init__(self, *, capabilities: Capabilities = CAPABILITIES, dies_after: int | None = None) -> None:
        self._capabilities = capabilities
        self.seen: list[Request] = []
        self.running = self.most_running = 0
        self.dies_after = dies_after

    @property
    def identity(self) -> Identity:
        return Identity("native", "fake", "id", "fake 1", 4096, 4, "nowhere")

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        self.seen.append(request)
        if self.dies_after is not None and len(self.seen) > self.dies_after:
            raise EngineDied("the fake engine was killed by SIGSEGV")
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            for _ in range(request.max_tokens or 1):
                await asyncio.sleep(0)
                yield Piece("x", 1)
            yield Answer("", "length", Usage(1, request.max_tokens or 1, 0), Timings(prefill_s=0.5))
        finally:
            self.running -= 1

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        raise NotImplementedError

    async def status(self) -> EngineStatus:
        return EngineStatus("ready", self.identity, Counters())

    async def close(self) -> None:
        pass
