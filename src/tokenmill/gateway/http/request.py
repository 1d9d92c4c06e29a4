"""Parses and validates bodies of chats and completions, and splits them into engine requests.

Bodies have the same keys and meaning as in a line of a batch. This module adds what only HTTP requests have: several
choices, several prompts, streams and the priority class.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import ClientDisconnect, Request

from tokenmill.config import GatewayConfig
from tokenmill.engine.engine import Request as EngineRequest
from tokenmill.gateway.http.faults import GatewayFault
from tokenmill.gateway.monitoring.recorder import PriorityClass
from tokenmill.jobs.openai.call import Call, Endpoint, check_request
from tokenmill.storage.json_text import compact_json, parse
from tokenmill.units import MIB, format_bytes

MAX_DEPTH = 64  # of nested arrays and objects
_LARGE_BYTES = MIB  # larger bodies are parsed in a thread, so that the event loop is not blocked
_SEEDS = 1 << 63
_PRIORITY_HEADER = "x-tokenmill-priority"
_OLD_PRIORITY_HEADER = "x-tokenmill-lane"  # alias from before 0.2
_ONLY_IN_BATCHES = {
    "priority": "to lower the priority, send the header X-Tokenmill-Priority: batch, or service_tier: flex",
    "deadline": "use timeout to limit the duration of this request",
}


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A validated request. `calls` has one entry per choice; they differ in prompt and seed."""

    endpoint: Endpoint
    raw: bytes | None  # the body as received; None: it was translated, so it is never relayed
    body: Mapping[str, Any]
    calls: tuple[Call, ...]
    model: str | None
    priority: PriorityClass
    stream: bool
    include_usage: bool
    timeout_s: float | None
    n: int  # choices per prompt

    def engine_requests(self) -> tuple[EngineRequest, ...]:
        """One engine request per choice; the choices of one prompt have different seeds."""
        made = []
        for index, call in enumerate(self.calls):
            request = call.request(self.priority)
            turn = index % self.n
            seed = request.sampling.seed
            if turn and seed is not None:
                # the largest seeds count downwards, because engines accept 63 bits
                seed = seed + turn if seed + turn < _SEEDS else seed - turn
                request = replace(request, sampling=replace(request.sampling, seed=seed))
            made.append(request)
        return tuple(made)


def parsed_request(
    endpoint: Endpoint, body: Mapping[str, Any], priority: PriorityClass, *, max_choices: int, raw: bytes | None = b""
) -> ParsedRequest:
    """Validate a body; raises RequestRefused or GatewayFault with the name of the invalid key."""
    for key, hint in _ONLY_IN_BATCHES.items():
        if body.get(key) is not None:
            raise GatewayFault(f"{key}: supported only in batches", param=key, hint=hint)
    values = check_request(endpoint, {key: value for key, value in body.items() if key not in _ONLY_IN_BATCHES})
    prompt = values.get("prompt")
    prompts = prompt if type(prompt) is list else [prompt]
    n = _choices(body)
    if n * len(prompts) > max_choices:
        raise GatewayFault(
            f"n: must be at most {max_choices} answers in one request (got {n * len(prompts)})", param="n"
        )
    options = values.get("stream_options", {})
    if options and "stream" not in values:
        raise GatewayFault("stream_options: requires stream", param="stream_options", hint="set stream to true")
    calls = [Call(endpoint, values if len(prompts) == 1 else {**values, "prompt": each}) for each in prompts]
    return ParsedRequest(
        endpoint,
        raw,
        body,
        tuple(call for call in calls for _ in range(n)),
        values.get("model"),
        priority,
        "stream" in values,
        bool(options.get("include_usage")),
        values.get("timeout"),
        n,
    )


def _choices(body: Mapping[str, Any]) -> int:
    """Number of choices per prompt."""
    n: int = body.get("n") or 1
    if body.get("best_of") not in (None, n):
        raise GatewayFault(f"best_of: must equal n ({n})", param="best_of", hint="leave best_of out")
    return n


def priority_of(headers: Mapping[str, str], body: Mapping[str, Any]) -> PriorityClass:
    """The priority class given by header or service tier; default: interactive."""
    for name, code in ((_PRIORITY_HEADER, "invalid_priority"), (_OLD_PRIORITY_HEADER, "invalid_lane")):
        given = headers.get(name)
        if given is None:
            continue
        if given not in ("interactive", "batch"):
            raise GatewayFault(f"the header {name} must be interactive or batch (got {given[:40]!r})", code=code)
        return "interactive" if given == "interactive" else "batch"
    return "batch" if body.get("service_tier") == "flex" else "interactive"


async def read_body(request: Request, settings: GatewayConfig) -> bytes:
    """Read a JSON body; refuses it with 413 if it is too large and with 408 if it does not arrive in time."""
    max_bytes = settings.max_body_bytes
    timeout_s = settings.read_timeout_s
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise GatewayFault(
            f"unsupported content type {kind[:60]!r}",
            status=415,
            code="unsupported_media_type",
            kind="json",
            hint="send JSON with Content-Type: application/json",
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise GatewayFault("compressed bodies are not supported", status=415, code="unsupported_encoding", kind="json")
    parts = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                parts.append(part)
    except TimeoutError:
        raise GatewayFault(
            f"the body did not arrive within {timeout_s:g} s", status=408, code="body_timeout", kind="size"
        ) from None
    except ClientDisconnect:
        raise GatewayFault("the client disconnected before its body was complete", code="client_left") from None
    return b"".join(parts)


def _too_large(max_bytes: int) -> GatewayFault:
    return GatewayFault(
        f"the body is larger than {format_bytes(max_bytes)}",
        status=413,
        code="body_too_large",
        kind="size",
        hint="gateway.max_body_bytes sets the limit",
    )


async def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object in a body; raises GatewayFault with status 400."""
    return await asyncio.to_thread(parse_json, raw) if len(raw) > _LARGE_BYTES else parse_json(raw)


def parse_json(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`; raises GatewayFault if it is invalid."""
    try:
        value = parse(raw.decode("utf-8").strip())
        if deeper_than(value, MAX_DEPTH):
            raise ValueError(f"not supported: nested deeper than {MAX_DEPTH}")  # noqa: TRY301
        if rb"\ud" in raw or rb"\uD" in raw:
            compact_json(value).encode()  # fails for unpaired surrogates
    except UnicodeError:
        raise GatewayFault("the body is not UTF-8 text", code="invalid_json", kind="json") from None
    except ValueError as error:
        reason = str(error)
        message = f"the body {reason}" if reason.startswith("must ") else f"the body is {reason}"
        raise GatewayFault(message, code="invalid_json", kind="json") from None
    return value


def deeper_than(value: Any, limit: int) -> bool:
    """Whether arrays and objects are nested deeper than `limit`."""
    level = [value]
    for _ in range(limit):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) is dict or type(inner) is list
        ]
        if not level:
            return False
    return True
