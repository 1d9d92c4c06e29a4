"""Maps error responses of servers to tokenmill's errors; keeps the server's message.

Pure. Recognizes the messages of llama.cpp, ik_llama.cpp, vLLM and OpenAI; all others are mapped by their HTTP status.
"""

import json
import re
from typing import Any

from tokenmill.errors import EngineError, RequestRefused, TokenmillError, TooLong

_TOO_LONG = (
    # llama.cpp since autumn 2025
    r"request \((?P<needed>\d+) tokens\) exceeds the available context size \((?P<context>\d+) tokens\)",
    r"input \((?P<needed>\d+) tokens\) is larger than the max context size \((?P<context>\d+) tokens\)",
    # vLLM 0.32, then older versions, newest first
    r"maximum context length is (?P<context>\d+) tokens.*?prompt contains at least (?P<needed>\d+) (?:input )?tokens",
    r"is too large: (?P<asked>\d+).*?maximum context length is (?P<context>\d+) tokens and your request has "
    r"(?P<needed>\d+) input tokens",
    r"maximum context length is (?P<context>\d+) tokens.*?(?:requested|request has|resulted in) (?:about )?"
    r"(?P<needed>\d+)(?: input)? tokens",
    r"prompt \(length (?P<needed>\d+)\) is longer than the maximum model length of (?P<context>\d+)",
    r"[Ii]nput length (?:of )?(?P<needed>\d+) exceeds .*?context length \(?(?P<context>\d+)\)?",
)
_TOO_LONG_HINT = "shorten the prompt, or use a larger --context"
_KEY_HINT = "set engine.api_key_env to the environment variable that holds the API key"


def is_loading(status: int, text: str) -> bool:
    """Whether an error only means that the server is still loading its model."""
    return status == 503 and bool(re.search(r"[Ll]oading model|starting up|not ready", text))


def to_error(status: int, text: str) -> TokenmillError:
    """Create the error for an error response."""
    error = error_object(text)
    message = str(error.get("message") or text.strip() or "no error message")[:2000]
    if status in (401, 403):
        return EngineError(f"the server denied access: {message}", hint=_KEY_HINT)
    if status in (400, 413, 422):
        return _too_long(error, message) or RequestRefused(f"the server refused the request: {message}")
    if status in (404, 501):
        return RequestRefused(f"the server does not support the request: {message}")
    return EngineError(f"the server failed ({status}): {message}")


def error_object(text: str) -> dict[str, Any]:
    """Extract the error object: OpenAI's envelope, older vLLM's bare object or FastAPI's detail; empty if none."""
    try:
        body = json.loads(text)
    except ValueError:
        return {}
    if not isinstance(body, dict):
        return {}
    inner = body.get("error", body)
    if isinstance(inner, str):
        return {"message": inner}
    if isinstance(inner, dict) and "message" in inner:
        return inner
    return {"message": json.dumps(body["detail"])} if "detail" in body else {}


def _too_long(error: dict[str, Any], message: str) -> TooLong | None:
    needed = error.get("n_prompt_tokens")
    context = error.get("n_ctx")
    if isinstance(needed, int) and isinstance(context, int):
        needed += 1  # llama.cpp counts only the prompt, but needs room for one generated token
    else:
        found = next(filter(None, (re.search(pattern, message, re.DOTALL) for pattern in _TOO_LONG)), None)
        if found is None:
            return None
        groups = found.groupdict()
        needed = int(groups["needed"]) + int(groups.get("asked") or 0)
        context = int(groups["context"])
    return TooLong(
        f"{needed} tokens do not fit a context of {context}",
        needed_tokens=needed,
        context_tokens=context,
        hint=_TOO_LONG_HINT,
    )
