"""Errors of the gateway client.

    TokenmillError
    └── GatewayError             the gateway did not do what was requested
        ├── GatewayUnavailable   no response within the patience                      retryable
        ├── GatewayRefused       4xx; the same request would be refused again
        ├── BatchRefused         the file has invalid lines
        ├── BatchCancelled       another client cancelled the batch
        └── BatchExpired         the completion window ended; answers are kept        retryable

A Dagster `RetryPolicy` retries only retryable errors.
A retry re-attaches to the batch or submits the remaining lines.
"""

from typing import ClassVar

from tokenmill.errors import TokenmillError


class GatewayError(TokenmillError):
    """The gateway did not do what was requested; the message says why."""

    code = "gateway_error"
    retryable: ClassVar[bool] = False


class GatewayUnavailable(GatewayError):
    """The gateway does not respond, or responds that it cannot serve requests now."""

    code = "gateway_unavailable"
    retryable = True


class GatewayRefused(GatewayError):
    """The gateway refused a request; the message quotes its error."""

    code = "gateway_refused"

    def __init__(self, message: str, *, status: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status


class BatchRefused(GatewayError):
    """The gateway accepted none of the lines; the message quotes its errors."""

    code = "batch_refused"


class BatchCancelled(GatewayError):
    """Another client cancelled the batch; materialise again to answer the remaining lines."""

    code = "batch_cancelled"


class BatchExpired(GatewayError):
    """The completion window ended before every line was answered; existing answers are kept."""

    code = "batch_expired"
    retryable = True
