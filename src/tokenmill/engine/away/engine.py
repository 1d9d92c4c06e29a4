"""An engine on another machine as its driver sees it: whole answers come, and nothing before them.

One life of it: when the machine or the host on it is lost, every stream gets `EngineDied`, from outside, and the object
is spent. An engine that dies while its machine lives is started again there, and its status says so meanwhile.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, Literal

from tokenmill.engine.away.faults import Fault, error_of
from tokenmill.engine.away.host import Facts
from tokenmill.engine.away.line import Line, Lost
from tokenmill.engine.engine import Answer, Capabilities, Counters, Identity, Piece, Prompt, Request, Status
from tokenmill.errors import EngineDied, EngineError

SILENT_S = 60.0  # a machine that cannot be reached for so long is taken for lost
_CLOSE_S = 30.0


class AwayEngine:
    """The engine of one host that is up. Belongs to the event loop in which it was made."""

    def __init__(self, line: Line, facts: Facts, *, name: str, silent_s: float = SILENT_S) -> None:
        """`name`: of the machine, for messages."""
        self._line, self._name, self._silent_s = line, name, silent_s
        self._facts = facts
        self._numbers = itertools.count(1)
        self._unreached_s: float | None = None  # since when
        self._closing = False
        self.died: asyncio.Future[EngineDied] = asyncio.get_running_loop().create_future()

    @property
    def identity(self) -> Identity:
        """What answers; its address is the machine's name."""
        return replace(self._facts.identity, address=self._name, pid=None)

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        return self._facts.capabilities

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

    async def _call(self, method: str, *arguments: Any) -> Any:
        if self.died.done():
            raise self._death(self.died.result().message)
        try:
            found = await self._line.call(method, *arguments)
        except Lost as lost:
            raise self._lost(lost) from lost
        self._unreached_s = None
        if not isinstance(found, Fault):
            return found
        error = error_of(found)
        if found.over:
            self._end(EngineDied(f"on {self._name}, {error.message}", hint=error.hint))
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
        if not self._closing and not self.died.done():
            self.died.set_result(death)


class AwayNative(AwayEngine):
    """A native one, which can be changed while it runs."""

    @property
    def most_lanes(self) -> int:
        """Batch sequences that the context has room for."""
        return self._facts.most_lanes or 1

    @property
    def streams(self) -> bool:
        """Whether each lane has cells of its own, and no head is kept."""
        return bool(self._facts.streams)

    async def set_lanes(self, lanes: int) -> None:
        """Change how many batch sequences run at once."""
        self._facts = await self._call("set_lanes", lanes)

    async def set_context(self, *, streams: bool) -> None:
        """Give each lane cells of its own, or one cache to all."""
        self._facts = await self._call("set_context", streams)


def engine_at(line: Line, facts: Facts, *, name: str) -> AwayEngine:
    """The engine of a host that is up."""
    return (AwayEngine if facts.most_lanes is None else AwayNative)(line, facts, name=name)
