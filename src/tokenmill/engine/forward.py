"""An engine in front of another one: every operation is forwarded, so a wrapper defines only what it changes.

Requests wait until the inner engine can take them. Everything else goes to the inner engine as it is now: whoever
changes or inspects a process that has died gets `EngineDied`, because its successor starts with its own settings.
"""

from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from tokenmill.engine.engine import Answer, Engine, KvLayout, Piece, Prompt, Request, Runtime, Speech, Usage
from tokenmill.errors import EngineDied


class ForwardingEngine(Engine):
    """Forwards to `inner`; subclasses define which engine that is, its facts and its life cycle."""

    @property
    @abstractmethod
    def inner(self) -> Engine | None:
        """The engine that runs now; None if there is none."""

    async def _ready(self, timeout_s: float | None) -> Engine:
        """The engine to send a request to; may wait for it, and raises EngineError if it does not come."""
        return self._running()

    def _running(self) -> Engine:
        if (inner := self.inner) is None:
            raise EngineDied(f"the engine is not running: {self.last_error}", from_outside=True)
        return inner

    @property
    def runtime(self) -> Runtime | None:
        """The inner engine's settings and memory."""
        return self.inner.runtime if self.inner is not None else None

    @property
    def http_api(self) -> Speech | None:
        """The inner engine's HTTP API."""
        return self.inner.http_api if self.inner is not None else None

    async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        """Work on one request once the inner engine is ready."""
        stream = (await self._ready(request.timeout_s)).stream(request)
        try:
            async for event in stream:
                yield event
        finally:
            await stream.aclose()

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """The tokens a prompt becomes, its template applied."""
        return await (await self._ready(None)).tokenize(prompt)

    async def embed(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a /v1/embeddings request."""
        return await (await self._ready(None)).embed(body)

    async def set_threads(self, threads: int, threads_batch: int) -> None:
        """Change the numbers of threads of the current process."""
        await self._running().set_threads(threads, threads_batch)

    async def set_slots(self, slots: int) -> None:
        """Change the number of slots of the current process."""
        await self._running().set_slots(slots)

    async def set_context(self, **changes: object) -> None:
        """Build another context in the current process."""
        await self._running().set_context(**changes)

    async def set_kv_layout(self, layout: KvLayout) -> None:
        """Change the KV layout of the current process."""
        await self._running().set_kv_layout(layout)

    async def pin_prefix(self, prompt: Prompt) -> Usage:
        """Pin a prefix in the current process."""
        return await self._running().pin_prefix(prompt)

    async def unpin_prefix(self, prompt: Prompt) -> None:
        """Unpin a prefix in the current process."""
        await self._running().unpin_prefix(prompt)

    async def save_prefix(self, prompt: Prompt, path: Path) -> int:
        """Save a prefix of the current process."""
        return await self._running().save_prefix(prompt, path)

    async def restore_prefix(self, path: Path, *, pin: bool = True) -> int:
        """Load a prefix into the current process."""
        return await self._running().restore_prefix(path, pin=pin)

    async def verify_saved_slots(self, folder: Path) -> tuple[bool, str]:
        """Test whether the current process can save and restore slots."""
        return await self._running().verify_saved_slots(folder)

    async def save_slot(self, slot: int, name: str) -> int:
        """Save a slot of the current process."""
        return await self._running().save_slot(slot, name)

    async def restore_slot(self, slot: int, name: str) -> int:
        """Load a slot into the current process."""
        return await self._running().restore_slot(slot, name)

    async def running_requests(self) -> list[dict[str, Any]]:
        """What the current process works on."""
        return await self._running().running_requests()

    async def cached_prefixes(self) -> list[dict[str, Any]]:
        """What the KV cache of the current process holds."""
        return await self._running().cached_prefixes()
