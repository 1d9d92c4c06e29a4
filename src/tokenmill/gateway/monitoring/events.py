"""/api/events: the gateway's state as server-sent events.

    history    once: the rates of the last minutes, one entry per poll
    status     after every poll: the content of /api/status
    prefixes   after a change: the prefix tree of each engine
    stopping   the last event, when the gateway shuts down

A slow client skips polls. A comment keeps the connection alive while there are no events.
"""

import json
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmill.gateway.http.client_connection import ClientLeft, cancel_on_disconnect
from tokenmill.gateway.http.faults import Stopping
from tokenmill.gateway.http.request_context import context_of
from tokenmill.gateway.http.response_writer import ResponseWriter, SlowClient
from tokenmill.gateway.monitoring.monitor import Monitor
from tokenmill.gateway.monitoring.view import prefix_view, status_view
from tokenmill.gateway.streaming import HEADERS

HEARTBEAT_S = 10.0
_HEARTBEAT = b": keep-alive\n\n"


def event(name: str, data: Any) -> bytes:
    """An encoded event."""
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


class Feed:
    """The events of the last poll, encoded once for all clients."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        self._version: int | None = None
        self.status = self.prefixes = b""

    def update(self) -> int:
        """Encode the last poll, if it is new; returns its version."""
        if self._version != self.monitor.version:
            self._version = self.monitor.version
            self.status = event("status", status_view(self.monitor))
            self.prefixes = event("prefixes", prefix_view(self.monitor))
        return self._version


class EventStream(Response):
    """Sends events until the client disconnects or the gateway stops."""

    def __init__(self, feed: Feed, *, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._feed = feed
        self._monitor = feed.monitor
        self._heartbeat_s = heartbeat_s
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Register a client."""
        state = self._monitor.state
        context = context_of(scope)
        writer = ResponseWriter(scope, send, state.config.gateway.write_timeout_s)
        with self._monitor.watching():
            try:
                async with cancel_on_disconnect(state, context, receive, answered=lambda: writer.ended):
                    await self._send(writer)
            except (ClientLeft, Stopping):
                pass  # the response ends
            except SlowClient:
                context.error = "slow_client"
                writer.abort()

    async def _send(self, writer: ResponseWriter) -> None:
        monitor = self._monitor
        feed = self._feed
        await writer.start(200, HEADERS)
        await writer.put(event("history", list(monitor.history)))
        version, prefixes = 0, b""  # send the last poll immediately, if there is one
        while not monitor.state.shutting_down.is_set():
            if not await monitor.wait_for_poll(version, self._heartbeat_s):
                await writer.put(_HEARTBEAT)
                continue
            version = feed.update()
            await writer.put(feed.status + (feed.prefixes if feed.prefixes != prefixes else b""))
            prefixes = feed.prefixes
        await writer.put(event("stopping", {}), more=False)
