"""Hosts in this process instead of on other machines: what is sent to them is pickled, as it would be."""

import asyncio
import pickle
from functools import cached_property
from typing import Any

from support.fake_engine import FakeEngine
from tokenmill import __version__
from tokenmill.engine.engine import Answer, Request, answer
from tokenmill.engine.ray_cluster.faults import Fault
from tokenmill.engine.ray_cluster.host import Facts, NodePlan, Prepare
from tokenmill.engine.ray_cluster.line import Channel, Lost
from tokenmill.engine.ray_cluster.nodes import Node


def never() -> Any:
    raise AssertionError("nothing is planned in these tests")


class FakeHost:
    """Answers as `host.Host` does, with an engine that can be made to fail."""

    def __init__(self, outlook: NodePlan | Fault | None = None, start: Fault | None = None) -> None:
        self._outlook = outlook or NodePlan(__version__, "fake", "m", None, False)
        self._start = start
        self.cancelled: list[int] = []
        self.closed = False

    @cached_property
    def engine(self) -> FakeEngine:
        return FakeEngine()

    async def outlook(self) -> NodePlan | Fault:
        return self._outlook

    async def start(self) -> Facts | Fault:
        return self._start or Facts(self.engine.identity, self.engine.capabilities, 0.5)

    async def loading(self) -> None:
        return None

    async def ask(self, number: int, request: Request) -> Answer:
        return await answer(self.engine, request)

    async def cancel(self, number: int) -> None:
        self.cancelled.append(number)

    async def tokenize(self, prompt: Any) -> tuple[int, ...]:
        return await self.engine.tokenize(prompt)

    async def status(self) -> Any:
        return await self.engine.status()

    async def close(self) -> None:
        self.closed = True


class NearLine:
    """A line to a host in this process, which can be cut."""

    def __init__(self, host: Any) -> None:
        self.host = host
        self.cut: asyncio.Future[Lost] = asyncio.get_running_loop().create_future()
        self.unreachable = False
        self.ended = False
        self.sent: list[asyncio.Task[Any]] = []

    async def call(self, method: str, *arguments: Any) -> Any:
        if self.unreachable:
            raise Lost("no route", for_good=False)
        if self.cut.done():
            raise self.cut.result()
        work = asyncio.create_task(getattr(self.host, method)(*pickle.loads(pickle.dumps(arguments))))
        self.sent.append(work)
        await asyncio.wait({work, self.cut}, return_when=asyncio.FIRST_COMPLETED)
        if self.cut.done():
            work.cancel()
            raise self.cut.result()
        return pickle.loads(pickle.dumps(work.result()))

    def send(self, method: str, *arguments: Any) -> None:
        if not self.ended:
            self.sent.append(asyncio.create_task(getattr(self.host, method)(*arguments)))

    def end(self) -> None:
        self.ended = True


class NearMachines:
    """Machines that tests add and take away; each has a host of its own."""

    def __init__(self, **hosts: Any) -> None:
        self.hosts = hosts
        self.there = [Node(f"id-{name}", name, 4.0, 0.0) for name in hosts]
        self.lines: dict[str, list[NearLine]] = {name: [] for name in hosts}

    async def nodes(self) -> tuple[Node, ...]:
        return tuple(self.there)

    def host(self, node: Node, prepare: Prepare) -> Channel:
        line = NearLine(self.hosts[node.host])
        self.lines[node.host].append(line)
        return line

    def add(self, name: str, host: Any) -> None:
        self.hosts[name], self.lines[name] = host, []
        self.there.append(Node(f"id-{name}", name, 4.0, 0.0))

    def lose(self, name: str, *, machine: bool = True) -> None:
        """The host there, and the machine too unless only that."""
        self.there = [node for node in self.there if node.host != name or not machine]
        self.lines[name][-1].cut.set_result(Lost("the power is out", for_good=True))
