"""Answers as events of a stream, byte for byte as OpenAI's clients read them.

Pure. What does not change from token to token is written once; a token costs one small JSON string.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.engine.engine import TokenLogprob, Usage
from tokenmill.errors import TokenmillError
from tokenmill.gateway.faults import error_body
from tokenmill.jobs.openai.answers import chat_logprobs, text_logprobs, usage_body
from tokenmill.jobs.openai.call import Endpoint
from tokenmill.storage.json_text import encode

DONE = b"data: [DONE]\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_text = json.JSONEncoder(ensure_ascii=True).encode  # escapes: half of a surrogate pair stays readable JSON


@dataclass(frozen=True, slots=True)
class Heading:
    """What every chunk and every answer says of itself."""

    endpoint: Endpoint
    id: str  # with its prefix
    created: int
    model: str
    fingerprint: str

    def fields(self, *, chunk: bool) -> dict[str, Any]:
        """As fields of an answer or a chunk."""
        chat = "chat.completion.chunk" if chunk else "chat.completion"
        return {
            "id": self.id,
            "object": chat if self.endpoint == "chat" else "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


class Chunks:
    """Writes the events of one stream."""

    def __init__(self, heading: Heading, *, include_usage: bool) -> None:
        self._chat = heading.endpoint == "chat"
        self._heading = heading
        opening = _text(heading.fields(chunk=True))[:-1]
        self._before = f'data: {opening}, "choices": [{{"index": '
        self._after = '}], "usage": null}\n\n' if include_usage else "}]}\n\n"
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> bytes:
        """The first event of a choice; completions have none."""
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
        """What the model thought, where the engine tells it apart."""
        return self._delta(index, f'{{"reasoning_content": {_text(text)}}}')

    def tool_call(self, index: int, number: int, call: Mapping[str, Any]) -> bytes:
        """One tool call, whole."""
        return self._delta(index, f'{{"tool_calls": [{_text({"index": number, **call})}]}}')

    def end(self, index: int, reason: str) -> bytes:
        """The last event of a choice."""
        if self._chat:
            return self._event(f'{index}, "delta": {{}}, "logprobs": null, "finish_reason": "{reason}"')
        return self._event(f'{index}, "text": "", "logprobs": null, "finish_reason": "{reason}"')

    def usage(self, usage: Usage) -> bytes:
        """What it cost, with no choices."""
        fields = self._heading.fields(chunk=True) | {"choices": [], "usage": usage_body(usage)}
        return f"data: {_text(fields)}\n\n".encode()

    def _delta(self, index: int, delta: str, odds: str = "null") -> bytes:
        return self._event(f'{index}, "delta": {delta}, "logprobs": {odds}, "finish_reason": null')

    def _event(self, choice: str) -> bytes:
        return f"{self._before}{choice}{self._after}".encode()


def failure(error: TokenmillError) -> bytes:
    """The honest end of a stream that broke off; nothing follows it."""
    return b"data: " + encode(error_body(error)) + b"\n\n"
