"""Cancels a request when its client disconnects, its deadline passes, or the gateway stops."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.types import Receive

from tokenmill.errors import EngineTimeout
from tokenmill.gateway.http.faults import Stopping
from tokenmill.gateway.http.request_context import RequestContext
from tokenmill.gateway.state import GatewayState


class ClientLeft(Exception):
    """The client closed the connection."""


@asynccontextmanager
async def cancel_on_disconnect(
    state: GatewayState,
    context: RequestContext,
    receive: Receive,
    *,
    timeout_s: float | None = None,
    answered: Callable[[], bool] = lambda: False,
) -> AsyncIterator[None]:
    """Run the block; raises ClientLeft, Stopping or EngineTimeout if it is cancelled before it ends.

    Cancelling the block closes the engine's stream, which frees the slot at the engine's next step. The request body
    must have been read, because `receive` is awaited for the disconnect. Once `answered` returns True, the block is no
    longer cancelled.
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
            state.in_flight.add(cancel)
            try:
                if state.cancelling.is_set():
                    cancel("stopping")
                yield
            finally:
                state.in_flight.discard(cancel)
                listening.cancel()
    except TimeoutError:
        if not limit.expired():
            raise
        if not reasons:
            raise EngineTimeout(
                f"no answer within {timeout_s:g} s", hint="set a longer timeout, or reduce max_tokens"
            ) from None
        if reasons == ["left"]:
            context.left = True
            raise ClientLeft from None
        raise Stopping("the gateway shut down before the answer was complete") from None


async def _disconnect(receive: Receive, left: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    left()
