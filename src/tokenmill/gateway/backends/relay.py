"""Relays one server response as bytes.

A stream is buffered until its first event with content, so that another backend can answer if the server fails before;
then bytes are passed on as they arrive. Other responses are read and passed on as a whole. Errors after the start of a
stream are reported to the client by the caller.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from tokenmill.engine.server.errors import to_error
from tokenmill.errors import EngineDied, EngineError, TokenmillError, TooLong
from tokenmill.gateway.backends.http_client import Response, UpstreamLost
from tokenmill.gateway.backends.passthrough import (
    ObservedAnswer,
    ObservedUsage,
    has_content,
    relayed_headers,
    usage_in,
)
from tokenmill.gateway.http.faults import Busy
from tokenmill.gateway.http.response_writer import ResponseWriter
from tokenmill.units import MIB

_MAX_ANSWER_BYTES = 256 * MIB
_MAX_ERROR_BYTES = MIB
_MAX_BUFFERED_BYTES = 16 * 1024  # of a stream before its first event with content
_DRAIN_S = 0.5  # maximum wait for the end of the body after the last event
_ERRORS = (b"error:", b'data: {"error"', b'data:{"error"')
Headers = list[tuple[bytes, bytes]]


class Relay:
    """One relayed response; `reported` and `tokens` are its known cost so far."""

    def __init__(self, response: Response, writer: ResponseWriter, engine: str, *, hide_usage: bool) -> None:
        self._response = response
        self._writer = writer
        self._engine = engine
        self._observed = ObservedAnswer(hide_usage=hide_usage)
        self.reported = ObservedUsage(None)

    @property
    def tokens(self) -> int:
        """Approximate number of relayed tokens: the number of events."""
        return self._observed.events

    @property
    def failed(self) -> bool:
        """Whether the server ended its stream with an error event, which was relayed."""
        return self._observed.failed

    async def run(self, begun: Callable[[bool], None]) -> None:
        """Relay the response; calls `begun` when it starts, with True if it is a stream.

        Raises UpstreamLost, EngineError or Busy. Until `begun` is called, another backend may answer.
        """
        response = self._response
        if response.status != 200:
            await self._refused()
        elif response.header(b"content-type").startswith(b"text/event-stream"):
            await self._stream(begun)
        else:
            body = await response.all(_MAX_ANSWER_BYTES)
            begun(False)
            self.reported = usage_in(body)
            await self._send_whole(200, body)

    async def _stream(self, begun: Callable[[bool], None]) -> None:
        response = self._response
        observed = self._observed
        put = self._writer.put
        data = await self._first()
        begun(True)
        await self._writer.start(200, [*relayed_headers(response.headers), *self._named()])
        while data:
            out = observed.take(data)
            if observed.ended_well:
                self.reported = observed.usage()
                await put(
                    out + observed.end(), more=False
                )  # clients disconnect at this event, so nothing may follow it
                await self._drained()
                return
            if out:
                await put(out)
            data = await response.part()
        self.reported = observed.usage()
        if not observed.failed:
            raise EngineDied(f"the stream of {self._engine} ended early")
        await put(observed.end(), more=False)

    async def _drained(self) -> None:
        """Read the response to its end, so that its connection can be reused."""
        with suppress(UpstreamLost, TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                while await self._response.part():
                    pass

    async def _first(self) -> bytes:
        """Read the beginning of a stream, up to its first event with content."""
        held = b""
        while len(held) < _MAX_BUFFERED_BYTES:
            data = await self._response.part()
            if not data:
                raise EngineDied(f"the stream of {self._engine} ended before its first event")
            held += data
            if held.startswith(_ERRORS):
                raise _fault(500, held)
            if has_content(held):
                break
        return held

    async def _refused(self) -> None:
        """Handle a status other than 200: pass request errors on, raise server errors."""
        status = self._response.status
        engine = self._engine
        body = await self._response.all(_MAX_ERROR_BYTES)
        if status in (401, 403):
            raise EngineError(
                f"{engine} rejected the API key (status {status})", hint="check the variable named by api_key_env"
            )
        if status == 429:
            wait = self._response.header(b"retry-after")
            wait_s = float(wait) if wait.isdigit() else 1.0
            raise Busy(f"{engine} is overloaded", retry_after_s=wait_s, code="upstream_busy", kind="upstream")
        if status < 400 or status in (404, 405, 408) or status >= 500:
            error = _fault(status, body)
            raise error if isinstance(error, EngineError) else EngineError(f"{engine}: {error.message}")
        error = _fault(status, body)
        if isinstance(error, TooLong) or not self._response.header(b"content-type").startswith(b"application/json"):
            raise error  # a prompt that is too long has the same code for all servers
        await self._send_whole(status, body)

    async def _send_whole(self, status: int, body: bytes) -> None:
        headers = [*relayed_headers(self._response.headers), *self._named()]
        headers.append((b"content-length", str(len(body)).encode()))
        usage = self.reported.usage
        if usage is not None and usage.cached_tokens is not None:
            headers.append((b"x-tokenmill-cached-tokens", str(usage.cached_tokens).encode()))
        await self._writer.start(status, headers)
        await self._writer.put(body, more=False)

    def _named(self) -> Headers:
        return [(b"x-tokenmill-engine", self._engine.encode("ascii", "replace"))]


def lost(engine: str, error: UpstreamLost) -> EngineDied:
    """The error for a broken connection."""
    return EngineDied(f"the connection to {engine} was lost: {error}", from_outside=True)


def _fault(status: int, body: bytes) -> TokenmillError:
    return to_error(status, body.decode(errors="replace"))
