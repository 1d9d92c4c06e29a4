"""Protocol between the native worker and its clients: JSON lines over a Unix socket.

    client                                          worker
    {"submit": 7, "request": {...}}                 {"loading": 0.4, "detail": "weights"}        until it is ready
    {"cancel": 7}                                   {"hello": {...}}                             once, when it is
    {"call": 8, "name": "status", "with": {...}}    {"piece": 7, ...} ... {"answer": 7, ...}
                                                    {"result": 8, "value": ...}
                                                    {"error": 7, "kind": "TooLong", ...}
                                                    {"beat": {...}}                              five a second

The client numbers its messages. Client and worker have the same version, and requests were validated when the user
submitted them: this module decodes them without validating again. An error of `MALFORMED` while a message is handled
means that it was written by another program.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter

from tokenmill.engine.engine import (
    Answer,
    Capabilities,
    Chat,
    Counters,
    Identity,
    Piece,
    Prompt,
    Request,
    Sampling,
    Timings,
    TokenLogprob,
    Usage,
)
from tokenmill.engine.fit_params import Buffer
from tokenmill.errors import EngineError, TokenmillError, to_wire

MAX_LINE_BYTES = 256 << 20  # a prompt of a million tokens as numbers is seven megabytes
HEARTBEAT_S = 0.2
MALFORMED = (AttributeError, LookupError, TypeError, ValueError, RecursionError)
_UNSET: tuple[Any, ...] = (None, (), {})


@dataclass(frozen=True, slots=True)
class Handshake:
    """Facts about a worker, sent when it is ready."""

    identity: Identity
    capabilities: Capabilities
    buffers: tuple[Buffer, ...]  # allocations that llama.cpp reports
    load_s: float
    threads: int
    threads_batch: int
    streams: bool = False  # each slot has cells of its own


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent every `HEARTBEAT_S`, so that clients can detect a hung worker."""

    step_age_s: float | None  # age of the current step of the loop; None while no request is in flight
    counters: Counters


HELLO = TypeAdapter(Handshake)
HEARTBEAT = TypeAdapter(Heartbeat)


def line(message: dict[str, Any]) -> bytes:
    """Encode a message."""
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass") + b"\n"


def read(text: bytes) -> dict[str, Any]:
    """Decode a message; EngineError if it is not a JSON object."""
    try:
        message = json.loads(text)
    except ValueError as error:
        raise EngineError(f"the engine's socket carries something else: {text[:60]!r}") from error
    if not isinstance(message, dict):
        raise EngineError(f"the engine's socket carries something else: {text[:60]!r}")
    return message


def request_message(request: Request) -> dict[str, Any]:
    """Encode a request; unset fields are left out."""
    message = {
        **_set_fields(request),
        "prompt": _prompt_out(request.prompt),
        "sampling": _set_fields(request.sampling),
    }
    return message | {"later": [_prompt_out(prompt) for prompt in request.later]} if request.later else message


def request_of(message: dict[str, Any]) -> Request:
    """Decode a request. Raises one of `MALFORMED` if `request_message` did not encode it."""
    sampling = message.get("sampling", {})
    if "logit_bias" in sampling:
        sampling = {**sampling, "logit_bias": tuple((token, bias) for token, bias in sampling["logit_bias"])}
    decoded = {
        "prompt": _prompt_in(message["prompt"]),
        "sampling": Sampling(**sampling),
        "stop": tuple(message.get("stop", ())),
        "later": tuple(map(_prompt_in, message.get("later", ()))),
    }
    return Request(**{**message, **decoded})


def _prompt_out(prompt: Prompt) -> Any:
    return _set_fields(prompt) if isinstance(prompt, Chat) else prompt


def _prompt_in(prompt: Any) -> Prompt:
    if isinstance(prompt, dict):
        return Chat(**{**prompt, "messages": tuple(prompt["messages"]), "tools": tuple(prompt.get("tools", ()))})
    return prompt if isinstance(prompt, str) else tuple(prompt)


def _set_fields(value: Request | Chat | Sampling) -> dict[str, Any]:
    return {name: item for name in value.__slots__ if (item := getattr(value, name)) not in _UNSET}


def failure(number: int, error: TokenmillError) -> dict[str, Any]:
    """The message that reports an error of request `number`."""
    return {"error": number, **to_wire(error)}


def piece_message(number: int, piece: Piece) -> dict[str, Any]:
    """Encode a piece."""
    message = {"piece": number, "text": piece.text, "tokens": piece.tokens}
    return message | {"logprobs": _logprobs_out(piece.logprobs)} if piece.logprobs else message


def piece_of(message: dict[str, Any]) -> Piece:
    """Decode a piece."""
    return Piece(message["text"], message["tokens"], _logprobs_in(message.get("logprobs", ())))


def answer_message(number: int, answer: Answer) -> dict[str, Any]:
    """Encode an answer."""
    return {
        "answer": number,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "usage": asdict(answer.usage),
        "timings": asdict(answer.timings),
        "notes": answer.notes,
        "logprobs": None if answer.logprobs is None else _logprobs_out(answer.logprobs),
    }


def answer_of(message: dict[str, Any]) -> Answer:
    """Decode an answer."""
    logprobs = message["logprobs"]
    return Answer(
        message["text"],
        message["finish_reason"],
        Usage(**message["usage"]),
        Timings(**message["timings"]),
        None if logprobs is None else _logprobs_in(logprobs),
        notes=tuple(message["notes"]),
    )


def _logprobs_out(logprobs: Iterable[TokenLogprob]) -> list[list[Any]]:
    """Encode logprobs; the bytes of a token are hexadecimal because they need not be valid UTF-8."""
    return [[each.text, each.token, each.logprob, each.raw.hex(), _logprobs_out(each.top)] for each in logprobs]


def _logprobs_in(rows: Iterable[Any]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(row[0], row[1], row[2], bytes.fromhex(row[3]), _logprobs_in(row[4])) for row in rows)
