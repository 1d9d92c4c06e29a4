"""Encodes chats and completions as OpenAI's server-sent events, and merges several engine streams into one.

The constant part of an event is encoded once per stream; each token adds one small JSON string.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from tokenmill.engine.answer_parts import AnswerPart, AnswerText
from tokenmill.engine.engine import Answer, FinishReason, TokenLogprob, Usage
from tokenmill.engine.output_parser import ReasoningPart
from tokenmill.errors import TokenmillError
from tokenmill.gateway.http.faults import error_body
from tokenmill.jobs.openai.answers import choice, usage_body
from tokenmill.jobs.openai.call import Endpoint
from tokenmill.jobs.openai.logprobs import chat_logprobs, text_logprobs
from tokenmill.storage.json_text import encode

DONE = b"data: [DONE]\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_MAX_QUEUED_EVENTS = 64  # events of merged streams waiting for the consumer
_T = TypeVar("_T")
_text = json.JSONEncoder(ensure_ascii=True).encode  # escaped: half of a surrogate pair stays readable JSON


@dataclass(frozen=True, slots=True)
class Heading:
    """Fields common to all chunks of an answer."""

    endpoint: Endpoint
    id: str  # with its prefix, such as chatcmpl-
    created: int
    model: str
    fingerprint: str

    def fields(self, *, chunk: bool) -> dict[str, Any]:
        """The fields of a chunk, or of a whole answer."""
        chat = "chat.completion.chunk" if chunk else "chat.completion"
        return {
            "id": self.id,
            "object": chat if self.endpoint == "chat" else "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


class Chunks:
    """Encodes the events of one stream."""

    def __init__(self, heading: Heading, *, include_usage: bool) -> None:
        self._chat = heading.endpoint == "chat"
        self._heading = heading
        opening = _text(heading.fields(chunk=True))[:-1]
        self._before = f'data: {opening}, "choices": [{{"index": '
        self._after = '}], "usage": null}\n\n' if include_usage else "}]}\n\n"
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> bytes:
        """The first event of a choice; empty for completions."""
        return self._delta(index, '{"role": "assistant", "content": "", "refusal": null}') if self._chat else b""

    def text(self, index: int, text: str, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        """A piece of text."""
        if self._chat:
            odds = _text(chat_logprobs(tuple(logprobs))) if logprobs else "null"
            return self._delta(index, f'{{"content": {_text(text)}}}', odds)
        odds = "null"
        if logprobs:
            offset = self._offsets.get(index, 0)
            odds = _text(text_logprobs(tuple(logprobs), offset))
            self._offsets[index] = offset + sum(len(token.text) for token in logprobs)
        return self._event(f'{index}, "text": {_text(text)}, "logprobs": {odds}, "finish_reason": null')

    def reasoning(self, index: int, text: str) -> bytes:
        """A piece of reasoning, if the engine separates it from the answer."""
        return self._delta(index, f'{{"reasoning_content": {_text(text)}}}')

    def tool_call(self, index: int, number: int, call: Mapping[str, Any]) -> bytes:
        """A complete tool call."""
        return self._delta(index, f'{{"tool_calls": [{_text({"index": number, **call})}]}}')

    def end(self, index: int, reason: str) -> bytes:
        """The last event of a choice."""
        if self._chat:
            return self._event(f'{index}, "delta": {{}}, "logprobs": null, "finish_reason": "{reason}"')
        return self._event(f'{index}, "text": "", "logprobs": null, "finish_reason": "{reason}"')

    def usage(self, usage: Usage) -> bytes:
        """The usage event, which has no choices."""
        fields = self._heading.fields(chunk=True) | {"choices": [], "usage": usage_body(usage)}
        return f"data: {_text(fields)}\n\n".encode()

    def _delta(self, index: int, delta: str, odds: str = "null") -> bytes:
        return self._event(f'{index}, "delta": {delta}, "logprobs": {odds}, "finish_reason": null')

    def _event(self, choice: str) -> bytes:
        return f"{self._before}{choice}{self._after}".encode()


def failure(error: TokenmillError) -> bytes:
    """The last event of a stream that failed."""
    return b"data: " + encode(error_body(error)) + b"\n\n"


class CompletionEncoder:
    """Writes chats and completions; see `AnswerEncoder`."""

    def __init__(self, heading: Heading, *, include_usage: bool) -> None:
        self._heading = heading
        self._chunks = Chunks(heading, include_usage=include_usage)
        self._include_usage = include_usage
        self._calls: Counter[int] = Counter()  # by choice

    def whole(self, answers: Sequence[Answer], usage: Usage) -> Mapping[str, Any]:
        """The response object."""
        choices = [choice(self._heading.endpoint, answer, index) for index, answer in enumerate(answers)]
        return self._heading.fields(chunk=False) | {"choices": choices, "usage": usage_body(usage)}

    def opening(self, index: int) -> bytes:
        """The first event of a choice."""
        return self._chunks.opening(index)

    def parts(self, index: int, parts: Iterable[AnswerPart]) -> bytes:
        """One event for each part."""
        return b"".join([self._part(index, part) for part in parts])

    def end(self, index: int, reason: FinishReason) -> bytes:
        """The last event of a choice."""
        return self._chunks.end(index, reason)

    def closing(self, usage: Usage) -> bytes:
        """The usage, if the client asked for it, and the end mark."""
        return (self._chunks.usage(usage) if self._include_usage else b"") + DONE

    def failure(self, error: TokenmillError) -> bytes:
        """An error event."""
        return failure(error)

    def _part(self, index: int, part: AnswerPart) -> bytes:
        if isinstance(part, AnswerText):
            return self._chunks.text(index, part.text, part.logprobs)
        if isinstance(part, ReasoningPart):
            return self._chunks.reasoning(index, part.text)
        self._calls[index] += 1
        return self._chunks.tool_call(index, self._calls[index] - 1, part.body())


@asynccontextmanager
async def merged(streams: Sequence[AsyncGenerator[_T, None]]) -> AsyncIterator[AsyncIterator[tuple[int, _T]]]:
    """Read all streams concurrently; yields (stream index, event) in order of arrival.

    The first error ends the iteration. Leaving the block closes every stream.
    """
    free_places = asyncio.Semaphore(_MAX_QUEUED_EVENTS)
    queue: asyncio.Queue[tuple[int, _T] | BaseException | None] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[_T, None]) -> None:
        async with aclosing(stream):
            async for event in stream:
                await free_places.acquire()
                queue.put_nowait((index, event))

    async def events() -> AsyncIterator[tuple[int, _T]]:
        running = len(streams)
        while running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
                continue
            free_places.release()
            yield item

    def ended(task: "asyncio.Task[None]") -> None:
        queue.put_nowait(None if task.cancelled() else task.exception())

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    for task in tasks:
        task.add_done_callback(ended)
    try:
        yield events()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
