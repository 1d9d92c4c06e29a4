"""The driver's view of an engine on a Ray node. Answers are not streamed: each arrives as one piece.

An engine that dies is restarted on its node. If the node or its actor is lost, requests in flight raise `EngineDied`
(from_outside), `ended` completes, and the object cannot be used again.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

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
)
from tokenmill.engine.ray.actors import ActorHandle, EngineFacts, NodeLost
from tokenmill.errors import EngineDied, EngineError

UNREACHABLE_TIMEOUT_S = 60.0  # a node that is unreachable for longer is lost
_RETRY_S = 1.0
_CLOSE_TIMEOUT_S = 30.0


class RayEngine(Engine):
    """A loaded engine on a node. Must be used in the event loop in which it was created."""

    def __init__(
        self, actor: ActorHandle, facts: EngineFacts, *, name: str, unreachable_timeout_s: float = UNREACHABLE_TIMEOUT_S
    ) -> None:
        """`name`: of the node, in messages."""
        self._actor = actor
        self._facts = facts
        self._name = name
        self._unreachable_timeout_s = unreachable_timeout_s
        self._unreachable_since_s: float | None = None
        self._closing = False
        self._watching = asyncio.create_task(self._watch())

    @property
    def identity(self) -> Identity:
        """Its identity, with the node's name as its address."""
        return replace(self._facts.identity, address=self._name, pid=None)

    @property
    def capabilities(self) -> Capabilities:
        """Its capabilities without those that need the node's files or HTTP API."""
        return replace(
            self._facts.capabilities,
            pins_prefixes=False,
            saves_prefixes=False,
            saves_slots=False,
            changes_threads=False,
            changes_context=False,
            lists_contents=False,
            embeddings=False,
        )

    @property
    def runtime(self) -> Runtime | None:
        """Its settings when it was last loaded or changed."""
        return self._facts.runtime

    @property
    def load_s(self) -> float:
        """Duration of the load."""
        return self._facts.load_s

    async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        """Generate: yields the whole text as one piece, then the answer. Closing the generator cancels the request."""
        answer: Answer = await self._call("answer", request)
        yield Piece(answer.text, answer.usage.completion_tokens, answer.logprobs or ())
        yield answer

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the tokens of a prompt, with the chat template applied."""
        return tuple(await self._call("engine", "tokenize", prompt))

    async def status(self) -> EngineStatus:
        """Return the current state and counters."""
        state: Literal["stopped", "failed"] = "stopped" if self._closing else "failed"
        try:
            status: EngineStatus = await self._call("engine", "status")
        except EngineError as error:
            return EngineStatus(state, self.identity, Counters(), error.message)
        self._facts = replace(self._facts, identity=status.identity)
        return replace(status, identity=self.identity)

    async def set_slots(self, slots: int) -> None:
        """Change the number of slots for batch requests."""
        await self._call("engine", "set_slots", slots)
        self._facts = await self._call("facts")

    async def set_kv_layout(self, layout: KvLayout) -> None:
        """Change the KV layout."""
        await self._call("engine", "set_kv_layout", layout)
        self._facts = await self._call("facts")

    async def close(self) -> None:
        """Stop the engine and kill its actor."""
        if self._closing:
            return
        self._closing = True
        self._watching.cancel()
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._actor.call("close")
        self._actor.kill()

    async def _watch(self) -> None:
        """Set `ended` when the engine has failed permanently or the node is lost."""
        while not self.ended.done():
            try:
                await self._call("loading")  # resets the time since the node was reachable
                await self._call("failed")
            except NodeLost:
                await asyncio.sleep(_RETRY_S)
            except EngineError as error:
                outside = error.from_outside if isinstance(error, EngineDied) else None
                self._end(EngineDied(f"on {self._name}, {error.message}", hint=error.hint, from_outside=outside))

    async def _call(self, method: str, *arguments: Any) -> Any:
        if self.ended.done():
            raise EngineDied(self.ended.result().message, from_outside=True)
        try:
            found = await self._actor.call(method, *arguments)
        except NodeLost as lost:
            raise self._unreachable(lost) from lost
        self._unreachable_since_s = None
        return found

    def _unreachable(self, lost: NodeLost) -> NodeLost:
        now_s = asyncio.get_running_loop().time()
        if self._unreachable_since_s is None:
            self._unreachable_since_s = now_s
        death = NodeLost(f"{self._name} is lost: {lost.message}", for_good=lost.for_good)
        if lost.for_good or now_s - self._unreachable_since_s > self._unreachable_timeout_s:
            self._end(death)
        return death

    def _end(self, death: EngineDied) -> None:
        if not self._closing and not self.ended.done():
            self.ended.set_result(death)
