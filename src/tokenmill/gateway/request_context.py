"""What is known of one request while it is in the house: its id, who sent it, and what the log will say."""

from dataclasses import dataclass
from typing import cast

from starlette.types import Scope

from tokenmill.engine.engine import Usage
from tokenmill.gateway.keys import Key
from tokenmill.gateway.recorder import Lane

_SCOPE = "tokenmill.visit"


@dataclass(slots=True)
class RequestContext:
    """One request; who learns something writes it here."""

    id: str
    began_s: float  # by GatewayState.now_s
    key: Key | None = None
    lane: Lane | None = None
    backend: str | None = None
    usage: Usage | None = None
    first_token_s: float | None = None
    error: str | None = None  # a word
    route_reason: str | None = None  # why it went to whom it went; None: the model alone decided
    left: bool = False  # the client went away

    @property
    def usage_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return self.usage.prompt_tokens + self.usage.completion_tokens if self.usage is not None else 0

    def enter(self, scope: Scope) -> None:
        """Go into a scope."""
        scope[_SCOPE] = self


def visit_of(scope: Scope) -> RequestContext:
    """The visit that a scope belongs to."""
    return cast(RequestContext, scope[_SCOPE])
