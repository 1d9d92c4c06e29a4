"""/health: whether there is an engine that answers. Needs no key, and says nothing that a stranger may not know."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tokenmill.gateway.openapi import json_answer
from tokenmill.gateway.parts import Part
from tokenmill.gateway.state import GatewayState


def part(state: GatewayState) -> Part:
    """One page."""

    async def health(_request: Request) -> Response:
        states = {backend.name: backend.state for backend in state.backends}
        up = sum(one == "ready" for one in states.values())
        status = (
            "stopping" if state.shutting_down.is_set() else "ok" if up == len(states) else "degraded" if up else "down"
        )
        return JSONResponse({"status": status, "engines": states}, 200 if status in ("ok", "degraded") else 503)

    return Part([Route("/health", health)], PATHS, SCHEMAS, open_paths=frozenset(("/health",)))


SCHEMAS = {
    "Health": {
        "type": "object",
        "required": ["status", "engines"],
        "properties": {
            "status": {"enum": ["ok", "degraded", "down", "stopping"]},
            "engines": {"type": "object", "additionalProperties": {"type": "string"}},
        },
    }
}
PATHS = {
    "/health": {
        "get": {
            "operationId": "health",
            "summary": "Whether there is an engine that answers.",
            "security": [],
            "responses": {
                "200": json_answer("Health", "There is one."),
                "503": json_answer("Health", "There is none, or the gateway is being stopped."),
            },
        }
    }
}
