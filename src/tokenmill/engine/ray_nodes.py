"""One engine on every Ray node that can run the model, while nodes come and go.

    node found -> its actor plans -> the engine is loaded -> it is handed out -> the node is lost -> tried again
                   does not fit, no such model, another model, another version: left out, with the reason

Nodes that join later are used. Decides nothing about jobs.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from tokenmill.engine.ray import ActorHandle, EngineFacts, LoadingEvent, NodePlan, PrepareEngine, RayNode
from tokenmill.engine.ray_engine import RayEngine
from tokenmill.errors import EngineDied, EngineError, TokenmillError
from tokenmill.units import number_of
from tokenmill.version import __version__

POLL_S = 3.0  # between two looks at the list of nodes
SLOW_PLAN_S = 30.0  # how long `survey` waits for other plans once it has one
WAITING_S = 30.0  # after which a node that does not answer is reported
PATIENCE_S = 20.0  # without any engine, for a node that comes back
MAX_LOSSES = 3  # of one node's actor while the node lives
_PROGRESS_S = 1.0
_SMALLER = "try a smaller --context, fewer --sequences or a smaller model; tokenmill plan on a node shows its memory"

EventKind = Literal["found", "waiting", "loading", "ready", "lost", "left out"]
T = TypeVar("T")
_Results = asyncio.Queue[T | BaseException | None]


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """A change of one node, to be shown."""

    name: str
    kind: EventKind
    message: str = ""
    hint: str | None = None
    loading: LoadingEvent | None = None


@dataclass(frozen=True, slots=True)
class ReadyNode:
    """A node whose engine can be used."""

    name: str
    engine: RayEngine
    tuned: bool


Use = Callable[[ReadyNode], Awaitable[T]]


class NodeSource(Protocol):
    """The part of `ray.RayCluster` that is used here."""

    async def nodes(self) -> tuple[RayNode, ...]:
        """The live nodes."""

    def start_actor(self, node: RayNode, prepare: PrepareEngine) -> ActorHandle:
        """Start an actor on one of them."""


@dataclass(slots=True)
class _NodeState:
    """One node; `task` runs while its engine is loaded or in use."""

    node: RayNode
    name: str
    actor: ActorHandle | None = None
    plan: NodePlan | None = None
    engine: RayEngine | None = None
    task: "asyncio.Task[None] | None" = None
    in_use: bool = False  # the engine was handed out
    losses: int = 0
    left_out: bool = False
    too_small: bool = False

    @property
    def usable(self) -> bool:
        """Whether its plan is known and accepted."""
        return self.plan is not None and not self.left_out


class RayNodes:
    """The nodes of a cluster and their engines. `survey` and `engines` may run in two event loops, in this order."""

    def __init__(
        self,
        cluster: NodeSource,
        prepare: PrepareEngine,
        *,
        on_event: Callable[[NodeEvent], None],
        model_id: str | None = None,
        poll_s: float = POLL_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`model_id`: the model to run; None: the one that most nodes have."""
        self._cluster = cluster
        self._prepare = prepare
        self._on_event = on_event
        self._poll_s = poll_s
        self._patience_s = patience_s
        self._nodes: dict[str, _NodeState] = {}
        self._names: set[str] = set()
        self._reasons: dict[str, str] = {}  # node -> why it was lost or left out
        self.model_id = model_id

    async def survey(self) -> str:
        """Have the nodes plan and return the identity of their model; EngineError if none can run it.

        Returns when all have planned, or some time after the first has; `engines` waits for the others.
        """
        self._add(await self._cluster.nodes())
        if not self._nodes:
            raise EngineError("the Ray cluster has no node with processors to give", hint="ray start on each machine")
        tasks = {asyncio.create_task(self._survey_node(state)) for state in self._nodes.values()}
        try:
            waiting = tasks
            while waiting and not any(state.usable for state in self._nodes.values()):
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if waiting:
                await asyncio.wait(waiting, timeout=SLOW_PLAN_S)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            await _cancel(tasks)
        plans = [state.plan for state in self._nodes.values() if state.plan is not None and not state.left_out]
        self.model_id = self.model_id or most_common(plan.model_id for plan in plans)
        for state in self._nodes.values():
            try:
                self._check(state)
            except EngineError as error:
                self._leave_out(state, error)
        if self.model_id is None or not any(state.usable for state in self._nodes.values()):
            raise self._no_node()
        return self.model_id

    async def engines(self, use: Use[T]) -> AsyncGenerator[T, None]:
        """What `use` makes of each engine once it is ready; ends when no engine is left and none is to be expected."""
        results: _Results[T] = asyncio.Queue()
        watching = asyncio.create_task(self._watch_nodes(use, results))
        try:
            while (found := await results.get()) is not None:
                if isinstance(found, BaseException):
                    raise found
                yield found
        finally:
            await _cancel([watching, *(state.task for state in self._nodes.values() if state.task is not None)])

    async def close(self) -> None:
        """Stop all engines and end their actors."""
        states = list(self._nodes.values())
        await asyncio.gather(*(state.engine.close() for state in states if state.engine is not None))
        for state in states:
            _drop_actor(state)
        self._nodes.clear()

    @property
    def up(self) -> tuple[str, ...]:
        """The nodes whose engines can be used now."""
        states = self._nodes.values()
        return tuple(each.name for each in states if each.engine is not None and not each.engine.ended.done())

    @property
    def coming(self) -> tuple[int | None, ...]:
        """The contexts of the engines that are being loaded, in tokens; None: unknown. Callable from any thread."""
        states = [each for each in list(self._nodes.values()) if each.task is not None and not each.in_use]
        return tuple(each.plan.context for each in states if each.plan is not None)

    # ---- one node

    async def _survey_node(self, state: _NodeState) -> None:
        try:
            await self._plan(state)
        except EngineDied as lost:
            self._lose(state, lost.message)
        except TokenmillError as error:
            self._leave_out(state, error)

    async def _plan(self, state: _NodeState) -> tuple[ActorHandle, NodePlan]:
        """Have a node plan, unless it has; raises what makes it unusable."""
        if state.actor is None:
            state.actor = self._cluster.start_actor(state.node, self._prepare)
        if state.plan is None:
            planning = asyncio.create_task(state.actor.call("plan"))
            try:
                await asyncio.wait({planning}, timeout=WAITING_S)
                if not planning.done():
                    message = "it runs other work of the cluster, or is slow to answer"
                    self._on_event(NodeEvent(state.name, "waiting", message))
                state.plan = await planning
            finally:
                planning.cancel()
        self._check(state)
        return state.actor, state.plan

    def _check(self, state: _NodeState) -> None:
        """EngineError if a node's plan makes it unusable."""
        plan = state.plan
        if plan is None:
            return
        if plan.version != __version__:
            hint = "install the same version on all nodes"
            raise EngineError(f"it has tokenmill {plan.version}, and here is {__version__}", hint=hint)
        if plan.lacks is not None:
            state.too_small = True
            raise EngineError(f"{plan.model} does not fit: {plan.lacks}")
        if self.model_id is not None and plan.model_id != self.model_id:
            hint = "copy the same file to all nodes"
            raise EngineError(f"its {plan.model} differs from that of the other nodes", hint=hint)

    async def _run(self, state: _NodeState, use: Use[T], results: "_Results[T]") -> None:
        """Load a node's engine, hand it out, and return when it is lost or the node is left out."""
        if state.losses:
            await asyncio.sleep(self._poll_s)
        try:
            actor, plan = await self._plan(state)
            facts = await self._load(state, actor)
        except EngineDied as lost:
            self._lose(state, lost.message)
            return
        except TokenmillError as error:
            self._leave_out(state, error)
            return
        engine = state.engine = RayEngine(actor, facts, name=state.name)
        slots = number_of(facts.identity.lanes or 1, "slot")
        self._on_event(NodeEvent(state.name, "ready", f"{facts.identity.build}; {slots}"))
        try:
            results.put_nowait(await use(ReadyNode(state.name, engine, plan.tuned)))
        except EngineDied as lost:
            self._lose(state, lost.message)
            return
        state.in_use = True
        death = await asyncio.shield(engine.ended)
        self._lose(state, death.message.removeprefix(f"{state.name} is lost: "))

    async def _load(self, state: _NodeState, actor: ActorHandle) -> EngineFacts:
        """Load the engine of a node and report the progress."""
        loading = asyncio.create_task(actor.call("load"))
        try:
            while not loading.done():
                await asyncio.wait({loading}, timeout=_PROGRESS_S)
                if not loading.done() and (now := await actor.call("loading")) is not None:
                    self._on_event(NodeEvent(state.name, "loading", loading=now))
            facts: EngineFacts = loading.result()
            return facts
        finally:
            loading.cancel()

    def _lose(self, state: _NodeState, reason: str) -> None:
        """An actor is lost; its node may live and get another one."""
        _drop_actor(state)
        state.plan = state.engine = None
        state.in_use = False
        state.losses += 1
        self._reasons[state.name] = f"it was lost: {reason}"
        if state.losses >= MAX_LOSSES:
            self._leave_out(state, EngineError(f"it was lost {state.losses} times: {reason}"))
        else:
            self._on_event(NodeEvent(state.name, "lost", reason))

    def _leave_out(self, state: _NodeState, reason: TokenmillError) -> None:
        if state.left_out:
            return
        _drop_actor(state)
        state.left_out = True
        self._reasons[state.name] = reason.message
        self._on_event(NodeEvent(state.name, "left out", reason.message, reason.hint))

    # ---- all nodes

    async def _watch_nodes(self, use: Use[T], results: "_Results[T]") -> None:
        """Run every live node that is not left out until none has been running for a while."""
        now_s = asyncio.get_running_loop().time
        active_s = now_s()
        try:
            while now_s() - active_s < self._patience_s:
                alive = await self._cluster.nodes()
                self._forget({node.id for node in alive})
                self._add(alive)
                for node in alive:
                    state = self._nodes[node.id]
                    if state.task is None and not state.left_out:
                        state.task = asyncio.create_task(self._run(state, use, results))
                running = {state.task for state in self._nodes.values() if state.task is not None}
                if running:
                    active_s = now_s()
                elif self._nodes and all(state.left_out for state in self._nodes.values()):
                    break  # waiting would not change that
                await _wait_any(running, self._poll_s)
                self._collect()
        except Exception as error:  # noqa: BLE001  raised again where the engines are used
            results.put_nowait(error)
            return
        results.put_nowait(None)

    def _collect(self) -> None:
        """Take the nodes whose run is over; what failed other than a node is raised."""
        for state in self._nodes.values():
            if state.task is not None and state.task.done():
                task = state.task
                state.task = None
                task.result()

    def _forget(self, alive: Collection[str]) -> None:
        gone = [state for state in self._nodes.values() if state.node.id not in alive and state.task is None]
        for state in gone:
            del self._nodes[state.node.id]

    def _add(self, nodes: Iterable[RayNode]) -> None:
        for node in nodes:
            if node.id not in self._nodes:
                name = unique_name(node.host, self._names)
                self._names.add(name)
                self._nodes[node.id] = _NodeState(node, name)
                self._on_event(NodeEvent(name, "found", _resources(node)))

    def _no_node(self) -> EngineError:
        hints = [f"{name}: {reason}" for name, reason in self._reasons.items()]
        if any(state.too_small for state in self._nodes.values()):
            hints.append(_SMALLER)
        return EngineError("no node of the Ray cluster can be used", hint="\n".join(hints) or None)


def unique_name(host: str, taken: Collection[str]) -> str:
    """A host's name, with a number if it is taken."""
    number = 1
    name = host
    while name in taken:
        number += 1
        name = f"{host}-{number}"
    return name


def most_common(identities: Iterable[str]) -> str | None:
    """The most frequent identity, of equally frequent ones the first; None if there are none."""
    counts: dict[str, int] = {}
    for identity in identities:
        counts[identity] = counts.get(identity, 0) + 1
    return max(counts, key=lambda each: counts[each], default=None)


def _drop_actor(state: _NodeState) -> None:
    if state.actor is not None:
        state.actor.kill()
    state.actor = None


def _resources(node: RayNode) -> str:
    cpus = number_of(round(node.cpus), "processor")
    return f"{cpus}, {number_of(round(node.gpus), 'GPU')}" if node.gpus else cpus


async def _wait_any(tasks: "Collection[asyncio.Task[None]]", timeout_s: float) -> None:
    if tasks:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    else:
        await asyncio.sleep(timeout_s)


async def _cancel(tasks: "Iterable[asyncio.Task[None]]") -> None:
    cancelled = list(tasks)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)
