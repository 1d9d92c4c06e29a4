"""/health: whether an engine is available. Needs no key."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tokenmill.gateway.http.openapi import DocumentedAnswer, Operation, RouteGroup
from tokenmill.gateway.schemas import Health, HealthReport
from tokenmill.gateway.state import GatewayState


def route_group(state: GatewayState) -> RouteGroup:
    """The route for health checks."""

    async def health(_request: Request) -> Response:
        states = {backend.name: backend.state for backend in state.backends}
        up = sum(one == "ready" for one in states.values())
        status: Health = (
            "stopping" if state.shutting_down.is_set() else "ok" if up == len(states) else "degraded" if up else "down"
        )
        report: HealthReport = {"status": status, "engines": states}
        return JSONResponse(report, 200 if status in ("ok", "degraded") else 503)

    return RouteGroup([Route("/health", health)], [_OPERATION], open_paths=frozenset(("/health",)))


_OPERATION = Operation(
    path="/health",
    id="health",
    summary="Whether an engine is ready.",
    answers={
        200: DocumentedAnswer("At least one engine is ready.", HealthReport),
        503: DocumentedAnswer("No engine is ready, or the gateway is shutting down.", HealthReport),
    },
    errors=(),
    needs_key=False,
)
