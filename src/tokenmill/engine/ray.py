"""Engines on a Ray cluster, and the only module that imports Ray.

    driver: RayEngine -- one actor call per request --> node: NodeActor -- Engine, restarted there when it dies

Ray starts the actors, carries calls and results, and reports lost nodes. An actor takes all processors and GPUs of its
node, so two batches never load two engines on one node: the second waits. Which nodes are used: `ray_nodes`.
"""

import asyncio
import logging
import os
import re
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tokenmill.config import EngineConfig
from tokenmill.engine.engine import Answer, Capabilities, Engine, Identity, Request, Runtime, answer
from tokenmill.engine.loading.progress import LoadProgress
from tokenmill.engine.warm import WarmProgress
from tokenmill.errors import EngineDied, EngineError, TokenmillError, UsageError
from tokenmill.model.identity import identity_of
from tokenmill.planner.plan import Plan
from tokenmill.units import format_bytes
from tokenmill.version import __version__

LOCAL = "ray"  # the cluster of this machine, which is started if there is none
_ADDRESS = re.compile(r"ray://[^\s/]+:\d+|[^\s/:]+:\d+|\[[0-9a-fA-F:]+\]:\d+|auto|local")
_CONNECT_S = 10.0
_NODE_ID = re.compile(r"\s*Node Id: \w+\.?", re.IGNORECASE)
_MAX_CONCURRENCY = 4096  # calls in flight per actor
_HINT = "check that the cluster runs (ray status), and that Ray and Python have the same versions on all nodes"


@dataclass(frozen=True, slots=True)
class RayNode:
    """A live node and the resources it gives to Ray."""

    id: str
    host: str  # not unique: several nodes may run on one host
    cpus: float
    gpus: float


LoadingEvent = LoadProgress | WarmProgress


class Launched(Protocol):
    """A launched engine."""

    @property
    def engine(self) -> Engine:
        """The engine, ready."""

    @property
    def load_s(self) -> float:
        """How long the load took."""


Launch = Callable[..., Awaitable[Launched]]
"""`native.launching.launch_engine`, given by the caller: this package does not import `native`."""


@dataclass(frozen=True, slots=True)
class PreparedEngine:
    """The engine to start on a node, as planned on that node."""

    plan: Plan
    model_path: Path
    config: EngineConfig
    state: Path
    launch: Launch
    tuned: bool = False  # an operating point of `tokenmill tune` is used


PrepareEngine = Callable[[], PreparedEngine]
"""Plans for the machine that it is called on; sent to every node."""


@dataclass(frozen=True, slots=True)
class NodePlan:
    """The plan of one node, before anything is loaded."""

    version: str  # of tokenmill
    model: str
    model_id: str
    lacks: str | None  # the memory that is missing; None: the model fits
    tuned: bool
    context: int | None = None  # tokens per sequence


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts about a loaded engine that are known without asking it again."""

    identity: Identity
    capabilities: Capabilities
    load_s: float
    runtime: Runtime | None = None


class NodeLost(EngineDied):
    """A node or its actor cannot be reached; no request is to blame. `for_good`: it will not answer again."""

    def __init__(self, message: str, *, for_good: bool) -> None:
        super().__init__(message, from_outside=True)
        self.for_good = for_good


# ---- on the node


class NodeActor:
    """Plans for its node, loads one engine, and passes calls on to it. Requires the driver's version of tokenmill."""

    def __init__(self, name: str, prepare: PrepareEngine) -> None:
        """`name`: of the engine among those of its machine. Nothing is planned or loaded yet."""
        self._name = name
        self._prepare = prepare
        self._preparing: asyncio.Task[PreparedEngine] | None = None
        self._engine: Engine | None = None
        self._load_s = 0.0
        self._loading: LoadingEvent | None = None

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call one of the methods below. Errors are returned, because Ray would wrap those that are raised."""
        try:
            return await getattr(self, method)(*arguments)
        except TokenmillError as error:
            return error

    async def plan(self) -> NodePlan:
        """Plan for this node."""
        prepared = await self._prepared()
        plan = prepared.plan
        lacks = "; ".join(f"{lack.tier} lacks {format_bytes(lack.missing_bytes)}" for lack in plan.shortfalls)
        model_id = await asyncio.to_thread(identity_of, prepared.model_path)
        return NodePlan(__version__, plan.profile.name, model_id, lacks or None, prepared.tuned, plan.settings.context)

    async def load(self) -> EngineFacts:
        """Load the engine as planned."""
        prepared = await self._prepared()
        loaded = await prepared.launch(
            prepared.plan,
            model_path=prepared.model_path,
            config=prepared.config,
            state=prepared.state,
            name=self._name,
            tell=self._set_loading,
        )
        self._engine = loaded.engine
        self._load_s = loaded.load_s
        return await self.facts()

    async def loading(self) -> LoadingEvent | None:
        """The progress of `load`; None before it begins."""
        return self._loading

    async def facts(self) -> EngineFacts:
        """The engine's facts as of now."""
        engine = self._loaded()
        return EngineFacts(engine.identity, engine.capabilities, self._load_s, engine.runtime)

    async def answer(self, request: Request) -> Answer:
        """The whole answer to a request; cancelling the call cancels the request."""
        return await answer(self._loaded(), request)

    async def engine(self, method: str, *arguments: Any) -> Any:
        """Call a method of the engine."""
        return await getattr(self._loaded(), method)(*arguments)

    async def failed(self) -> None:
        """Wait until the engine has failed and will not be restarted, then raise its error."""
        raise await asyncio.shield(self._loaded().ended)

    async def close(self) -> None:
        """Stop the engine."""
        engine = self._engine
        self._engine = None
        if engine is not None:
            await engine.close()

    async def _prepared(self) -> PreparedEngine:
        if self._preparing is None:
            self._preparing = asyncio.create_task(asyncio.to_thread(self._prepare))
        return await asyncio.shield(self._preparing)

    def _set_loading(self, now: LoadingEvent) -> None:
        self._loading = now

    def _loaded(self) -> Engine:
        if self._engine is None:
            raise EngineDied("the engine was stopped", from_outside=True)
        return self._engine


# ---- on the driver


class ActorHandle:
    """The actor of one node, as the driver calls it."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray = ray
        self._actor = actor

    async def call(self, method: str, *arguments: Any) -> Any:
        """What a method of `NodeActor` returns; raises what it raises, or NodeLost. Cancelling cancels it there."""
        failures = self._ray.exceptions
        try:
            reference = self._actor.call.remote(method, *arguments)
            result = asyncio.wrap_future(reference.future())
            result.add_done_callback(_retrieve_exception)
            # Ray sets the result of a future even if it was cancelled, so the future itself must not be cancelled.
            found = await asyncio.shield(result)
        except asyncio.CancelledError:
            with suppress(failures.RayError, ConnectionError):
                self._ray.cancel(reference)
            raise
        except failures.ActorUnavailableError as error:
            raise NodeLost(_first_line(error), for_good=False) from error
        except failures.RayTaskError as error:
            raise EngineError(f"a node failed: {_last_line(error)}", hint="Ray's logs on that node say more") from error
        except (failures.RayError, ConnectionError) as error:
            raise NodeLost(_death_cause(error), for_good=True) from error
        if isinstance(found, TokenmillError):
            raise found
        return found

    def kill(self) -> None:
        """End the actor and every process that it started."""
        with suppress(self._ray.exceptions.RayError, ConnectionError):
            self._ray.kill(self._actor)


class RayCluster:
    """A cluster that this process is connected to."""

    def __init__(self, ray: Any) -> None:
        """`ray`: the module, connected."""
        self._ray = ray

    async def nodes(self) -> tuple[RayNode, ...]:
        """The live nodes that have processors to give, by host name."""
        try:
            rows = await asyncio.to_thread(self._ray.nodes)
        except (self._ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
            raise EngineError(f"Ray does not list its nodes: {_first_line(error)}", hint=_HINT) from error
        return live_nodes(rows)

    def start_actor(self, node: RayNode, prepare: PrepareEngine) -> ActorHandle:
        """Start an actor on a node; its calls wait until the node's processors and GPUs are free."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415  an extra

        remote = self._ray.remote(NodeActor).options(
            num_cpus=node.cpus,
            num_gpus=node.gpus,
            max_restarts=0,
            max_concurrency=_MAX_CONCURRENCY,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        )
        return ActorHandle(self._ray, remote.remote(f"ray-{node.id[:12]}", prepare))


def live_nodes(rows: list[dict[str, Any]]) -> tuple[RayNode, ...]:
    """The live nodes with processors among the rows of `ray.nodes()`; one joined with none serves other purposes."""
    found = [
        RayNode(
            str(row["NodeID"]),
            str(row.get("NodeManagerHostname") or row.get("NodeManagerAddress") or row["NodeID"]),
            float(row.get("Resources", {}).get("CPU", 0.0)),
            float(row.get("Resources", {}).get("GPU", 0.0)),
        )
        for row in rows
        if row.get("Alive")
    ]
    return tuple(sorted((node for node in found if node.cpus > 0), key=lambda node: (node.host, node.id)))


@contextmanager
def connect(address: str) -> Iterator[RayCluster]:
    """Connect to a cluster: LOCAL, HOST:PORT, or ray://HOST:PORT. Its actors end with the connection at the latest."""
    if address != LOCAL and not _ADDRESS.fullmatch(address):
        raise UsageError(
            f"{address!r} is not the address of a Ray cluster", hint=f"{LOCAL}, HOST:6379, or ray://HOST:10001"
        )
    # Ray prints messages about lost nodes to stdout, between our data, even with log_to_driver=False. It reads this
    # pattern when it is imported and leaves out the lines that match, which are all.
    os.environ |= {"RAY_DEDUP_LOGS": "1", "RAY_DEDUP_LOGS_SKIP_REGEX": "^"}
    try:
        import ray  # noqa: PLC0415  an extra
    except ImportError as error:
        raise EngineError("Ray is not installed here", hint="pip install 'tokenmill[ray]'") from error
    _check_listening(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # of a cluster that we start
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=None if address == LOCAL else address,
            log_to_driver=False,
            include_dashboard=False,
            logging_level=logging.CRITICAL,
        )
    except (ConnectionError, RuntimeError, ValueError, OSError, ImportError, ray.exceptions.RayError) as error:
        raise EngineError(f"no Ray cluster answers at {address}: {_first_line(error)}", hint=_HINT) from error
    finally:
        signal.signal(signal.SIGTERM, before)  # Ray's handler would exit with code 0
    try:
        yield RayCluster(ray)
    finally:
        ray.shutdown()


def _check_listening(address: str) -> None:
    """EngineError if nothing listens at an address: Ray would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise EngineError(f"no Ray cluster answers at {address}: {error.strerror or error}", hint=_HINT) from error


def _retrieve_exception(done: "asyncio.Future[Any]") -> None:
    """Keep asyncio from logging the error of a call whose caller is gone."""
    if not done.cancelled():
        done.exception()


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _last_line(error: BaseException) -> str:
    """The last line of a traceback that Ray carries as text."""
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)


def _death_cause(error: BaseException) -> str:
    """Why an actor died: the line below the actor's particulars in Ray's message."""
    text = str(error)
    if "No module named 'tokenmill" in text:
        return "tokenmill is not installed there"
    if "creation task" in text:
        return _last_line(error)
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("\t")]
    return _NODE_ID.sub("", lines[1] if len(lines) > 1 else _first_line(error))
