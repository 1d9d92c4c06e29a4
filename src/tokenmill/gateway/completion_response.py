"""One chat or completion from its body to its last byte: admitted, routed, answered whole or as a stream.

Nothing is sent before an engine has given its first sign, so that what goes wrong before it has a status of its own;
what goes wrong after it ends the stream with an error event. Leaving, at any point, closes the engine's streams.
"""

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmill.errors import TokenmillError
from tokenmill.gateway import bodies
from tokenmill.gateway.disconnects import ClientLeft, cancel_on_disconnect
from tokenmill.gateway.fallback import FallbackRunner, Work
from tokenmill.gateway.request_context import visit_of
from tokenmill.gateway.response_writer import ResponseWriter, SlowClient
from tokenmill.gateway.state import GatewayState
from tokenmill.gateway.streams import failure
from tokenmill.jobs.openai.call import Endpoint

ANYBODY = "anybody"  # whom requests without a key count for


class CompletionResponse(Response):
    """Answers one request; everything happens when it is called."""

    def __init__(self, state: GatewayState, endpoint: Endpoint) -> None:
        self._state = state
        self._endpoint = endpoint
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read, admit, answer."""
        state = self._state
        visit = visit_of(scope)
        settings = self._state.config.gateway
        request = Request(scope, receive)
        body = await bodies.read(request, most_bytes=settings.max_body_bytes, timeout_s=settings.read_timeout_s)
        given = await bodies.parse(body)
        visit.lane = bodies.lane_of(request.headers, given)
        asked = bodies.asked(self._endpoint, given, visit.lane, most_choices=settings.max_choices)
        sending = ResponseWriter(scope, send, settings.write_timeout_s)
        name, own = (visit.key.name, visit.key.limits) if visit.key is not None else (ANYBODY, None)
        timeout_s = min(filter(None, (asked.timeout_s, settings.request_timeout_s)), default=None)
        with state.limiter.admit(name, own) as charge:
            try:
                async with cancel_on_disconnect(
                    state, visit, receive, timeout_s=timeout_s, answered=lambda: sending.ended
                ):
                    await FallbackRunner(state, visit, sending, charge).run(Work(asked, body, given))
            except ClientLeft:
                visit.error = "client_left"  # nobody is there to be told
            except SlowClient:
                visit.error = "slow_client"
                sending.abort()
            except TokenmillError as error:
                await _tell(error, sending, lambda word: setattr(visit, "error", word))


async def _tell(error: TokenmillError, sending: ResponseWriter, note: Callable[[str], None]) -> None:
    """An error before the answer began is an answer of its own; after that, its honest end."""
    if not sending.begun:
        raise error
    note(error.code)
    try:
        await sending.put(failure(error), more=False)
    except SlowClient:
        sending.abort()
