"""/v1/responses: create, retrieve, list input items, cancel, delete, and count tokens."""

import asyncio
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tokenmill.gateway.answering import AnswerFormat, count_tokens, respond
from tokenmill.gateway.batches.files import owner_of
from tokenmill.gateway.batches.service import BatchService
from tokenmill.gateway.http.faults import GatewayFault
from tokenmill.gateway.http.openapi import (
    ENGINE_HEADERS,
    INFERENCE,
    NO_KEY,
    PRIORITY_HEADER,
    DocumentedAnswer,
    Operation,
    RouteGroup,
    path_parameter,
)
from tokenmill.gateway.http.request import ParsedRequest, parse_body, parsed_request, priority_of, read_body
from tokenmill.gateway.http.request_context import context_of
from tokenmill.gateway.responses import background
from tokenmill.gateway.responses.events import ResponseEncoder
from tokenmill.gateway.responses.stored import StoredResponse, StoredResponses
from tokenmill.gateway.state import GatewayState
from tokenmill.jobs.openai.responses.answers import ResponseObject, response_object
from tokenmill.jobs.openai.responses.items import Item, items_of
from tokenmill.jobs.openai.responses.request import ResponseRequest, chat_body, check_response
from tokenmill.jobs.openai.responses.tools import hosted_tools


def route_group(state: GatewayState, service: BatchService) -> RouteGroup:
    """The routes of responses, which are stored where batches are."""
    opened = _Opened(state, service)
    return RouteGroup(
        [Route("/v1/responses", CreateResponse(state, opened), methods=["POST"]), *_routes(opened)], _OPERATIONS
    )


@dataclass(frozen=True, slots=True)
class _Opened:
    """Access to stored responses while the gateway serves."""

    state: GatewayState
    service: BatchService

    def responses(self) -> StoredResponses:
        """Raises GatewayFault until the gateway serves."""
        return StoredResponses(*self.service.files())

    async def get(self, request: Request) -> StoredResponse:
        """The response that the path names."""
        name = request.path_params["response_id"]
        return await asyncio.to_thread(self.responses().get, name, owner_of(request))

    async def history(self, body: Mapping[str, Any], owner: str | None) -> list[Item]:
        """The items of the conversation before this request."""
        previous = body.get("previous_response_id")
        if previous is None:
            return []
        return await asyncio.to_thread(self.responses().history, previous, owner)


@dataclass(frozen=True, slots=True, eq=False)
class CreateResponse:
    """POST /v1/responses as an ASGI application."""

    state: GatewayState
    opened: _Opened

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read a request and answer it, or store it as a job."""
        http = Request(scope, receive)
        body = await parse_body(await read_body(http, self.state.config.gateway))
        check_response(body)
        owner = owner_of(http)
        history = await self.opened.history(body, owner)
        if body.get("background"):
            await (await self._queue(body, history, owner))(scope, receive, send)
            return
        request = self._parsed(http, body, history)
        reply = _Reply(body, secrets.token_hex(16), owner)
        headers = [(b"x-tokenmill-not-told", ", ".join(left).encode())] if (left := _left_out(body)) else []

        async def finished() -> None:
            if body.get("store") is not False:
                await asyncio.to_thread(self.opened.responses().keep, reply.stored())

        await respond(self.state, scope, receive, send, request, AnswerFormat(reply.encoder, finished, headers))

    def _parsed(self, http: Request, body: Mapping[str, Any], history: list[Item]) -> ParsedRequest:
        priority = priority_of(http.headers, body)
        return parsed_request("chat", chat_body(body, history), priority, max_choices=1, raw=None)

    async def _queue(self, body: Mapping[str, Any], history: list[Item], owner: str | None) -> Response:
        """Store a background response and its job."""
        unsupported = "stream" if body.get("stream") else "store" if body.get("store") is False else None
        if unsupported:
            raise GatewayFault(f"{unsupported}: not supported with background", param=unsupported)
        job = background.job_body(body, history)
        routes = self.state.routes
        routes.choose(body.get("model"), "batch", None, self.state.key_name(owner))  # refuses unknown models
        named = {"id": secrets.token_hex(16), "model": body.get("model") or routes.models()[0].id}
        queued = response_object(body, created_s=time.time(), status="queued", **named)
        stored = StoredResponse(items_of(body["input"]), queued, owner)
        await asyncio.to_thread(background.start, self.opened.responses(), stored, job)
        self.opened.service.wake()
        return JSONResponse(queued)


class _Reply:
    """The response to one request, and what is stored of it."""

    def __init__(self, body: Mapping[str, Any], id: str, owner: str | None) -> None:
        self._body = body
        self._id = id
        self._owner = owner
        self._encoder: ResponseEncoder | None = None

    def encoder(self, model: str, fingerprint: str) -> ResponseEncoder:
        """The encoder for the backend that answers."""
        previous = self._body.get("previous_response_id")
        self._encoder = ResponseEncoder(
            self._body, id=self._id, created_s=time.time(), model=model, fingerprint=fingerprint, previous=previous
        )
        return self._encoder

    def stored(self) -> StoredResponse:
        """The complete response."""
        assert self._encoder is not None  # noqa: S101  it has written the response
        return StoredResponse(items_of(self._body["input"]), self._encoder.response, self._owner)


def _left_out(body: Mapping[str, Any]) -> list[str]:
    """Hosted tools, which the model does not see."""
    return hosted_tools(body.get("tools") or ())


def _routes(opened: _Opened) -> list[Route]:
    async def one(request: Request) -> Response:
        if request.query_params.get("stream") == "true":
            raise GatewayFault("stream: stored responses are not streamed", param="stream", hint="poll without it")
        return JSONResponse((await opened.get(request)).body)

    async def input_items(request: Request) -> Response:
        response = await opened.get(request)
        data = [{"id": f"item_{response.id[5:]}{n}", **item} for n, item in enumerate(response.input)]
        ids = [item["id"] for item in data]
        listed = {"object": "list", "data": data, "has_more": False}
        return JSONResponse(listed | {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None})

    async def cancel(request: Request) -> Response:
        response = await opened.get(request)
        rows = opened.responses().rows
        if response.body.get("background") is not True:
            raise GatewayFault(
                f"{response.id} does not run in the background", status=409, code="response_not_cancellable"
            )
        await asyncio.to_thread(rows.cancel, response.id)
        opened.service.wake()
        return await one(request)

    async def delete(request: Request) -> Response:
        response = await opened.get(request)
        await asyncio.to_thread(opened.responses().delete, response)
        opened.service.wake()
        return JSONResponse({"id": response.id, "object": "response", "deleted": True})

    async def tokens(request: Request) -> Response:
        body = await parse_body(await read_body(request, opened.state.config.gateway))
        check_response(body)
        history = await opened.history(body, owner_of(request))
        parsed = parsed_request("chat", chat_body(body, history), "interactive", max_choices=1, raw=None)
        count = await count_tokens(opened.state, context_of(request.scope), parsed)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": count})

    return [
        Route("/v1/responses/input_tokens", tokens, methods=["POST"]),
        Route("/v1/responses/{response_id}", one, methods=["GET"]),
        Route("/v1/responses/{response_id}", delete, methods=["DELETE"]),
        Route("/v1/responses/{response_id}/input_items", input_items, methods=["GET"]),
        Route("/v1/responses/{response_id}/cancel", cancel, methods=["POST"]),
    ]


class ResponseDeleted(TypedDict):
    """The answer of DELETE /v1/responses/{response_id}."""

    id: str
    object: Literal["response"]
    deleted: bool


class ResponseItems(TypedDict):
    """The input items of a response."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(TypedDict):
    """The number of prompt tokens of a response request."""

    object: Literal["response.input_tokens"]
    input_tokens: int


_ID = path_parameter("response_id")
_RESPONSE = {200: DocumentedAnswer("The response.", ResponseObject)}
_OPERATIONS = (
    Operation(
        method="post",
        path="/v1/responses",
        id="createResponse",
        summary="Answer input items; with `background`, in a batch job that is polled.",
        parameters=[PRIORITY_HEADER],
        body=ResponseRequest,
        answers={
            200: DocumentedAnswer(
                "The response; with `stream`, server-sent events.",
                ResponseObject,
                ("text/event-stream",),
                ENGINE_HEADERS,
            )
        },
        errors=(*INFERENCE, 507),
    ),
    Operation(
        path="/v1/responses/{response_id}",
        id="getResponse",
        summary="Retrieve a stored response.",
        parameters=[_ID],
        answers=_RESPONSE,
        errors=(400, 404, *NO_KEY),
    ),
    Operation(
        method="delete",
        path="/v1/responses/{response_id}",
        id="deleteResponse",
        summary="Delete a stored response; if it runs in the background, it is cancelled.",
        parameters=[_ID],
        answers={200: DocumentedAnswer("The response is deleted.", ResponseDeleted)},
        errors=(404, *NO_KEY),
    ),
    Operation(
        path="/v1/responses/{response_id}/input_items",
        id="listInputItems",
        summary="List the input items of a stored response, without those of previous responses.",
        parameters=[_ID],
        answers={200: DocumentedAnswer("The items.", ResponseItems)},
        errors=(404, *NO_KEY),
    ),
    Operation(
        method="post",
        path="/v1/responses/{response_id}/cancel",
        id="cancelResponse",
        summary="Cancel a background response.",
        parameters=[_ID],
        answers=_RESPONSE,
        errors=(404, 409, *NO_KEY),
    ),
    Operation(
        method="post",
        path="/v1/responses/input_tokens",
        id="countInputTokens",
        summary="Count the prompt tokens of a response request.",
        body=ResponseRequest,
        answers={200: DocumentedAnswer("The count.", InputTokens)},
        errors=INFERENCE,
    ),
)
