"""Related routes with their OpenAPI description, and a context manager that runs while the gateway serves.

Each module with routes has a function `route_group(state)`, which `app.py` calls.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from starlette.routing import BaseRoute

from tokenmill.gateway.http.openapi import Operation


@dataclass(frozen=True, slots=True)
class RouteGroup:
    """Related routes of the gateway."""

    routes: Sequence[BaseRoute]
    operations: Sequence[Operation] = ()  # for /openapi.json
    lifespan: Callable[[], AbstractAsyncContextManager[None]] | None = None
    open_paths: frozenset[str] = frozenset()  # paths that need no key
