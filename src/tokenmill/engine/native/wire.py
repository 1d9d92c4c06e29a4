"""What the native worker and its clients say to each other: one JSON object a line over a Unix socket.

    client                                          worker
    {"submit": 7, "request": {...}}                 {"loading": 0.4, "detail": "weights"}        until it is ready
    {"cancel": 7}                                   {"hello": {...}}                             once, when it is
    {"call": 8, "name": "status", "with": {...}}    {"piece": 7, ...} ... {"answer": 7, ...}
                                                    {"result": 8, "value": ...}
                                                    {"error": 7, "kind": "TooLong", ...}
                                                    {"beat": {...}}                              five a second

Numbers are the client's own. Every value is checked where it arrives.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tokenmill import errors
from tokenmill.engine.engine import (
    Answer,
    Capabilities,
    Counters,
    Identity,
    Piece,
    Request,
    Timings,
    TokenLogprob,
    Usage,
)
from tokenmill.engine.fit_params import Buffer
from tokenmill.errors import EngineError, RequestRefused, TokenmillError, TooLong

MOST_LINE_BYTES = 256 << 20  # a prompt of a million tokens as numbers is seven megabytes
BEAT_S = 0.2


@dataclass(frozen=True, slots=True)
class Hello:
    """What a worker is, once it can answer."""

    identity: Identity
    capabilities: Capabilities
    buffers: tuple[Buffer, ...]  # what llama.cpp says it took
    load_s: float
    threads: int
    threads_batch: int
    most_lanes: int  # that the context has room for
    streams: bool = False  # each lane has cells of its own


@dataclass(frozen=True, slots=True)
class Beat:
    """A worker's pulse."""

    step_age_s: float | None  # how long the step in hand has been running; None: none is
    counters: Counters


REQUEST, HELLO, BEAT = TypeAdapter(Request), TypeAdapter(Hello), TypeAdapter(Beat)


def line(message: dict[str, Any]) -> bytes:
    """One message as it travels."""
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass") + b"\n"


def read(text: bytes) -> dict[str, Any]:
    """One message as it came."""
    try:
        message = json.loads(text)
    except ValueError as error:
        raise EngineError(f"the engine's socket carries something else: {text[:60]!r}") from error
    if not isinstance(message, dict):
        raise EngineError(f"the engine's socket carries something else: {text[:60]!r}")
    return message


def request_of(value: Any) -> Request:
    """A request that a client sent."""
    try:
        return REQUEST.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RequestRefused(f"the request is not understood: {where}: {first['msg']}") from error


def failure(number: int, error: TokenmillError) -> dict[str, Any]:
    """An error as it travels."""
    more = {}
    if isinstance(error, TooLong):
        more = {"needed_tokens": error.needed_tokens, "context_tokens": error.context_tokens}
    return {"error": number, "kind": type(error).__name__, "message": error.message, "hint": error.hint, **more}


def error_of(message: dict[str, Any]) -> TokenmillError:
    """The error that a message carries, of the class it had."""
    kind = getattr(errors, str(message.get("kind")), None)
    text, hint = str(message.get("message")), message.get("hint")
    if kind is TooLong:
        return TooLong(
            text, hint=hint, needed_tokens=message["needed_tokens"], context_tokens=message["context_tokens"]
        )
    if isinstance(kind, type) and issubclass(kind, TokenmillError):
        return kind(text, hint=hint)
    return EngineError(text, hint=hint)


def piece_message(number: int, piece: Piece) -> dict[str, Any]:
    """A piece as it travels."""
    message = {"piece": number, "text": piece.text, "tokens": piece.tokens}
    return message | {"logprobs": _logprobs_out(piece.logprobs)} if piece.logprobs else message


def piece_of(message: dict[str, Any]) -> Piece:
    """A piece as it came."""
    return Piece(message["text"], message["tokens"], _logprobs_in(message.get("logprobs", ())))


def answer_message(number: int, answer: Answer) -> dict[str, Any]:
    """An answer as it travels."""
    return {
        "answer": number, "text": answer.text, "finish_reason": answer.finish_reason, "usage": asdict(answer.usage),
        "timings": asdict(answer.timings), "notes": answer.notes,
        "logprobs": None if answer.logprobs is None else _logprobs_out(answer.logprobs),
    }  # fmt: skip


def answer_of(message: dict[str, Any]) -> Answer:
    """An answer as it came."""
    logprobs = message["logprobs"]
    return Answer(
        message["text"], message["finish_reason"], Usage(**message["usage"]), Timings(**message["timings"]),
        None if logprobs is None else _logprobs_in(logprobs), notes=tuple(message["notes"]),
    )  # fmt: skip


def _logprobs_out(logprobs: Iterable[TokenLogprob]) -> list[list[Any]]:
    """Bytes of tokens need not be text: they travel as hexadecimal digits."""
    return [[each.text, each.token, each.logprob, each.raw.hex(), _logprobs_out(each.top)] for each in logprobs]


def _logprobs_in(rows: Iterable[Any]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(row[0], row[1], row[2], bytes.fromhex(row[3]), _logprobs_in(row[4])) for row in rows)
