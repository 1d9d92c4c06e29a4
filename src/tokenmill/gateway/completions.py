"""/v1/chat/completions and /v1/completions: handles a request from its body to the last byte of the response.

    Completions   reads, admits and answers one request
    _Attempts     tries the backends of the route, in order, until one answers

Headers are sent with the first engine event: an error before it gets its own status code, an error after it ends the
stream with an error event. A backend relays bytes if it can; otherwise it is called through the engine protocol.
"""

import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tokenmill.engine import tool_calls
from tokenmill.engine.engine import Answer, Identity, Piece, Usage
from tokenmill.engine.engine import Request as EngineRequest
from tokenmill.engine.tool_calls import ToolUse
from tokenmill.errors import EngineError, RequestRefused, TokenmillError
from tokenmill.gateway.backends.backend import Backend, Events, StartedStream, begin, candidates
from tokenmill.gateway.http import openapi
from tokenmill.gateway.http.client_connection import ClientLeft, cancel_on_disconnect
from tokenmill.gateway.http.faults import Busy, GatewayFault
from tokenmill.gateway.http.openapi import INFERENCE, Operation, RouteGroup
from tokenmill.gateway.http.request import ParsedRequest, parse_body, parsed_request, priority_of, read_body
from tokenmill.gateway.http.request_context import RequestContext, context_of
from tokenmill.gateway.http.response_writer import ResponseWriter, SlowClient
from tokenmill.gateway.monitoring.recorder import FinishedRequest, PriorityClass
from tokenmill.gateway.state import GatewayState
from tokenmill.gateway.streaming import DONE, HEADERS, ChoiceStream, Chunks, Heading, failure, merged
from tokenmill.jobs.openai.answers import ChatCompletion, Completion, choice, usage_body
from tokenmill.jobs.openai.call import Endpoint
from tokenmill.jobs.openai.requests import ChatRequest, CompletionRequest
from tokenmill.storage.json_text import encode

AnswerEvent = tuple[int, Piece | Answer]


def route_group(state: GatewayState) -> RouteGroup:
    """Routes for chats and completions."""
    routes = [
        Route("/v1/chat/completions", Completions(state, "chat"), methods=["POST"]),
        Route("/v1/completions", Completions(state, "completion"), methods=["POST"]),
    ]
    return RouteGroup(routes, _OPERATIONS)


@dataclass(frozen=True, slots=True, eq=False)
class Completions:
    """The endpoint as an ASGI application.

    It does not use Starlette's StreamingResponse, which runs the response in a separate task. Here the request's own
    task awaits the engine, so a disconnect cancels exactly that call.
    """

    state: GatewayState
    endpoint: Endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read, admit and answer one request."""
        state = self.state
        settings = state.config.gateway
        context = context_of(scope)

        http = Request(scope, receive)
        raw = await read_body(http, settings)
        body = await parse_body(raw)
        context.priority = priority_of(http.headers, body)
        request = parsed_request(self.endpoint, body, context.priority, raw=raw, max_choices=settings.max_choices)

        writer = ResponseWriter(scope, send, settings.write_timeout_s)
        timeout_s = min(filter(None, (request.timeout_s, settings.request_timeout_s)), default=None)
        with state.limiter.admit(*context.client) as charge:
            try:
                async with cancel_on_disconnect(
                    state, context, receive, timeout_s=timeout_s, answered=lambda: writer.ended
                ):
                    await _Attempts(state, context, writer, charge).run(request)
            except ClientLeft:
                context.error = "client_left"
            except SlowClient:
                context.error = "slow_client"
                writer.abort()
            except TokenmillError as error:
                if not writer.begun:
                    raise  # an exception handler turns it into a response
                context.error = error.code
                await _end_with(error, writer)


async def _end_with(error: TokenmillError, writer: ResponseWriter) -> None:
    """End a response that has started with an error event."""
    try:
        await writer.put(failure(error), more=False)
    except SlowClient:
        writer.abort()


class _Attempts:
    """One request and the backends of its route."""

    def __init__(
        self, state: GatewayState, context: RequestContext, writer: ResponseWriter, charge: Callable[[int], None]
    ) -> None:
        self._state = state
        self._context = context
        self._writer = writer
        self._charge = charge
        self._tokens = 0  # generated so far
        self._answers: dict[int, Answer] = {}

    async def run(self, request: ParsedRequest) -> None:
        """Answer the request; raises the error of the last backend if all of them fail."""
        chain = await self._chain(request)
        last: EngineError | Busy | None = None
        for backend in candidates(chain):
            try:
                await self._answer(backend, request)
            except (EngineError, Busy) as error:
                if self._writer.begun:
                    raise
                last = error
                self._state.log(
                    {
                        "event": "not_answered",
                        "id": self._context.id,
                        "backend": backend.name,
                        "why": " ".join(error.message.split()),
                    }
                )
            else:
                return
        raise last or GatewayFault("no engine is available", status=503, code="no_engine", retry_after_s=2.0)

    async def _chain(self, request: ParsedRequest) -> Sequence[Backend]:
        routes = self._state.routes
        key = self._context.key
        tokens = await self._length(request) if routes.by_length else None
        chain, reason = routes.choose_with_reason(
            request.model, request.priority, tokens, key.name if key is not None else None
        )
        self._context.route_reason = reason
        return chain

    async def _length(self, request: ParsedRequest) -> int | None:
        """Prompt tokens, counted by the first engine that can; None if none can."""
        for backend in self._state.backends:
            try:
                return len(await backend.engine.tokenize(request.calls[0].prompt))
            except (EngineError, RequestRefused):
                continue
        return None

    async def _answer(self, backend: Backend, request: ParsedRequest) -> None:
        """Answer with one backend."""
        self._context.backend = backend.name
        if await backend.relay(request, self._writer, self._context, self._charge):
            return
        capabilities = backend.engine.capabilities
        uses = [tool_calls.adapt(each, capabilities) for each in request.engine_requests()]
        requests = [use.request for use in uses]
        begun = await begin(backend, requests[0])
        self._record_first_token(backend, begun)
        send = self._stream if request.stream else self._whole
        try:
            async with self._events(begun, requests) as events:
                await send(backend, request, uses[0], events)  # all choices have the same tools
        finally:
            self._charge(self._context.usage_tokens if self._context.usage else self._tokens)

    def _record_first_token(self, backend: Backend, begun: StartedStream) -> None:
        if isinstance(begun.first, Piece):
            seconds = self._state.now_s() - self._context.began_s
            self._context.first_token_s = seconds
            self._state.recorder.first_token(seconds, backend.name, self._priority)

    @property
    def _priority(self) -> PriorityClass:
        return self._context.priority or "interactive"

    @asynccontextmanager
    async def _events(
        self, begun: StartedStream, requests: Sequence[EngineRequest]
    ) -> AsyncIterator[AsyncIterator[AnswerEvent]]:
        """Events of all choices. The others start after the first one, so that they find the prompt in the cache."""
        first = _continued(begun)
        if len(requests) == 1:
            async with aclosing(first):
                yield _numbered(first)
            return
        others = [begun.backend.stream(request) for request in requests[1:]]
        async with merged([first, *others]) as events:
            yield events

    # ---- responses

    async def _whole(
        self, backend: Backend, request: ParsedRequest, use: ToolUse, events: AsyncIterator[AnswerEvent]
    ) -> None:
        heading = self._heading(backend, request)
        async for index, event in events:
            if isinstance(event, Piece):
                self._tokens += event.tokens
                continue
            self._done(backend, index, event)
            self._answers[index] = use.parse(event)
        usage = self._total(request)
        choices = [choice(request.endpoint, answer, index) for index, answer in sorted(self._answers.items())]
        body = encode(heading.fields(chunk=False) | {"choices": choices, "usage": usage_body(usage)})
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if usage.cached_tokens is not None:
            headers.append((b"x-tokenmill-cached-tokens", str(usage.cached_tokens).encode()))
        await self._writer.start(200, [*headers, *_engine_headers(backend, use)])
        await self._writer.put(body, more=False)

    async def _stream(
        self, backend: Backend, request: ParsedRequest, use: ToolUse, events: AsyncIterator[AnswerEvent]
    ) -> None:
        chunks = Chunks(self._heading(backend, request), include_usage=request.include_usage)
        choices = [ChoiceStream(chunks, index, use.reader()) for index in range(len(request.calls))]
        put = self._writer.put
        await self._writer.start(200, [*HEADERS, *_engine_headers(backend, use)])
        for each in choices:
            if opening := chunks.opening(each.index):
                await put(opening)
        async for index, event in events:
            if isinstance(event, Piece):
                self._tokens += event.tokens
                data = choices[index].piece(event)
            else:
                self._done(backend, index, event)
                data = choices[index].end(event)
            if data:
                await put(data)
        usage = self._total(request)
        await put((chunks.usage(usage) if request.include_usage else b"") + DONE, more=False)

    # ---- usage

    def _done(self, backend: Backend, index: int, answer: Answer) -> None:
        self._answers[index] = answer
        context = self._context
        self._state.recorder.finished(
            FinishedRequest(
                answer.usage,
                answer.timings,
                backend.name,
                self._priority,
                self._state.now_s() - context.began_s,
                context.first_token_s,
                context.key.name if context.key is not None else None,
                answer.notes,
            )
        )

    def _total(self, request: ParsedRequest) -> Usage:
        """Usage of all choices: each prompt counts once, with the smallest number of cached tokens of its choices."""
        usages = [answer.usage for _, answer in sorted(self._answers.items())]
        groups = [usages[start : start + request.n] for start in range(0, len(usages), request.n)]
        cached = [usage.cached_tokens for usage in usages]
        total = Usage(
            sum(group[0].prompt_tokens for group in groups),
            sum(usage.completion_tokens for usage in usages),
            None if None in cached else sum(min(usage.cached_tokens or 0 for usage in group) for group in groups),
        )
        self._context.usage = total
        return total

    def _heading(self, backend: Backend, request: ParsedRequest) -> Heading:
        identity = backend.engine.identity
        prefix = "chatcmpl" if request.endpoint == "chat" else "cmpl"
        model = request.model or self._state.routes.models()[0].id
        return Heading(
            request.endpoint, f"{prefix}-{secrets.token_hex(14)}", int(time.time()), model, fingerprint(identity)
        )


@lru_cache(64)
def fingerprint(identity: Identity) -> str:
    """`system_fingerprint`: equal for answers of the same model and build."""
    return "fp_" + hashlib.sha256(f"{identity.model_id} {identity.build}".encode()).hexdigest()[:12]


def _engine_headers(backend: Backend, use: ToolUse) -> list[tuple[bytes, bytes]]:
    """The backend's name, and a warning header if the model does not see the request's tools."""
    headers = [(b"x-tokenmill-engine", backend.name.encode("ascii", "replace"))]
    if use.hidden:
        headers.append((b"x-tokenmill-not-told", b"tools"))
    return headers


async def _continued(begun: StartedStream) -> Events:
    async with aclosing(begun.rest):
        yield begun.first
        async for event in begun.rest:
            yield event


async def _numbered(events: AsyncIterator[Piece | Answer]) -> AsyncIterator[AnswerEvent]:
    async for event in events:
        yield 0, event


_PRIORITY = {
    "name": "X-Tokenmill-Priority",
    "in": "header",
    "required": False,
    "schema": {"enum": ["interactive", "batch"]},
    "description": "batch: scheduled after interactive requests. X-Tokenmill-Lane is an alias.",
}
_HEADERS = {
    "X-Tokenmill-Engine": {"schema": {"type": "string"}, "description": "Name of the engine that answered."},
    "X-Tokenmill-Cached-Tokens": {
        "schema": {"type": "integer"},
        "description": "Prompt tokens that were reused from the cache; not sent with streams.",
    },
    "X-Request-Id": {"schema": {"type": "string"}, "description": "The request's own ID, or a new one."},
}


def _operation(path: str, id: str, summary: str, body: Any, answer: Any) -> Operation:
    description = "The answer; with `stream`, server-sent events that end with [DONE]."
    return Operation(
        method="post",
        path=path,
        id=id,
        summary=summary,
        parameters=[_PRIORITY],
        body=body,
        answers={200: openapi.DocumentedAnswer(description, answer, ("text/event-stream",), _HEADERS)},
        errors=INFERENCE,
    )


_OPERATIONS = (
    _operation("/v1/chat/completions", "createChatCompletion", "Answer a conversation.", ChatRequest, ChatCompletion),
    _operation("/v1/completions", "createCompletion", "Continue a text.", CompletionRequest, Completion),
)
