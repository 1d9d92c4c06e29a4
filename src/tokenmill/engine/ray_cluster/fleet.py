"""One engine on every machine that can have one, while machines come and go.

    a machine is seen -> its host plans -> the engine is loaded -> it is handed out -> its host is lost -> tried again
                           does not fit, no such model, another model, another version: left out, with words

A machine that joins later is used, one that is lost is forgotten. Decides nothing about jobs.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from tokenmill.engine.ray_cluster.engine import AwayEngine
from tokenmill.engine.ray_cluster.faults import Fault
from tokenmill.engine.ray_cluster.host import Facts, NodePlan, Prepare
from tokenmill.engine.ray_cluster.line import Channel, Lost
from tokenmill.engine.ray_cluster.nodes import Node, agreed, name_for
from tokenmill.engine.ray_cluster.places import Machines, NodeEvent, NodeState, Ready
from tokenmill.errors import EngineError, TokenmillError
from tokenmill.units import number_of
from tokenmill.version import __version__

LOOK_S = 3.0  # between two looks at which machines there are
SLOW_S = 30.0  # for the plans of the others, once one is there
WAITS_S = 30.0  # after which it is said that a machine is not free
PATIENCE_S = 20.0  # without any engine, for a machine that comes back
MOST_TRIES = 3  # of a host that is lost while its machine lives
_LOADING_S = 1.0  # between two looks at a load
_SMALLER = "try a smaller --context, fewer --sequences or a smaller model; tokenmill plan on a machine says what it has"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Out:
    """Where engines go."""

    give: Callable[[Ready], Awaitable[None]]
    over: Callable[[EngineError | None], None]  # there will be no more
    wake: asyncio.Event  # something has happened to a machine


class RayFleet:
    """The machines of a cluster and their engines.

    `survey` and `engines` may run in two event loops, one after the other.
    """

    def __init__(
        self,
        machines: Machines,
        prepare: Prepare,
        *,
        tell: Callable[[NodeEvent], None],
        model_id: str | None = None,
        look_s: float = LOOK_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`model_id`: the one model that counts; None: the one that most machines have."""
        self._machines = machines
        self._prepare = prepare
        self._tell = tell
        self._look_s = look_s
        self._patience_s = patience_s
        self._places: dict[str, NodeState] = {}
        self._names: set[str] = set()
        self._why: dict[str, str] = {}  # what is wrong with machines, by name
        self.model_id = model_id
        self.model = ""

    async def survey(self) -> str:
        """Have the machines plan; the identity of their model. EngineError if none of them can run it.

        Returns when all have planned, or some time after the first has: the others are waited for in `engines`.
        """
        self._meet(await self._machines.nodes())
        if not self._places:
            raise EngineError(
                "the Ray cluster has no machine with processors to give", hint="ray start on each of them"
            )
        tasks = {asyncio.create_task(self._planned(place)) for place in self._places.values()}
        try:
            waiting = tasks
            while waiting and not self._outlooks:
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if waiting:
                await asyncio.wait(waiting, timeout=SLOW_S)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
        self.model_id = self.model_id or agreed(outlook.model_id for outlook in self._outlooks)
        for place in self._places.values():
            self._check_model(place)
        if self.model_id is None or not self._outlooks:
            raise self.none_left()
        self.model = self._outlooks[0].model
        return self.model_id

    async def engines(self, made: Callable[[Ready], Awaitable[T]]) -> AsyncGenerator[T, None]:
        """Engines as they get ready, also of machines that join later. Ends when none is left or to be expected.

        `made` makes of each what is to be given, beside the others.
        """
        given: asyncio.Queue[T | EngineError | None] = asyncio.Queue()

        async def give(ready: Ready) -> None:
            given.put_nowait(await made(ready))

        looking = asyncio.create_task(self._keep_looking(_Out(give, given.put_nowait, asyncio.Event())))
        try:
            while (found := await given.get()) is not None:
                if isinstance(found, EngineError):
                    raise found
                yield found
        finally:
            tasks = [looking, *(place.task for place in self._places.values() if place.task is not None)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """End all engines."""
        places = list(self._places.values())
        await asyncio.gather(*(place.engine.close() for place in places if place.engine is not None))
        for place in places:
            if place.line is not None:
                place.line.end()
        self._places.clear()

    def none_left(self) -> EngineError:
        """That no machine can be used, and why."""
        why = [f"{name}: {words}" for name, words in self._why.items()]
        if any(place.lacks for place in self._places.values()):
            why.append(_SMALLER)
        return EngineError("no machine of the Ray cluster can be used", hint="\n".join(why) or None)

    @property
    def up(self) -> tuple[str, ...]:
        """Machines whose engines can be used now."""
        places = self._places.values()
        return tuple(each.name for each in places if each.engine is not None and not each.engine.ended.done())

    @property
    def coming(self) -> tuple[int | None, ...]:
        """The contexts of engines that are being loaded or made ready, in tokens; None: not known. For any thread."""
        loading = [each for each in list(self._places.values()) if each.task is not None and not each.out]
        return tuple(each.outlook.context for each in loading if each.outlook is not None)

    @property
    def _outlooks(self) -> list[NodePlan]:
        return [place.outlook for place in self._places.values() if place.outlook is not None and not place.out]

    def _meet(self, nodes: tuple[Node, ...]) -> None:
        for node in nodes:
            if node.id not in self._places:
                name = name_for(node, self._names)
                self._names.add(name)
                self._places[node.id] = NodeState(node, name)
                self._tell(NodeEvent(name, "found", _gives(node)))

    # -- one machine -------------------------------------------------------------------------------------------------

    async def _planned(self, place: NodeState) -> None:
        """Have a machine plan; it is left out where that comes to nothing."""
        if place.line is None:
            place.line = self._machines.host(place.node, self._prepare)
        found = await self._heard(place, self._outlook(place, place.line))
        if found is None:
            return
        place.outlook = found
        if found.version != __version__:
            hint = "the same version on all of them"
            self._leave_out(
                place, EngineError(f"it has tokenmill {found.version}, and here is {__version__}", hint=hint)
            )
        elif found.lacks is not None:
            place.lacks = True
            self._leave_out(place, EngineError(f"{found.model} does not fit: {found.lacks}"))
        else:
            self._check_model(place)

    async def _outlook(self, place: NodeState, line: Channel) -> NodePlan | Fault:
        """What a machine plans; told where it has to be waited for."""
        asked = asyncio.ensure_future(line.call("outlook"))
        await asyncio.wait({asked}, timeout=WAITS_S)
        if not asked.done():
            self._tell(NodeEvent(place.name, "waits", "other work on the cluster has it, or it is slow to answer"))
        found: NodePlan | Fault = await asked
        return found

    async def _heard(self, place: NodeState, coming: Awaitable[T | Fault]) -> T | None:
        """What a machine answers; None: it is lost or left out, and that was told."""
        try:
            found = await coming
        except Lost as lost:
            self._lost(place, lost.message)
            return None
        except EngineError as error:
            self._leave_out(place, error)
            return None
        if isinstance(found, Fault):
            self._leave_out(place, found.error)
            return None
        return found

    def _check_model(self, place: NodeState) -> None:
        ours = self.model_id
        outlook = place.outlook
        if ours is not None and outlook is not None and outlook.model_id != ours and not place.out:
            hint = "the same file on all of them"
            self._leave_out(place, EngineError(f"its {outlook.model} is another than the others'", hint=hint))

    async def _raise(self, place: NodeState, out: "_Out") -> None:
        """From a machine to its engine."""
        if place.outlook is None or place.line is None:
            await self._planned(place)
        line = place.line
        outlook = place.outlook
        if place.out or line is None or outlook is None:
            return
        found = await self._heard(place, self._started(place, line))
        if found is None:
            return
        place.engine = AwayEngine(line, found, name=place.name)
        lanes = number_of(found.identity.lanes or 1, "lane")
        self._tell(NodeEvent(place.name, "ready", f"{found.identity.build}; {lanes}"))
        await out.give(Ready(place.name, place.engine, outlook.tuned))

    async def _started(self, place: NodeState, line: Channel) -> Facts | Fault:
        """Start the engine there, and tell how far it is."""
        starting = asyncio.ensure_future(line.call("start"))
        try:
            while not starting.done():
                await asyncio.wait({starting}, timeout=_LOADING_S)
                if not starting.done() and (now := await line.call("loading")) is not None:
                    self._tell(NodeEvent(place.name, "loading", loading=now))
            found: Facts | Fault = starting.result()
            return found
        finally:
            starting.cancel()

    def _lost(self, place: NodeState, why: str) -> None:
        """A host is lost; its machine may live."""
        if place.line is not None:
            place.line.end()
        place.line = place.outlook = place.engine = None
        place.tries += 1
        self._why[place.name] = f"it was lost: {why}"
        if place.tries >= MOST_TRIES:
            self._leave_out(place, EngineError(f"its host was lost {place.tries} times: {why}"))
        else:
            self._tell(NodeEvent(place.name, "lost", why))

    def _leave_out(self, place: NodeState, why: TokenmillError) -> None:
        if place.line is not None:
            place.line.end()
        place.line = None
        place.out = True
        self._why[place.name] = why.message
        self._tell(NodeEvent(place.name, "left out", why.message, why.hint))

    # -- all of them -------------------------------------------------------------------------------------------------

    async def _keep_looking(self, out: "_Out") -> None:
        clock = asyncio.get_running_loop().time
        at_work_s = clock()
        try:
            while clock() - at_work_s < self._patience_s:
                self._look(await self._machines.nodes(), out)
                if any(place.at_work for place in self._places.values()):
                    at_work_s = clock()
                elif all(place.out for place in self._places.values()) and self._places:
                    break  # what is there is of no use, and waiting will not change that
                try:
                    async with asyncio.timeout(self._look_s):
                        await out.wake.wait()
                except TimeoutError:
                    pass
                out.wake.clear()
        except EngineError as error:
            out.over(error)
            return
        out.over(None)

    def _look(self, nodes: tuple[Node, ...], out: "_Out") -> None:
        """Forget machines that are gone, take in those that came, and get engines for those that have none."""
        there = {node.id for node in nodes}
        for place in list(self._places.values()):
            if place.engine is not None and place.engine.ended.done():
                self._lost(place, place.engine.ended.result().message.removeprefix(f"{place.name} is lost: "))
            if place.node.id not in there and not place.at_work:
                del self._places[place.node.id]
        self._meet(nodes)
        for place in self._places.values():
            if not place.at_work and not place.out and place.node.id in there:
                self._begin(place, out)

    def _begin(self, place: NodeState, out: "_Out") -> None:
        def over(task: "asyncio.Task[None]") -> None:
            place.task = None
            if not task.cancelled() and (error := task.exception()) is not None:
                out.over(error if isinstance(error, EngineError) else EngineError(f"{place.name}: {error!r}"))
            if place.engine is not None:
                place.engine.ended.add_done_callback(lambda _: out.wake.set())

        place.task = asyncio.create_task(self._raise(place, out))
        place.task.add_done_callback(over)


def _gives(node: Node) -> str:
    cpus = number_of(round(node.cpus), "processor")
    return f"{cpus}, {number_of(round(node.gpus), 'GPU')}" if node.gpus else cpus
