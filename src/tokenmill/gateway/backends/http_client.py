"""A minimal HTTP/1.1 client for one server, with microseconds of overhead per request.

Connections are pooled; a request on a connection that the server closed while idle is sent again. Body pieces are
returned as they arrive, and reading pauses while the consumer is slow. Closing a response early closes its connection,
which makes servers stop generating. Does not interpret bodies.
"""

import asyncio
import socket
import ssl
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

_CONNECT_S = 5.0
_KEEP_S = 4.0  # idle time after which a connection is dropped; servers close theirs after 5 s or more
_MAX_IDLE = 64
_MAX_HEADER_BYTES = 64 * 1024
_MAX_UNREAD_BYTES = 256 * 1024  # received but not consumed


class UpstreamLost(Exception):
    """The connection broke before the response was complete."""


class UpstreamUnreachable(UpstreamLost):
    """The connection could not be established; nothing was sent."""


class Response(asyncio.Protocol):
    """One connection, and its current response."""

    def __init__(self, owner: "Upstream") -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self.used = False  # has carried a response before
        self.idle = False  # no request is in flight
        self.idle_since_s = 0.0
        self.lost: str | None = None
        self._renew()

    def _renew(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []  # lower-case names
        self._parts: list[bytes] = []
        self._waiting_bytes = self._header_bytes = 0
        self._whole = self._framed = self._headed = self._paused = self._keeps = False
        self.begun = False  # a byte of the response has arrived
        self.given_up = False  # `give_up` was called
        self._waiter: asyncio.Future[None] | None = None

    # ---- asyncio protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection was established."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass

    def data_received(self, data: bytes) -> None:
        """Parse received data and wake the reader."""
        if self.idle:
            self._break("the server sent data without a request")
            return
        self.begun = True
        if not self._headed:
            self._header_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._break(f"the server sent malformed HTTP: {error}")
            return
        if not self._headed and self._header_bytes > _MAX_HEADER_BYTES:
            self._break("the response headers are too long")
            return
        if self._waiting_bytes > _MAX_UNREAD_BYTES and not self._paused and self.transport is not None:
            self._paused = True
            self.transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        """The end of the connection ends a body without a length."""
        if self._headed and not self._framed:
            self._whole = True
            self._wake()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection was closed or lost."""
        self.lost = self.lost or (f"{exc}" if exc else "the server closed the connection")
        self._owner.remove(self)
        self._wake()

    def _break(self, reason: str) -> None:
        self.lost = reason
        if self.transport is not None:
            self.transport.abort()
        self._wake()

    # ---- parser callbacks

    def on_message_begin(self) -> None:
        """Refuse a second response to one request."""
        if self._whole:
            raise ValueError("a second response to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Store the status; headers of 1xx responses are dropped."""
        self.status = self._parser.get_status_code()
        if self.status < 200:
            self.headers.clear()
            return
        self._headed = True
        self._framed = any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)

    def on_body(self, body: bytes) -> None:
        """Store a part of the body."""
        self._parts.append(body)
        self._waiting_bytes += len(body)

    def on_message_complete(self) -> None:
        """Note the end of the response."""
        if self._headed:
            self._whole = True
            self._keeps = self._framed and self._parser.should_keep_alive()  # unknown to the parser later

    # ---- reading

    def write(self, request: bytes) -> None:
        """Send a request over this idle connection."""
        assert self.transport is not None  # noqa: S101  connected
        self._renew()
        self.idle = False
        self.transport.write(request)

    async def wait_for_headers(self) -> None:
        """Wait for status and headers; raises UpstreamLost if they do not arrive."""
        while not self._headed:
            if self.lost is not None:
                raise UpstreamLost(self.lost)
            await self._wait()

    async def part(self) -> bytes:
        """The body received since the last call; empty at its end. Raises UpstreamLost if it is incomplete."""
        while not self._parts:
            if self._whole:
                return b""
            if self.lost is not None:
                raise UpstreamLost(self.lost)
            await self._wait()
        parts = self._parts
        self._parts = []
        self._waiting_bytes = 0
        if self._paused and self.transport is not None:
            self._paused = False
            self.transport.resume_reading()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def all(self, max_bytes: int) -> bytes:
        """The whole body; raises UpstreamLost if it is incomplete or larger than `max_bytes`."""
        parts = []
        size = 0
        while part := await self.part():
            size += len(part)
            if size > max_bytes:
                raise UpstreamLost(f"the response is larger than {max_bytes} bytes")
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def header(self, wanted: bytes) -> bytes:
        """The value of a header, or an empty string."""
        return next((value for name, value in self.headers if name == wanted), b"")

    def close(self) -> None:
        """Release the connection: return it to the pool if the response was read completely, else close it."""
        if self._whole and self.lost is None and self._keeps:
            self._owner.keep(self)
        else:
            self._owner.remove(self)
            if self.transport is not None:
                self.transport.abort()

    def give_up(self, reason: str) -> None:
        """Close the connection if the response has not started."""
        if not self.begun:
            self.given_up = True
            self._break(reason)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Upstream:
    """A server with its connection pool. Belongs to one event loop."""

    def __init__(self, url: str, key: str | None = None, *, connect_s: float = _CONNECT_S) -> None:
        """`url`: scheme, host, optional port and path, as returned by `base_url`."""
        parts = urlsplit(url)
        self.url = url
        self._connect_s = connect_s
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        key_line = f"Authorization: Bearer {key}\r\n" if key else ""
        self._common = f"Host: {parts.netloc}\r\n{key_line}User-Agent: tokenmill\r\nAccept-Encoding: identity\r\n"
        self._idle: list[Response] = []
        self._in_flight: set[Response] = set()

    async def send(self, method: str, path: str, body: bytes = b"", request_id: str = "") -> Response:
        """Send a request; returns when status and headers have arrived. The caller closes the response.

        Raises UpstreamUnreachable or UpstreamLost.
        """
        lines = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._common}"
        if request_id:
            lines += f"X-Request-Id: {request_id}\r\n"
        if body:
            lines += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        request = f"{lines}\r\n".encode("latin-1") + body
        while True:
            response = self._pooled() or await self._connect()
            self._in_flight.add(response)
            response.write(request)
            try:
                await response.wait_for_headers()
            except UpstreamLost:
                response.close()
                if response.used and not response.begun and not response.given_up:
                    continue  # the server closed it while idle
                raise
            except BaseException:
                response.close()
                raise
            return response

    def give_up(self, reason: str) -> None:
        """Cancel all requests whose response has not started, so that another backend can answer them."""
        for response in tuple(self._in_flight):
            response.give_up(reason)

    def keep(self, response: Response) -> None:
        """Return an idle connection to the pool."""
        self._in_flight.discard(response)
        response.used = response.idle = True
        response.idle_since_s = asyncio.get_running_loop().time()
        self._idle.append(response)
        if len(self._idle) > _MAX_IDLE:
            self._drop(self._idle.pop(0))

    def remove(self, response: Response) -> None:
        """Remove a closed connection from the pool."""
        self._in_flight.discard(response)
        if response in self._idle:
            self._idle.remove(response)

    def close(self) -> None:
        """Close all connections."""
        for response in (*self._idle, *self._in_flight):
            self._drop(response)
        self._idle.clear()

    @staticmethod
    def _drop(response: Response) -> None:
        if response.transport is not None:
            response.transport.abort()

    def _pooled(self) -> Response | None:
        now_s = asyncio.get_running_loop().time()
        while self._idle:
            response = self._idle.pop()  # the most recently used one, so that the others may expire
            if response.lost is None and now_s - response.idle_since_s < _KEEP_S:
                return response
            self._drop(response)
        return None

    async def _connect(self) -> Response:
        loop = asyncio.get_running_loop()
        settings: dict[str, Any] = {"server_hostname": self._host} if self._tls else {}
        try:
            async with asyncio.timeout(self._connect_s):
                transport, response = await loop.create_connection(
                    lambda: Response(self), self._host, self._port, ssl=self._tls, **settings
                )
        except TimeoutError:
            raise UpstreamUnreachable(f"no connection within {self._connect_s:g} s") from None
        except OSError as error:  # ssl.SSLError is one
            raise UpstreamUnreachable(error.strerror or str(error)) from error
        if (connected := transport.get_extra_info("socket")) is not None:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return response
