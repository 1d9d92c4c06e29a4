"""Writes answers as messages, or as the streaming events of Anthropic's Messages API.

    message_start
    for each block: content_block_start, content_block_delta ..., content_block_stop
    message_delta (stop reason and usage), message_stop      error: the stream failed

The number of prompt tokens is known at the end, so `message_start` counts none and `message_delta` all.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict

from tokenmill.engine.answer_parts import AnswerPart, AnswerText, parts_of
from tokenmill.engine.engine import Answer, FinishReason, Usage
from tokenmill.engine.output_parser import ReasoningPart
from tokenmill.engine.tool_formats import ToolCall
from tokenmill.errors import TokenmillError
from tokenmill.gateway.http.faults import anthropic_error
from tokenmill.storage.json_text import encode, parse

Block = dict[str, Any]
_STOP_REASONS: Mapping[FinishReason, str] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageUsage(TypedDict, total=False):
    """Tokens of a message; `cache_read_input_tokens` are not part of `input_tokens`."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int


class MessageObject(TypedDict):
    """A message of the model."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "tool_use"] | None
    stop_sequence: None
    usage: MessageUsage


class MessageEncoder:
    """Writes one message; see `AnswerEncoder`."""

    def __init__(self, id: str, model: str) -> None:
        self._id = id
        self._model = model
        self._index = -1  # of the last block
        self._open: str | None = None  # type of the open block
        self._reason: FinishReason = "stop"

    def whole(self, answers: Sequence[Answer], usage: Usage) -> Mapping[str, Any]:
        """The message."""
        answer = answers[0]
        content = [_block(part) for part in parts_of(answer)]
        return self._message(content, _STOP_REASONS[answer.finish_reason], message_usage(usage))

    def opening(self, index: int) -> bytes:
        """The start of the message."""
        return _event("message_start", message=self._message([], None, {"input_tokens": 0, "output_tokens": 0}))

    def parts(self, index: int, parts: Iterable[AnswerPart]) -> bytes:
        """The events of some parts."""
        return b"".join([event for part in parts for event in self._part(part)])

    def end(self, index: int, reason: FinishReason) -> bytes:
        """The end of the last block; an answer without any has an empty text."""
        self._reason = reason
        opening = b"" if self._index >= 0 else self._start(_block(AnswerText("")))
        return b"".join([opening, *self._close()])

    def closing(self, usage: Usage) -> bytes:
        """The stop reason, the usage, and the end."""
        delta = {"stop_reason": _STOP_REASONS[self._reason], "stop_sequence": None}
        return _event("message_delta", delta=delta, usage=message_usage(usage)) + _event("message_stop")

    def failure(self, error: TokenmillError) -> bytes:
        """An error event."""
        return b"event: error\ndata: " + encode(anthropic_error(error)) + b"\n\n"

    def _message(self, content: list[Block], reason: str | None, usage: MessageUsage) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": None,
            "usage": usage,
        }

    def _part(self, part: AnswerPart) -> Iterator[bytes]:
        if isinstance(part, ToolCall):
            yield from self._close()
            yield self._start({"type": "tool_use", "id": part.id, "name": part.name, "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": part.arguments})
            yield from self._close()
            return
        if not part.text:
            return  # probabilities of tokens that are not part of a text
        kind = "thinking" if isinstance(part, ReasoningPart) else "text"
        if self._open != kind:
            yield from self._close()
            yield self._start(_block(type(part)("")))
        yield self._delta({"type": f"{kind}_delta", kind: part.text})

    def _start(self, block: Block) -> bytes:
        self._index += 1
        self._open = block["type"]
        return _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: Block) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> Iterator[bytes]:
        """End the open block, if any."""
        if self._open is not None:
            if self._open == "thinking":
                yield self._delta({"type": "signature_delta", "signature": ""})
            self._open = None
            yield _event("content_block_stop", index=self._index)


def message_usage(usage: Usage) -> MessageUsage:
    """Token counts of a message."""
    cached = usage.cached_tokens
    body: MessageUsage = {
        "input_tokens": usage.prompt_tokens - (cached or 0),
        "output_tokens": usage.completion_tokens,
    }
    if cached is not None:
        body["cache_read_input_tokens"] = cached
    return body


def _block(part: AnswerPart) -> Block:
    if isinstance(part, ReasoningPart):
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    if isinstance(part, ToolCall):
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": _arguments(part.arguments)}
    return {"type": "text", "text": part.text}


def _arguments(text: str) -> dict[str, Any]:
    """The arguments of a call; empty if the answer was cut off inside of them."""
    try:
        return parse(text)
    except ValueError:
        return {}


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **fields}) + b"\n\n"
