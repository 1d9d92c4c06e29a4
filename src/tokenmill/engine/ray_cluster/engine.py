"""An engine on another machine as its driver sees it: whole answers come, and nothing before them.

One life of it: when the machine or the host on it is lost, every stream gets `EngineDied`, from outside, and the object
is spent. An engine that dies while its machine lives is started again there, and its status says so meanwhile.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, Literal

from tokenmill.engine.engine import (
    Answer,
    Capabilities,
    Counters,
    Engine,
    Identity,
    KvLayout,
    Piece,
    Prompt,
    Request,
    Runtime,
    Status,
)
from tokenmill.engine.ray_cluster.faults import Fault
from tokenmill.engine.ray_cluster.host import Facts
from tokenmill.engine.ray_cluster.line import Channel, Lost
from tokenmill.errors import EngineDied, EngineError

SILENT_S = 60.0  # a machine that cannot be reached for so long is taken for lost
_CLOSE_S = 30.0


class AwayEngine(Engine):
    """The engine of one host that is up. Belongs to the event loop in which it was made."""

    def __init__(self, line: Channel, facts: Facts, *, name: str, silent_s: float = SILENT_S) -> None:
        """`name`: of the machine, for messages."""
        self._line = line
        self._name = name
        self._silent_s = silent_s
        self._facts = facts
        self._numbers = itertools.count(1)
        self._unreached_s: float | None = None  # since when
        self._closing = False
        self.ended = asyncio.get_running_loop().create_future()

    @property
    def identity(self) -> Identity:
        """What answers; its address is the machine's name."""
        return replace(self._facts.identity, address=self._name, pid=None)

    @property
    def capabilities(self) -> Capabilities:
        """What it can do from here: files and the engine's own API are on the other machine."""
        return replace(
            self._facts.capabilities,
            pins_heads=False,
            saves_heads=False,
            saves_slots=False,
            changes_threads=False,
            changes_context=False,
            lists_contents=False,
            embeddings=False,
        )

    @property
    def runtime(self) -> Runtime | None:
        """Its settings when it was started or changed last."""
        return self._facts.runtime

    @property
    def load_s(self) -> float:
        """How long it took to load."""
        return self._facts.load_s

    async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        """Work on one request: all of its text as one piece, then the answer. Closing the generator cancels."""
        number = next(self._numbers)
        try:
            answer: Answer = await self._call("ask", number, request)
        except asyncio.CancelledError:
            self._line.send("cancel", number)
            raise
        yield Piece(answer.text, answer.usage.completion_tokens, answer.logprobs or ())
        yield answer

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """The tokens a prompt becomes, its template applied."""
        return tuple(await self._call("tokenize", prompt))

    async def status(self) -> Status:
        """State and counters, as of now."""
        state: Literal["stopped", "failed"] = "stopped" if self._closing else "failed"
        try:
            status: Status = await self._call("status")
        except EngineError as error:
            return Status(state, self.identity, Counters(), error.message)
        self._facts = replace(self._facts, identity=status.identity)
        return replace(status, identity=self.identity)

    async def close(self) -> None:
        """End the engine and its host."""
        if self._closing:
            return
        self._closing = True
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._line.call("close")
        except (Lost, EngineError, TimeoutError):
            pass  # it is ended below whatever it says
        self._line.end()

    async def set_slots(self, slots: int) -> None:
        """Change the number of slots for batch requests."""
        self._facts = await self._call("set_slots", slots)

    async def set_kv_layout(self, layout: KvLayout) -> None:
        """Change the KV layout."""
        self._facts = await self._call("set_kv_layout", layout)

    async def _call(self, method: str, *arguments: Any) -> Any:
        if self.ended.done():
            raise self._death(self.ended.result().message)
        try:
            found = await self._line.call(method, *arguments)
        except Lost as lost:
            raise self._lost(lost) from lost
        self._unreached_s = None
        if not isinstance(found, Fault):
            return found
        error = found.error
        if found.over:
            # the host's restart policy gave up; each death was reported to the requests in flight when it happened
            outside = error.from_outside if isinstance(error, EngineDied) else None
            self._end(EngineDied(f"on {self._name}, {error.message}", hint=error.hint, from_outside=outside))
        raise error

    def _lost(self, lost: Lost) -> EngineDied:
        now_s = asyncio.get_running_loop().time()
        self._unreached_s = now_s if self._unreached_s is None else self._unreached_s
        death = self._death(f"{self._name} is lost: {lost.message}")
        if lost.for_good or now_s - self._unreached_s > self._silent_s:
            self._end(death)
        return death

    def _death(self, message: str) -> EngineDied:
        return EngineDied(message, from_outside=True)

    def _end(self, death: EngineDied) -> None:
        if not self._closing and not self.ended.done():
            self.ended.set_result(death)
