"""/v1/chat/completions and /v1/completions."""

import secrets
import time
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tokenmill.gateway.answering import AnswerFormat, respond
from tokenmill.gateway.http import openapi
from tokenmill.gateway.http.openapi import INFERENCE, Operation, RouteGroup
from tokenmill.gateway.http.request import parse_body, parsed_request, priority_of, read_body
from tokenmill.gateway.http.request_context import context_of
from tokenmill.gateway.state import GatewayState
from tokenmill.gateway.streaming import CompletionEncoder, Heading
from tokenmill.jobs.openai.answers import ChatCompletion, Completion
from tokenmill.jobs.openai.call import Endpoint
from tokenmill.jobs.openai.requests import ChatRequest, CompletionRequest


def route_group(state: GatewayState) -> RouteGroup:
    """Routes for chats and completions."""
    routes = [
        Route("/v1/chat/completions", Completions(state, "chat"), methods=["POST"]),
        Route("/v1/completions", Completions(state, "completion"), methods=["POST"]),
    ]
    return RouteGroup(routes, _OPERATIONS)


@dataclass(frozen=True, slots=True, eq=False)
class Completions:
    """The endpoint as an ASGI application."""

    state: GatewayState
    endpoint: Endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read, admit and answer one request."""
        settings = self.state.config.gateway
        http = Request(scope, receive)
        raw = await read_body(http, settings)
        body = await parse_body(raw)
        priority = context_of(scope).priority = priority_of(http.headers, body)
        request = parsed_request(self.endpoint, body, priority, raw=raw, max_choices=settings.max_choices)
        prefix = "chatcmpl" if self.endpoint == "chat" else "cmpl"

        def encoder(model: str, fingerprint: str) -> CompletionEncoder:
            name = f"{prefix}-{secrets.token_hex(14)}"
            heading = Heading(self.endpoint, name, int(time.time()), model, fingerprint)
            return CompletionEncoder(heading, include_usage=request.include_usage)

        await respond(self.state, scope, receive, send, request, AnswerFormat(encoder))


def _operation(path: str, id: str, summary: str, body: Any, answer: Any) -> Operation:
    description = "The answer; with `stream`, server-sent events that end with [DONE]."
    return Operation(
        method="post",
        path=path,
        id=id,
        summary=summary,
        parameters=[openapi.PRIORITY_HEADER],
        body=body,
        answers={200: openapi.DocumentedAnswer(description, answer, ("text/event-stream",), openapi.ENGINE_HEADERS)},
        errors=INFERENCE,
    )


_OPERATIONS = (
    _operation("/v1/chat/completions", "createChatCompletion", "Answer a conversation.", ChatRequest, ChatCompletion),
    _operation("/v1/completions", "createCompletion", "Continue a text.", CompletionRequest, Completion),
)
