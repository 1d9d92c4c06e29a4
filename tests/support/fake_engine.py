"""A fake engine for faults that a real one does not have on demand: dies, hangs and fails on marked prompts.

The prompt decides: `poison` crashes the engine, `slow` never ends, `gated` waits until the gate is opened, `steady`
takes some time, `long` does not fit, `late` exceeds its timeout, `broken N` fails N times and then answers. Everything
else is answered with four tokens.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tokenmill.engine.engine import (
    Answer,
    Capabilities,
    Counters,
    Engine,
    EngineState,
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
from tokenmill.engine.restart import RestartingEngine
from tokenmill.errors import EngineDied, EngineError, EngineTimeout, TooLong

CAPABILITIES = Capabilities(
    shares_prefixes=True,
    keeps_prefixes=True,
    chooses_slots=False,
    interactive_first=True,
    pins_prefixes=False,
    saves_prefixes=False,
    changes_threads=False,
    changes_context=False,
    reports_cached_tokens=True,
    grammar=False,
    json_schema=False,
    logit_bias=False,
    tools_parsed=False,
    max_logprobs=0,
)
TOKENS = 4
STEADY_TOKENS = 30
CRASH = "the fake engine was killed by SIGSEGV (it touched memory that is not its own)"
KILLED = "the fake engine was killed by SIGKILL (by another process; the kernel counted no out-of-memory kill)"
UNKNOWN = "the fake engine was killed by SIGKILL (by another process or by the OOM killer)"
_FROM_OUTSIDE: dict[str, bool | None] = {KILLED: True, UNKNOWN: None}


@dataclass(slots=True)
class Seen:
    """What all processes of an engine have seen."""

    streams: list[str] = field(default_factory=list)  # prompts in order of arrival
    together: list[set[str]] = field(default_factory=list)  # prompts in flight at each death
    failures: Counter[str] = field(default_factory=Counter)
    most_at_once: int = 0
    lives: int = 0


class FakeEngine(Engine):
    """One process of the engine."""

    def __init__(self, seen: Seen | None = None, *, slots: int = 4, words: str = CRASH) -> None:
        self.seen = seen or Seen()
        self.seen.lives += 1
        self.at_work: set[str] = set()
        self.changed = asyncio.Event()  # set when a stream starts
        self.gate_open = asyncio.Event()
        self.pieces = 0
        self.steady_tokens = STEADY_TOKENS
        self.piece_text: str | None = None  # text of every piece; None: its number
        self.evicted_tokens: int | None = None
        self._slots, self._words = slots, words

    @property
    def identity(self) -> Identity:
        return Identity("native", "fake", "m", "fake 1", 4096, self._slots, "nowhere")

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        prompt = request.prompt if isinstance(request.prompt, str) else str(request.prompt)
        self.seen.streams.append(prompt)
        self.at_work.add(prompt)
        self.seen.most_at_once = max(self.seen.most_at_once, len(self.at_work))
        self.changed.set()
        try:
            await self._until_alive(0.0)
            self._refuse(prompt, request)
            if "slow" in prompt:
                await self._until_alive(None)
            if "gated" in prompt:
                await self._until_open()
            tokens = self.steady_tokens if "steady" in prompt else TOKENS
            for number in range(tokens):
                await self._until_alive(0.005 if "steady" in prompt else 0.001)
                self.pieces += 1
                yield Piece(self.piece_text or f" {number}", 1)
                if "poison" in prompt and number == 1:
                    self.die(self._words)
            usage = Usage(len(prompt), tokens, 0)
            yield Answer(f"{prompt}: 0 1 2 3", "stop", usage, Timings(0.0, 0.001, 0.002))
        finally:
            self.at_work.discard(prompt)

    def _refuse(self, prompt: str, request: Request) -> None:
        if "long" in prompt:
            raise TooLong("the prompt has 5000 tokens and the context 4096", needed_tokens=5000, context_tokens=4096)
        if "late" in prompt:
            raise EngineTimeout(f"not done within {request.timeout_s:g} s")
        if "broken" in prompt:
            self.seen.failures[prompt] += 1
            if self.seen.failures[prompt] <= int(prompt.split("broken ")[1].split(maxsplit=1)[0]):
                raise EngineError("the server failed (500): out of luck")

    def die(self, words: str) -> None:
        if not self.ended.done():
            self.seen.together.append(set(self.at_work))
            self.ended.set_result(EngineDied(words, from_outside=_FROM_OUTSIDE.get(words, False)))

    async def _until_alive(self, seconds: float | None) -> None:
        """A point at which the engine may die."""
        await asyncio.wait({self.ended}, timeout=seconds)
        if self.ended.done():
            death = self.ended.result()
            raise EngineDied(death.message, from_outside=isinstance(death, EngineDied) and death.from_outside)

    async def _until_open(self) -> None:
        opened = asyncio.ensure_future(self.gate_open.wait())
        either: set[asyncio.Future[Any]] = {self.ended, opened}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            opened.cancel()
        await self._until_alive(0.0)

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        return tuple(str(prompt).encode())

    async def status(self) -> EngineStatus:
        state: EngineState = "failed" if self.ended.done() else "ready"
        return EngineStatus(
            state, self.identity, Counters(running=len(self.at_work), evicted_tokens=self.evicted_tokens)
        )

    async def close(self) -> None:
        pass


class Unreachable(FakeEngine):
    """A server not started by tokenmill: it does not answer for a while, and its death is not detected."""

    def __init__(self, seen: Seen | None = None) -> None:
        super().__init__(seen)
        self.reachable = True

    async def _until_alive(self, seconds: float | None) -> None:
        await asyncio.sleep(seconds or 0.0)
        if not self.reachable:
            raise EngineDied("the connection to http://there was lost: refused", from_outside=None)

    async def status(self) -> EngineStatus:
        return replace(EngineStatus("ready", self.identity, Counters()), state="ready" if self.reachable else "failed")


class Widening(FakeEngine):
    """An engine whose number of slots can be changed."""

    def __init__(self, seen: Seen | None = None, *, slots: int = 4, words: str = CRASH) -> None:
        super().__init__(seen, slots=slots, words=words)
        self.asked: list[int] = []

    @property
    def capabilities(self) -> Capabilities:
        return replace(CAPABILITIES, max_slots=4)

    async def set_slots(self, slots: int) -> None:
        self.asked.append(slots)
        self._slots = slots


class Parting(Widening):
    """An engine whose KV layout can be changed."""

    def __init__(self, seen: Seen | None = None, *, slots: int = 4, words: str = CRASH) -> None:
        super().__init__(seen, slots=slots, words=words)
        self.kv_layout: KvLayout = "unified"

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, changes_kv_layout=True)

    @property
    def runtime(self) -> Runtime:
        return Runtime(1, 1, self.kv_layout)

    async def set_kv_layout(self, layout: KvLayout) -> None:
        self.kv_layout = layout


def restarting(
    seen: Seen,
    *,
    kind: type[FakeEngine] = FakeEngine,
    words: str = CRASH,
    most_restarts: int = 20,
    started: Callable[[FakeEngine], None] | None = None,
) -> RestartingEngine:
    """An engine that restarts immediately when it dies."""

    async def start() -> FakeEngine:
        engine = kind(seen, words=words)
        if started is not None:
            started(engine)
        return engine

    first = kind(seen, words=words)
    if started is not None:
        started(first)

    def delay(deaths: object, now_s: float, most: int) -> float | None:
        return None if seen.lives > most else 0.0

    return RestartingEngine(first, start, most_restarts=most_restarts, delay=delay)
