"""A fake engine for measurements: it caches prefixes, counts computed tokens, and can grow or die on request.

Its clock counts tokens: answers arrive immediately, and their timings are a millisecond per computed token and two per
generated token.
"""

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator
from dataclasses import replace

from support.fake_engine import CAPABILITIES
from tokenmill.engine.engine import (
    Answer,
    Capabilities,
    Chat,
    Counters,
    Engine,
    EngineKind,
    EngineStatus,
    Identity,
    Piece,
    Prompt,
    Request,
    Runtime,
    Timings,
    Usage,
)
from tokenmill.errors import EngineDied, RequestRefused

HEAD = (1,)  # the sign for a beginning


class PrefixEngine(Engine):
    """A server with a fixed number of slots; `kind` url: it reports no tokens and does not support `ignore_eos`."""

    def __init__(
        self,
        *,
        kind: EngineKind = "llama-server",
        context: int | None = 4096,
        slots: int | None = 4,
        pid: int | None = None,
    ) -> None:
        self.requests: list[Request] = []
        self.at_once = self.most_at_once = 0
        self.keeps = True
        self._seen: list[tuple[object, ...]] = []
        self._identity = Identity(kind, "prefix", "id", "prefix 1", context, slots, "nowhere", pid)

    @property
    def identity(self) -> Identity:
        return self._identity

    @property
    def capabilities(self) -> Capabilities:
        return replace(CAPABILITIES, chooses_slots=self._identity.kind == "llama-server")

    async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        if self._identity.kind == "url" and (request.ignore_eos or not isinstance(request.prompt, str)):
            raise RequestRefused("this server cannot")
        self.requests.append(request)
        assert not isinstance(request.prompt, Chat)
        units: tuple[object, ...] = (
            tuple(request.prompt.split()) if isinstance(request.prompt, str) else tuple(request.prompt)
        )
        cached = min(max((_common(units, seen) for seen in self._seen), default=0), len(units) - 1) if self.keeps else 0
        self._seen.append(units)
        tokens = request.max_tokens or 0
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self.work(len(units) - cached)
            for _ in range(tokens):
                await asyncio.sleep(0)
                yield Piece("x", 1)
            timings = Timings(0.0, (len(units) - cached) / 1000, tokens / 500)
            yield Answer("x" * tokens, "length", Usage(len(units), tokens, cached), timings)
        finally:
            self.at_once -= 1

    async def work(self, computed: int) -> None:
        await asyncio.sleep(0)

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        if self._identity.kind == "url":
            raise RequestRefused("this server cannot be asked for tokens")
        return (*HEAD, *(hash(word) % 30_000 for word in str(prompt).split()))

    async def status(self) -> EngineStatus:
        return EngineStatus("ready", self._identity, Counters())

    async def close(self) -> None:
        pass


class TurnedEngine(PrefixEngine):
    """An engine whose threads and slots can be changed while it runs."""

    def __init__(self, *, slots: int = 2, max_slots: int = 8) -> None:
        super().__init__(kind="native", slots=slots)
        self._runtime = Runtime(4, 4)
        self._max_slots = max_slots
        self.turned: list[tuple[str, int]] = []

    @property
    def capabilities(self) -> Capabilities:
        return replace(CAPABILITIES, changes_threads=True, max_slots=self._max_slots)

    @property
    def runtime(self) -> Runtime:
        return self._runtime

    async def set_threads(self, threads: int, threads_batch: int) -> None:
        self.turned.append(("threads", threads))
        self._runtime = Runtime(threads, threads_batch)

    async def set_slots(self, slots: int) -> None:
        self.turned.append(("slots", slots))


_GROWS = """
import sys
held = []
for line in sys.stdin:
    held.append(bytearray(b"x") * int(line))
    print("done", flush=True)
"""


class GrowingEngine(PrefixEngine):
    """One in a process of its own that takes real memory for every token it computes, and may die of it."""

    def __init__(self, bytes_per_token: int, *, dies_at: int | None = None) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-c", _GROWS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        super().__init__(slots=2, pid=self._child.pid)
        self._bytes_per_token, self._dies_at, self._computed = bytes_per_token, dies_at, 0

    async def work(self, computed: int) -> None:
        self._computed += computed
        if self._dies_at is not None and self._computed > self._dies_at:
            self._child.kill()
            raise EngineDied("the engine was killed by SIGKILL (out of memory)", hint="its last words: no more")
        await asyncio.to_thread(self._grow, computed * self._bytes_per_token)

    def _grow(self, size: int) -> None:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(f"{size}\n")
        self._child.stdin.flush()
        assert self._child.stdout.readline() == "done\n"

    async def close(self) -> None:
        self._child.kill()
        self._child.communicate()


def _common(one: tuple[object, ...], two: tuple[object, ...]) -> int:
    count = 0
    for first, second in zip(one, two, strict=False):
        if first != second:
            break
        count += 1
    return count
