"""/v1/chat/completions and /v1/completions."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokenmill.gateway.completion_response import CompletionResponse
from tokenmill.gateway.openapi import INFERENCE, Answer, Operation
from tokenmill.gateway.parts import Part
from tokenmill.gateway.state import GatewayState
from tokenmill.jobs.openai.answers import ChatCompletion, Completion
from tokenmill.jobs.openai.requests import ChatRequest, CompletionRequest


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
    return Part(routes, _OPERATIONS)


_LANE = {
    "name": "X-Tokenmill-Lane",
    "in": "header",
    "required": False,
    "schema": {"enum": ["interactive", "batch"]},
    "description": "batch: behind interactive requests.",
}
_HEADERS = {
    "X-Tokenmill-Engine": {"schema": {"type": "string"}, "description": "The engine that answered."},
    "X-Tokenmill-Cached-Tokens": {"schema": {"type": "integer"}, "description": "Of the prompt; not with streams."},
    "X-Request-Id": {"schema": {"type": "string"}, "description": "That of the request, or a new one."},
}


def _operation(path: str, id: str, summary: str, body: Any, answer: Any) -> Operation:
    description = "The answer, whole or, with stream, as events that end with [DONE]."
    return Operation(
        method="post",
        path=path,
        id=id,
        summary=summary,
        parameters=[_LANE],
        body=body,
        answers={200: Answer(description, answer, ("text/event-stream",), _HEADERS)},
        errors=INFERENCE,
    )


_OPERATIONS = (
    _operation("/v1/chat/completions", "createChatCompletion", "Answer a conversation.", ChatRequest, ChatCompletion),
    _operation("/v1/completions", "createCompletion", "Continue a text.", CompletionRequest, Completion),
)
