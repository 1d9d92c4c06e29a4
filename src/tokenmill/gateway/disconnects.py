"""Work for a client that may leave, for a gateway that may be stopped, and within the time that a request may take.

The block is broken off at once: closing the engine's stream on its way out frees the lane at the engine's next step.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.types import Receive

from tokenmill.errors import EngineTimeout
from tokenmill.gateway.faults import Stopping
from tokenmill.gateway.request_context import RequestContext
from tokenmill.gateway.state import GatewayState


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


@asynccontextmanager
async def cancel_on_disconnect(
    state: GatewayState,
    visit: RequestContext,
    receive: Receive,
    *,
    timeout_s: float | None = None,
    answered: Callable[[], bool] = lambda: False,
) -> AsyncIterator[None]:
    """Run the block until it ends or there is no point: ClientLeft, Stopping or EngineTimeout.

    The request's body must have been read: `receive` is listened to for the client's leaving. Once all is `answered`
    the block is left to end by itself.
    """
    loop = asyncio.get_running_loop()
    why: list[str] = []
    try:
        async with asyncio.timeout(timeout_s) as limit:

            def end(reason: str) -> None:
                if not why and not answered():
                    why.append(reason)
                    limit.reschedule(loop.time())

            listening = loop.create_task(_listen(receive, lambda: end("left")))
            state.at_work.add(end)
            try:
                if state.hand_back.is_set():
                    end("stopping")
                yield
            finally:
                state.at_work.discard(end)
                listening.cancel()
    except TimeoutError:
        if not limit.expired():
            raise
        if not why:
            raise EngineTimeout(
                f"no answer within {timeout_s:g} s", hint="give it a longer timeout, or ask for fewer tokens"
            ) from None
        if why == ["left"]:
            visit.left = True
            raise ClientLeft from None
        raise Stopping("this gateway is being stopped, and the answer was not finished in time") from None


async def _listen(receive: Receive, left: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    left()
