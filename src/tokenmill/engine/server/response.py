"""The OpenAI protocol as the servers speak it, read: lines of a stream, chunks, token probabilities.

Pure. What each server adds is taken where it comes: llama.cpp's `timings`, vLLM's usage in every chunk, ik_llama.cpp's
usage without cached tokens. Requests are written in server_bodies.py, errors are read in server_faults.py.
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
    """The payload of one line of a stream of events; None for comments (pings), names and blank lines."""
    name, colon, value = line.partition(":")
    # older llama.cpp and ik_llama.cpp send their errors as a field of that name, which httpx-sse would drop
    return value.strip() if colon and name in ("data", "error") else None


def object_of(text: str) -> dict[str, Any]:
    """A JSON object, or EngineError."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise EngineError(f"the server sent what is not JSON: {text[:200]!r}") from error
    if not isinstance(value, dict):
        raise EngineError(f"the server sent what is no JSON object: {text[:200]!r}")
    return value


@dataclass(slots=True)
class Collector:
    """One stream: chunks in, pieces out, and all of it as an answer at the end."""

    kind: EngineKind
    chat: bool
    top_logprobs: int | None  # as asked for
    max_tokens: int | None
    lane: int | None = None
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
        """Whether the server has said why it stopped."""
        return self.finish is not None

    def take(self, chunk: Mapping[str, Any]) -> Piece | None:
        """Add a chunk; the piece it brings, if any."""
        self.usage = chunk.get("usage") or self.usage
        self.timings = chunk.get("timings") or self.timings
        choices = chunk.get("choices") or ()
        if not choices:
            return None
        choice = choices[0]
        self.finish = choice.get("finish_reason") or self.finish
        text = self._delta(choice.get("delta") or {}) if self.chat else choice.get("text") or ""
        probabilities = logprobs_of(choice.get("logprobs"), self.top_logprobs)
        self.text.append(text)
        self.logprobs += probabilities
        tokens = self._new_tokens(bool(text), len(probabilities))
        return Piece(text, tokens, probabilities) if text or tokens or probabilities else None

    def answer(self, cached_tokens: int | None = None) -> Answer:
        """The whole; `cached_tokens` from elsewhere where the server does not tell here."""
        text = "".join(self.text)
        usage = self.use()
        if usage.cached_tokens is None:
            usage = Usage(usage.prompt_tokens, usage.completion_tokens, cached_tokens)
        reason, notes = self._reason(usage)
        return Answer(
            text,
            reason,
            usage,
            self._spent(),
            tuple(self.logprobs) if self.top_logprobs is not None else None,
            self._message(text) if self.chat else None,
            self.lane,
            notes,
        )

    def use(self) -> Usage:
        """Tokens of prompt and answer."""
        prompt = self.usage.get("prompt_tokens")
        completion = self.usage.get("completion_tokens")
        cached = self.timings.get("cache_n")
        computed = self.timings.get("prompt_n")
        if prompt is None and cached is not None and computed is not None:
            prompt = cached + computed
            completion = self.timings.get("predicted_n")
        if prompt is None or completion is None:
            raise EngineError(
                "the server did not say how many tokens it used",
                hint="it must know stream_options.include_usage; a newer version does",
            )
        if cached is None:
            cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if cached is None and computed is not None:
            cached = max(0, prompt - computed)  # ik_llama.cpp tells both
        return Usage(prompt, completion, cached)

    def _delta(self, delta: Mapping[str, Any]) -> str:
        self.reasoning.append(delta.get("reasoning_content") or delta.get("reasoning") or "")
        for part in delta.get("tool_calls") or ():
            call = self.calls.setdefault(
                part.get("index") or 0, {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
            )
            call["id"] = part.get("id") or call["id"]
            function = part.get("function") or {}
            call["function"]["name"] += function.get("name") or ""
            call["function"]["arguments"] += function.get("arguments") or ""
        return delta.get("content") or ""

    def _new_tokens(self, text: bool, probabilities: int) -> int:
        """Tokens in the chunk just taken: by the server's own count, else by their probabilities, else one."""
        said = self.timings.get("predicted_n") or self.usage.get("completion_tokens")
        new = max(0, said - self.counted) if said is not None else probabilities or int(text)
        self.counted += new
        return new

    def _reason(self, usage: Usage) -> tuple[FinishReason, tuple[str, ...]]:
        said = self.finish or ""
        if said in ("abort", "error"):
            raise EngineError(f"the server gave up on the request: {said}")
        if self.calls and said == "stop":
            return "tool_calls", ()
        if (
            self.kind == "ik_llama"
            and said == "stop"
            and self.max_tokens
            and usage.completion_tokens >= self.max_tokens
        ):
            return "length", ()  # its chats end with `stop` whatever ended them
        if said in _REASONS:
            return _REASONS[said], ()
        return "stop", (f"the server's reason to stop was {said!r}",)

    def _spent(self) -> Timings:
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
    """Token probabilities of a chunk, in the chat's form or in the older one of completions."""
    if not given or top is None:
        return ()
    if given.get("content") is not None:
        return tuple(_entry(entry, top) for entry in given["content"])
    tokens = given.get("tokens") or ()
    chosen = given.get("token_logprobs") or ()
    likeliest = given.get("top_logprobs") or [None] * len(tokens)
    return tuple(
        TokenLogprob(token, None, logprob, token.encode(), _ranked(others, top))
        for token, logprob, others in zip(tokens, chosen, likeliest, strict=True)
        if logprob is not None
    )


def _entry(entry: Mapping[str, Any], top: int) -> TokenLogprob:
    raw = entry.get("bytes")
    others = tuple(_entry(other, 0) for other in (entry.get("top_logprobs") or ())[:top])
    raw = bytes(raw) if raw is not None else entry["token"].encode()
    return TokenLogprob(entry["token"], entry.get("id"), entry["logprob"], raw, others)


def _ranked(others: Mapping[str, float] | None, top: int) -> tuple[TokenLogprob, ...]:
    best = sorted((others or {}).items(), key=lambda item: -item[1])[:top]  # the chosen one may come on top of `top`
    return tuple(TokenLogprob(token, None, logprob, token.encode()) for token, logprob in best)
