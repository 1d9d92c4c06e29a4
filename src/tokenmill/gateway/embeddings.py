"""/v1/embeddings, forwarded to servers that support it; the native engine does not."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tokenmill.errors import EngineError, RequestRefused
from tokenmill.gateway.backends.backend import Backend, candidates
from tokenmill.gateway.http.client_connection import ClientLeft, cancel_on_disconnect
from tokenmill.gateway.http.faults import GatewayFault
from tokenmill.gateway.http.openapi import INFERENCE, DocumentedAnswer, Operation, RouteGroup
from tokenmill.gateway.http.request import parse_body, priority_of, read_body
from tokenmill.gateway.http.request_context import context_of
from tokenmill.gateway.state import GatewayState
from tokenmill.jobs.openai.embeddings import EmbeddingList, EmbeddingRequest
from tokenmill.jobs.openai.validation import validate


def route_group(state: GatewayState) -> RouteGroup:
    """The route for embeddings."""

    async def embeddings(request: Request) -> Response:
        settings = state.config.gateway
        context = context_of(request.scope)
        given = await parse_body(await read_body(request, settings))
        validate(EmbeddingRequest, given)
        context.priority = priority_of(request.headers, {})
        chain = state.routes.choose(
            given.get("model"), context.priority, None, context.key.name if context.key else None
        )
        with state.limiter.admit(*context.client) as charge:
            try:
                async with cancel_on_disconnect(state, context, request.receive, timeout_s=settings.request_timeout_s):
                    backend, answer = await _first(chain, given)
            except ClientLeft:
                return Response(status_code=499)
        context.backend = backend.name
        charge(int((answer.get("usage") or {}).get("total_tokens") or 0))
        return JSONResponse(answer, headers={"x-tokenmill-engine": backend.name})

    return RouteGroup([Route("/v1/embeddings", embeddings, methods=["POST"])], [_OPERATION])


async def _first(chain: tuple[Backend, ...] | Any, given: Mapping[str, Any]) -> tuple[Backend, dict[str, Any]]:
    last: EngineError | None = None
    for backend in candidates(chain):
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
    raise GatewayFault(
        "no engine here computes embeddings",
        status=501,
        code="embeddings_not_supported",
        hint="route the model to a server that does, such as llama-server --embeddings",
    )


_OPERATION = Operation(
    method="post",
    path="/v1/embeddings",
    id="createEmbedding",
    summary="Create embeddings, if an engine supports them.",
    body=EmbeddingRequest,
    answers={200: DocumentedAnswer("The embeddings.", EmbeddingList)},
    errors=INFERENCE,
)
