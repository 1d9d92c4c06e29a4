"""Answers one validated request with the backends of its route, in the format of its API.

    respond     admits the request and handles timeouts, disconnects and errors
    _Attempts   tries the backends of the route, in order, until one answers

Headers are sent with the first engine event: an error before it gets its own status code, an error after it ends the
stream with an error event. A backend relays bytes if it can; otherwise it is called through the engine protocol, and an
`AnswerEncoder` writes the response: chats and completions in `streaming.py`, responses and messages in their packages.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from tokenmill.engine import tool_calls
from tokenmill.engine.answer_parts import AnswerPart, AnswerReader
from tokenmill.engine.engine import Answer, Capabilities, Chat, FinishReason, Piece, Usage
from tokenmill.engine.engine import Request as EngineRequest
from tokenmill.engine.media import Kind, media_kinds
from tokenmill.engine.tool_calls import ToolUse
from tokenmill.errors import EngineError, RequestRefused, TokenmillError
from tokenmill.gateway.backends.backend import Backend, Events, StartedStream, begin, candidates
from tokenmill.gateway.http.client_connection import ClientLeft, cancel_on_disconnect
from tokenmill.gateway.http.faults import Busy, GatewayFault
from tokenmill.gateway.http.request import ParsedRequest
from tokenmill.gateway.http.request_context import RequestContext, context_of
from tokenmill.gateway.http.response_writer import ResponseWriter, SlowClient
from tokenmill.gateway.monitoring.recorder import FinishedRequest, PriorityClass
from tokenmill.gateway.state import GatewayState
from tokenmill.gateway.streaming import HEADERS, failure, merged
from tokenmill.jobs.openai.answers import made_by
from tokenmill.storage.json_text import encode

AnswerEvent = tuple[int, Piece | Answer]


class AnswerEncoder(Protocol):
    """Writes one response in the format of an API. Choices are numbered from 0; only chats have several."""

    def whole(self, answers: Sequence[Answer], usage: Usage) -> Mapping[str, Any]:
        """The response without streaming; tool calls are parsed."""

    def opening(self, index: int) -> bytes:
        """The events before the first part of a choice."""

    def parts(self, index: int, parts: Iterable[AnswerPart]) -> bytes:
        """The events of some parts."""

    def end(self, index: int, reason: FinishReason) -> bytes:
        """The events after the last part of a choice."""

    def closing(self, usage: Usage) -> bytes:
        """The last events of a stream."""

    def failure(self, error: TokenmillError) -> bytes:
        """The last events of a stream that failed."""


async def _nothing() -> None:
    """The default of `AnswerFormat.finished`."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How to write the response to one request."""

    encoder: Callable[[str, str], AnswerEncoder]  # called with the model's name and the fingerprint
    finished: Callable[[], Awaitable[None]] = _nothing  # called once the answer is complete, before its last bytes
    headers: Sequence[tuple[bytes, bytes]] = ()


async def respond(
    state: GatewayState, scope: Scope, receive: Receive, send: Send, request: ParsedRequest, how: AnswerFormat
) -> None:
    """Admit and answer a request.

    Does not use Starlette's StreamingResponse, which runs the response in a separate task. Here the request's own task
    awaits the engine, so a disconnect cancels exactly that call.
    """
    settings = state.config.gateway
    context = context_of(scope)
    context.priority = request.priority
    writer = ResponseWriter(scope, send, settings.write_timeout_s)
    timeout_s = min(filter(None, (request.timeout_s, settings.request_timeout_s)), default=None)
    with state.limiter.admit(*context.client) as charge:
        attempts = _Attempts(state, context, writer, charge, how)
        try:
            async with cancel_on_disconnect(
                state, context, receive, timeout_s=timeout_s, answered=lambda: writer.ended
            ):
                await attempts.run(request)
        except ClientLeft:
            context.error = "client_left"
        except SlowClient:
            context.error = "slow_client"
            writer.abort()
        except TokenmillError as error:
            if not writer.begun:
                raise  # an exception handler turns it into a response
            context.error = error.code
            await _end_with(attempts.failure(error), writer)


def reading(chain: Sequence[Backend], request: ParsedRequest) -> Sequence[Backend]:
    """The backends that read the images and audio of a request; all of them if none does, so that one refuses."""
    prompt = request.calls[0].prompt
    kinds = media_kinds(prompt.messages) if isinstance(prompt, Chat) else frozenset()
    if not kinds:
        return chain
    can = [backend for backend in chain if _reads(backend.engine.capabilities, kinds)]
    return can or chain


def _reads(capabilities: Capabilities, kinds: frozenset[Kind]) -> bool:
    return (capabilities.images or "image" not in kinds) and (capabilities.audio or "audio" not in kinds)


async def count_tokens(state: GatewayState, context: RequestContext, request: ParsedRequest) -> int:
    """The number of prompt tokens, counted by the first backend of the route that can."""
    key = context.key.name if context.key is not None else None
    chain = state.routes.choose(request.model, request.priority, None, key)
    error: TokenmillError | None = None
    for backend in candidates(reading(chain, request)):
        context.backend = backend.name
        use = tool_calls.adapt(request.engine_requests()[0], backend.engine.capabilities)
        try:
            return len(await backend.engine.tokenize(use.request.prompt))
        except EngineError as failed:
            error = failed
    raise error or GatewayFault("no engine is available", status=503, code="no_engine", retry_after_s=2.0)


async def _end_with(event: bytes, writer: ResponseWriter) -> None:
    """End a response that has started with an error event."""
    try:
        await writer.put(event, more=False)
    except SlowClient:
        writer.abort()


class _Attempts:
    """One request and the backends of its route."""

    def __init__(
        self,
        state: GatewayState,
        context: RequestContext,
        writer: ResponseWriter,
        charge: Callable[[int], None],
        how: AnswerFormat,
    ) -> None:
        self._state = state
        self._how = how
        self._encoder: AnswerEncoder | None = None
        self._context = context
        self._writer = writer
        self._charge = charge
        self._choices = self._n = 1  # in all, and for each prompt
        self._tokens = 0  # generated so far
        self._answers: dict[int, Answer] = {}

    async def run(self, request: ParsedRequest) -> None:
        """Answer the request; raises the error of the last backend if all of them fail."""
        chain = await self._chain(request)
        last: EngineError | Busy | None = None
        for backend in candidates(reading(chain, request)):
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

    def failure(self, error: TokenmillError) -> bytes:
        """The event that ends a stream with an error."""
        return failure(error) if self._encoder is None else self._encoder.failure(error)

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
        model = request.model or backend.engine.identity.model
        self._encoder = self._how.encoder(model, made_by(backend.engine.identity))
        self._choices, self._n = len(requests), request.n
        send = self._stream if request.stream else self._whole
        try:
            async with self._events(begun, requests) as events:
                await send(backend, self._encoder, uses[0], events)  # all choices have the same tools
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
        self, backend: Backend, encoder: AnswerEncoder, use: ToolUse, events: AsyncIterator[AnswerEvent]
    ) -> None:
        async for index, event in events:
            if isinstance(event, Piece):
                self._tokens += event.tokens
                continue
            self._done(backend, index, event)
            self._answers[index] = use.parse(event)
        usage = self._total()
        body = encode(encoder.whole([answer for _, answer in sorted(self._answers.items())], usage))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if usage.cached_tokens is not None:
            headers.append((b"x-tokenmill-cached-tokens", str(usage.cached_tokens).encode()))
        await self._how.finished()
        await self._writer.start(200, [*headers, *self._headers(backend, use)])
        await self._writer.put(body, more=False)

    async def _stream(
        self, backend: Backend, encoder: AnswerEncoder, use: ToolUse, events: AsyncIterator[AnswerEvent]
    ) -> None:
        readers = [AnswerReader(use.reader()) for _ in range(self._choices)]
        put = self._writer.put
        await self._writer.start(200, [*HEADERS, *self._headers(backend, use)])
        for index in range(self._choices):
            if opening := encoder.opening(index):
                await put(opening)
        async for index, event in events:
            if isinstance(event, Piece):
                self._tokens += event.tokens
                data = encoder.parts(index, readers[index].piece(event))
            else:
                self._done(backend, index, event)
                parts, reason = readers[index].end(event)
                data = encoder.parts(index, parts) + encoder.end(index, reason)
            if data:
                await put(data)
        closing = encoder.closing(self._total())
        await self._how.finished()
        await put(closing, more=False)

    def _headers(self, backend: Backend, use: ToolUse) -> list[tuple[bytes, bytes]]:
        return [*_engine_headers(backend, use), *self._how.headers]

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

    def _total(self) -> Usage:
        """Usage of all choices: each prompt counts once, with the smallest number of cached tokens of its choices."""
        usages = [answer.usage for _, answer in sorted(self._answers.items())]
        groups = [usages[start : start + self._n] for start in range(0, len(usages), self._n)]
        cached = [usage.cached_tokens for usage in usages]
        total = Usage(
            sum(group[0].prompt_tokens for group in groups),
            sum(usage.completion_tokens for usage in usages),
            None if None in cached else sum(min(usage.cached_tokens or 0 for usage in group) for group in groups),
        )
        self._context.usage = total
        return total


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
