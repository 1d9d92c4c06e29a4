"""/v1/messages and /v1/messages/count_tokens."""

import secrets
from dataclasses import dataclass
from typing import TypedDict

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tokenmill.gateway.answering import AnswerFormat, count_tokens, respond
from tokenmill.gateway.http.openapi import (
    ENGINE_HEADERS,
    INFERENCE,
    PRIORITY_HEADER,
    DocumentedAnswer,
    Operation,
    RouteGroup,
)
from tokenmill.gateway.http.request import parse_body, parsed_request, priority_of, read_body
from tokenmill.gateway.http.request_context import context_of
from tokenmill.gateway.messages.events import MessageEncoder, MessageObject
from tokenmill.gateway.messages.request import (
    CountTokensRequest,
    MessageRequest,
    chat_body,
    check_message,
    hosted_tools,
)
from tokenmill.gateway.schemas import AnthropicError
from tokenmill.gateway.state import GatewayState


def route_group(state: GatewayState) -> RouteGroup:
    """The routes of messages."""

    async def tokens(request: Request) -> Response:
        body = await parse_body(await read_body(request, state.config.gateway))
        check_message(body, CountTokensRequest)
        parsed = parsed_request("chat", chat_body(body), "interactive", max_choices=1, raw=None)
        return JSONResponse({"input_tokens": await count_tokens(state, context_of(request.scope), parsed)})

    routes = [
        Route("/v1/messages", CreateMessage(state), methods=["POST"]),
        Route("/v1/messages/count_tokens", tokens, methods=["POST"]),
    ]
    return RouteGroup(routes, _OPERATIONS)


@dataclass(frozen=True, slots=True, eq=False)
class CreateMessage:
    """POST /v1/messages as an ASGI application."""

    state: GatewayState

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read and answer one request."""
        http = Request(scope, receive)
        body = await parse_body(await read_body(http, self.state.config.gateway))
        check_message(body)
        request = parsed_request("chat", chat_body(body), priority_of(http.headers, {}), max_choices=1, raw=None)
        left_out = hosted_tools(body.get("tools") or ())
        headers = [(b"x-tokenmill-not-told", ", ".join(left_out).encode())] if left_out else []

        def encoder(model: str, _fingerprint: str) -> MessageEncoder:
            return MessageEncoder(f"msg_{secrets.token_hex(14)}", model)

        await respond(self.state, scope, receive, send, request, AnswerFormat(encoder, headers=headers))


class MessageTokens(TypedDict):
    """The number of prompt tokens of a message request."""

    input_tokens: int


_OPERATIONS = (
    Operation(
        method="post",
        path="/v1/messages",
        id="createMessage",
        summary="Answer a conversation, in Anthropic's API.",
        parameters=[PRIORITY_HEADER],
        body=MessageRequest,
        answers={
            200: DocumentedAnswer(
                "The message; with `stream`, server-sent events.", MessageObject, ("text/event-stream",), ENGINE_HEADERS
            )
        },
        errors=INFERENCE,
        error=AnthropicError,
    ),
    Operation(
        method="post",
        path="/v1/messages/count_tokens",
        id="countMessageTokens",
        summary="Count the prompt tokens of a conversation.",
        body=CountTokensRequest,
        answers={200: DocumentedAnswer("The count.", MessageTokens)},
        errors=INFERENCE,
        error=AnthropicError,
    ),
)
