"""What a part of the gateway brings: its routes, their description, and what runs while the gateway serves.

def batch_part(state: GatewayState) -> Part     # in the part's own file; its line is in app.parts()
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from starlette.routing import BaseRoute

from tokenmill.gateway.http.openapi import Operation


@dataclass(frozen=True, slots=True)
class RouteGroup:
    """One part."""

    routes: Sequence[BaseRoute]
    operations: Sequence[Operation] = ()  # for /openapi.json
    alongside: Callable[[], AbstractAsyncContextManager[None]] | None = None
    open_paths: frozenset[str] = frozenset()  # need no key: pages that ask for one themselves
