"""A minimal HTTP/1.1 client for one server, with microseconds of overhead per request.

Connections are pooled; one that the server closed while idle is replaced once silently, because no response had
started. Body pieces arrive as the server wrote them, joined only if received together, and reading pauses while the
consumer is slow. Leaving a response early closes its connection, which makes servers stop generating. Does not
interpret bodies.
"""

import asyncio
import socket
import ssl
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

_CONNECT_S = 5.0
_KEEP_S = 4.0  # of an idle connection; servers close theirs after 5 s or more
_MOST_IDLE = 64
_MOST_HEADER_BYTES = 64 * 1024
_MOST_WAITING_BYTES = 256 * 1024  # of a body that was not consumed yet


class UpstreamLost(Exception):
    """The server did not respond, or not completely."""


class UpstreamUnreachable(UpstreamLost):
    """No connection could be made; nothing was sent."""


class Response(asyncio.Protocol):
    """One connection, and its current response."""

    def __init__(self, owner: "Upstream") -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self.used = False  # it has carried a response before
        self.at_rest = False  # no request is in flight
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
        self.given_up = False  # the wait for the response was cancelled
        self._waiter: asyncio.Future[None] | None = None

    # ---- asyncio protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is there."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass

    def data_received(self, data: bytes) -> None:
        """Parse received data, and wake the reader once."""
        if self.at_rest:
            self._break("it spoke without being asked")
            return
        self.begun = True
        if not self._headed:
            self._header_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._break(f"it sent what is not HTTP: {error}")
            return
        if not self._headed and self._header_bytes > _MOST_HEADER_BYTES:
            self._break("its headers do not end")
            return
        if self._waiting_bytes > _MOST_WAITING_BYTES and not self._paused and self.transport is not None:
            self._paused = True
            self.transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        """A body without a length ends with its connection."""
        if self._headed and not self._framed:
            self._whole = True
            self._wake()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection was lost, idle or during a response."""
        self.lost = self.lost or (f"{exc}" if exc else "the server closed the connection")
        self._owner.gone(self)
        self._wake()

    def _break(self, words: str) -> None:
        self.lost = words
        if self.transport is not None:
            self.transport.abort()
        self._wake()

    # ---- parser callbacks

    def on_message_begin(self) -> None:
        """A second response to one request is an error of the server."""
        if self._whole:
            raise ValueError("more than was asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """All headers; those of 1xx responses are dropped."""
        self.status = self._parser.get_status_code()
        if self.status < 200:
            self.headers.clear()
            return
        self._headed = True
        self._framed = any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._parts.append(body)
        self._waiting_bytes += len(body)

    def on_message_complete(self) -> None:
        """The end."""
        if self._headed:
            self._whole = True
            self._keeps = self._framed and self._parser.should_keep_alive()  # the parser forgets it after this

    # ---- reading

    def ask(self, request: bytes) -> None:
        """Send a request over an idle connection."""
        assert self.transport is not None  # noqa: S101  it was connected
        self._renew()
        self.at_rest = False
        self.transport.write(request)

    async def head(self) -> None:
        """Wait for status and headers; raises Lost if they do not arrive."""
        while not self._headed:
            if self.lost is not None:
                raise UpstreamLost(self.lost)
            await self._wait()

    async def part(self) -> bytes:
        """The body received since the last call; empty at its end. Raises Lost if the connection ends early."""
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

    async def all(self, most_bytes: int) -> bytes:
        """The whole body; raises Lost if it is too large."""
        parts = []
        size = 0
        while part := await self.part():
            size += len(part)
            if size > most_bytes:
                raise UpstreamLost(f"its answer is larger than {most_bytes} bytes")
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def header(self, wanted: bytes) -> bytes:
        """A header's value, or an empty string."""
        return next((value for name, value in self.headers if name == wanted), b"")

    def close(self) -> None:
        """Release the connection: it is kept if the response was read completely."""
        if self._whole and self.lost is None and self._keeps:
            self._owner.keep(self)
        else:
            self._owner.gone(self)
            if self.transport is not None:
                self.transport.abort()

    def give_up(self, words: str) -> None:
        """Cancel the wait for a response that has not started."""
        if not self.begun:
            self.given_up = True
            self._break(words)

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
    """A server with its connections. Belongs to one event loop."""

    def __init__(self, url: str, key: str | None = None, *, connect_s: float = _CONNECT_S) -> None:
        """`url` in the form of base_url: scheme, host, optional port and path."""
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
        self._asked: set[Response] = set()

    async def send(self, method: str, path: str, body: bytes = b"", request_id: str = "") -> Response:
        """Send a request and return when status and headers have arrived. The caller closes the response.

        Raises Unreachable or Lost.
        """
        lines = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._common}"
        if request_id:
            lines += f"X-Request-Id: {request_id}\r\n"
        if body:
            lines += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        request = f"{lines}\r\n".encode("latin-1") + body
        while True:
            response = self._kept() or await self._connect()
            self._asked.add(response)
            response.ask(request)
            try:
                await response.head()
            except UpstreamLost:
                response.close()
                if response.used and not response.begun and not response.given_up:
                    continue  # it had been closed while idle
                raise
            except BaseException:
                response.close()
                raise
            return response

    def give_up(self, words: str) -> None:
        """Cancel every request whose response has not started, so that another backend can answer it."""
        for response in tuple(self._asked):
            response.give_up(words)

    def keep(self, response: Response) -> None:
        """Return an idle connection to the pool."""
        self._asked.discard(response)
        response.used = response.at_rest = True
        response.idle_since_s = asyncio.get_running_loop().time()
        self._idle.append(response)
        if len(self._idle) > _MOST_IDLE:
            self._drop(self._idle.pop(0))

    def gone(self, response: Response) -> None:
        """Remove a connection."""
        self._asked.discard(response)
        if response in self._idle:
            self._idle.remove(response)

    def close(self) -> None:
        """Close all connections."""
        for response in (*self._idle, *self._asked):
            self._drop(response)
        self._idle.clear()

    @staticmethod
    def _drop(response: Response) -> None:
        if response.transport is not None:
            response.transport.abort()

    def _kept(self) -> Response | None:
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
