"""/openapi.json (OpenAPI 3.1), built from the operations of all route groups and their models.

Each module with routes has a function `route_group(state)`, which `app.py` calls. Its RouteGroup has an `Operation` for
each route. Models are msgspec Structs or TypedDicts; each becomes a schema under its name, without the suffix `Object`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from tokenmill.gateway.schemas import Error
from tokenmill.version import __version__

_ERRORS = {
    400: "The request is invalid; the error names the key.",
    401: "The API key is missing or unknown.",
    403: "The host or origin is not allowed.",
    404: "The resource does not exist.",
    405: "The path does not support this method.",
    408: "The body did not arrive in time.",
    409: "The resource is in use.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "A limit is reached or the queue is full; retry after the time in Retry-After.",
    501: "No engine supports this.",
    502: "The engine failed.",
    503: "No engine is available, or the gateway is shutting down.",
    504: "The request timed out.",
}
NO_KEY = (401, 403, 503)
INFERENCE = (400, 401, 403, 404, 408, 413, 415, 429, 501, 502, 503, 504)
PRIORITY_HEADER: Mapping[str, Any] = {
    "name": "X-Tokenmill-Priority",
    "in": "header",
    "required": False,
    "schema": {"enum": ["interactive", "batch"]},
    "description": "batch: scheduled after interactive requests. X-Tokenmill-Lane is an alias.",
}
ENGINE_HEADERS: Mapping[str, Any] = {
    "X-Tokenmill-Engine": {"schema": {"type": "string"}, "description": "Name of the engine that answered."},
    "X-Tokenmill-Cached-Tokens": {
        "schema": {"type": "integer"},
        "description": "Prompt tokens that were reused from the cache; not sent with streams.",
    },
    "X-Tokenmill-Not-Told": {
        "schema": {"type": "string"},
        "description": "What the model does not see: tools, if its chat template ignores them, or hosted tools.",
    },
    "X-Request-Id": {"schema": {"type": "string"}, "description": "The request's own ID, or a new one."},
}


@dataclass(frozen=True, slots=True)
class DocumentedAnswer:
    """The response of one status: a JSON model, or other media types."""

    description: str
    model: Any = None
    media: tuple[str, ...] = ()
    headers: Mapping[str, Any] = field(default_factory=dict)
    mentions: tuple[Any, ...] = ()  # further models that the description refers to


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path."""

    path: str
    id: str
    summary: str
    answers: Mapping[int, DocumentedAnswer]
    errors: Sequence[int] = NO_KEY
    method: str = "get"
    body: Any = None
    body_type: str = "application/json"
    parameters: Sequence[Mapping[str, Any]] = ()
    needs_key: bool = True
    error: Any = Error


@dataclass(frozen=True, slots=True)
class RouteGroup:
    """Related routes, their operations, and a context manager that runs while the gateway serves."""

    routes: Sequence[BaseRoute]
    operations: Sequence[Operation] = ()
    lifespan: Callable[[], AbstractAsyncContextManager[None]] | None = None
    open_paths: frozenset[str] = frozenset()  # paths that need no key


def path_parameter(name: str) -> dict[str, Any]:
    """A required path parameter."""
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def query_parameter(name: str, description: str, schema: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """An optional query parameter."""
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": description, **more}


def document(operations: Iterable[Operation]) -> dict[str, Any]:
    """The OpenAPI document of the operations and of /openapi.json itself."""
    every = [*operations, _ITSELF]
    models = [Error]
    for operation in every:
        models += filter(
            None, (operation.body, operation.error, *(answer.model for answer in operation.answers.values()))
        )
        models += [model for answer in operation.answers.values() for model in answer.mentions]
    references, schemas = _described(models)
    schema_of = {id(model): reference for model, reference in zip(models, references, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for operation in every:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tokenmill",
            "version": __version__,
            "description": "OpenAI-compatible API for local engines. Interactive requests have priority over batches.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": _without_null_defaults(schemas),
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "tokenmill keys add NAME"},
                "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key."},
            },
        },
        "security": [{"key": []}, {"x_api_key": []}, {}],
    }


def _described(models: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """A reference to each model, and the schemas by name, without the suffix `Object`."""
    found = msgspec.json.schema_components(models, ref_template="#/components/schemas/{name}")
    text = msgspec.json.encode(found).decode()
    for name in found[1]:
        if name.endswith("Object"):
            short = name.removesuffix("Object")
            text = text.replace(f'"{name}"', f'"{short}"').replace(f'/{name}"', f'/{short}"')
    references, schemas = msgspec.json.decode(text)
    return references, schemas


def route(described: Mapping[str, Any]) -> Route:
    """The route that serves the document."""

    async def openapi(_request: Request) -> Response:
        return JSONResponse(described)

    return Route("/openapi.json", openapi)


_ITSELF = Operation(
    path="/openapi.json",
    id="openapi",
    summary="This document.",
    answers={200: DocumentedAnswer("The document.", model=dict[str, Any])},
)


def _operation(operation: Operation, schema_of: Mapping[int, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {"operationId": operation.id, "summary": operation.summary}
    if not operation.needs_key:
        described["security"] = []
    if operation.parameters:
        described["parameters"] = list(operation.parameters)
    if operation.body is not None:
        content = {operation.body_type: {"schema": schema_of[id(operation.body)]}}
        described["requestBody"] = {"required": True, "content": content}
    error = {"application/json": {"schema": schema_of[id(operation.error)]}}
    described["responses"] = {
        **{
            str(status): {"description": _ERRORS.get(status, HTTPStatus(status).phrase), "content": error}
            for status in operation.errors
        },
        **{str(status): _answer(answer, schema_of) for status, answer in operation.answers.items()},
    }
    return described


def _answer(answer: DocumentedAnswer, schema_of: Mapping[int, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {kind: _media(kind) for kind in answer.media}
    if answer.model is not None:
        content["application/json"] = {"schema": schema_of[id(answer.model)]}
    described = {"description": answer.description, "headers": answer.headers, "content": content}
    return {name: value for name, value in described.items() if value}


def _media(kind: str) -> dict[str, Any]:
    if kind == "text/event-stream":
        return {}  # a validator must not read an endless stream
    binary = {"format": "binary"} if kind == "application/octet-stream" else {}
    return {"schema": {"type": "string", **binary}}


def _without_null_defaults(schema: Any) -> Any:
    """The schema without `default: null`."""
    if isinstance(schema, dict):
        return {
            name: _without_null_defaults(value)
            for name, value in schema.items()
            if name != "default" or value is not None
        }
    return [_without_null_defaults(each) for each in schema] if isinstance(schema, list) else schema
