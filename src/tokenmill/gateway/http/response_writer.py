"""Writes a response to a client that may read slowly."""

import asyncio
from collections.abc import Sequence

from starlette.types import Scope, Send

ABORT = "tokenmill.abort"  # scope key of the function that drops the connection and its unsent data


class SlowClient(Exception):
    """The client does not read its response in time."""


class ResponseWriter:
    """Writes one response and tracks whether it has started. Raises SlowClient if the client reads too slowly."""

    def __init__(self, scope: Scope, send: Send, timeout_s: float) -> None:
        """`timeout_s`: maximum time for the client to read what was sent before."""
        self._scope = scope
        self._send = send
        self._timeout_s = timeout_s
        self.begun = self.ended = False

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Send the status and the headers."""
        self.begun = True
        await self._send_in_time({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def put(self, data: bytes, *, more: bool = True) -> None:
        """Send a part of the body."""
        self.ended = not more
        await self._send_in_time({"type": "http.response.body", "body": data, "more_body": more})

    async def _send_in_time(self, message: dict[str, object]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                await self._send(message)
        except TimeoutError:
            if not limit.expired():
                raise
            raise SlowClient from None

    def abort(self) -> None:
        """Drop the connection and its unsent data."""
        drop = self._scope.get(ABORT)
        if drop is not None:
            drop()
