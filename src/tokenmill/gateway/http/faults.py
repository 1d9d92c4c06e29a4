"""Errors in OpenAI's and Anthropic's formats: a JSON object, a status, and Retry-After if a retry may succeed.

Every error response is built here. `source` says whether the request, the gateway or the engine caused the error.
"""

import math
import re
from typing import ClassVar, Literal

from tokenmill.errors import (
    EngineDied,
    EngineError,
    NonFiniteLogits,
    RequestRefused,
    TokenmillError,
    TooLong,
)
from tokenmill.gateway.schemas import AnthropicError, Error

_KEY = re.compile(r"([A-Za-z_]\w*)[:\[.]")
CLIENT_LEFT = 499  # logged if the client disconnected before a response, as in nginx
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    501: "not_implemented_error",
    503: "service_unavailable_error",
}
_MAY_PASS = frozenset((408, 429, 500, 502, 503, 504))  # a retry may succeed
_CLIENTS_WAIT_S = 60.0  # OpenAI's clients ignore a longer Retry-After and retry within seconds
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class GatewayFault(TokenmillError):
    """A request that the gateway refuses."""

    code = "invalid_request"
    status: ClassVar[int] = 400

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str | None = None,
        param: str | None = None,
        hint: str | None = None,
        retry_after_s: float | None = None,
        kind: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint, code=code)
        self.answer_status = status if status is not None else self.status
        self.param = param
        self.retry_after_s = retry_after_s
        self.kind = kind  # label of the refusal metric; None: not counted


class Busy(GatewayFault):
    """The queue is full, or a limit of a key is reached; retry later."""

    status = 429

    def __init__(self, message: str, *, retry_after_s: float, code: str = "queue_full", kind: str = "queue") -> None:
        super().__init__(message, code=code, retry_after_s=retry_after_s, kind=kind)


class Stopping(GatewayFault):
    """The gateway is shutting down."""

    status = 503

    def __init__(self, message: str = "the gateway is shutting down") -> None:
        super().__init__(message, code="stopping", hint="retry in a few seconds", retry_after_s=5.0, kind="stopping")


def status_of(error: TokenmillError) -> int:
    """The HTTP status of an error."""
    return error.answer_status if isinstance(error, GatewayFault) else error.http_status


def source_of(error: TokenmillError) -> Literal["request", "gateway", "engine"]:
    """The cause of an error: request, gateway or engine."""
    if isinstance(error, EngineError):
        return "engine"
    return "request" if status_of(error) < 500 else "gateway"


def error_body(error: TokenmillError) -> Error:
    """OpenAI's error object."""
    status = status_of(error)
    return {
        "error": {
            "message": _message(error),
            "type": _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error"),
            "param": param_of(error),
            "code": error.code,
            "source": source_of(error),
        }
    }


def _message(error: TokenmillError) -> str:
    """The message with its hint. If the prompt is too long, it starts like the message of OpenAI and vLLM.

    Clients such as LiteLLM match this text to fall back to a model with a larger context.
    """
    text = error.message
    if isinstance(error, TooLong):
        text = (
            f"This model's maximum context length is {error.context_tokens} tokens, but the request needs "
            f"{error.needed_tokens} tokens"
        )
    return f"{text} ({error.hint})" if error.hint and not isinstance(error, EngineError) else text


def anthropic_error(error: TokenmillError) -> AnthropicError:
    """Anthropic's error object."""
    detail = error_body(error)["error"]
    kind = _ANTHROPIC_TYPES.get(status_of(error), "invalid_request_error" if status_of(error) < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": detail["message"], "code": error.code}}


def error_headers(error: TokenmillError) -> dict[str, str]:
    """Retry-After if a retry may succeed; X-Should-Retry: false if it cannot.

    OpenAI's and Anthropic's clients retry the statuses 408, 409, 429 and 5xx, unless X-Should-Retry forbids it.
    """
    wait_s = error.retry_after_s if isinstance(error, GatewayFault) else 1.0 if isinstance(error, EngineDied) else None
    headers = {} if wait_s is None else {"retry-after": str(max(1, math.ceil(wait_s)))}
    hopeless = status_of(error) not in _MAY_PASS or isinstance(error, NonFiniteLogits)
    if hopeless or (wait_s is not None and wait_s > _CLIENTS_WAIT_S):
        headers["x-should-retry"] = "false"
    return headers


def param_of(error: TokenmillError) -> str | None:
    """The invalid key of the body; engine errors start with its name."""
    if isinstance(error, GatewayFault):
        return error.param
    if not isinstance(error, RequestRefused):
        return None
    found = _KEY.match(error.message)
    return error.param or (found[1] if found else None)
