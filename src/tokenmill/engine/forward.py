"""Base class of engines that wrap another engine: forwards every operation to it.

Requests wait until the inner engine is ready. Other operations are sent to the current process and raise `EngineDied`
if it has died, because the next process starts with its own settings.
"""

from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from tokenmill.engine.engine import Answer, Engine, HttpApi, KvLayout, Piece, Prompt, Request, Runtime, Usage
from tokenmill.errors import EngineDied


class ForwardingEngine(Engine):
    """Forwards to `inner`; subclasses define `inner`, the facts and the life cycle."""

    @property
    @abstractmethod
    def inner(self) -> Engine | None:
        """The running engine; None if none is running."""

    async def _ready(self, timeout_s: float | None) -> Engine:
        """Return the engine for a request, waiting until it is ready; EngineError if it does not become ready."""
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
    def http_api(self) -> HttpApi | None:
        """The inner engine's HTTP API."""
        return self.inner.http_api if self.inner is not None else None

    async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        """Generate once the inner engine is ready."""
        stream = (await self._ready(request.timeout_s)).stream(request)
        try:
            async for event in stream:
                yield event
        finally:
            await stream.aclose()

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the tokens of a prompt, with the chat template applied."""
        return await (await self._ready(None)).tokenize(prompt)

    async def embed(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Forward a /v1/embeddings request."""
        return await (await self._ready(None)).embed(body)

    async def set_threads(self, threads: int, threads_batch: int) -> None:
        """Change the number of threads of the current process."""
        await self._running().set_threads(threads, threads_batch)

    async def set_slots(self, slots: int) -> None:
        """Change the number of slots of the current process."""
        await self._running().set_slots(slots)

    async def set_context(self, **changes: object) -> None:
        """Replace the context of the current process."""
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
        """The sequences in flight in the current process."""
        return await self._running().running_requests()

    async def cached_prefixes(self) -> list[dict[str, Any]]:
        """The cached prefixes of the current process."""
        return await self._running().cached_prefixes()
