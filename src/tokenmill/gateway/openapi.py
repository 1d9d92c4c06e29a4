"""/openapi.json: what is served, said in OpenAPI 3.1. Each part describes its own routes; here they come together."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tokenmill.gateway.parts import Part
from tokenmill.version import __version__

_WORDS = {
    400: "The request is wrong; the error names the key.",
    401: "No key was given, or one that is not known.",
    403: "The host or origin is not allowed.",
    404: "There is no such thing.",
    405: "This method is not for this path.",
    408: "The body did not arrive in time.",
    409: "It is in use.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "A limit is reached or the queue is full; Retry-After says when to try again.",
    501: "No engine here can do that.",
    502: "The engine failed.",
    503: "The engine died or the gateway is being stopped.",
    504: "The answer took longer than it was given.",
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The key that is wrong."},
                "code": {"type": ["string", "null"], "description": "The word that programs go by."},
                "source": {"enum": ["request", "gateway", "engine"], "description": "Who failed."},
            },
        }
    },
}


def ref(schema: str) -> dict[str, str]:
    """A schema by its name."""
    return {"$ref": f"#/components/schemas/{schema}"}


def json_answer(schema: str, description: str) -> dict[str, Any]:
    """An answer in JSON."""
    return {"description": description, "content": {"application/json": {"schema": ref(schema)}}}


def json_body(schema: str) -> dict[str, Any]:
    """A body in JSON."""
    return {"required": True, "content": {"application/json": {"schema": ref(schema)}}}


def refusals(*statuses: int) -> dict[str, Any]:
    """Errors that an operation may answer with."""
    return {str(status): json_answer("Error", _WORDS.get(status, HTTPStatus(status).phrase)) for status in statuses}


NO_KEY = refusals(401, 403, 503)
NOT_FOUND = refusals(404)


def document(parts: Sequence[Part]) -> dict[str, Any]:
    """The whole description."""
    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = {"Error": ERROR}
    for part in parts:
        paths |= part.paths
        schemas |= part.schemas
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tokenmill",
            "version": __version__,
            "description": "OpenAI's protocol before engines of one's own. Interactive requests go before batches.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths | dict(_OWN),
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "tokenmill keys add NAME"}},
        },
        "security": [{"key": []}, {}],
    }


_OWN: Mapping[str, Any] = {
    "/openapi.json": {
        "get": {
            "operationId": "openapi",
            "summary": "This description.",
            "responses": {
                "200": {"description": "It.", "content": {"application/json": {"schema": {"type": "object"}}}},
                **NO_KEY,
            },
        }
    }
}


def route(described: Mapping[str, Any]) -> Route:
    """Serves the description."""

    async def openapi(_request: Request) -> Response:
        return JSONResponse(described)

    return Route("/openapi.json", openapi)
