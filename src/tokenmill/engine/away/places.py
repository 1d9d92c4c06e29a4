"""A machine on its way to an engine: where it stands, and what is said of it."""

import asyncio
from dataclasses import dataclass
from typing import Literal, Protocol

from tokenmill.engine.away.engine import AwayEngine
from tokenmill.engine.away.host import Loading, Outlook, Prepare
from tokenmill.engine.away.line import Line
from tokenmill.engine.away.nodes import Node

What = Literal["found", "waits", "loading", "ready", "lost", "left out"]


@dataclass(frozen=True, slots=True)
class News:
    """Something about one machine, for a person."""

    name: str
    what: What
    words: str = ""
    hint: str | None = None
    loading: Loading | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """A machine whose engine can be used."""

    name: str
    engine: AwayEngine
    tuned: bool


class Machines(Protocol):
    """What has machines: a cluster."""

    async def nodes(self) -> tuple[Node, ...]:
        """Those that live."""

    def host(self, node: Node, prepare: Prepare) -> Line:
        """A host on one of them."""


@dataclass(slots=True)
class Place:
    """One machine."""

    node: Node
    name: str
    line: Line | None = None
    outlook: Outlook | None = None
    engine: AwayEngine | None = None
    out: bool = False  # it is not used
    lacks: bool = False  # because the model does not fit there
    tries: int = 0
    task: "asyncio.Task[None] | None" = None

    @property
    def at_work(self) -> bool:
        """Whether it has an engine, or is getting one."""
        return self.task is not None or (self.engine is not None and not self.engine.died.done())
