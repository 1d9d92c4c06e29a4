"""Fake engines with known throughput and tokens, for decisions about slots and the KV layout."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace

from support.fake_engine import CAPABILITIES
from tokenmill.engine.engine import (
    Answer,
    Capabilities,
    Counters,
    Engine,
    EngineStatus,
    Identity,
    KvLayout,
    Piece,
    Prompt,
    Request,
    Runtime,
    Timings,
    Usage,
)
from tokenmill.errors import RequestRefused, TokenmillError, TooLong


@dataclass
class RatedEngine(Engine):
    """Decodes as many tokens per second as its table says for the current number of slots."""

    tok_s: dict[int, float]
    max_slots: int = 16
    set_to: list[int] = field(default_factory=list)  # arguments of set_slots
    requests: list[Request] = field(default_factory=list)
    slots: int = 0
    hangs_at: int | None = None  # a number of slots with which no token arrives
    fails_at: tuple[int, TokenmillError] | None = None  # a number of slots with which every answer fails
    closed: int = 0  # streams that were cancelled

    @property
    def identity(self) -> Identity:
        return Identity("native", "rated", "m", "rated 1", 4096, self.max_slots, "nowhere")

    @property
    def capabilities(self) -> Capabilities:
        return replace(CAPABILITIES, max_slots=self.max_slots)

    async def set_slots(self, slots: int) -> None:
        self.slots = slots
        self.set_to.append(slots)

    async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        self.requests.append(request)
        if "long" in str(request.prompt):
            raise TooLong("5 too many", needed_tokens=105, context_tokens=100)
        if self.fails_at is not None and self.slots == self.fails_at[0]:
            raise self.fails_at[1]
        tokens = request.max_tokens or 0
        if self.slots == self.hangs_at and tokens > 1:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self.closed += 1
        seconds = self.slots * (tokens - 1) / self.tok_s[self.slots]
        yield Answer("", "length", Usage(8, tokens, 0), Timings(0.0, 0.1, seconds))

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        return (1,)

    async def status(self) -> EngineStatus:
        return EngineStatus("ready", self.identity, Counters())

    async def close(self) -> None:
        return None


@dataclass
class LayoutEngine(Engine):
    """Takes words as tokens, and records the KV layouts it is set to."""

    max_slots: int = 4
    kv_layout: KvLayout = "unified"
    changes_kv_layout: bool = True
    refuses: TokenmillError | None = None
    template: tuple[int, ...] = ()  # tokens that its chat template puts before every prompt
    set_to: list[KvLayout] = field(default_factory=list)  # arguments of set_kv_layout
    tokenized: int = 0

    @property
    def identity(self) -> Identity:
        return Identity("native", "layout", "m", "layout 1", 4096, self.max_slots, "nowhere")

    @property
    def capabilities(self) -> Capabilities:
        return replace(CAPABILITIES, changes_kv_layout=self.changes_kv_layout)

    @property
    def runtime(self) -> Runtime:
        return Runtime(1, 1, self.kv_layout)

    async def set_kv_layout(self, layout: KvLayout) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.set_to.append(layout)
        self.kv_layout = layout

    async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        assert not request, "no answer is needed for the decision"
        yield Piece("", 0)

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        self.tokenized += 1
        if "refused" in str(prompt):
            raise RequestRefused("not this one")
        return self.template + tuple(int.from_bytes(word.encode()[-7:]) for word in str(prompt).split())

    async def status(self) -> EngineStatus:
        return EngineStatus("ready", self.identity, Counters())

    async def close(self) -> None:
        return None
