"""The listening side: uvicorn with limits that it lacks on connections that are silent, slow or too many.

    a connection past the limit        takes the place of one that has been idle for a while; else 503, and closed
    headers that do not arrive         closed after idle_timeout_s, however slowly bytes trickle in
    headers that do not end            431, and closed
    a client that does not read        the writer waits for it (sending.py), then drops the connection

Signals are not touched: `Listener.stop` and `Listener.stop_now` are for who handles them.
"""

import asyncio
import json
import logging
import resource
import socket
import ssl
from asyncio.events import TimerHandle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tokenmill.config import GatewayConfig
from tokenmill.errors import ConfigError, UsageError
from tokenmill.gateway.http.faults import GatewayFault, error_body, error_headers
from tokenmill.gateway.http.response_writer import ABORT

_MOST_HEADER_BYTES = 64 * 1024
_SPARE_FILES = 256  # for other files: engines, logs, stores
_BACKLOG = 2048
_MAY_GO_S = 5.0  # an idle connection may be closed for a new one after this

OnRefused = Callable[[str], None]


def protocol_for(config: GatewayConfig, refused: OnRefused) -> type[HttpToolsProtocol]:
    """The protocol class with this configuration's limits."""
    full = _plain(GatewayFault("too many connections", status=503, code="too_many_connections", retry_after_s=5.0))
    long = _plain(GatewayFault("the headers are too long", status=431, code="headers_too_long"))

    idle: dict[Any, float] = {}  # connections without a request and since when, the longest idle first

    class Connection(HttpToolsProtocol):
        """One connection."""

        _waiting: TimerHandle | None = None
        _header_bytes = 0  # size of the headers being received
        _in_headers = True
        _turned = False  # headers or a message ended in the data being parsed

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) <= config.max_connections or self._oldest_gone():
                self._expect_headers()
            else:
                refused("connections")
                self._refuse(full)

        def connection_lost(self, exc: Exception | None) -> None:
            self._cease_waiting()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            before = self._in_headers
            self._turned = False
            super().data_received(data)
            if before and not self._turned and not self.transport.is_closing():
                self._header_bytes += len(data)
                if self._header_bytes > _MOST_HEADER_BYTES:
                    refused("headers")
                    self._refuse(long)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]

        def on_headers_complete(self) -> None:
            self._cease_waiting()
            self._in_headers = False
            self._turned = True
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._in_headers = True
            self._turned = True
            self._header_bytes = 0
            super().on_message_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if not self.transport.is_closing() and self.cycle.response_complete:
                self._expect_headers()

        def send_400_response(self, msg: str) -> None:
            refused("http")
            self._refuse(_plain(GatewayFault("this is not HTTP that can be read", code="invalid_http")))

        def _expect_headers(self) -> None:
            self._cease_waiting()
            idle[self] = self.loop.time()
            self._waiting = self.loop.call_later(config.idle_timeout_s, self._hang_up)

        def _oldest_gone(self) -> bool:
            """Whether a connection that was idle for a while can be closed for a new one."""
            oldest = next(iter(idle), None)
            if oldest is None or self.loop.time() - idle[oldest] < _MAY_GO_S:
                return False
            oldest._hang_up()
            return True

        def _hang_up(self) -> None:
            self._cease_waiting()
            # a client that has not read the last response by now will not, and a clean close would wait for it
            (self.transport.abort if self.transport.get_write_buffer_size() else self.transport.close)()

        def _cease_waiting(self) -> None:
            idle.pop(self, None)
            if self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None

        def _refuse(self, answer: bytes) -> None:
            self._cease_waiting()
            self.transport.write(answer)
            self.transport.close()

    return Connection


def _plain(fault: GatewayFault) -> bytes:
    """A fault as the bytes of a whole response."""
    body = json.dumps(error_body(fault)).encode()
    headers = {
        **error_headers(fault),
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
    }
    lines = [f"HTTP/1.1 {fault.answer_status} {HTTPStatus(fault.answer_status).phrase}"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode() + body


def bind(config: GatewayConfig) -> socket.socket:
    """Bind the address before spending an hour on loading a model; UsageError or ConfigError if that fails."""
    _check_tls(config)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # explicitly TCP, or asyncio leaves Nagle's algorithm on, and a response waits 40 ms for its own headers
    taken = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((config.host, config.port))
    except OSError as error:
        taken.close()
        raise UsageError(
            f"{config.host} port {config.port} cannot be listened on: {error.strerror or error}",
            hint="another --port, or 0 for any that is free; gateway.host and gateway.port set them for good",
        ) from error
    taken.setblocking(False)
    return taken


def url_of(config: GatewayConfig, listening: socket.socket) -> str:
    """The URL for clients."""
    host, port = listening.getsockname()[:2]
    shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)  # noqa: S104  only compared
    return f"{'https' if config.tls_cert else 'http'}://{f'[{shown}]' if ':' in shown else shown}:{port}"


def allow_files(connections: int) -> int:
    """Raise the limit of open files to what the connections need; returns the resulting limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _SPARE_FILES
    if soft < wanted:
        soft = min(wanted, hard) if hard != resource.RLIM_INFINITY else wanted
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


class Listener(uvicorn.Server):
    """A server that does not handle signals; its owner does."""

    def __init__(self, app: ASGIApp, config: GatewayConfig, refused: OnRefused) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol_for(config, refused),
                ws="none",
                lifespan="off",
                log_level="error",
                log_config=None,
                access_log=False,
                interface="asgi3",
                server_header=False,
                timeout_keep_alive=max(1, round(config.idle_timeout_s)),
                backlog=_BACKLOG,
                ssl_certfile=config.tls_cert,
                ssl_keyfile=config.tls_key,
            )
        )
        self.config.load()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Not installed: the owner handles signals."""
        yield

    def stop(self) -> None:
        """Accept nothing new, and end when requests in flight have ended."""
        self.should_exit = True

    def stop_now(self) -> None:
        """Stop immediately."""
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it would log every task that it cancels
        self.should_exit = self.force_exit = True


def _check_tls(config: GatewayConfig) -> None:
    """Raise ConfigError if certificate and key cannot be used."""
    if config.tls_cert is None or config.tls_key is None:
        return
    for path in (config.tls_cert, config.tls_key):
        _readable(path)
    try:
        # without a password given, a key that has one would make OpenSSL ask for it at the terminal
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(config.tls_cert, config.tls_key, password="")
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"gateway.tls_cert and tls_key cannot be used: {error}",
            hint="PEM files that belong together, the key without a password",
        ) from error


def _readable(path: str) -> None:
    try:
        with open(path, "rb"):  # noqa: PTH123
            pass
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}", hint="gateway.tls_cert, gateway.tls_key"
        ) from error
