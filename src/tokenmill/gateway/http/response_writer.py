"""Writes a response to a client that may read slowly."""

import asyncio
from collections.abc import Sequence

from starlette.types import Scope, Send

ABORT = "tokenmill.abort"  # in a scope: drops the connection and what is still to be sent


class SlowClient(Exception):
    """The client does not read what is sent to it."""


class ResponseWriter:
    """Writes one response and knows whether it has begun. A client that reads too slowly raises SlowClient."""

    def __init__(self, scope: Scope, send: Send, timeout_s: float) -> None:
        """`timeout_s`: how long a client may take to read what was sent before."""
        self._scope = scope
        self._send = send
        self._timeout_s = timeout_s
        self.begun = self.ended = False

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Send the status and the headers."""
        self.begun = True
        await self._in_time({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def put(self, data: bytes, *, more: bool = True) -> None:
        """Send a part of the body."""
        self.ended = not more
        await self._in_time({"type": "http.response.body", "body": data, "more_body": more})

    async def _in_time(self, message: dict[str, object]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                await self._send(message)
        except TimeoutError:
            if not limit.expired():
                raise
            raise SlowClient from None

    def abort(self) -> None:
        """Drop the connection of a client that does not read."""
        drop = self._scope.get(ABORT)
        if drop is not None:
            drop()
