"""/v1/models: what is served, under every name it has."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tokenmill.errors import UnknownModel
from tokenmill.gateway.backend import Model
from tokenmill.gateway.openapi import NO_KEY, NOT_FOUND, json_answer
from tokenmill.gateway.parts import Part
from tokenmill.gateway.state import GatewayState


def part(state: GatewayState) -> Part:
    """The list, and one of it."""

    async def listed(_request: Request) -> Response:
        bodies = [_body(name, model) for model in state.routes.models() for name in (model.id, *model.aliases)]
        return JSONResponse({"object": "list", "data": bodies})

    async def one(request: Request) -> Response:
        wanted = request.path_params["model"]
        for model in state.routes.models():
            if wanted in (model.id, *model.aliases):
                return JSONResponse(_body(wanted, model))
        raise UnknownModel(f"the model {wanted[:100]!r} is not served here", hint="/v1/models lists what is")

    # a model's name may have slashes in it
    return Part([Route("/v1/models", listed), Route("/v1/models/{model:path}", one)], PATHS, SCHEMAS)


def _body(name: str, model: Model) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "tokenmill",
        "context_length": model.context,
        "engines": list(model.backends),
    }


SCHEMAS = {
    "Model": {
        "type": "object",
        "required": ["id", "object", "created", "owned_by"],
        "properties": {
            "id": {"type": "string"},
            "object": {"const": "model"},
            "created": {"type": "integer"},
            "owned_by": {"type": "string"},
            "context_length": {"type": ["integer", "null"], "description": "Tokens of one sequence at most."},
            "engines": {"type": "array", "items": {"type": "string"}, "description": "Who answers, the first first."},
        },
    },
    "ModelList": {
        "type": "object",
        "required": ["object", "data"],
        "properties": {
            "object": {"const": "list"},
            "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}},
        },
    },
}
PATHS = {
    "/v1/models": {
        "get": {
            "operationId": "listModels",
            "summary": "Every model that is served, under every name.",
            "responses": {"200": json_answer("ModelList", "The models."), **NO_KEY},
        }
    },
    "/v1/models/{model}": {
        "get": {
            "operationId": "retrieveModel",
            "summary": "One model.",
            "parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}],
            "responses": {"200": json_answer("Model", "The model."), **NOT_FOUND, **NO_KEY},
        }
    },
}
