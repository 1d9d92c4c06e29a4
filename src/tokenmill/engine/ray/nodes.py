"""Runs an engine on every Ray node that fits the model; nodes may join and leave at any time.

    node found -> its actor plans -> the engine is loaded -> it is in use -> the node is lost -> retried
                   model does not fit, is missing or differs, or another version: node excluded, with the reason

Does not schedule jobs.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from tokenmill.engine.ray.actors import ActorHandle, EngineFacts, LoadingEvent, NodePlan, PrepareEngine, RayNode
from tokenmill.engine.ray.engine import RayEngine
from tokenmill.errors import EngineDied, EngineError, TokenmillError
from tokenmill.units import number_of
from tokenmill.version import __version__

POLL_S = 3.0  # interval of listing the nodes
SURVEY_TIMEOUT_S = 30.0  # for the other plans after the first
WAITING_NOTICE_S = 30.0  # after which a node that does not answer is reported
REJOIN_TIMEOUT_S = 20.0  # for a node to come back when no engine is left
MAX_LOSSES = 3  # losses of an actor on one node
_PROGRESS_S = 1.0
_SMALLER = (
    "use a smaller --context, fewer --sequences or a smaller model; run tokenmill plan on a node to see its memory"
)

EventKind = Literal["found", "waiting", "loading", "ready", "lost", "excluded"]
T = TypeVar("T")
_Results = asyncio.Queue[T | BaseException | None]


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """A change of a node's state, for display."""

    name: str
    kind: EventKind
    message: str = ""
    hint: str | None = None
    loading: LoadingEvent | None = None


@dataclass(frozen=True, slots=True)
class ReadyNode:
    """A node with a ready engine."""

    name: str
    engine: RayEngine
    tuned: bool


Use = Callable[[ReadyNode], Awaitable[T]]


class NodeSource(Protocol):
    """The interface of `ray.RayCluster`."""

    async def nodes(self) -> tuple[RayNode, ...]:
        """The live nodes."""

    def start_actor(self, node: RayNode, prepare: PrepareEngine) -> ActorHandle:
        """Start an actor on a node."""


@dataclass(slots=True)
class _NodeState:
    """One node; `task` runs while its engine is loaded or in use."""

    node: RayNode
    name: str
    actor: ActorHandle | None = None
    plan: NodePlan | None = None
    engine: RayEngine | None = None
    task: "asyncio.Task[None] | None" = None
    in_use: bool = False  # `use` has accepted the engine
    losses: int = 0
    excluded: bool = False
    too_small: bool = False

    @property
    def usable(self) -> bool:
        """Whether it has planned and is not excluded."""
        return self.plan is not None and not self.excluded


class RayNodes:
    """The nodes of a cluster and their engines. Call `survey`, then `engines`; each may run in its own event loop."""

    def __init__(
        self,
        cluster: NodeSource,
        prepare: PrepareEngine,
        *,
        on_event: Callable[[NodeEvent], None],
        model_id: str | None = None,
        poll_s: float = POLL_S,
        rejoin_timeout_s: float = REJOIN_TIMEOUT_S,
    ) -> None:
        """`model_id`: the model to run; default: the one that most nodes have."""
        self._cluster = cluster
        self._prepare = prepare
        self._on_event = on_event
        self._poll_s = poll_s
        self._rejoin_timeout_s = rejoin_timeout_s
        self._nodes: dict[str, _NodeState] = {}
        self._names: set[str] = set()
        self._reasons: dict[str, str] = {}  # node -> why it was lost or left out
        self.model_id = model_id

    async def survey(self) -> str:
        """Let the nodes plan, and return the identity of their model; EngineError if no node can run it.

        Returns when all nodes have planned, or `SURVEY_TIMEOUT_S` after the first; `engines` waits for the others.
        """
        self._add(await self._cluster.nodes())
        if not self._nodes:
            raise EngineError("the Ray cluster has no nodes with CPU resources", hint="run ray start on each machine")
        tasks = {asyncio.create_task(self._survey_node(state)) for state in self._nodes.values()}
        try:
            waiting = tasks
            while waiting and not any(state.usable for state in self._nodes.values()):
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if waiting:
                await asyncio.wait(waiting, timeout=SURVEY_TIMEOUT_S)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            await _cancel(tasks)
        plans = [state.plan for state in self._nodes.values() if state.plan is not None and not state.excluded]
        self.model_id = self.model_id or most_common(plan.model_id for plan in plans)
        for state in self._nodes.values():
            try:
                self._check(state)
            except EngineError as error:
                self._exclude(state, error)
        if self.model_id is None or not any(state.usable for state in self._nodes.values()):
            raise self._no_node()
        return self.model_id

    async def engines(self, use: Use[T]) -> AsyncGenerator[T, None]:
        """Yield the result of `use` for each engine that becomes ready; ends when no node can provide an engine."""
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
        """Stop all engines and kill their actors."""
        states = list(self._nodes.values())
        await asyncio.gather(*(state.engine.close() for state in states if state.engine is not None))
        for state in states:
            _drop_actor(state)
        self._nodes.clear()

    @property
    def up(self) -> tuple[str, ...]:
        """Names of the nodes with a ready engine."""
        states = self._nodes.values()
        return tuple(each.name for each in states if each.engine is not None and not each.engine.ended.done())

    @property
    def loading_contexts(self) -> tuple[int | None, ...]:
        """Context sizes of the engines that are loading; None: unknown. Thread-safe."""
        states = [each for each in list(self._nodes.values()) if each.task is not None and not each.in_use]
        return tuple(each.plan.context for each in states if each.plan is not None)

    # ---- one node

    async def _survey_node(self, state: _NodeState) -> None:
        try:
            await self._plan(state)
        except EngineDied as lost:
            self._lose(state, lost.message)
        except TokenmillError as error:
            self._exclude(state, error)

    async def _plan(self, state: _NodeState) -> tuple[ActorHandle, NodePlan]:
        """Return the plan of a node, creating it if necessary; raises an error if the node is unusable."""
        if state.actor is None:
            state.actor = self._cluster.start_actor(state.node, self._prepare)
        if state.plan is None:
            planning = asyncio.create_task(state.actor.call("plan"))
            try:
                await asyncio.wait({planning}, timeout=WAITING_NOTICE_S)
                if not planning.done():
                    message = "it is busy with other work, or slow to answer"
                    self._on_event(NodeEvent(state.name, "waiting", message))
                state.plan = await planning
            finally:
                planning.cancel()
        self._check(state)
        return state.actor, state.plan

    def _check(self, state: _NodeState) -> None:
        """Raise EngineError if a node is unusable according to its plan."""
        plan = state.plan
        if plan is None:
            return
        if plan.version != __version__:
            hint = "install the same version on all nodes"
            raise EngineError(f"it has tokenmill {plan.version}, the driver has {__version__}", hint=hint)
        if plan.lacks is not None:
            state.too_small = True
            raise EngineError(f"{plan.model} does not fit: {plan.lacks}")
        if self.model_id is not None and plan.model_id != self.model_id:
            hint = "copy the same model file to all nodes"
            raise EngineError(f"its {plan.model} differs from the model of the other nodes", hint=hint)

    async def _run(self, state: _NodeState, use: Use[T], results: "_Results[T]") -> None:
        """Load a node's engine and pass it to `use`; returns when it is lost or the node is excluded."""
        if state.losses:
            await asyncio.sleep(self._poll_s)
        try:
            actor, plan = await self._plan(state)
            facts = await self._load(state, actor)
        except EngineDied as lost:
            self._lose(state, lost.message)
            return
        except TokenmillError as error:
            self._exclude(state, error)
            return
        engine = state.engine = RayEngine(actor, facts, name=state.name)
        slots = number_of(facts.identity.slots or 1, "slot")
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
        """Load a node's engine and report the progress."""
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
        """Handle the loss of an actor; a live node gets another one, up to `MAX_LOSSES` times."""
        _drop_actor(state)
        state.plan = state.engine = None
        state.in_use = False
        state.losses += 1
        self._reasons[state.name] = f"it was lost: {reason}"
        if state.losses >= MAX_LOSSES:
            self._exclude(state, EngineError(f"it was lost {state.losses} times: {reason}"))
        else:
            self._on_event(NodeEvent(state.name, "lost", reason))

    def _exclude(self, state: _NodeState, reason: TokenmillError) -> None:
        if state.excluded:
            return
        _drop_actor(state)
        state.excluded = True
        self._reasons[state.name] = reason.message
        self._on_event(NodeEvent(state.name, "excluded", reason.message, reason.hint))

    # ---- all nodes

    async def _watch_nodes(self, use: Use[T], results: "_Results[T]") -> None:
        """Run all live nodes that are not excluded, until none has been running for the rejoin timeout."""
        now_s = asyncio.get_running_loop().time
        active_s = now_s()
        try:
            while now_s() - active_s < self._rejoin_timeout_s:
                alive = await self._cluster.nodes()
                self._forget({node.id for node in alive})
                self._add(alive)
                for node in alive:
                    state = self._nodes[node.id]
                    if state.task is None and not state.excluded:
                        state.task = asyncio.create_task(self._run(state, use, results))
                running = {state.task for state in self._nodes.values() if state.task is not None}
                if running:
                    active_s = now_s()
                elif self._nodes and all(state.excluded for state in self._nodes.values()):
                    break
                await _wait_any(running, self._poll_s)
                self._collect()
        except Exception as error:  # noqa: BLE001  raised in `engines`
            results.put_nowait(error)
            return
        results.put_nowait(None)

    def _collect(self) -> None:
        """Collect finished tasks; raises errors that are not failures of a node."""
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
        return EngineError("no node of the Ray cluster can run the model", hint="\n".join(hints) or None)


def unique_name(host: str, taken: Collection[str]) -> str:
    """The host's name, with a number if it is already taken."""
    number = 1
    name = host
    while name in taken:
        number += 1
        name = f"{host}-{number}"
    return name


def most_common(identities: Iterable[str]) -> str | None:
    """The most frequent identity (the first of several); None if there are none."""
    counts: dict[str, int] = {}
    for identity in identities:
        counts[identity] = counts.get(identity, 0) + 1
    return max(counts, key=lambda each: counts[each], default=None)


def _drop_actor(state: _NodeState) -> None:
    if state.actor is not None:
        state.actor.kill()
    state.actor = None


def _resources(node: RayNode) -> str:
    cpus = number_of(round(node.cpus), "CPU")
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
