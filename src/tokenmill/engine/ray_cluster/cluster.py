"""Hosts on the machines of a Ray cluster. Ray starts them, carries calls to them and says when one is lost.

The one file that knows Ray, which is an extra: it is imported when a cluster is asked for. Each host takes all the
processors and GPUs that its machine gives to Ray, so two batches do not load two engines on one machine: the second
waits until the first is done.
"""

import asyncio
import logging
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tokenmill.engine.ray_cluster.host import Host, Prepare
from tokenmill.engine.ray_cluster.line import Channel, Lost
from tokenmill.engine.ray_cluster.nodes import Node, living
from tokenmill.errors import EngineError, UsageError

HERE = "ray"  # the cluster of this machine, which is started if there is none
_ADDRESS = re.compile(r"ray://[^\s/]+:\d+|[^\s/:]+:\d+|\[[0-9a-fA-F:]+\]:\d+|auto|local")
_REACH_S = 10.0
_NODE_ID = re.compile(r"\s*Node Id: \w+\.?", re.IGNORECASE)
_MOST_AT_ONCE = 4096  # calls that one host has in hand
_HINT = "see that the cluster runs (ray status), and that Ray and Python are the same versions here and there"


class Cluster:
    """A cluster that this process is connected to."""

    def __init__(self, ray: Any) -> None:
        """`ray`: the module, connected."""
        self._ray = ray

    async def nodes(self) -> tuple[Node, ...]:
        """The machines that live."""
        try:
            return living(await asyncio.to_thread(self._ray.nodes))
        except (self._ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
            raise EngineError(f"Ray does not say which machines there are: {_first(error)}", hint=_HINT) from error

    def host(self, node: Node, prepare: Prepare) -> Channel:
        """A host on a machine; it is there once the machine's processors and GPUs are free."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415  an extra

        remote = self._ray.remote(Host).options(
            num_cpus=node.cpus,
            num_gpus=node.gpus,
            max_restarts=0,
            max_concurrency=_MOST_AT_ONCE,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        )
        return _Actor(self._ray, remote.remote(f"ray-{node.id[:12]}", prepare))


class _Actor:
    """A host as an actor."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray = ray
        self._actor = actor

    async def call(self, method: str, *arguments: Any) -> Any:
        """What a method returns."""
        failures = self._ray.exceptions
        try:
            # Never cancelled: Ray would then set the result of a future that has one.
            coming = asyncio.wrap_future(getattr(self._actor, method).remote(*arguments).future())
            coming.add_done_callback(_looked_at)
            return await asyncio.shield(coming)
        except failures.ActorUnavailableError as error:
            raise Lost(_first(error), for_good=False) from error
        except failures.RayTaskError as error:
            raise EngineError(f"a host failed: {_last(error)}", hint="its log is Ray's, on its machine") from error
        except (failures.RayError, ConnectionError) as error:
            raise Lost(_why(error), for_good=True) from error

    def send(self, method: str, *arguments: Any) -> None:
        """Call a method and do not wait for it."""
        with suppress(self._ray.exceptions.RayError, ConnectionError):  # nobody is there to hear it
            getattr(self._actor, method).remote(*arguments)

    def end(self) -> None:
        """End the actor with all it started."""
        with suppress(self._ray.exceptions.RayError, ConnectionError):
            self._ray.kill(self._actor)


@contextmanager
def connected(where: str) -> Iterator[Cluster]:
    """The cluster at an address: HERE, HOST:PORT, or ray://HOST:PORT. Hosts end with the connection at the latest."""
    if where != HERE and not _ADDRESS.fullmatch(where):
        raise UsageError(f"{where!r} is no Ray cluster", hint=f"{HERE}, HOST:6379, or ray://HOST:10001")
    # What Ray has to say of lost machines goes to stdout, between our data, whatever `log_to_driver` says. It is read
    # when Ray is imported; the pattern is of lines that are not to be printed, and this one is of all.
    os.environ |= {"RAY_DEDUP_LOGS": "1", "RAY_DEDUP_LOGS_SKIP_REGEX": "^"}
    try:
        import ray  # noqa: PLC0415  an extra
    except ImportError as error:
        raise EngineError("Ray is not installed here", hint="pip install 'tokenmill[ray]'") from error
    _check_there(where)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster that we start tells nobody of itself
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=None if where == HERE else where,
            log_to_driver=False,
            include_dashboard=False,
            logging_level=logging.CRITICAL,
        )
    except (ConnectionError, RuntimeError, ValueError, OSError, ImportError, ray.exceptions.RayError) as error:
        raise EngineError(f"no Ray cluster answers at {where}: {_first(error)}", hint=_HINT) from error
    finally:
        signal.signal(signal.SIGTERM, before)  # Ray's would exit as if all were well
    try:
        yield Cluster(ray)
    finally:
        ray.shutdown()


def _check_there(where: str) -> None:
    """EngineError where nothing listens at an address: Ray would try for minutes."""
    host, _, port = where.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except OSError as error:
        raise EngineError(f"no Ray cluster answers at {where}: {error.strerror or error}", hint=_HINT) from error


def _looked_at(done: "asyncio.Future[Any]") -> None:
    """Who waited may have gone by now, and nobody is to be told that a failure was overlooked."""
    if not done.cancelled():
        done.exception()


def _first(error: BaseException) -> str:
    """The first line of Ray's page."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _last(error: BaseException) -> str:
    """The last line of a traceback that Ray carries as text."""
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)


def _why(error: BaseException) -> str:
    """Why an actor is gone, in a line: what Ray says below the actor's particulars."""
    text = str(error)
    if "No module named 'tokenmill" in text:
        return "tokenmill is not installed there"
    if "creation task" in text:
        return _last(error)
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("\t")]
    return _NODE_ID.sub("", lines[1] if len(lines) > 1 else _first(error))
