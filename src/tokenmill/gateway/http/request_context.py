"""Context of one request: its ID, its client, and the fields of its log line."""

from dataclasses import dataclass
from typing import cast

from starlette.types import Scope

from tokenmill.engine.engine import Usage
from tokenmill.gateway.http.keys import Key, KeyLimits
from tokenmill.gateway.monitoring.recorder import PriorityClass

_SCOPE = "tokenmill.visit"
_ANYBODY = "anybody"  # all requests without a key count as one client


@dataclass(slots=True)
class RequestContext:
    """One request; each layer adds its fields."""

    id: str
    began_s: float  # by GatewayState.now_s
    key: Key | None = None
    lane: PriorityClass | None = None
    backend: str | None = None
    usage: Usage | None = None
    first_token_s: float | None = None
    error: str | None = None  # its code
    route_reason: str | None = None  # why these backends were chosen; None: the model alone decided
    left: bool = False  # the client closed the connection

    @property
    def usage_tokens(self) -> int:
        """Prompt and answer tokens."""
        return self.usage.prompt_tokens + self.usage.completion_tokens if self.usage is not None else 0

    @property
    def client(self) -> tuple[str, KeyLimits | None]:
        """Name and limits of the client, for `Limiter.admit`."""
        return (self.key.name, self.key.limits) if self.key is not None else (_ANYBODY, None)

    def enter(self, scope: Scope) -> None:
        """Store the context in an ASGI scope."""
        scope[_SCOPE] = self


def visit_of(scope: Scope) -> RequestContext:
    """The context of an ASGI scope."""
    return cast(RequestContext, scope[_SCOPE])
