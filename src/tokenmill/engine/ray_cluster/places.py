"""A machine on its way to an engine: where it stands, and what is said of it."""

import asyncio
from dataclasses import dataclass
from typing import Literal, Protocol

from tokenmill.engine.ray_cluster.engine import AwayEngine
from tokenmill.engine.ray_cluster.host import Loading, NodePlan, Prepare
from tokenmill.engine.ray_cluster.line import Channel
from tokenmill.engine.ray_cluster.nodes import Node

What = Literal["found", "waits", "loading", "ready", "lost", "left out"]


@dataclass(frozen=True, slots=True)
class NodeEvent:
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

    def host(self, node: Node, prepare: Prepare) -> Channel:
        """A host on one of them."""


@dataclass(slots=True)
class NodeState:
    """One machine."""

    node: Node
    name: str
    line: Channel | None = None
    outlook: NodePlan | None = None
    engine: AwayEngine | None = None
    out: bool = False  # it is not used
    lacks: bool = False  # because the model does not fit there
    tries: int = 0
    task: "asyncio.Task[None] | None" = None

    @property
    def at_work(self) -> bool:
        """Whether it has an engine, or is getting one."""
        return self.task is not None or (self.engine is not None and not self.engine.ended.done())
