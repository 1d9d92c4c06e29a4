"""/api/events: the gateway's state as server-sent events, while a client is connected.

    history    once: the rates of the last minutes, one entry per poll
    status     with every poll: /api/status
    heads      when it has changed: the prefix tree in the cells of each engine
    stopping   the last one, when the gateway ends

A slow client misses polls instead of filling a queue. A comment is sent now and then if there is no event.
"""

import json
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmill.gateway.http.client_connection import ClientLeft, cancel_on_disconnect
from tokenmill.gateway.http.faults import Stopping
from tokenmill.gateway.http.request_context import visit_of
from tokenmill.gateway.http.response_writer import ResponseWriter, SlowClient
from tokenmill.gateway.monitoring.monitor import Monitor
from tokenmill.gateway.monitoring.view import heads_view, status_view
from tokenmill.gateway.streaming import HEADERS

HEARTBEAT_S = 10.0
_HEARTBEAT = b": still here\n\n"


def event(name: str, data: Any) -> bytes:
    """One encoded event."""
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


class Feed:
    """The events of a poll, encoded once for all clients."""

    def __init__(self, watch: Monitor) -> None:
        self.watch = watch
        self._version: int | None = None
        self.status = self.heads = b""

    def update(self) -> int:
        """Encode the last poll unless that was done; returns its version."""
        if self._version != self.watch.version:
            self._version = self.watch.version
            self.status = event("status", status_view(self.watch))
            self.heads = event("heads", heads_view(self.watch))
        return self._version


class EventStream(Response):
    """Sends events until the client leaves or the gateway stops."""

    def __init__(self, feed: Feed, *, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._feed = feed
        self._watch = feed.watch
        self._heartbeat_s = heartbeat_s
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Register a client."""
        state = self._watch.state
        visit = visit_of(scope)
        sending = ResponseWriter(scope, send, state.config.gateway.write_timeout_s)
        with self._watch.looking():
            try:
                async with cancel_on_disconnect(state, visit, receive, answered=lambda: sending.ended):
                    await self._send(sending)
            except (ClientLeft, Stopping):
                pass  # the last client has left
            except SlowClient:
                visit.error = "slow_client"
                sending.abort()

    async def _send(self, sending: ResponseWriter) -> None:
        watch = self._watch
        feed = self._feed
        await sending.start(200, HEADERS)
        await sending.put(event("history", list(watch.history)))
        version, heads = 0, b""  # a poll may already have been made: send it immediately
        while not watch.state.shutting_down.is_set():
            if not await watch.newer(version, self._heartbeat_s):
                await sending.put(_HEARTBEAT)
                continue
            version = feed.update()
            await sending.put(feed.status + (feed.heads if feed.heads != heads else b""))
            heads = feed.heads
        await sending.put(event("stopping", {}), more=False)
