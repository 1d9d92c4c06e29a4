"""Node actors in this process instead of on a Ray cluster; calls and results are pickled, as Ray does."""

import asyncio
import pickle
from functools import cached_property
from typing import Any

from support.fake_engine import FakeEngine
from tokenmill import __version__
from tokenmill.engine.engine import Engine
from tokenmill.engine.ray.actors import (
    ActorHandle,
    EngineFacts,
    NodeActor,
    NodeLost,
    NodePlan,
    PreparedEngine,
    PrepareEngine,
    RayNode,
)
from tokenmill.errors import TokenmillError


def never() -> PreparedEngine:
    raise AssertionError("nothing is planned in these tests")


class FakeActor(NodeActor):
    """A NodeActor with a given plan and a fake engine; `plan` and `load` may be errors."""

    def __init__(
        self,
        plan: NodePlan | TokenmillError | None = None,
        *,
        load: TokenmillError | None = None,
        engine: Engine | None = None,
    ) -> None:
        super().__init__("fake", never)
        self._given_plan = plan or NodePlan(__version__, "fake", "m", None, False)
        self._load_error = load
        self._given_engine = engine
        self.closed = False

    @cached_property
    def fake(self) -> FakeEngine:
        return FakeEngine()

    async def plan(self) -> NodePlan:
        if isinstance(self._given_plan, TokenmillError):
            raise self._given_plan
        return self._given_plan

    async def load(self) -> EngineFacts:
        if self._load_error is not None:
            raise self._load_error
        self._engine = self._given_engine or self.fake
        self._load_s = 0.5
        return await self.facts()

    async def close(self) -> None:
        self.closed = True
        await super().close()


class FakeHandle(ActorHandle):
    """A handle of an actor in this process, which can be disconnected."""

    def __init__(self, actor: NodeActor) -> None:
        super().__init__(None, None)
        self.actor = actor
        self.lost: asyncio.Future[NodeLost] = asyncio.get_running_loop().create_future()
        self.unreachable = asyncio.Event()
        self.killed = False
        self.cancelled: list[str] = []

    async def call(self, method: str, *arguments: Any) -> Any:
        if self.unreachable.is_set():
            raise NodeLost("no route", for_good=False)
        if self.lost.done():
            raise self.lost.result()
        sent = pickle.loads(pickle.dumps((method, *arguments)))
        calls = [asyncio.ensure_future(self.actor.call(*sent)), asyncio.ensure_future(self.unreachable.wait())]
        try:
            await asyncio.wait({*calls, self.lost}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.cancelled.append(method)
            raise
        finally:
            done = calls[0].done()
            for call in calls:
                call.cancel()
        if not done:
            raise self.lost.result() if self.lost.done() else NodeLost("no route", for_good=False)
        found = pickle.loads(pickle.dumps(calls[0].result()))
        if isinstance(found, TokenmillError):
            raise found
        return found

    def kill(self) -> None:
        self.killed = True


class FakeCluster:
    """Nodes that tests add and remove; each runs one actor, to which new handles reconnect."""

    def __init__(self, **actors: FakeActor) -> None:
        self.actors = actors
        self.alive = [RayNode(f"id-{name}", name, 4.0, 0.0) for name in actors]
        self.handles: dict[str, list[FakeHandle]] = {name: [] for name in actors}

    async def nodes(self) -> tuple[RayNode, ...]:
        return tuple(self.alive)

    def start_actor(self, node: RayNode, prepare: PrepareEngine) -> FakeHandle:
        handle = FakeHandle(self.actors[node.host])
        self.handles[node.host].append(handle)
        return handle

    def add(self, name: str, actor: FakeActor) -> None:
        self.actors[name] = actor
        self.handles[name] = []
        self.alive.append(RayNode(f"id-{name}", name, 4.0, 0.0))

    def lose(self, name: str, *, node: bool = True) -> None:
        """Lose the actor of a node and, by default, the node."""
        self.alive = [each for each in self.alive if each.host != name or not node]
        self.handles[name][-1].lost.set_result(NodeLost("the power is out", for_good=True))
