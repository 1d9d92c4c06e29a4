"""The dashboard at /, its data (/api/status, /api/events), and /metrics.

The dashboard's files are served from this package unchanged. They contain no data and need no key; the page asks for
one if the gateway requires it.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tokenmill.gateway.http.faults import GatewayFault
from tokenmill.gateway.http.openapi import NO_KEY, DocumentedAnswer, Operation, RouteGroup, path_parameter
from tokenmill.gateway.monitoring.events import EventStream, Feed
from tokenmill.gateway.monitoring.metrics import CONTENT_TYPE, Metrics
from tokenmill.gateway.monitoring.monitor import Monitor
from tokenmill.gateway.monitoring.view import prefix_view, status_view
from tokenmill.gateway.schemas import EnginePrefixes, StatusObject, StatusWithPrefixes
from tokenmill.gateway.state import GatewayState

FOLDER = "/page"
_INDEX = "index.html"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
_KEY_REQUIRED = b'<meta name="tokenmill-key" content="none">', b'<meta name="tokenmill-key" content="wanted">'
_SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
MAX_AGE_S = 0.5  # a poll that is more recent is reused


def route_group(state: GatewayState) -> RouteGroup:
    """Routes for the dashboard, its data, and metrics."""
    monitor = Monitor(state)
    feed = Feed(monitor)
    metrics = Metrics(monitor)
    contents = page_files()

    async def page(request: Request) -> Response:
        body = contents[_INDEX].replace(*_KEY_REQUIRED) if state.keys.required else contents[_INDEX]
        return _file(request, _INDEX, body)

    async def page_file(request: Request) -> Response:
        name = request.path_params["file"]
        if name not in contents or name == _INDEX:
            raise GatewayFault(f"{FOLDER}/{name[:100]} does not exist", status=404, code="not_found")
        return _file(request, name, contents[name])

    async def status(_request: Request) -> Response:
        await monitor.poll(max_age_s=MAX_AGE_S)
        found: StatusWithPrefixes = {**status_view(monitor), "prefixes": prefix_view(monitor)}
        return JSONResponse(found)

    async def events(_request: Request) -> Response:
        return EventStream(feed)

    async def scrape(_request: Request) -> Response:
        return Response(await metrics.text(), headers={"content-type": CONTENT_TYPE})

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        state.recorder.all += [monitor, metrics]
        try:
            async with monitor.lifespan():
                yield
        finally:
            for one in (monitor, metrics):
                state.recorder.all.remove(one)

    routes = [
        Route("/", page),
        Route(f"{FOLDER}/{{file}}", page_file),
        Route("/api/status", status),
        Route("/api/events", events),
        Route("/metrics", scrape),
    ]
    free = frozenset(("/", *(f"{FOLDER}/{name}" for name in contents)))
    return RouteGroup(routes, _OPERATIONS, lifespan, free)


def page_files() -> dict[str, bytes]:
    """The content of the dashboard's files by name."""
    folder = files("tokenmill.gateway") / "dashboard"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in _TYPES}


def _file(request: Request, name: str, body: bytes) -> Response:
    tag = f'"{sha256(body).hexdigest()[:20]}"'
    headers = {**_SECURITY_HEADERS, "content-type": _TYPES[name.rpartition(".")[2]], "etag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers)


_EVENTS = (
    "Server-sent events: `history` (once), `status` (every second), `prefixes` (after a change), `stopping` (the last "
    "one). The data is JSON: a list of rates, Status, a list of EnginePrefixes, an empty object."
)
_UNCHANGED = DocumentedAnswer("Not modified.")
_OPERATIONS = (
    Operation(
        path="/",
        id="page",
        summary="The dashboard.",
        answers={200: DocumentedAnswer("The HTML page.", media=("text/html",)), 304: _UNCHANGED},
        errors=(403, 503),
        needs_key=False,
    ),
    Operation(
        path="/page/{file}",
        id="pageFile",
        summary="A file of the dashboard.",
        parameters=[path_parameter("file")],
        answers={
            200: DocumentedAnswer("The file.", media=("text/javascript", "text/css", "image/svg+xml")),
            304: _UNCHANGED,
        },
        errors=(404, *NO_KEY),
        needs_key=False,
    ),
    Operation(
        path="/api/status",
        id="status",
        summary="State of the gateway, its engines and their running requests.",
        answers={200: DocumentedAnswer("The current state.", StatusWithPrefixes)},
    ),
    Operation(
        path="/api/events",
        id="events",
        summary="State changes of the gateway as server-sent events.",
        answers={200: DocumentedAnswer(_EVENTS, media=("text/event-stream",), mentions=(StatusObject, EnginePrefixes))},
        errors=(429, *NO_KEY),
    ),
    Operation(
        path="/metrics",
        id="metrics",
        summary="Metrics for Prometheus.",
        answers={200: DocumentedAnswer("Prometheus text format.", media=("text/plain",))},
    ),
)
