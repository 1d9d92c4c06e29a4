"""Decides which requests can be relayed to a server unchanged, and reads usage from its responses.

A request is relayed if every key in it has the same meaning for the server; only the model's name and, for vLLM, the
priority are replaced. Usage is read from the end of the response. Pure: sockets are in `http_client`, the sequence is
in `relay`.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenmill.engine.engine import HttpApi, Timings, Usage
from tokenmill.engine.media import media_kinds
from tokenmill.engine.schema_bounds import bounded
from tokenmill.engine.server.request import BATCH_PRIORITY, INTERACTIVE_PRIORITY
from tokenmill.errors import RequestRefused
from tokenmill.gateway.http.request import ParsedRequest
from tokenmill.storage.json_text import encode

_EVERYWHERE = frozenset(
    (
        "model",
        "messages",
        "prompt",
        "max_tokens",
        "temperature",
        "top_p",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "response_format",
        "user",
    )
)
_TOOLS = frozenset(("tools", "tool_choice", "parallel_tool_calls"))
# Relayable keys by engine kind; requests with other keys are translated by the engine protocol.
# ik_llama.cpp is missing, because its streams report wrong finish reasons.
_KEYS: Mapping[str, frozenset[str]] = {
    "llama-server": _EVERYWHERE | {"max_completion_tokens", "top_k", "min_p", "repeat_penalty"},
    "vllm": _EVERYWHERE | {"max_completion_tokens", "logprobs", "top_logprobs", "logit_bias", "min_p"},
    "url": _EVERYWHERE | {"max_completion_tokens", "logprobs", "top_logprobs", "logit_bias"},
}
_MODEL = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.)*")')
_ERROR = re.compile(rb'^(?:error:|data: ?\{"error")', re.MULTILINE)
_TAIL_BYTES = 8192  # kept from the end of a response, which contains the usage
_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
_REPLACED = frozenset((b"content-length", b"date", b"server", b"set-cookie", b"x-request-id", b"www-authenticate"))


def _has_compilable_schemas(given: Mapping[str, Any]) -> bool:
    """Whether the JSON schemas can be relayed unchanged; otherwise the engine protocol bounds or rejects them."""
    schemas = [given.get("response_format"), given.get("tools")]
    try:
        return bool(bounded(schemas) == schemas)
    except RequestRefused:
        return False


def relayed_body(request: ParsedRequest, api: HttpApi) -> bytes | None:
    """The body to send; None if the request cannot be relayed."""
    keys = _KEYS.get(api.kind)
    if keys is None or request.raw is None or len(request.calls) != 1:
        return None
    if api.tools:
        keys |= _TOOLS
    messages = request.body.get("messages") or ()
    if media_kinds(messages) and (not api.remote_media or not (api.images and api.audio)):
        return None  # the engine protocol checks them
    if not keys.issuperset(request.body) or not _has_compilable_schemas(request.body):
        return None
    wanted = request.body.get("max_tokens", request.body.get("max_completion_tokens"))
    if api.kind != "llama-server" and (wanted == 0 or (wanted is None and request.endpoint == "completion")):
        return None
    more: dict[str, Any] = {}
    if api.priorities:
        more["priority"] = INTERACTIVE_PRIORITY if request.priority == "interactive" else BATCH_PRIORITY
    if request.stream and not request.include_usage and api.kind != "llama-server":
        more["stream_options"] = {**(request.body.get("stream_options") or {}), "include_usage": True}
    if not more and request.body.get("model") == api.model:
        return request.raw
    return _spliced(request.raw, request.body, api.model, more) or encode({**request.body, "model": api.model, **more})


def hides_usage(request: ParsedRequest, api: HttpApi) -> bool:
    """Whether the usage event must be removed, because the gateway requested it and the client did not."""
    return request.stream and not request.include_usage and api.kind != "llama-server"


def _spliced(body: bytes, given: Mapping[str, Any], model: str, more: Mapping[str, Any]) -> bytes | None:
    """The body with another model and additional keys; None if it cannot be edited safely."""
    if body.count(b'"model"') != 1 or b"\\u006" in body or not more.keys().isdisjoint(given):
        return None
    found = _MODEL.search(body)
    end = body.rstrip()
    if found is None or json.loads(found[1]) != given.get("model") or not end.endswith(b"}"):
        return None
    added = b"".join(b"," + json.dumps(key).encode() + b":" + encode_value(value) for key, value in more.items())
    return body[: found.start(1)] + json.dumps(model).encode() + body[found.end(1) : len(end) - 1] + added + b"}"


def encode_value(value: Any) -> bytes:
    """`value` as compact JSON."""
    return json.dumps(value, separators=(",", ":")).encode()


def relayed_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The server's headers that are passed to the client."""
    headers = list(headers)
    named = {name.strip().lower() for key, value in headers if key == b"connection" for name in value.split(b",")}
    return [
        (name, value)
        for name, value in headers
        if name not in _HOP_BY_HOP
        and name not in _REPLACED
        and name not in named
        and not name.startswith((b"access-control-", b"x-tokenmill-"))
    ]


@dataclass(frozen=True, slots=True)
class ObservedUsage:
    """Usage that a response reported."""

    usage: Usage | None
    timings: Timings = field(default_factory=Timings)


class ObservedAnswer:
    """Observes one relayed response: counts events, keeps the last bytes, and removes the usage event if asked to."""

    def __init__(self, *, hide_usage: bool = False) -> None:
        self.events = 0
        self._hide = hide_usage
        self._held = b""  # an incomplete event that may have to be removed
        self._tail = b""

    def take(self, data: bytes) -> bytes:
        """Observe received bytes; returns the bytes to pass on."""
        self.events += data.count(b"data: ")
        self._tail = data if len(data) >= _TAIL_BYTES else (self._tail + data)[-_TAIL_BYTES:]
        return self._without_usage(data) if self._hide else data

    def end(self) -> bytes:
        """The remaining bytes to pass on."""
        left = self._held
        self._held = b""
        return left

    @property
    def ended_well(self) -> bool:
        """Whether the stream's last event was received."""
        return b"data: [DONE]" in self._tail[-64:]

    @property
    def failed(self) -> bool:
        """Whether the stream ended with an error event."""
        return _ERROR.search(self._tail) is not None

    def usage(self) -> ObservedUsage:
        """The reported usage."""
        return usage_in(self._tail)

    def _without_usage(self, data: bytes) -> bytes:
        data = self._held + data
        end = max(data.rfind(b"\n\n") + 2, data.rfind(b"\r\n\r\n") + 4)
        end = 0 if end <= 3 else end
        whole = data[:end]
        self._held = data[end:]
        if b'"usage"' not in whole:
            return whole
        mark = b"\r\n\r\n" if b"\r\n\r\n" in whole else b"\n\n"
        return b"".join(event + mark for event in whole.split(mark)[:-1] if not _only_usage(event))


def _only_usage(event: bytes) -> bool:
    """Whether an event contains only usage."""
    if b'"usage"' not in event:
        return False
    try:
        chunk = json.loads(event.partition(b":")[2])
    except ValueError:
        return False
    return isinstance(chunk, dict) and bool(chunk.get("usage")) and not chunk.get("choices")


_COUNTS = re.compile(
    rb'"(prompt_tokens|completion_tokens|cached_tokens|prompt_n|predicted_n|cache_n|prompt_ms|predicted_ms)"\s*:\s*'
    rb"(\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)"
)


def usage_in(text: bytes) -> ObservedUsage:
    """The usage in the end of a response, read from `usage` and llama.cpp's `timings`."""
    starts = [place for name in (b'"usage"', b'"timings"') if (place := text.rfind(name)) >= 0]
    if not starts:
        return ObservedUsage(None)
    found: dict[bytes, bytes] = dict(_COUNTS.findall(text[min(starts) :]))
    whole = {name: int(float(value)) for name, value in found.items()}
    prompt = whole.get(b"prompt_tokens")
    completion = whole.get(b"completion_tokens")
    cached = whole.get(b"cached_tokens")
    if b"cache_n" in whole:
        cached = whole[b"cache_n"]
        if prompt is None and b"prompt_n" in whole:
            prompt = cached + whole[b"prompt_n"]
            completion = whole.get(b"predicted_n")
    seconds = {name: float(found[name]) / 1000 for name in (b"prompt_ms", b"predicted_ms") if name in found}
    timings = Timings(prefill_s=seconds.get(b"prompt_ms"), decode_s=seconds.get(b"predicted_ms"))
    return ObservedUsage(None if prompt is None or completion is None else Usage(prompt, completion, cached), timings)


def has_content(data: bytes) -> bool:
    """Whether the beginning of a stream contains more than a role; from then on no other backend may answer."""
    for line in data.splitlines():
        if not line.startswith(b"data:"):
            continue
        try:
            chunk = json.loads(line[5:])
        except ValueError:
            return True  # the end of a stream, or an incomplete event
        choices = chunk.get("choices") if isinstance(chunk, dict) else None
        if not choices or not isinstance(choices[0], dict):
            return True
        delta = choices[0].get("delta")
        if not isinstance(delta, dict) or choices[0].get("finish_reason"):
            return True
        if any(value for name, value in delta.items() if name != "role"):
            return True
    return False
