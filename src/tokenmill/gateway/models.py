"""/v1/models: the served models and their aliases."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tokenmill.errors import UnknownModel
from tokenmill.gateway import schemas
from tokenmill.gateway.backends.routing import ServedModel
from tokenmill.gateway.http.openapi import NO_KEY, DocumentedAnswer, Operation, RouteGroup, path_parameter
from tokenmill.gateway.state import GatewayState


def route_group(state: GatewayState) -> RouteGroup:
    """Routes that list the models and describe one."""

    async def listed(_request: Request) -> Response:
        bodies = [_body(name, model) for model in state.routes.models() for name in (model.id, *model.aliases)]
        found: schemas.ModelList = {"object": "list", "data": bodies}
        return JSONResponse(found)

    async def one(request: Request) -> Response:
        wanted = request.path_params["model"]
        for model in state.routes.models():
            if wanted in (model.id, *model.aliases):
                return JSONResponse(_body(wanted, model))
        raise UnknownModel(f"the model {wanted[:100]!r} is not served", hint="/v1/models lists the served models")

    # a model's name may contain slashes
    return RouteGroup([Route("/v1/models", listed), Route("/v1/models/{model:path}", one)], _OPERATIONS)


def _body(name: str, model: ServedModel) -> schemas.ModelObject:
    return {
        "id": name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "tokenmill",
        "context_length": model.context,
        "engines": list(model.backends),
    }


_OPERATIONS = (
    Operation(
        path="/v1/models",
        id="listModels",
        summary="List the served models; aliases are listed too.",
        answers={200: DocumentedAnswer("The models.", schemas.ModelList)},
    ),
    Operation(
        path="/v1/models/{model}",
        id="retrieveModel",
        summary="Describe one model.",
        parameters=[path_parameter("model")],
        answers={200: DocumentedAnswer("The model.", schemas.ModelObject)},
        errors=(404, *NO_KEY),
    ),
)
