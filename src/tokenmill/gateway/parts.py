"""What a part of the gateway brings: its routes, their description, and what runs beside them.

    def batch_part(state: GatewayState) -> Part     # in the part's own file; its line is in app.parts()

`paths` and `schemas` go into /openapi.json as they are; `alongside` is entered when the gateway starts to listen and
left when it has stopped taking requests.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from starlette.routing import BaseRoute


@dataclass(frozen=True, slots=True)
class Part:
    """One part."""

    routes: Sequence[BaseRoute]
    paths: Mapping[str, Any] = field(default_factory=dict)  # OpenAPI path items
    schemas: Mapping[str, Any] = field(default_factory=dict)  # OpenAPI components.schemas
    alongside: Callable[[], AbstractAsyncContextManager[None]] | None = None
    open_paths: frozenset[str] = frozenset()  # need no key: pages that ask for one themselves
