"""What can go wrong between Dagster and a gateway.

    TokenmillError
    └── GatewayError          the gateway did not do what it was asked
        ├── GatewayAway       nobody answers, for longer than there is patience        may pass
        ├── Refused           it answered no; the same request will be answered no     will not
        ├── BatchRefused      a file of jobs that is no batch                          will not
        ├── BatchStopped      the batch was cancelled by somebody else                 will not
        └── BatchExpired      its completion window was over; answers that came stay   may pass

What may pass is worth one of Dagster's retries: it re-attaches, or hands in what is left.
"""

from typing import ClassVar

from tokenmill.errors import TokenmillError


class GatewayError(TokenmillError):
    """The gateway did not do what it was asked; the message says what."""

    may_pass: ClassVar[bool] = False


class GatewayAway(GatewayError):
    """Nobody answers at the gateway's address, or it says that it cannot now: is `tokenmill serve` running there?"""

    may_pass = True


class Refused(GatewayError):
    """The gateway refused a request; its own words are in the message."""

    def __init__(self, message: str, *, status: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status


class BatchRefused(GatewayError):
    """The gateway took none of the lines: the message names those that are wrong."""


class BatchStopped(GatewayError):
    """Somebody cancelled the batch at the gateway; materialise again to have the rest answered."""


class BatchExpired(GatewayError):
    """The completion window was over before every line had its answer; those that came are kept."""

    may_pass = True
