"""The outermost middleware: assigns request IDs, authenticates, applies host and origin checks, and logs every request.

Checks addresses, hosts, origins and keys, never bodies. Plain ASGI, because a wrapper that runs the stream in another
task would delay freeing the slot when a client leaves.
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
from tokenmill.gateway.http.faults import CLIENT_LEFT, GatewayFault, Stopping, error_body, error_headers, status_of
from tokenmill.gateway.http.keys import Key
from tokenmill.gateway.http.request_context import RequestContext
from tokenmill.gateway.monitoring.recorder import Seen
from tokenmill.gateway.state import GatewayState

_ID = re.compile(r"[A-Za-z0-9_.:-]{1,100}")
_LOOPBACK_NAMES = frozenset(("localhost", "127.0.0.1", "::1"))
_SENT_TO_PAGES = "x-request-id, x-tokenmill-engine, x-tokenmill-cached-tokens, x-tokenmill-not-told, retry-after"


class AccessMiddleware:
    """The outermost application."""

    def __init__(
        self,
        inner: ASGIApp,
        state: GatewayState,
        *,
        routes: Sequence[BaseRoute],
        open_paths: frozenset[str],
        alongside: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        """`alongside` runs while the gateway serves, for callers without ASGI's lifespan."""
        self._inner = inner
        self._state = state
        self._open = open_paths
        self.alongside = alongside
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
        visit = RequestContext(_id(headers.get(b"x-request-id")), self._state.now_s())
        visit.enter(scope)
        origin = self._allowed_origin(headers)
        added = [(b"x-request-id", visit.id.encode()), *_for_pages(origin)]
        status = 0

        async def answered(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        try:
            try:
                self._check(scope, headers, visit)
            except TokenmillError as error:
                await refusal(error, visit, self._state)(scope, receive, answered)
            else:
                preflight = scope["method"] == "OPTIONS" and origin is not None
                await (_preflight(headers) if preflight else self._inner)(scope, receive, answered)
        finally:
            self._write_down(scope, visit, CLIENT_LEFT if visit.left and not status else status or 500)

    # ---- access

    def _check(self, scope: Scope, headers: Mapping[bytes, str], visit: RequestContext) -> None:
        if self._state.shutting_down.is_set() and scope["path"] != "/health":
            raise Stopping
        self._check_host(headers)
        self._check_origin(scope, headers)
        known = self._state.keys.all()
        if not known and self._loopback:
            return
        given = _shown_key(headers)
        visit.key = self._state.keys.owner(given) if given is not None else None
        open_page = scope["path"] in self._open or (scope["method"] == "OPTIONS" and b"origin" in headers)
        if visit.key is None and not open_page:
            said = "no key was given" if given is None else "this key is not known here"
            raise GatewayFault(
                said, status=401, code="invalid_api_key", kind="key", hint="send it as: Authorization: Bearer KEY"
            )

    def _check_host(self, headers: Mapping[bytes, str]) -> None:
        """Refuse foreign host names that resolve to this machine (DNS rebinding)."""
        host = _host_name(headers.get(b"host", ""))
        if host in self._hosts or (not self._loopback and not self._hosts):
            return
        if self._loopback and (host in _LOOPBACK_NAMES or host.endswith(".localhost") or is_loopback(host)):
            return
        raise GatewayFault(
            f"the host {host[:100]!r} is not served here",
            status=403,
            code="host_not_allowed",
            kind="host",
            hint="use the address that it listens on, or add the name to gateway.allowed_hosts",
        )

    def _check_origin(self, scope: Scope, headers: Mapping[bytes, str]) -> None:
        """Pages of other origins may neither read nor write, not even with requests without preflight."""
        origin = headers.get(b"origin")
        if origin is None or self._allowed_origin(headers) is not None:
            return
        if urlsplit(origin).netloc.lower() == headers.get(b"host", "").lower():
            return
        raise GatewayFault(
            f"pages of {origin[:100]!r} may not use this",
            status=403,
            code="origin_not_allowed",
            kind="host",
            hint="add it to gateway.allowed_origins",
        )

    def _allowed_origin(self, headers: Mapping[bytes, str]) -> str | None:
        origin = headers.get(b"origin")
        return origin if origin is not None and origin.lower() in self._origins else None

    # ---- records

    def _write_down(self, scope: Scope, visit: RequestContext, status: int) -> None:
        seconds = self._state.now_s() - visit.began_s
        route = self._patterns.get(scope.get("endpoint", self), "other")
        key = visit.key.name if visit.key is not None else None
        seen = Seen(
            visit.id, scope["method"], route, status, seconds, visit.backend, visit.lane, key, visit.usage, visit.error
        )
        self._state.recorder.request(seen)
        line = _line(seen, visit.first_token_s)
        self._state.log(line if visit.route_reason is None else line | {"why": visit.route_reason})


def refusal(error: TokenmillError, visit: RequestContext, state: GatewayState) -> JSONResponse:
    """The response to a request that failed before it was answered."""
    visit.error = error.code
    if isinstance(error, GatewayFault) and error.kind is not None:
        state.recorder.refused(error.kind)
    headers = error_headers(error)
    if status_of(error) == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error_body(error), status_of(error), headers)


def is_loopback(host: str) -> bool:
    """Whether an address is reachable only from this machine."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def allowed_to_listen(config: GatewayConfig, keys: Sequence[Key]) -> bool:
    """Check that this address may be listened on: any but the loopback's requires a key."""
    return is_loopback(config.host) or bool(keys)


def _id(given: str | None) -> str:
    return given if given is not None and _ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"


def _shown_key(headers: Mapping[bytes, str]) -> str | None:
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


def _for_pages(origin: str | None) -> Iterable[tuple[bytes, bytes]]:
    if origin is None:
        return ()
    return (
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-expose-headers", _SENT_TO_PAGES.encode()),
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


def _line(seen: Seen, first_token_s: float | None) -> dict[str, Any]:
    """The log fields of a request, without path, body and key."""
    usage = seen.usage
    given: dict[str, Any] = {
        "id": seen.id,
        "method": seen.method,
        "route": seen.route,
        "status": seen.status,
        "ms": round(seen.seconds * 1000, 1),
        "backend": seen.backend,
        "lane": seen.lane,
        "key": seen.key,
        "first_token_ms": None if first_token_s is None else round(first_token_s * 1000, 1),
        "prompt_tokens": usage.prompt_tokens if usage else None,
        "cached_tokens": usage.cached_tokens if usage else None,
        "completion_tokens": usage.completion_tokens if usage else None,
        "error": seen.error,
    }
    return {name: value for name, value in given.items() if value is not None}
