"""Decides which requests a server can answer unchanged, and reads usage from its responses.

A request is relayed if every key in it has the same meaning for the server; its bytes stay unchanged except for the
model's name and, for vLLM, the priority. Usage is read from the end of the response. Pure: sockets are in `upstream`,
the sequence is in `relaying`.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenmill.engine.engine import Speech, Timings, Usage
from tokenmill.engine.schema_bounds import bounded
from tokenmill.engine.server.request import PATIENT, URGENT
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
# By engine kind. Other keys have another meaning or spelling there: the engine protocol translates them.
# ik_llama.cpp is not listed, because its streams do not report finish reasons correctly.
_KEYS: Mapping[str, frozenset[str]] = {
    "llama-server": _EVERYWHERE | {"max_completion_tokens", "top_k", "min_p", "repeat_penalty"},
    "vllm": _EVERYWHERE | {"max_completion_tokens", "logprobs", "top_logprobs", "logit_bias", "min_p"},
    "url": _EVERYWHERE | {"max_completion_tokens", "logprobs", "top_logprobs", "logit_bias"},
}
_MODEL = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.)*")')
_ERROR = re.compile(rb'^(?:error:|data: ?\{"error")', re.MULTILINE)
_TAIL_BYTES = 8192  # bytes kept of a response's end, which contain the usage
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
_NOT_ITS_OWN = frozenset((b"content-length", b"date", b"server", b"set-cookie", b"x-request-id", b"www-authenticate"))


def _has_compilable_schemas(given: Mapping[str, Any]) -> bool:
    """Whether the server may get the JSON schemas unchanged; if not, the engine protocol bounds or rejects them."""
    schemas = [given.get("response_format"), given.get("tools")]
    try:
        return bool(bounded(schemas) == schemas)
    except RequestRefused:
        return False


def relayed_body(request: ParsedRequest, speech: Speech) -> bytes | None:
    """The bytes to send; None if the request must be translated, or needs a feature of the gateway."""
    keys = _KEYS.get(speech.kind)
    if keys is None or len(request.calls) != 1:
        return None
    if speech.tools:
        keys |= _TOOLS
    if not keys.issuperset(request.body) or not _has_compilable_schemas(request.body):
        return None
    wanted = request.body.get("max_tokens", request.body.get("max_completion_tokens"))
    if speech.kind != "llama-server" and (wanted == 0 or (wanted is None and request.endpoint == "completion")):
        return None
    more: dict[str, Any] = {}
    if speech.priorities:
        more["priority"] = URGENT if request.lane == "interactive" else PATIENT
    if request.stream and not request.include_usage and speech.kind != "llama-server":
        more["stream_options"] = {**(request.body.get("stream_options") or {}), "include_usage": True}
    if not more and request.body.get("model") == speech.model:
        return request.raw
    return _spliced(request.raw, request.body, speech.model, more) or encode(
        {**request.body, "model": speech.model, **more}
    )


def hides_usage(request: ParsedRequest, speech: Speech) -> bool:
    """Whether only the gateway asked for the usage event; llama.cpp has usage in its last event anyway."""
    return request.stream and not request.include_usage and speech.kind != "llama-server"


def _spliced(body: bytes, given: Mapping[str, Any], model: str, more: Mapping[str, Any]) -> bytes | None:
    """The bytes with another model and additional keys; None if that cannot be done reliably."""
    if body.count(b'"model"') != 1 or b"\\u006" in body or not more.keys().isdisjoint(given):
        return None
    found = _MODEL.search(body)
    end = body.rstrip()
    if found is None or json.loads(found[1]) != given.get("model") or not end.endswith(b"}"):
        return None
    added = b"".join(b"," + json.dumps(key).encode() + b":" + encode_value(value) for key, value in more.items())
    return body[: found.start(1)] + json.dumps(model).encode() + body[found.end(1) : len(end) - 1] + added + b"}"


def encode_value(value: Any) -> bytes:
    """Compact JSON."""
    return json.dumps(value, separators=(",", ":")).encode()


def relayed_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The server's headers that are passed to the client, without connection headers and our own."""
    headers = list(headers)
    named = {name.strip().lower() for key, value in headers if key == b"connection" for name in value.split(b",")}
    return [
        (name, value)
        for name, value in headers
        if name not in _HOP_BY_HOP
        and name not in _NOT_ITS_OWN
        and name not in named
        and not name.startswith((b"access-control-", b"x-tokenmill-"))
    ]


@dataclass(frozen=True, slots=True)
class ObservedUsage:
    """Usage of a response, as far as reported."""

    usage: Usage | None
    timings: Timings = field(default_factory=Timings)


class ObservedAnswer:
    """One relayed response: keeps its last bytes, counts events, and can remove one event."""

    def __init__(self, *, hide_usage: bool = False) -> None:
        self.events = 0
        self._hide = hide_usage
        self._held = b""  # the beginning of an event that may have to be removed
        self._tail = b""

    def take(self, data: bytes) -> bytes:
        """The part of received bytes to pass on."""
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
        """Whether the server reported an error at the end of the stream."""
        return _ERROR.search(self._tail) is not None

    def spent(self) -> ObservedUsage:
        """The reported usage."""
        return spent_in(self._tail)

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


def spent_in(text: bytes) -> ObservedUsage:
    """The usage in the end of a response: `usage` of every server, `timings` of llama.cpp."""
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


def says_something(data: bytes) -> bool:
    """Whether the beginning of a stream has more than a role; from then on no other backend may answer."""
    for line in data.splitlines():
        if not line.startswith(b"data:"):
            continue
        try:
            chunk = json.loads(line[5:])
        except ValueError:
            return True  # the end of a stream, or half an event
        choices = chunk.get("choices") if isinstance(chunk, dict) else None
        if not choices or not isinstance(choices[0], dict):
            return True
        delta = choices[0].get("delta")
        if not isinstance(delta, dict) or choices[0].get("finish_reason"):
            return True
        if any(value for name, value in delta.items() if name != "role"):
            return True
    return False
