"""The outermost middleware: request IDs, authentication, host and origin checks, and the access log.

Never reads bodies. Plain ASGI: a wrapper that runs the response in another task would delay freeing the slot when a
client disconnects.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenmill.config import GatewayConfig
from tokenmill.errors import TokenmillError
from tokenmill.gateway.http.faults import (
    CLIENT_LEFT,
    GatewayFault,
    Stopping,
    anthropic_error,
    error_body,
    error_headers,
    status_of,
)
from tokenmill.gateway.http.keys import Key
from tokenmill.gateway.http.request_context import RequestContext
from tokenmill.gateway.monitoring.recorder import RequestRecord
from tokenmill.gateway.state import GatewayState

_ID = re.compile(r"[A-Za-z0-9_.:-]{1,100}")
_ANTHROPIC_PATH = "/v1/messages"  # and below: errors have Anthropic's format
_LOOPBACK_NAMES = frozenset(("localhost", "127.0.0.1", "::1"))
_EXPOSED_HEADERS = (
    "x-request-id, x-tokenmill-engine, x-tokenmill-cached-tokens, x-tokenmill-not-told, retry-after, x-should-retry"
)


class AccessMiddleware:
    """The outermost ASGI application."""

    def __init__(
        self,
        inner: ASGIApp,
        state: GatewayState,
        *,
        routes: Sequence[BaseRoute],
        open_paths: frozenset[str],
        lifespan: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        """`open_paths` need no key; `lifespan` is for callers that do not use ASGI's lifespan protocol."""
        self._inner = inner
        self._state = state
        self._open = open_paths
        self.lifespan = lifespan
        self._loopback = is_loopback(state.config.gateway.host)
        self._hosts = frozenset(name.lower() for name in state.config.gateway.allowed_hosts)
        self._origins = frozenset(origin.lower().rstrip("/") for origin in state.config.gateway.allowed_origins)
        self._patterns = {route.endpoint: route.path for route in routes if isinstance(route, Route)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "lifespan":
            await self._inner(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name: value.decode("latin-1") for name, value in reversed(scope["headers"])}
        context = RequestContext(_id(headers.get(b"x-request-id")), self._state.now_s())
        context.anthropic = scope["path"].startswith(_ANTHROPIC_PATH)
        context.enter(scope)
        origin = self._allowed_origin(headers)
        added = [(b"x-request-id", context.id.encode()), *_cors_headers(origin)]
        status = 0

        async def answered(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        try:
            try:
                self._check(scope, headers, context)
            except TokenmillError as error:
                await refusal(error, context, self._state)(scope, receive, answered)
            else:
                preflight = scope["method"] == "OPTIONS" and origin is not None
                await (_preflight(headers) if preflight else self._inner)(scope, receive, answered)
        finally:
            self._record(scope, context, CLIENT_LEFT if context.left and not status else status or 500)

    # ---- access

    def _check(self, scope: Scope, headers: Mapping[bytes, str], context: RequestContext) -> None:
        if self._state.shutting_down.is_set() and scope["path"] != "/health":
            raise Stopping
        self._check_host(headers)
        self._check_origin(scope, headers)
        if not self._state.keys.required and self._loopback:
            return
        given = _key_in(headers)
        context.key = self._state.keys.find(given) if given is not None else None
        open_page = scope["path"] in self._open or (scope["method"] == "OPTIONS" and b"origin" in headers)
        if context.key is None and not open_page:
            reason = "missing API key" if given is None else "unknown API key"
            raise GatewayFault(
                reason, status=401, code="invalid_api_key", kind="key", hint="send the header Authorization: Bearer KEY"
            )

    def _check_host(self, headers: Mapping[bytes, str]) -> None:
        """Refuse foreign host names that resolve to this machine (DNS rebinding)."""
        host = _host_name(headers.get(b"host", ""))
        if host in self._hosts or (not self._loopback and not self._hosts):
            return
        if self._loopback and (host in _LOOPBACK_NAMES or host.endswith(".localhost") or is_loopback(host)):
            return
        raise GatewayFault(
            f"host {host[:100]!r} is not allowed",
            status=403,
            code="host_not_allowed",
            kind="host",
            hint="use the address that the gateway listens on, or add the name to gateway.allowed_hosts",
        )

    def _check_origin(self, scope: Scope, headers: Mapping[bytes, str]) -> None:
        """Refuse requests from pages of other origins, including those without preflight."""
        origin = headers.get(b"origin")
        if origin is None or self._allowed_origin(headers) is not None:
            return
        if urlsplit(origin).netloc.lower() == headers.get(b"host", "").lower():
            return
        raise GatewayFault(
            f"origin {origin[:100]!r} is not allowed",
            status=403,
            code="origin_not_allowed",
            kind="host",
            hint="add it to gateway.allowed_origins",
        )

    def _allowed_origin(self, headers: Mapping[bytes, str]) -> str | None:
        origin = headers.get(b"origin")
        return origin if origin is not None and origin.lower() in self._origins else None

    # ---- records

    def _record(self, scope: Scope, context: RequestContext, status: int) -> None:
        seconds = self._state.now_s() - context.began_s
        route = self._patterns.get(scope.get("endpoint", self), "other")
        key = context.key.name if context.key is not None else None
        record = RequestRecord(
            context.id,
            scope["method"],
            route,
            status,
            seconds,
            context.backend,
            context.priority,
            key,
            context.usage,
            context.error,
        )
        self._state.recorder.request(record)
        line = _line(record, context.first_token_s)
        self._state.log(line if context.route_reason is None else line | {"why": context.route_reason})


def refusal(error: TokenmillError, context: RequestContext, state: GatewayState) -> JSONResponse:
    """The response to a request that failed before its response started."""
    context.error = error.code
    if isinstance(error, GatewayFault) and error.kind is not None:
        state.recorder.refused(error.kind)
    headers = error_headers(error)
    if status_of(error) == 401:
        headers["www-authenticate"] = "Bearer"
    body = anthropic_error(error) if context.anthropic else error_body(error)
    return JSONResponse(body, status_of(error), headers)


def is_loopback(host: str) -> bool:
    """Whether an address is reachable only from this machine."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def allowed_to_listen(config: GatewayConfig, keys: Sequence[Key]) -> bool:
    """Whether the gateway may listen on the configured address: any but a loopback address requires a key."""
    return is_loopback(config.host) or bool(keys)


def _id(given: str | None) -> str:
    return given if given is not None and _ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"


def _key_in(headers: Mapping[bytes, str]) -> str | None:
    scheme, _, token = headers.get(b"authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get(b"x-api-key")


def _host_name(host: str) -> str:
    """A Host header without its port."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.rpartition(":")[0] if name.count(":") == 1 else name


def _cors_headers(origin: str | None) -> Iterable[tuple[bytes, bytes]]:
    if origin is None:
        return ()
    return (
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-expose-headers", _EXPOSED_HEADERS.encode()),
        (b"vary", b"Origin"),
    )


def _preflight(headers: Mapping[bytes, str]) -> Response:
    wanted = headers.get(b"access-control-request-headers", "authorization, content-type")
    return Response(
        status_code=204,
        headers={
            "access-control-allow-methods": "GET, POST, DELETE",
            "access-control-allow-headers": wanted,
            "access-control-max-age": "600",
        },
    )


def _line(record: RequestRecord, first_token_s: float | None) -> dict[str, Any]:
    """Fields of the access log line; path, body and secret are left out."""
    usage = record.usage
    given: dict[str, Any] = {
        "id": record.id,
        "method": record.method,
        "route": record.route,
        "status": record.status,
        "ms": round(record.seconds * 1000, 1),
        "backend": record.backend,
        "lane": record.priority,
        "key": record.key,
        "first_token_ms": None if first_token_s is None else round(first_token_s * 1000, 1),
        "prompt_tokens": usage.prompt_tokens if usage else None,
        "cached_tokens": usage.cached_tokens if usage else None,
        "completion_tokens": usage.completion_tokens if usage else None,
        "error": record.error,
    }
    return {name: value for name, value in given.items() if value is not None}
