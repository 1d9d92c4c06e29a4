"""Context of one request: ID, client, and the fields of its log line."""

from dataclasses import dataclass
from typing import cast

from starlette.types import Scope

from tokenmill.engine.engine import Usage
from tokenmill.gateway.http.keys import Key, KeyLimits
from tokenmill.gateway.monitoring.recorder import PriorityClass

_SCOPE = "tokenmill.visit"
_NO_KEY = "anybody"  # client name of all requests without a key


@dataclass(slots=True)
class RequestContext:
    """One request; each layer fills in its fields."""

    id: str
    began_s: float  # on the clock GatewayState.now_s
    key: Key | None = None
    priority: PriorityClass | None = None
    backend: str | None = None
    usage: Usage | None = None
    first_token_s: float | None = None
    error: str | None = None  # its code
    route_reason: str | None = None  # the route that matched; None: chosen by model alone
    anthropic: bool = False  # errors have Anthropic's format
    left: bool = False  # the client closed the connection

    @property
    def usage_tokens(self) -> int:
        """Prompt and answer tokens."""
        return self.usage.prompt_tokens + self.usage.completion_tokens if self.usage is not None else 0

    @property
    def client(self) -> tuple[str, KeyLimits | None]:
        """Owner and limits of the client, for `Limiter.admit`."""
        return (self.key.owner, self.key.limits) if self.key is not None else (_NO_KEY, None)

    def enter(self, scope: Scope) -> None:
        """Store the context in an ASGI scope."""
        scope[_SCOPE] = self


def context_of(scope: Scope) -> RequestContext:
    """The context of an ASGI scope."""
    return cast(RequestContext, scope[_SCOPE])
