"""The client's end of a request: writing to a client that may be slow, and noticing a client that leaves."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from starlette.types import Receive, Scope, Send

from tokenmill.errors import EngineTimeout
from tokenmill.gateway.faults import Stopping
from tokenmill.gateway.request_context import RequestContext

if TYPE_CHECKING:
    from tokenmill.gateway.state import GatewayState

ABORT = "tokenmill.abort"  # in a scope: drops the connection and what is still to be sent


class SlowClient(Exception):
    """The client does not read what is sent to it."""


class ClientLeft(Exception):
    """The client closed the connection."""


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


@asynccontextmanager
async def cancel_on_disconnect(
    state: "GatewayState",
    context: RequestContext,
    receive: Receive,
    *,
    timeout_s: float | None = None,
    answered: Callable[[], bool] = lambda: False,
) -> AsyncIterator[None]:
    """Run the block until it ends. Raises ClientLeft, Stopping or EngineTimeout if it is cancelled before.

    Cancelling the block closes the engine's stream, which frees the slot at the engine's next step. The request's body
    must have been read, because `receive` is used to notice the disconnect. Once `answered` is true, the block is left
    to end by itself.
    """
    loop = asyncio.get_running_loop()
    reasons: list[str] = []
    try:
        async with asyncio.timeout(timeout_s) as limit:

            def cancel(reason: str) -> None:
                if not reasons and not answered():
                    reasons.append(reason)
                    limit.reschedule(loop.time())

            listening = loop.create_task(_disconnect(receive, lambda: cancel("left")))
            state.at_work.add(cancel)
            try:
                if state.hand_back.is_set():
                    cancel("stopping")
                yield
            finally:
                state.at_work.discard(cancel)
                listening.cancel()
    except TimeoutError:
        if not limit.expired():
            raise
        if not reasons:
            raise EngineTimeout(
                f"no answer within {timeout_s:g} s", hint="give it a longer timeout, or ask for fewer tokens"
            ) from None
        if reasons == ["left"]:
            context.left = True
            raise ClientLeft from None
        raise Stopping("the gateway is shutting down, and the answer was not finished in time") from None


async def _disconnect(receive: Receive, left: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    left()
