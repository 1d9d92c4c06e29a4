"""The HTTP server: uvicorn with additional limits on idle, slow and excess connections.

    too many connections               a new one replaces the longest idle one, else gets 503
    incomplete headers                 closed after idle_timeout_s, even if bytes keep arriving
    headers that are too long          431, then closed
    a client that does not read        dropped after write_timeout_s (response_writer.py)

Signals are not handled here; their handler calls `Listener.stop` or `Listener.stop_now`.
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

_MAX_HEADER_BYTES = 64 * 1024
_SPARE_FILES = 256  # file descriptors for engines, logs and stores
_BACKLOG = 2048
_MIN_IDLE_S = 5.0  # idle time after which a connection may be closed for a new one

OnRefused = Callable[[str], None]


def protocol_for(config: GatewayConfig, refused: OnRefused) -> type[HttpToolsProtocol]:
    """The protocol class with this configuration's limits."""
    full = _plain(GatewayFault("too many connections", status=503, code="too_many_connections", retry_after_s=5.0))
    long = _plain(GatewayFault("the request headers are too long", status=431, code="headers_too_long"))

    idle: dict[Any, float] = {}  # idle connections and since when, the longest idle first

    class Connection(HttpToolsProtocol):
        """One connection."""

        _idle_timer: TimerHandle | None = None
        _header_bytes = 0  # size of the headers being received
        _in_headers = True
        _boundary = False  # headers or a message ended in the data being parsed

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) <= config.max_connections or self._close_oldest_idle():
                self._expect_headers()
            else:
                refused("connections")
                self._refuse(full)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_idle_timer()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            before = self._in_headers
            self._boundary = False
            super().data_received(data)
            if before and not self._boundary and not self.transport.is_closing():
                self._header_bytes += len(data)
                if self._header_bytes > _MAX_HEADER_BYTES:
                    refused("headers")
                    self._refuse(long)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]

        def on_headers_complete(self) -> None:
            self._stop_idle_timer()
            self._in_headers = False
            self._boundary = True
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._in_headers = True
            self._boundary = True
            self._header_bytes = 0
            super().on_message_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if not self.transport.is_closing() and self.cycle.response_complete:
                self._expect_headers()

        def send_400_response(self, msg: str) -> None:
            refused("http")
            self._refuse(_plain(GatewayFault("malformed HTTP request", code="invalid_http")))

        def _expect_headers(self) -> None:
            self._stop_idle_timer()
            idle[self] = self.loop.time()
            self._idle_timer = self.loop.call_later(config.idle_timeout_s, self._hang_up)

        def _close_oldest_idle(self) -> bool:
            """Close the longest idle connection, if it may be closed; returns whether one was."""
            oldest = next(iter(idle), None)
            if oldest is None or self.loop.time() - idle[oldest] < _MIN_IDLE_S:
                return False
            oldest._hang_up()
            return True

        def _hang_up(self) -> None:
            self._stop_idle_timer()
            # abort if the last response is still unread: a clean close would wait for the client
            (self.transport.abort if self.transport.get_write_buffer_size() else self.transport.close)()

        def _stop_idle_timer(self) -> None:
            idle.pop(self, None)
            if self._idle_timer is not None:
                self._idle_timer.cancel()
                self._idle_timer = None

        def _refuse(self, answer: bytes) -> None:
            self._stop_idle_timer()
            self.transport.write(answer)
            self.transport.close()

    return Connection


def _plain(fault: GatewayFault) -> bytes:
    """A fault as a complete HTTP response."""
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
    """Bind the address, before a model is loaded; raises UsageError or ConfigError if that fails."""
    _check_tls(config)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # asyncio disables Nagle's algorithm only if the protocol is TCP; otherwise responses take 40 ms longer
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((config.host, config.port))
    except OSError as error:
        listening.close()
        raise UsageError(
            f"cannot listen on {config.host} port {config.port}: {error.strerror or error}",
            hint="choose another --port, or 0 to pick a free port; gateway.host and gateway.port set the defaults",
        ) from error
    listening.setblocking(False)
    return listening


def url_of(config: GatewayConfig, listening: socket.socket) -> str:
    """The URL for clients."""
    host, port = listening.getsockname()[:2]
    shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)  # noqa: S104  only compared
    return f"{'https' if config.tls_cert else 'http'}://{f'[{shown}]' if ':' in shown else shown}:{port}"


def allow_files(connections: int) -> int:
    """Raise the limit of open files for this number of connections; returns the resulting limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _SPARE_FILES
    if soft < wanted:
        soft = min(wanted, hard) if hard != resource.RLIM_INFINITY else wanted
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


class Listener(uvicorn.Server):
    """A uvicorn server that does not handle signals."""

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
        """Does nothing; overrides uvicorn's signal handlers."""
        yield

    def stop(self) -> None:
        """Accept no new connections; the server ends when requests in flight have ended."""
        self.should_exit = True

    def stop_now(self) -> None:
        """Stop without waiting for requests in flight."""
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it logs every task that it cancels
        self.should_exit = self.force_exit = True


def _check_tls(config: GatewayConfig) -> None:
    """Raise ConfigError if certificate and key cannot be used."""
    if config.tls_cert is None or config.tls_key is None:
        return
    for path in (config.tls_cert, config.tls_key):
        _readable(path)
    try:
        # an empty password, so that OpenSSL does not ask for one at the terminal
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(config.tls_cert, config.tls_key, password="")
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"gateway.tls_cert and tls_key cannot be used: {error}",
            hint="give a PEM certificate and its key without a password",
        ) from error


def _readable(path: str) -> None:
    try:
        with open(path, "rb"):  # noqa: PTH123
            pass
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}", hint="check gateway.tls_cert and gateway.tls_key"
        ) from error
