"""The gateway as an ASGI application: all routes behind the access middleware."""

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
from tokenmill.gateway.batches.service import BatchService
from tokenmill.gateway.http import openapi
from tokenmill.gateway.http.faults import GatewayFault
from tokenmill.gateway.http.middleware import AccessMiddleware, refusal
from tokenmill.gateway.http.openapi import RouteGroup
from tokenmill.gateway.http.request_context import context_of
from tokenmill.gateway.messages import routes as messages
from tokenmill.gateway.monitoring import dashboard_api, health
from tokenmill.gateway.responses import routes as responses
from tokenmill.gateway.state import GatewayState


def create_app(state: GatewayState, extra: Sequence[RouteGroup] | None = None) -> AccessMiddleware:
    """Create the application; `extra` replaces the batch and dashboard groups."""
    every = (*core_groups(state), *(extra_groups(state) if extra is None else extra))
    document = openapi.document(operation for group in every for operation in group.operations)
    routes = [route for group in every for route in group.routes]

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for group in every:
                if group.lifespan is not None:
                    await stack.enter_async_context(group.lifespan())
            yield

    inner = Starlette(routes=[*routes, openapi.route(document)], lifespan=lifespan, exception_handlers=_handlers(state))
    open_paths = frozenset().union(*(group.open_paths for group in every))
    return AccessMiddleware(inner, state, routes=inner.routes, open_paths=open_paths, lifespan=lambda: lifespan(inner))


def _handlers(state: GatewayState) -> dict[Any, Any]:
    """Exception handlers that answer in OpenAI's error format."""

    async def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, TokenmillError)  # noqa: S101  registered for this class
        return refusal(error, context_of(request.scope), state)

    async def starlettes(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101
        method = request.method
        path = request.url.path[:100]
        detail = f"{method} is not allowed for {path}" if error.status_code == 405 else f"{path} does not exist"
        fault = GatewayFault(detail if error.status_code in (404, 405) else str(error.detail), status=error.status_code)
        answer = refusal(fault, context_of(request.scope), state)
        answer.headers.update(error.headers or {})
        return answer

    async def bugs(request: Request, error: Exception) -> Response:
        fault = GatewayFault("internal error; see the gateway's log", status=500, code="internal_error", kind="bug")
        return refusal(fault, context_of(request.scope), state)

    return {TokenmillError: ours, HTTPException: starlettes, Exception: bugs}


def core_groups(state: GatewayState) -> tuple[RouteGroup, ...]:
    """Route groups that answer single requests."""
    return (
        completions.route_group(state),
        messages.route_group(state),
        models.route_group(state),
        embeddings.route_group(state),
        health.route_group(state),
        managed.route_group(state),
    )


def extra_groups(state: GatewayState) -> tuple[RouteGroup, ...]:
    """Route groups for batches and files, responses, metrics and the dashboard."""
    service = BatchService(state)
    return (
        batch_routes.route_group(state, service),
        responses.route_group(state, service),
        dashboard_api.route_group(state),
    )
