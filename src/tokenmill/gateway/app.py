"""The gateway as an ASGI application: all routes, and the middleware in front of them."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.errors import TokenmillError
from tokenmill.gateway import completions, embeddings, models
from tokenmill.gateway.backends import managed
from tokenmill.gateway.batches import routes as batch_routes
from tokenmill.gateway.http import openapi
from tokenmill.gateway.http.faults import GatewayFault
from tokenmill.gateway.http.middleware import AccessMiddleware, refusal
from tokenmill.gateway.http.request_context import visit_of
from tokenmill.gateway.http.route_group import RouteGroup
from tokenmill.gateway.monitoring import dashboard_api, health
from tokenmill.gateway.state import GatewayState


def create_app(state: GatewayState, more: Sequence[RouteGroup] | None = None) -> AccessMiddleware:
    """Create the application; `more` are parts in addition to the core ones, by default all that exist."""
    every = (*front(state), *(parts(state) if more is None else more))
    described = openapi.document(operation for part in every for operation in part.operations)
    routes = [route for part in every for route in part.routes]

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for part in every:
                if part.alongside is not None:
                    await stack.enter_async_context(part.alongside())
            yield

    inner = Starlette(routes=[*routes, openapi.route(described)], lifespan=lifespan, exception_handlers=handlers(state))
    free = frozenset().union(*(part.open_paths for part in every))
    return AccessMiddleware(inner, state, routes=inner.routes, open_paths=free, alongside=lambda: lifespan(inner))


def handlers(state: GatewayState) -> dict[Any, Any]:
    """Convert every error to OpenAI's format."""

    async def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, TokenmillError)  # noqa: S101  what it is registered for
        return refusal(error, visit_of(request.scope), state)

    async def starlettes(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101
        method = request.method
        path = request.url.path[:100]
        said = f"{method} is not for {path}" if error.status_code == 405 else f"there is nothing at {path}"
        fault = GatewayFault(said if error.status_code in (404, 405) else str(error.detail), status=error.status_code)
        answer = refusal(fault, visit_of(request.scope), state)
        answer.headers.update(error.headers or {})
        return answer

    async def bugs(request: Request, error: Exception) -> Response:
        fault = GatewayFault(
            "tokenmill itself failed; its log says where", status=500, code="internal_error", kind="bug"
        )
        return refusal(fault, visit_of(request.scope), state)

    return {TokenmillError: ours, HTTPException: starlettes, Exception: bugs}


def front(state: GatewayState) -> tuple[RouteGroup, ...]:
    """The parts that answer single requests."""
    return (
        completions.part(state),
        models.part(state),
        embeddings.part(state),
        health.part(state),
        managed.part(state),
    )


def parts(state: GatewayState) -> tuple[RouteGroup, ...]:
    """The other parts: batches and files, metrics and the dashboard."""
    return batch_routes.part(state), dashboard_api.page_part(state)
