"""Requests that a server can answer as they are, and its answers, as bytes.

A request is relayed where every key in it means to that server what it means here; its bytes stay as they came but for
the model's name and, for vLLM, the priority. What it used is read from the end of the answer. Pure: sockets are
upstream.py's, the order of things is backends.py's.
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
from tokenmill.gateway.request import ParsedRequest
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
# By kind; what is missing has another meaning or spelling there and goes through the engine protocol, which knows it.
# ik_llama.cpp is missing altogether: its streams do not say truly why they ended.
_KEYS: Mapping[str, frozenset[str]] = {
    "llama-server": _EVERYWHERE | {"max_completion_tokens", "top_k", "min_p", "repeat_penalty"},
    "vllm": _EVERYWHERE | {"max_completion_tokens", "logprobs", "top_logprobs", "logit_bias", "min_p"},
    "url": _EVERYWHERE | {"max_completion_tokens", "logprobs", "top_logprobs", "logit_bias"},
}
_MODEL = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.)*")')
_ERROR = re.compile(rb'^(?:error:|data: ?\{"error")', re.MULTILINE)
_TAIL_BYTES = 8192  # of an answer: its last events, with what it used
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
    """Whether the server may get the JSON schemas as they are; if not, the engine protocol bounds or refuses them."""
    schemas = [given.get("response_format"), given.get("tools")]
    try:
        return bool(bounded(schemas) == schemas)
    except RequestRefused:
        return False


def relayed_body(request: ParsedRequest, speech: Speech) -> bytes | None:
    """The bytes to send; None: this server needs it said in another way, or it asks for what is ours."""
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
    """Whether the stream's event of usage was asked for by us alone; llama.cpp tells in its last event anyhow."""
    return request.stream and not request.include_usage and speech.kind != "llama-server"


def _spliced(body: bytes, given: Mapping[str, Any], model: str, more: Mapping[str, Any]) -> bytes | None:
    """The same bytes with another model and further keys; None where that is not certain to be right."""
    if body.count(b'"model"') != 1 or b"\\u006" in body or not more.keys().isdisjoint(given):
        return None
    found = _MODEL.search(body)
    end = body.rstrip()
    if found is None or json.loads(found[1]) != given.get("model") or not end.endswith(b"}"):
        return None
    added = b"".join(b"," + json.dumps(key).encode() + b":" + encode_value(value) for key, value in more.items())
    return body[: found.start(1)] + json.dumps(model).encode() + body[found.end(1) : len(end) - 1] + added + b"}"


def encode_value(value: Any) -> bytes:
    """A JSON value in few bytes."""
    return json.dumps(value, separators=(",", ":")).encode()


def relayed_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """A server's headers that are for the client: not those of the connection, nor those that speak for us."""
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
    """What an answer used, as far as it says."""

    usage: Usage | None
    timings: Timings = field(default_factory=Timings)


class ObservedAnswer:
    """One answer going by: its last bytes are kept, events are counted, one event may be taken out."""

    def __init__(self, *, hide_usage: bool = False) -> None:
        self.events = 0
        self._hide = hide_usage
        self._held = b""  # the beginning of an event, where one may have to be taken out
        self._tail = b""

    def take(self, data: bytes) -> bytes:
        """What to pass on of what came."""
        self.events += data.count(b"data: ")
        self._tail = data if len(data) >= _TAIL_BYTES else (self._tail + data)[-_TAIL_BYTES:]
        return self._without_usage(data) if self._hide else data

    def end(self) -> bytes:
        """What is left to pass on."""
        left = self._held
        self._held = b""
        return left

    @property
    def ended_well(self) -> bool:
        """Whether a stream's last event was there."""
        return b"data: [DONE]" in self._tail[-64:]

    @property
    def failed(self) -> bool:
        """Whether the server itself told of an error at the end of the stream."""
        return _ERROR.search(self._tail) is not None

    def spent(self) -> ObservedUsage:
        """What it used."""
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
    """Whether an event tells what was used and nothing else."""
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
    """What the end of an answer says was used: `usage` of every server, `timings` of llama.cpp's."""
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
    """Whether the beginning of a stream has more than a role in it: from then on nobody else may answer."""
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
