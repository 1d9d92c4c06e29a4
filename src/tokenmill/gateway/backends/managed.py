"""A backend with admission control, a circuit breaker, health checks and byte relaying.

An unhealthy backend is skipped while another one is available, and requests that wait for its first byte move to the
next one. Belongs to one event loop.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from tokenmill.engine.engine import Engine, Liveness, Request
from tokenmill.engine.process.ports import is_loopback
from tokenmill.errors import EngineDied, EngineError, EngineTimeout
from tokenmill.gateway.backends.admission import AdmissionGate
from tokenmill.gateway.backends.backend import Events
from tokenmill.gateway.backends.breaker import Breaker, Rules
from tokenmill.gateway.backends.health_check import HealthHistory, PollPace, keep_checking, probe
from tokenmill.gateway.backends.http_client import Upstream, UpstreamLost
from tokenmill.gateway.backends.passthrough import hides_usage, relayed_body
from tokenmill.gateway.backends.relay import Relay, lost
from tokenmill.gateway.http.openapi import RouteGroup
from tokenmill.gateway.http.request_context import RequestContext
from tokenmill.gateway.http.response_writer import ResponseWriter
from tokenmill.gateway.monitoring.recorder import FinishedRequest, Recorder

if TYPE_CHECKING:
    from tokenmill.gateway.http.request import ParsedRequest
    from tokenmill.gateway.state import GatewayState

_STATES: dict[Liveness, str] = {
    "unresponsive": "unresponsive",
    "restarting": "restarting",
    "unreachable": "down",
    "failed": "failed",
}
_PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}


class ManagedBackend:
    """One backend."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        gate: AdmissionGate,
        *,
        recorder: Recorder | None = None,
        key: str | None = None,
        rules: Rules | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`key`: the server's API key. `recorder`: records relayed answers; others are recorded by the caller."""
        self.name = name
        self.engine = engine
        self.gate = gate
        self._recorder = recorder
        self._key = key
        self._clock = clock
        self._breaker = Breaker(rules or Rules())
        self._health = HealthHistory()
        self._upstream: Upstream | None = None
        self._proxied = False
        self.trouble: str | None = None  # error of the last failed request

    # ---- state

    @property
    def state(self) -> str:
        """A value of engine.State, or the circuit breaker's state while it refuses requests."""
        liveness = self.engine.liveness
        if liveness != "up":
            return _STATES[liveness]
        if self._health.condition != "up":
            return self._health.condition
        now_s = self._clock()
        return "ready" if self._breaker.allows(now_s) else self._breaker.state(now_s)

    @property
    def available(self) -> bool:
        """Whether it is ready."""
        return self.state == "ready"

    async def check(self, pace: PollPace) -> None:
        """Poll its health; once it is down, requests that wait for their first byte are cancelled."""
        if not await self.engine.reconnect() and self.engine.liveness != "unresponsive":
            return  # restarting or unreachable
        if self.engine.http_api is not None:
            result = await probe(self._current_upstream(), pace.timeout_s)
        else:
            result = "up"
        before = self._health
        self._health = self._health.add(result)
        if self._health.condition == "down" and before.condition != "down" and self._upstream is not None:
            self._upstream.give_up("the backend is down")
        if result == "up":
            self._breaker = self._breaker.looks_healthy(self._clock())

    def close(self) -> None:
        """Close its connections; the engine stays open."""
        if self._upstream is not None:
            self._upstream.close()

    # ---- through the engine protocol

    async def stream(self, request: Request) -> Events:
        """Run one request once it is admitted; the last event is the answer. Closing the stream cancels the request."""
        async with self.gate.enter(request.priority):
            events = self.engine.stream(request)
            try:
                with self._attempt() as begun:
                    async for event in events:
                        begun()
                        yield event
            finally:
                await events.aclose()

    # ---- relaying

    async def relay(
        self, request: "ParsedRequest", writer: ResponseWriter, context: RequestContext, charge: Callable[[int], None]
    ) -> bool:
        """Relay the request; returns False if it needs the engine protocol."""
        api = self.engine.http_api
        if api is None:
            return False
        upstream = self._current_upstream()
        body = relayed_body(request, api)
        if body is None or self._proxied:
            return False
        async with self.gate.enter(request.priority):
            with self._attempt() as succeeded:
                try:
                    response = await upstream.send("POST", _PATHS[request.endpoint], body, context.id)
                    relayed = Relay(response, writer, self.name, hide_usage=hides_usage(request, api))
                    try:
                        await relayed.run(lambda token: self._record_start(context, succeeded, token=token))
                        succeeded()
                        if relayed.failed:
                            context.error = "engine_error"
                    finally:
                        response.close()
                        self._record_usage(relayed, context, charge)
                except UpstreamLost as error:
                    raise lost(self.name, error) from error
        return True

    def _record_start(self, context: RequestContext, succeeded: Callable[[], None], *, token: bool) -> None:
        succeeded()
        if token:
            context.first_token_s = time.perf_counter() - context.began_s
            if self._recorder is not None:
                self._recorder.first_token(context.first_token_s, self.name, context.priority or "interactive")

    def _record_usage(self, relayed: Relay, context: RequestContext, charge: Callable[[int], None]) -> None:
        usage = relayed.reported.usage
        if usage is None:
            charge(relayed.tokens)
            return
        context.usage = usage
        charge(context.usage_tokens)
        if self._recorder is not None:
            self._recorder.finished(
                FinishedRequest(
                    usage,
                    relayed.reported.timings,
                    self.name,
                    context.priority or "interactive",
                    time.perf_counter() - context.began_s,
                    context.first_token_s,
                    context.key.name if context.key is not None else None,
                )
            )

    # ---- internal

    @contextmanager
    def _attempt(self) -> Iterator[Callable[[], None]]:
        """Report the outcome of a request to the circuit breaker; yields a callback for the start of the answer."""
        self._breaker = self._breaker.began(self._clock())
        reported = False

        def succeeded() -> None:
            nonlocal reported
            if not reported:
                reported = True
                self._breaker = self._breaker.succeeded()
                self.trouble = None

        try:
            yield succeeded
        except EngineTimeout:
            raise  # the request's own timeout is not a failure of the backend
        except EngineError as error:
            reported = True
            self.trouble = error.message
            self._breaker = self._breaker.failed(self._clock(), lost=isinstance(error, EngineDied))
            raise
        finally:
            if not reported:
                self._breaker = self._breaker.abandoned()

    def _current_upstream(self) -> Upstream:
        """The client for its current address; a restarted engine may have another port."""
        address = self.engine.identity.address
        if self._upstream is None or self._upstream.url != address:
            self.close()
            self._upstream = Upstream(address, self._key)
            self._proxied = _proxied(address)
        return self._upstream


def route_group(state: "GatewayState", pace: PollPace | None = None) -> RouteGroup:
    """A group without routes that polls the backends' health while the gateway serves."""

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        checking = asyncio.create_task(keep_checking(state.backends, pace or PollPace()))
        try:
            yield
        finally:
            checking.cancel()
            await asyncio.gather(checking, return_exceptions=True)
            for backend in state.backends:
                backend.close()

    return RouteGroup([], lifespan=lifespan)


def _proxied(address: str) -> bool:
    """Whether the environment requires a proxy, which `Upstream` does not support."""
    parts = urlsplit(address)
    host = parts.hostname or ""
    return not is_loopback(host) and parts.scheme in getproxies() and not proxy_bypass(host)
