"""Loads the engines of a gateway one after the other, serves until it is stopped, and shuts down.

On shutdown the gateway accepts no new requests and waits for those in flight until the grace period ends. The rest is
cancelled with an error, jobs return to the queue, and the engines are stopped. A second stop request skips the wait.
"""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tokenmill.api.engines.choose import SlowLoad, watch_engine
from tokenmill.api.progress import OnProgress
from tokenmill.api.progress import log as messages
from tokenmill.config import Config, EngineConfig
from tokenmill.engine.engine import Engine
from tokenmill.engine.loading.progress import LoadProgress
from tokenmill.engine.pinned_prefixes import PinnedPrefix
from tokenmill.engine.process import registry
from tokenmill.engine.server.address import base_url, key_from
from tokenmill.engine.server.client import ServerEngine
from tokenmill.engine.start import OnSlowLoad, attach
from tokenmill.engine.warm import WarmProgress
from tokenmill.errors import EngineError, TokenmillError, UsageError
from tokenmill.gateway.app import create_app
from tokenmill.gateway.backends.admission import AdmissionGates
from tokenmill.gateway.backends.backend import Backend
from tokenmill.gateway.backends.late_server import LateServer
from tokenmill.gateway.backends.managed import ManagedBackend
from tokenmill.gateway.backends.routing import Routes
from tokenmill.gateway.http import keys
from tokenmill.gateway.http.listening import Listener, allow_files, url_of
from tokenmill.gateway.http.middleware import allowed_to_listen
from tokenmill.gateway.http.rate_limits import Limiter
from tokenmill.gateway.http.token_budget import TokenBudget
from tokenmill.gateway.monitoring.recorder import Recorders
from tokenmill.gateway.state import AccessLog, GatewayState, ServedDigest
from tokenmill.native.launching import ReadyEngine, Tell, launch_engine
from tokenmill.planner.plan import Plan

_PREDECESSOR_S = 60.0  # maximum wait for the engine of a killed gateway to exit
_POLL_S = 0.05
_AFTER_GRACE_S = 5.0  # maximum wait for cancelled requests to receive their error


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine of the gateway: started from a plan, or reached at a URL."""

    name: str
    names: tuple[str, ...]  # names of its model for clients; the first is displayed
    config: EngineConfig
    plan: Plan | None = None
    model_path: Path | None = None
    url: str | None = None
    model: str | None = None  # the model to use, if the server has several
    digests: tuple[PinnedPrefix, ...] = ()


def check_address(config: Config) -> None:
    """Raise UsageError if the address requires an API key and none exists."""
    if not allowed_to_listen(config.gateway, keys.read(config.state_path)):
        raise UsageError(
            f"listening on {config.gateway.host} requires an API key, and none exists",
            hint="create one with `tokenmill keys add NAME`, or listen on 127.0.0.1",
        )


@asynccontextmanager
async def started_engines(
    wanted: Sequence[EngineSpec],
    config: Config,
    *,
    tell: Callable[[str], Tell] | None = None,
    slow: OnSlowLoad | None = None,
) -> AsyncIterator[tuple[list[tuple[EngineSpec, Engine]], dict[str, ReadyEngine]]]:
    """Start or connect to all engines, one after the other; closes them on exit."""
    engines: list[tuple[EngineSpec, Engine]] = []
    ready_engines: dict[str, ReadyEngine] = {}
    async with AsyncExitStack() as stack:
        for one in wanted:
            if one.plan is None or one.model_path is None:
                engine: Engine = await _attached(one, alone=len(wanted) == 1)
            else:
                await _predecessor_gone(config.state_path, one.name)
                ready_engines[one.name] = await launch_engine(
                    one.plan,
                    model_path=one.model_path,
                    config=one.config,
                    state=config.state_path,
                    name=one.name,
                    tell=tell(one.name) if tell is not None else None,
                    slow=slow,
                    prefixes=one.digests,
                    prefixes_dir=config.prefixes_path,
                )
                engine = ready_engines[one.name].engine
            stack.push_async_callback(engine.close)
            engines.append((one, engine))
        reached = [engine for _, engine in engines if engine.liveness != "unreachable"]
        if engines and not reached and (error := engines[0][1].last_error) is not None:
            raise error
        yield engines, ready_engines


class Gateway:
    """Loaded engines with the server in front of them. Belongs to one event loop."""

    def __init__(self, state: GatewayState, engines: Sequence[tuple[EngineSpec, Engine]]) -> None:
        """Use `loaded_gateway`."""
        self.state = state
        self.failure: TokenmillError | None = None  # set if the gateway stopped because every engine failed
        self._engines = engines
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def serve(self, listening: socket.socket, ready: Callable[[], None] | None = None) -> None:
        """Serve until `stop` is called or all engines have failed permanently."""
        watching = asyncio.ensure_future(self._watch())
        try:
            await serve(self.state, listening, stop=self._stop, stop_now=self._stop_now, ready=ready)
        finally:
            watching.cancel()

    def stop(self) -> None:
        """Accept no new requests; `serve` returns when those in flight end, at most after `gateway.grace_s`."""
        self._stop.set()

    def stop_now(self) -> None:
        """Stop without waiting for requests in flight."""
        self._stop_now.set()
        self._stop.set()

    async def _watch(self) -> None:
        """Log exits and restarts of engines; stop when every engine has failed."""
        restarting = [(engine, one.name) for one, engine in self._engines if engine.capabilities.restarts]
        several = len(self._engines) > 1
        ends = await asyncio.gather(
            *(watch_engine(engine, name if several else None) for engine, name in restarting), return_exceptions=True
        )
        if restarting and len(restarting) == len(self._engines):
            self.failure = next((end for end in ends if isinstance(end, TokenmillError)), None)
            self.stop()


@asynccontextmanager
async def loaded_gateway(
    wanted: Sequence[EngineSpec], config: Config, on_progress: OnProgress, log: AccessLog | None = None
) -> AsyncIterator[Gateway]:
    """Load the engines one after the other; closes them on exit."""
    several = len(wanted) > 1
    async with started_engines(
        wanted,
        config,
        tell=lambda name: _load_progress(name if several else None, on_progress),
        slow=SlowLoad().report,
    ) as (engines, ready_engines):
        yield Gateway(state_for(config, engines, ready_engines, log), engines)


def _load_progress(name: str | None, on_progress: OnProgress) -> Tell:
    """Progress callback for one engine; logs `name` before the first event."""
    announced = name is None

    def report(event: LoadProgress | WarmProgress) -> None:
        nonlocal announced
        if not announced:
            announced = True
            messages.info("engine %s:", name)
        on_progress(event)

    return report


async def _attached(one: EngineSpec, *, alone: bool) -> Engine:
    """Attach to a running server; one that is down is attached later if there are other engines."""
    url = one.url or one.config.kind

    async def again() -> ServerEngine:
        return await attach(url, one.config, model=one.model)

    try:
        return await again()
    except EngineError as error:
        if alone:
            raise
        name = one.model or next(iter(one.names), one.name)
        return LateServer(again, model=name, address=base_url(url), error=error)


def state_for(
    config: Config,
    engines: Sequence[tuple[EngineSpec, Engine]],
    ready_engines: dict[str, ReadyEngine],
    log: AccessLog | None = None,
) -> GatewayState:
    """The shared state for these engines."""
    settings = config.gateway
    gates = AdmissionGates(config.gateway.queue)
    backends: list[Backend] = []
    served: list[tuple[Backend, tuple[str, ...]]] = []
    recorder = Recorders()
    for one, engine in engines:
        identity = engine.identity
        can = engine.capabilities
        gate = gates.open(one.name, slots=identity.slots, interactive_first=can.interactive_first)
        key = key_from(one.config.api_key_env) if one.url is not None else None
        backend = ManagedBackend(one.name, engine, gate, recorder=recorder, key=key)
        backends.append(backend)
        served.append((backend, tuple(dict.fromkeys((*one.names, identity.model, one.name)))))
    usual = keys.KeyLimits(**{name: getattr(settings, name) for name in keys.LIMITS})
    routes = Routes(config.routes, served, int(time.time()))
    state = GatewayState(
        config,
        config.state_path,
        backends,
        routes,
        gates,
        keys.Keys(config.state_path),
        Limiter(usual, time.monotonic, TokenBudget.of(config.state_path)),
        ready_engines,
        digests_of(config, ready_engines),
        recorder=recorder,
    )
    state.log = log or state.log
    return state


def digests_of(config: Config, ready_engines: dict[str, ReadyEngine]) -> list[ServedDigest]:
    """The digests with the engines that hold them."""
    found = []
    for entry in config.digests:
        digest = ServedDigest(entry.name, Path(entry.file))
        for name, ready in ready_engines.items():
            for head in ready.warmth.prefixes if ready.warmth is not None else ():
                if head.name == entry.name:
                    digest.held[name] = head
        found.append(digest)
    return found


async def serve(
    state: GatewayState,
    listening: socket.socket,
    *,
    stop: asyncio.Event,
    stop_now: asyncio.Event | None = None,
    ready: Callable[[], None] | None = None,
) -> None:
    """Serve until `stop` is set, then shut down within the grace period; `stop_now` ends it."""
    settings = state.config.gateway
    app = create_app(state)
    allow_files(settings.max_connections)
    listener = Listener(app, settings, state.recorder.refused)
    state.url = url_of(settings, listening)
    async with app.lifespan():
        serving = asyncio.create_task(listener.serve(sockets=[listening]))
        waiting = asyncio.create_task(stop.wait())
        try:
            await _started(listener, serving)
            if ready is not None:
                ready()
            await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
            state.shutting_down.set()
            await _shut_down(state, listener, serving, stop_now or asyncio.Event())
        finally:
            waiting.cancel()
            serving.cancel()


async def _shut_down(
    state: GatewayState, listener: Listener, serving: "asyncio.Task[None]", stop_now: asyncio.Event
) -> None:
    """Wait for requests in flight, cancel those left after the grace period, and wait for their responses."""
    listener.stop()
    hurry = asyncio.create_task(stop_now.wait())
    try:
        await asyncio.wait({serving, hurry}, timeout=state.config.gateway.grace_s, return_when=asyncio.FIRST_COMPLETED)
        state.cancel_all()
        if not stop_now.is_set():
            await asyncio.wait({serving, hurry}, timeout=_AFTER_GRACE_S, return_when=asyncio.FIRST_COMPLETED)
        listener.stop_now()
        await serving
    finally:
        hurry.cancel()


async def _started(listener: Listener, serving: "asyncio.Task[None]") -> None:
    while not listener.started and not serving.done():
        await asyncio.sleep(0)
    if serving.done():
        serving.result()


async def _predecessor_gone(state: Path, name: str) -> None:
    """Wait until the engine of a killed gateway has exited and its name is free."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + _PREDECESSOR_S
    while (
        (left := registry.read(state, name)) is not None and left.alive and not left.detached and loop.time() < until_s
    ):
        await asyncio.sleep(_POLL_S)
