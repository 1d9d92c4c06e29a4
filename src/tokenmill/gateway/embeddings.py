"""/v1/embeddings, where the engine has them: servers that do are asked as they are; the native engine has none."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tokenmill.errors import EngineError, RequestRefused
from tokenmill.gateway import bodies
from tokenmill.gateway.backend import Backend, worth_trying
from tokenmill.gateway.completion_response import ANYBODY
from tokenmill.gateway.disconnects import ClientLeft, cancel_on_disconnect
from tokenmill.gateway.faults import Fault
from tokenmill.gateway.openapi import json_answer, refusals
from tokenmill.gateway.parts import Part
from tokenmill.gateway.request_context import visit_of
from tokenmill.gateway.state import GatewayState

_KEYS = frozenset(("model", "input", "encoding_format", "dimensions", "user"))


def part(state: GatewayState) -> Part:
    """One route."""

    async def embeddings(request: Request) -> Response:
        settings = state.config.gateway
        visit = visit_of(request.scope)
        body = await bodies.read(request, most_bytes=settings.max_body_bytes, timeout_s=settings.read_timeout_s)
        given = await bodies.parse(body)
        _check(given)
        visit.lane = bodies.lane_of(request.headers, {})
        name, own = (visit.key.name, visit.key.limits) if visit.key is not None else (ANYBODY, None)
        chain = state.routes.choose(given.get("model"), visit.lane, None, visit.key.name if visit.key else None)
        with state.limiter.admit(name, own) as charge:
            try:
                async with cancel_on_disconnect(state, visit, request.receive, timeout_s=settings.request_timeout_s):
                    backend, answer = await _first(chain, given)
            except ClientLeft:
                return Response(status_code=499)
        visit.backend = backend.name
        charge(int((answer.get("usage") or {}).get("total_tokens") or 0))
        return JSONResponse(answer, headers={"x-tokenmill-engine": backend.name})

    return Part([Route("/v1/embeddings", embeddings, methods=["POST"])], PATHS, SCHEMAS)


def _check(given: Mapping[str, Any]) -> None:
    for key in given:
        if key not in _KEYS:
            raise Fault(f"unknown key {key[:60]!r}", param=key, code="unknown_parameter")
    if not isinstance(given.get("model"), str | None):
        raise Fault("model must be a text", param="model")
    value = given.get("input")
    texts = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(one, str | int | list) and not isinstance(one, bool) for one in texts):
        raise Fault("input must be a text, a list of texts, or lists of token numbers", param="input")


async def _first(chain: tuple[Backend, ...] | Any, given: Mapping[str, Any]) -> tuple[Backend, dict[str, Any]]:
    last: EngineError | None = None
    for backend in worth_trying(chain):
        if not backend.engine.capabilities.embeddings:
            continue
        try:
            async with backend.gate.enter("interactive"):
                return backend, await backend.engine.embed(given)
        except EngineError as error:
            last = error
        except RequestRefused as error:
            if not error.message.startswith("the server does not have that"):
                raise
    if last is not None:
        raise last
    raise Fault(
        "no engine here computes embeddings",
        status=501,
        code="embeddings_not_supported",
        hint="route the model to a server that does, such as llama-server --embeddings",
    )


SCHEMAS = {
    "EmbeddingRequest": {
        "type": "object",
        "required": ["input"],
        "additionalProperties": False,
        "properties": {
            "model": {"type": ["string", "null"]},
            "input": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "minItems": 1, "items": {"type": "string"}},
                    {"type": "array", "minItems": 1, "items": {"type": "integer"}},
                ]
            },
            "encoding_format": {"enum": ["float", "base64", None]},
            "dimensions": {"type": ["integer", "null"]},
            "user": {"type": ["string", "null"]},
        },
    },
    "EmbeddingList": {
        "type": "object",
        "required": ["data"],
        "properties": {"object": {"const": "list"}, "data": {"type": "array"}, "usage": {"type": "object"}},
    },
}
PATHS = {
    "/v1/embeddings": {
        "post": {
            "operationId": "createEmbedding",
            "summary": "Embeddings, where the engine has them.",
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/EmbeddingRequest"}}},
            },
            "responses": {
                "200": json_answer("EmbeddingList", "The embeddings."),
                **refusals(400, 401, 403, 404, 408, 413, 415, 429, 501, 502, 503, 504),
            },
        }
    }
}
