"""Engines on a Ray cluster, and the only module that imports Ray.

    driver: RayEngine -- one actor call per request --> node: NodeActor -- Engine, restarted there when it dies

Ray starts the actors, transports calls and results, and reports lost nodes. An actor reserves all CPUs and GPUs of its
node, so a second batch waits instead of loading a second engine there. `nodes` selects the nodes.
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
from tokenmill.version import __version__, install_hint

LOCAL = "ray"  # a cluster on this machine, started if there is none
_ADDRESS = re.compile(r"ray://[^\s/]+:\d+|[^\s/:]+:\d+|\[[0-9a-fA-F:]+\]:\d+|auto|local")
_CONNECT_TIMEOUT_S = 10.0
_NODE_ID = re.compile(r"\s*Node Id: \w+\.?", re.IGNORECASE)
_MAX_CONCURRENCY = 4096  # calls in flight per actor
_HINT = "check that the cluster is running (ray status), with the same versions of Ray and Python on all nodes"


@dataclass(frozen=True, slots=True)
class RayNode:
    """A live node and its Ray resources."""

    id: str
    host: str  # not unique: several nodes may run on one host
    cpus: float
    gpus: float


LoadingEvent = LoadProgress | WarmProgress


class Launched(Protocol):
    """The result of `Launch`."""

    @property
    def engine(self) -> Engine:
        """The ready engine."""

    @property
    def load_s(self) -> float:
        """Duration of the load."""


Launch = Callable[..., Awaitable[Launched]]
"""`native.launching.launch_engine`, passed by the caller because this package must not import `native`."""


@dataclass(frozen=True, slots=True)
class PreparedEngine:
    """An engine planned on its node, to be started there."""

    plan: Plan
    model_path: Path
    config: EngineConfig
    state: Path
    launch: Launch
    tuned: bool = False  # uses an operating point of `tokenmill tune`


PrepareEngine = Callable[[], PreparedEngine]
"""Plans for the machine that it runs on. Sent to every node."""


@dataclass(frozen=True, slots=True)
class NodePlan:
    """The plan of one node, before anything is loaded."""

    version: str  # of tokenmill
    model: str
    model_id: str
    lacks: str | None  # missing memory; None: the model fits
    tuned: bool
    context: int | None = None  # tokens per sequence


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts about a loaded engine, cached by the driver."""

    identity: Identity
    capabilities: Capabilities
    load_s: float
    runtime: Runtime | None = None


class NodeLost(EngineDied):
    """A node or its actor cannot be reached. `for_good`: permanently."""

    def __init__(self, message: str, *, for_good: bool) -> None:
        super().__init__(message, from_outside=True)
        self.for_good = for_good


# ---- on the node


class NodeActor:
    """Plans for its node, loads one engine, and forwards calls to it. Must have the driver's version of tokenmill."""

    def __init__(self, name: str, prepare: PrepareEngine) -> None:
        """`name`: the engine's name on its machine. Does not plan or load anything yet."""
        self._name = name
        self._prepare = prepare
        self._preparing: asyncio.Task[PreparedEngine] | None = None
        self._engine: Engine | None = None
        self._load_s = 0.0
        self._loading: LoadingEvent | None = None

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call one of the methods below. Returns errors instead of raising them, because Ray would wrap them."""
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
        """The latest progress of `load`; None before the first."""
        return self._loading

    async def facts(self) -> EngineFacts:
        """The engine's current facts."""
        engine = self._loaded()
        return EngineFacts(engine.identity, engine.capabilities, self._load_s, engine.runtime)

    async def answer(self, request: Request) -> Answer:
        """The complete answer to a request. Cancelling the call cancels the request."""
        return await answer(self._loaded(), request)

    async def engine(self, method: str, *arguments: Any) -> Any:
        """Call a method of the engine."""
        return await getattr(self._loaded(), method)(*arguments)

    async def failed(self) -> None:
        """Wait until the engine has failed permanently, and raise its error."""
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
    """The driver's handle of a node's actor."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray = ray
        self._actor = actor

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of `NodeActor`; raises its error, or NodeLost. Cancellation is forwarded."""
        failures = self._ray.exceptions
        try:
            reference = self._actor.call.remote(method, *arguments)
            result = asyncio.wrap_future(reference.future())
            result.add_done_callback(_retrieve_exception)
            # The future must not be cancelled, because Ray would still set its result.
            found = await asyncio.shield(result)
        except asyncio.CancelledError:
            with suppress(failures.RayError, ConnectionError):
                self._ray.cancel(reference)
            raise
        except failures.ActorUnavailableError as error:
            raise NodeLost(_first_line(error), for_good=False) from error
        except failures.RayTaskError as error:
            raise EngineError(f"a node failed: {_last_line(error)}", hint="see Ray's logs on that node") from error
        except (failures.RayError, ConnectionError) as error:
            raise NodeLost(_death_cause(error), for_good=True) from error
        if isinstance(found, TokenmillError):
            raise found
        return found

    def kill(self) -> None:
        """Kill the actor and all its processes."""
        with suppress(self._ray.exceptions.RayError, ConnectionError):
            self._ray.kill(self._actor)


class RayCluster:
    """A cluster that this process is connected to."""

    def __init__(self, ray: Any) -> None:
        """`ray`: the connected module."""
        self._ray = ray

    async def nodes(self) -> tuple[RayNode, ...]:
        """The live nodes with CPU resources, ordered by host name."""
        try:
            rows = await asyncio.to_thread(self._ray.nodes)
        except (self._ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
            raise EngineError(f"cannot list the nodes of the Ray cluster: {_first_line(error)}", hint=_HINT) from error
        return live_nodes(rows)

    def start_actor(self, node: RayNode, prepare: PrepareEngine) -> ActorHandle:
        """Start an actor on a node; its calls wait until the node's CPUs and GPUs are free."""
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
    """The live nodes with CPU resources among the rows of `ray.nodes()`."""
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
    """Connect to a cluster: LOCAL, HOST:PORT or ray://HOST:PORT. Closing the connection kills its actors."""
    if address != LOCAL and not _ADDRESS.fullmatch(address):
        raise UsageError(
            f"{address!r} is not the address of a Ray cluster", hint=f"use {LOCAL}, HOST:6379 or ray://HOST:10001"
        )
    # Ray prints messages about lost nodes to stdout even with log_to_driver=False, which would corrupt our output. On
    # import it reads this pattern of lines to skip, which matches all.
    os.environ |= {"RAY_DEDUP_LOGS": "1", "RAY_DEDUP_LOGS_SKIP_REGEX": "^"}
    try:
        import ray  # noqa: PLC0415  an extra
    except ImportError as error:
        raise EngineError("Ray is not installed", hint=install_hint("ray")) from error
    _check_listening(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # for a cluster that this process starts
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=None if address == LOCAL else address,
            log_to_driver=False,
            include_dashboard=False,
            logging_level=logging.CRITICAL,
        )
    except (ConnectionError, RuntimeError, ValueError, OSError, ImportError, ray.exceptions.RayError) as error:
        raise EngineError(f"cannot connect to a Ray cluster at {address}: {_first_line(error)}", hint=_HINT) from error
    finally:
        signal.signal(signal.SIGTERM, before)  # Ray's handler would exit with code 0
    try:
        yield RayCluster(ray)
    finally:
        ray.shutdown()


def _check_listening(address: str) -> None:
    """Raise EngineError if nothing listens at an address, because Ray would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise EngineError(
            f"cannot connect to a Ray cluster at {address}: {error.strerror or error}", hint=_HINT
        ) from error


def _retrieve_exception(done: "asyncio.Future[Any]") -> None:
    """Retrieve the exception of a cancelled call, which asyncio would log otherwise."""
    if not done.cancelled():
        done.exception()


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _last_line(error: BaseException) -> str:
    """The last line of a traceback in Ray's message."""
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)


def _death_cause(error: BaseException) -> str:
    """Why an actor died: the line after the actor's details in Ray's message."""
    text = str(error)
    if "No module named 'tokenmill" in text:
        return "tokenmill is not installed on this node"
    if "creation task" in text:
        return _last_line(error)
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("\t")]
    return _NODE_ID.sub("", lines[1] if len(lines) > 1 else _first_line(error))
