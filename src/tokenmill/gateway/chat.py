"""/v1/chat/completions and /v1/completions."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokenmill.gateway.completion_response import CompletionResponse
from tokenmill.gateway.openapi_chat import PATHS, SCHEMAS
from tokenmill.gateway.parts import Part
from tokenmill.gateway.state import GatewayState


def part(state: GatewayState) -> Part:
    """Chats and completions."""

    async def chat(_request: Request) -> Response:
        return CompletionResponse(state, "chat")

    async def completion(_request: Request) -> Response:
        return CompletionResponse(state, "completion")

    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completion, methods=["POST"]),
    ]
    return Part(routes, PATHS, SCHEMAS)
