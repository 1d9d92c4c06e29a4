"""Parses streamed responses of servers: events, chunks, token probabilities, usage.

Pure. Supports OpenAI's format and the additions of llama.cpp (`timings`), vLLM (usage in every chunk) and ik_llama.cpp
(usage without cached tokens).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenmill.engine.engine import Answer, EngineKind, FinishReason, Piece, Timings, TokenLogprob, Usage
from tokenmill.errors import EngineError

DONE = "[DONE]"
_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
}


def data_of(line: str) -> str | None:
    """The payload of a line of server-sent events; None for comments (pings), event names and blank lines."""
    name, colon, value = line.partition(":")
    # older llama.cpp and ik_llama.cpp send errors in an `error` field
    return value.strip() if colon and name in ("data", "error") else None


def object_of(text: str) -> dict[str, Any]:
    """Parse a JSON object; EngineError if it is something else."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise EngineError(f"the server did not send JSON: {text[:200]!r}") from error
    if not isinstance(value, dict):
        raise EngineError(f"the server did not send a JSON object: {text[:200]!r}")
    return value


@dataclass(slots=True)
class Collector:
    """Collects the chunks of one stream: returns pieces as they arrive, and the answer at the end."""

    kind: EngineKind
    chat: bool
    top_logprobs: int | None  # as requested
    max_tokens: int | None
    slot: int | None = None
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    counted: int = 0  # generated tokens so far
    finish: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    timings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether the server has sent a finish reason."""
        return self.finish is not None

    def take(self, chunk: Mapping[str, Any]) -> Piece | None:
        """Add a chunk and return its piece, if any."""
        self.usage = chunk.get("usage") or self.usage
        self.timings = chunk.get("timings") or self.timings
        choices = chunk.get("choices") or ()
        if not choices:
            return None
        choice = choices[0]
        self.finish = choice.get("finish_reason") or self.finish
        text, reasoning = self._delta(choice.get("delta") or {}) if self.chat else (choice.get("text") or "", "")
        probabilities = logprobs_of(choice.get("logprobs"), self.top_logprobs)
        self.text.append(text)
        self.logprobs += probabilities
        tokens = self._new_tokens(bool(text or reasoning), len(probabilities))
        return Piece(text, tokens, probabilities, reasoning) if text or reasoning or tokens or probabilities else None

    def answer(self, cached_tokens: int | None = None) -> Answer:
        """Return the complete answer. `cached_tokens` is used if the stream did not report them."""
        text = "".join(self.text)
        usage = self.use()
        if usage.cached_tokens is None:
            usage = Usage(usage.prompt_tokens, usage.completion_tokens, cached_tokens)
        reason, notes = self._reason(usage)
        return Answer(
            text,
            reason,
            usage,
            self._timings(),
            tuple(self.logprobs) if self.top_logprobs is not None else None,
            self._message(text) if self.chat else None,
            self.slot,
            notes,
        )

    def use(self) -> Usage:
        """Return the token counts; EngineError if the server did not send them."""
        prompt = self.usage.get("prompt_tokens")
        completion = self.usage.get("completion_tokens")
        cached = self.timings.get("cache_n")
        computed = self.timings.get("prompt_n")
        if prompt is None and cached is not None and computed is not None:
            prompt = cached + computed
            completion = self.timings.get("predicted_n")
        if prompt is None or completion is None:
            raise EngineError(
                "the server did not report token usage",
                hint="use a newer version, which supports stream_options.include_usage",
            )
        if cached is None:
            cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if cached is None and computed is not None:
            cached = max(0, prompt - computed)  # ik_llama.cpp
        return Usage(prompt, completion, cached)

    def _delta(self, delta: Mapping[str, Any]) -> tuple[str, str]:
        """The text and the reasoning of a delta; its tool calls are collected."""
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        self.reasoning.append(reasoning)
        for part in delta.get("tool_calls") or ():
            call = self.calls.setdefault(
                part.get("index") or 0, {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
            )
            call["id"] = part.get("id") or call["id"]
            function = part.get("function") or {}
            call["function"]["name"] += function.get("name") or ""
            call["function"]["arguments"] += function.get("arguments") or ""
        return delta.get("content") or "", reasoning

    def _new_tokens(self, text: bool, probabilities: int) -> int:
        """Number of tokens in the last chunk: the server's count, else the number of logprobs, else one."""
        reported = self.timings.get("predicted_n") or self.usage.get("completion_tokens")
        new = max(0, reported - self.counted) if reported is not None else probabilities or int(text)
        self.counted += new
        return new

    def _reason(self, usage: Usage) -> tuple[FinishReason, tuple[str, ...]]:
        finish = self.finish or ""
        if finish in ("abort", "error"):
            raise EngineError(f"the server aborted the request (finish_reason {finish!r})")
        if self.calls and finish == "stop":
            return "tool_calls", ()
        if (
            self.kind == "ik_llama"
            and finish == "stop"
            and self.max_tokens
            and usage.completion_tokens >= self.max_tokens
        ):
            return "length", ()  # its chats always end with `stop`
        if finish in _REASONS:
            return _REASONS[finish], ()
        return "stop", (f"the server reported finish_reason {finish!r}",)

    def _timings(self) -> Timings:
        prefill = self.timings.get("prompt_ms")
        decode = self.timings.get("predicted_ms")
        return Timings(
            prefill_s=prefill / 1000 if prefill is not None else None,
            decode_s=decode / 1000 if decode is not None else None,
        )

    def _message(self, text: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not self.calls else None}
        reasoning = "".join(self.reasoning)
        if reasoning:
            message["reasoning_content"] = reasoning
        if self.calls:
            message["tool_calls"] = [call for _, call in sorted(self.calls.items())]
        return message


def logprobs_of(given: Any, top: int | None) -> tuple[TokenLogprob, ...]:
    """Parse the logprobs of a chunk, in the format of chats or the older one of completions."""
    if not given or top is None:
        return ()
    if given.get("content") is not None:
        return tuple(_entry(entry, top) for entry in given["content"])
    tokens = given.get("tokens") or ()
    chosen = given.get("token_logprobs") or ()
    top_tokens = given.get("top_logprobs") or [None] * len(tokens)
    return tuple(
        TokenLogprob(token, None, logprob, token.encode(), _ranked(others, top))
        for token, logprob, others in zip(tokens, chosen, top_tokens, strict=True)
        if logprob is not None
    )


def _entry(entry: Mapping[str, Any], top: int) -> TokenLogprob:
    raw = entry.get("bytes")
    others = tuple(_entry(other, 0) for other in (entry.get("top_logprobs") or ())[:top])
    raw = bytes(raw) if raw is not None else entry["token"].encode()
    return TokenLogprob(entry["token"], entry.get("id"), entry["logprob"], raw, others)


def _ranked(others: Mapping[str, float] | None, top: int) -> tuple[TokenLogprob, ...]:
    best = sorted((others or {}).items(), key=lambda item: -item[1])[:top]  # may have one more: the sampled token
    return tuple(TokenLogprob(token, None, logprob, token.encode()) for token, logprob in best)
