"""A backend with admission control, a circuit breaker, health checks and byte relaying.

A backend that looks dead is skipped while another is available; requests that wait for its first byte move to the next
one, and it is used again once it is healthy. Belongs to one event loop.
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
from tokenmill.gateway.backends.health_check import PollPace, Vitals, keep_checking, look
from tokenmill.gateway.backends.http_client import Upstream, UpstreamLost
from tokenmill.gateway.backends.passthrough import hides_usage, relayed_body
from tokenmill.gateway.backends.relay import Relaying, lost
from tokenmill.gateway.http.request_context import RequestContext
from tokenmill.gateway.http.response_writer import ResponseWriter
from tokenmill.gateway.http.route_group import RouteGroup
from tokenmill.gateway.monitoring.recorder import FinishedRequest, Recorder

if TYPE_CHECKING:
    from tokenmill.gateway.http.request import ParsedRequest
    from tokenmill.gateway.state import GatewayState

_STATES: dict[Liveness, str] = {"restarting": "restarting", "unreachable": "down", "failed": "failed"}
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
        """`key` is the server's API key; `recorder` is informed of relayed answers."""
        self.name = name
        self.engine = engine
        self.gate = gate
        self._recorder = recorder
        self._key = key
        self._clock = clock
        self._breaker = Breaker(rules or Rules())
        self._vitals = Vitals()
        self._upstream: Upstream | None = None
        self._proxied = False
        self.trouble: str | None = None  # error of the last failed request

    # ---- state

    @property
    def state(self) -> str:
        """A value of engine.State, or the breaker's while it refuses requests."""
        liveness = self.engine.liveness
        if liveness != "up":
            return _STATES[liveness]
        if self._vitals.condition != "up":
            return self._vitals.condition
        now_s = self._clock()
        return "ready" if self._breaker.allows(now_s) else self._breaker.position(now_s)

    @property
    def available(self) -> bool:
        """Whether to try it now."""
        return self.state == "ready"

    async def check(self, pace: PollPace) -> None:
        """Poll its health; if it is down, requests that wait for their first byte are cancelled."""
        if not await self.engine.reconnect():
            return  # it is restarting or unreachable, as its state says
        if self.engine.http_api is not None:
            finding = await look(self._upstream_now(), pace.timeout_s)
        else:
            finding = "up"
        before = self._vitals
        self._vitals = self._vitals.saw(finding)
        if self._vitals.condition == "down" and before.condition != "down" and self._upstream is not None:
            self._upstream.give_up("it is down")
        if finding == "up":
            self._breaker = self._breaker.looks_healthy(self._clock())

    def close(self) -> None:
        """Close connections; the engine belongs to its owner."""
        if self._upstream is not None:
            self._upstream.close()

    # ---- through the engine protocol

    async def stream(self, request: Request) -> Events:
        """Run one request when it is admitted; the last event is the answer. Closing cancels."""
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
        self, request: "ParsedRequest", sending: ResponseWriter, visit: RequestContext, charge: Callable[[int], None]
    ) -> bool:
        """Answer by relaying bytes; False if this request needs the engine protocol."""
        speech = self.engine.http_api
        if speech is None:
            return False
        upstream = self._upstream_now()
        body = relayed_body(request, speech)
        if body is None or self._proxied:
            return False
        async with self.gate.enter(request.lane):
            with self._attempt() as succeeded:
                try:
                    response = await upstream.send("POST", _PATHS[request.endpoint], body, visit.id)
                    relaying = Relaying(response, sending, self.name, hide_usage=hides_usage(request, speech))
                    try:
                        await relaying.run(lambda token: self._begun(visit, succeeded, token=token))
                        succeeded()
                        if relaying.failed:
                            visit.error = "engine_error"
                    finally:
                        response.close()
                        self._spent(relaying, visit, charge)
                except UpstreamLost as error:
                    raise lost(self.name, error) from error
        return True

    def _begun(self, visit: RequestContext, succeeded: Callable[[], None], *, token: bool) -> None:
        succeeded()
        if token:
            visit.first_token_s = time.perf_counter() - visit.began_s
            if self._recorder is not None:
                self._recorder.first_token(visit.first_token_s, self.name, visit.lane or "interactive")

    def _spent(self, relaying: Relaying, visit: RequestContext, charge: Callable[[int], None]) -> None:
        usage = relaying.spent.usage
        if usage is None:
            charge(relaying.tokens)
            return
        visit.usage = usage
        charge(visit.usage_tokens)
        if self._recorder is not None:
            self._recorder.finished(
                FinishedRequest(
                    usage,
                    relaying.spent.timings,
                    self.name,
                    visit.lane or "interactive",
                    time.perf_counter() - visit.began_s,
                    visit.first_token_s,
                    visit.key.name if visit.key is not None else None,
                )
            )

    # ---- internal

    @contextmanager
    def _attempt(self) -> Iterator[Callable[[], None]]:
        """Report the outcome of a request to the breaker; yields the callback for the start of an answer."""
        self._breaker = self._breaker.began(self._clock())
        told = False

        def succeeded() -> None:
            nonlocal told
            if not told:
                told = True
                self._breaker = self._breaker.succeeded()
                self.trouble = None

        try:
            yield succeeded
        except EngineTimeout:
            raise  # a request's own timeout says nothing about the backend
        except EngineError as error:
            told = True
            self.trouble = error.message
            self._breaker = self._breaker.failed(self._clock(), lost=isinstance(error, EngineDied))
            raise
        finally:
            if not told:
                self._breaker = self._breaker.left()

    def _upstream_now(self) -> Upstream:
        """Connections to its current address; a restarted engine may have another port."""
        address = self.engine.identity.address
        if self._upstream is None or self._upstream.url != address:
            self.close()
            self._upstream = Upstream(address, self._key)
            self._proxied = _proxied(address)
        return self._upstream


def part(state: "GatewayState", pace: PollPace | None = None) -> RouteGroup:
    """Has no routes: polls the backends' health while the gateway serves."""

    @asynccontextmanager
    async def alongside() -> AsyncIterator[None]:
        checking = asyncio.create_task(keep_checking(state.backends, pace or PollPace()))
        try:
            yield
        finally:
            checking.cancel()
            await asyncio.gather(checking, return_exceptions=True)
            for backend in state.backends:
                backend.close()

    return RouteGroup([], alongside=alongside)


def _proxied(address: str) -> bool:
    """Whether the environment requires a proxy, which only the engine's own client supports."""
    parts = urlsplit(address)
    host = parts.hostname or ""
    return not is_loopback(host) and parts.scheme in getproxies() and not proxy_bypass(host)
