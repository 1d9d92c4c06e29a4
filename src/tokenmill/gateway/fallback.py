"""An admitted request and its engines: the chain is tried, events are made into an answer or into a stream.

A backend that can pass bytes on as they are (`relay`) does so; the others are spoken to through the engine protocol.
"""

import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tokenmill.engine import tool_calls
from tokenmill.engine.engine import Answer, Identity, Piece, Usage
from tokenmill.engine.engine import Request as EngineRequest
from tokenmill.engine.tool_calls import ToolUse
from tokenmill.errors import EngineError, RequestRefused
from tokenmill.gateway.backend import Backend, Events, StartedStream, begin, worth_trying
from tokenmill.gateway.bodies import Asked
from tokenmill.gateway.faults import Busy, Fault
from tokenmill.gateway.merged import merged
from tokenmill.gateway.recorder import Finished
from tokenmill.gateway.request_context import RequestContext
from tokenmill.gateway.response_writer import ResponseWriter
from tokenmill.gateway.state import GatewayState
from tokenmill.gateway.streams import DONE, HEADERS, Chunks, Heading
from tokenmill.jobs.openai.answers import choice, usage_body
from tokenmill.storage.json_text import encode

Event = tuple[int, Piece | Answer]


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be answered, as it was understood and as it came."""

    asked: Asked
    body: bytes
    given: Mapping[str, Any]


class FallbackRunner:
    """One request on its way through its chain."""

    def __init__(
        self, state: GatewayState, visit: RequestContext, sending: ResponseWriter, charge: Callable[[int], None]
    ) -> None:
        self._state = state
        self._visit = visit
        self._sending = sending
        self._charge = charge
        self._tokens = 0  # that have come
        self._answers: dict[int, Answer] = {}

    async def run(self, work: Work) -> None:
        """Answer; EngineError and Faults of the last backend that was tried, once none is left."""
        chain = await self._chain(work.asked)
        last: EngineError | Busy | None = None
        for backend in worth_trying(chain):
            try:
                await self._by(backend, work)
            except (EngineError, Busy) as error:
                if self._sending.begun:
                    raise
                last = error
                self._state.log(
                    {
                        "event": "not_answered",
                        "id": self._visit.id,
                        "backend": backend.name,
                        "why": " ".join(error.message.split()),
                    }
                )
            else:
                return
        raise last or Fault("no engine can take the request now", status=503, code="no_engine", retry_after_s=2.0)

    async def _chain(self, asked: Asked) -> Sequence[Backend]:
        routes = self._state.routes
        key = self._visit.key
        tokens = await self._length(asked) if routes.by_length else None
        chain, reason = routes.reasoned(asked.model, asked.lane, tokens, key.name if key is not None else None)
        self._visit.route_reason = reason
        return chain

    async def _length(self, asked: Asked) -> int | None:
        """Tokens of the prompt, by the first engine that can count; engines differ a little."""
        for backend in self._state.backends:
            try:
                return len(await backend.engine.tokenize(asked.calls[0].prompt))
            except (EngineError, RequestRefused):
                continue
        return None

    async def _by(self, backend: Backend, work: Work) -> None:
        """Answer by one backend."""
        self._visit.backend = backend.name
        if await backend.relay(work, self._sending, self._visit, self._charge):
            return
        capabilities = backend.engine.capabilities
        uses = [tool_calls.adapt(request, capabilities) for request in work.asked.requests()]
        requests = [use.request for use in uses]
        begun = await begin(backend, requests[0])
        self._first_sign(backend, begun)
        send = self._stream if work.asked.stream else self._whole
        try:
            async with self._events(begun, requests) as events:
                await send(backend, work.asked, uses[0], events)  # choices of one request share their tools
        finally:
            self._charge(self._visit.usage_tokens if self._visit.usage else self._tokens)

    def _first_sign(self, backend: Backend, begun: StartedStream) -> None:
        if isinstance(begun.first, Piece):
            seconds = self._state.now_s() - self._visit.began_s
            self._visit.first_token_s = seconds
            self._state.recorder.first_token(seconds, backend.name, self._lane)

    @property
    def _lane(self) -> Any:
        return self._visit.lane or "interactive"

    @asynccontextmanager
    async def _events(
        self, begun: StartedStream, requests: Sequence[EngineRequest]
    ) -> AsyncIterator[AsyncIterator[Event]]:
        """Events of all choices. The others start when the first has, so that they find the prompt's head computed."""
        first = _gone_on(begun)
        if len(requests) == 1:
            async with aclosing(first):
                yield _numbered(first)
            return
        others = [begun.backend.stream(request) for request in requests[1:]]
        async with merged([first, *others]) as events:
            yield events

    # ---- the two ways to answer

    async def _whole(self, backend: Backend, asked: Asked, use: ToolUse, events: AsyncIterator[Event]) -> None:
        heading = self._heading(backend, asked)
        async for index, event in events:
            if isinstance(event, Piece):
                self._tokens += event.tokens
                continue
            self._done(backend, index, event)
            self._answers[index] = use.parse(event)
        usage = self._total(asked)
        choices = [choice(asked.endpoint, answer, index) for index, answer in sorted(self._answers.items())]
        body = encode(heading.fields(chunk=False) | {"choices": choices, "usage": usage_body(usage)})
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if usage.cached_tokens is not None:
            headers.append((b"x-tokenmill-cached-tokens", str(usage.cached_tokens).encode()))
        await self._sending.start(200, [*headers, *_engine_headers(backend, use)])
        await self._sending.put(body, more=False)

    async def _stream(self, backend: Backend, asked: Asked, use: ToolUse, events: AsyncIterator[Event]) -> None:
        chunks = Chunks(self._heading(backend, asked), include_usage=asked.include_usage)
        choices = [_Choice(chunks, index, use.reader()) for index in range(len(asked.calls))]
        put = self._sending.put
        await self._sending.start(200, [*HEADERS, *_engine_headers(backend, use)])
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
        usage = self._total(asked)
        await put((chunks.usage(usage) if asked.include_usage else b"") + DONE, more=False)

    # ---- what it cost

    def _done(self, backend: Backend, index: int, answer: Answer) -> None:
        self._answers[index] = answer
        visit = self._visit
        self._state.recorder.finished(
            Finished(
                answer.usage,
                answer.timings,
                backend.name,
                self._lane,
                self._state.now_s() - visit.began_s,
                visit.first_token_s,
                visit.key.name if visit.key is not None else None,
                answer.notes,
            )
        )

    def _total(self, asked: Asked) -> Usage:
        """Of all choices: a prompt counts once, and as reused only what nobody computed."""
        usages = [answer.usage for _, answer in sorted(self._answers.items())]
        groups = [usages[start : start + asked.n] for start in range(0, len(usages), asked.n)]
        cached = [usage.cached_tokens for usage in usages]
        total = Usage(
            sum(group[0].prompt_tokens for group in groups),
            sum(usage.completion_tokens for usage in usages),
            None if None in cached else sum(min(usage.cached_tokens or 0 for usage in group) for group in groups),
        )
        self._visit.usage = total
        return total

    def _heading(self, backend: Backend, asked: Asked) -> Heading:
        identity = backend.engine.identity
        prefix = "chatcmpl" if asked.endpoint == "chat" else "cmpl"
        model = asked.model or self._state.routes.models()[0].id
        return Heading(
            asked.endpoint, f"{prefix}-{secrets.token_hex(14)}", int(time.time()), model, fingerprint(identity)
        )


class _Choice:
    """One choice of a stream."""

    def __init__(self, chunks: Chunks, index: int, reader: tool_calls.Reader | None) -> None:
        self.index = index
        self._chunks = chunks
        self._reader = reader
        self._calls = 0

    def piece(self, piece: Piece) -> bytes:
        """The events of a piece; none while it may be part of a tool call."""
        if self._reader is not None:
            return b"".join(map(self._part, self._reader.feed(piece.text)))
        if not piece.text and not piece.logprobs:
            return b""
        return self._chunks.text(self.index, piece.text, piece.logprobs)

    def end(self, answer: Answer) -> bytes:
        """The last events: what was held back, calls that the engine found itself, and why it ended."""
        parts = list(map(self._part, self._reader.end())) if self._reader is not None else []
        message = answer.message or {}
        if message.get("reasoning_content"):
            parts.append(self._chunks.reasoning(self.index, str(message["reasoning_content"])))
        for call in message.get("tool_calls") or ():
            parts.append(self._call(call))
        reason = answer.finish_reason if self._reader is None else self._reader.finish_reason(answer.finish_reason)
        return b"".join(parts) + self._chunks.end(self.index, reason)

    def _part(self, part: tool_calls.Part) -> bytes:
        return self._chunks.text(self.index, part) if isinstance(part, str) else self._call(part.body())

    def _call(self, call: Mapping[str, Any]) -> bytes:
        self._calls += 1
        return self._chunks.tool_call(self.index, self._calls - 1, call)


@lru_cache(64)
def fingerprint(identity: Identity) -> str:
    """The same for answers of the same model and build."""
    return "fp_" + hashlib.sha256(f"{identity.model_id} {identity.build}".encode()).hexdigest()[:12]


def _engine_headers(backend: Backend, use: ToolUse) -> list[tuple[bytes, bytes]]:
    """The backend's name, and a warning where the model does not see the request's tools."""
    headers = [(b"x-tokenmill-engine", backend.name.encode("ascii", "replace"))]
    if use.hidden:
        headers.append((b"x-tokenmill-not-told", b"tools"))
    return headers


async def _gone_on(begun: StartedStream) -> Events:
    async with aclosing(begun.rest):
        yield begun.first
        async for event in begun.rest:
            yield event


async def _numbered(events: AsyncIterator[Piece | Answer]) -> AsyncIterator[Event]:
    async for event in events:
        yield 0, event
