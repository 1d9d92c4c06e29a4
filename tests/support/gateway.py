"""A gateway for tests: the real server on its own port, in a thread with its own event loop."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import openai

from support import patient
from support.native_engine import plan_for
from tokenmill.config import Config, EngineConfig, GatewayConfig
from tokenmill.engine.engine import Engine
from tokenmill.engine.pinned_prefixes import PinnedPrefix
from tokenmill.gateway.http.listening import bind
from tokenmill.gateway.serving import EngineSpec, serve, started_engines, state_for
from tokenmill.gateway.state import GatewayState

LIMIT_S = 120.0
T = TypeVar("T")
Engines = Callable[[Config], AbstractAsyncContextManager[GatewayState]]


class Served:
    """A gateway that answers."""

    def __init__(self, state: GatewayState, loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
        self.state, self._loop, self._stop = state, loop, stop
        self._lines: list[dict[str, Any]] = []
        self._clients: list[openai.OpenAI] = []

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The log so far. A line is written after the last byte of its answer: the gateway gets a few turns for it."""

        async def turns() -> None:
            for _ in range(4):
                await asyncio.sleep(0)

        if self._loop.is_running():
            self.call(turns())
        return self._lines

    def log(self, line: Mapping[str, Any]) -> None:
        self._lines.append(dict(line))

    @property
    def url(self) -> str:
        return self.state.url

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def client(self, key: str = "none", **settings: Any) -> Any:
        """OpenAI's own client; untyped, because its types know only OpenAI's models and keys."""
        http = openai.DefaultHttpxClient(verify=patient.TRUSTED)
        one = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=LIMIT_S, http_client=http, **settings
        )
        self._clients.append(one)
        return one

    def asynchronous(self, key: str = "none") -> Any:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=LIMIT_S)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something in the gateway's own loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(LIMIT_S)

    def close_clients(self) -> None:
        for client in self._clients:
            client.close()

    def tell_to_stop(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)

    def running(self) -> int:
        """Streams inside all engines."""

        async def count() -> int:
            return sum(backend.gate.running for backend in self.state.backends)

        return self.call(count())


def config_in(folder: Path, **settings: Any) -> Config:
    """A configuration with its state in a folder, on any free port."""
    return Config(state_dir=str(folder), gateway=GatewayConfig(port=0, **{"log": "off", **settings}))


def native_engine(
    model: Path,
    *,
    heads: Sequence[PinnedPrefix] = (),
    context: int = 1024,
    sequences: int = 4,
    step_limit_s: float | None = None,
) -> Engines:
    """One real engine on one thread."""

    @asynccontextmanager
    async def up(config: Config) -> AsyncIterator[GatewayState]:
        plan = plan_for(model, context=context, sequences=sequences)
        engine = EngineConfig(warm=False, step_limit_s=step_limit_s)
        wanted = EngineSpec("here", ("smollm2",), engine, plan, model, digests=tuple(heads))
        async with started_engines([wanted], config) as (engines, ups):
            yield state_for(config, engines, ups)

    return up


def fake_engines(make: Callable[[], Sequence[tuple[str, Engine]]]) -> Engines:
    """Engines for faults; all serve the model `fake`."""

    @asynccontextmanager
    async def up(config: Config) -> AsyncIterator[GatewayState]:
        engines = [(EngineSpec(name, ("fake",), EngineConfig()), engine) for name, engine in make()]
        try:
            yield state_for(config, engines, {})
        finally:
            for _, engine in engines:
                await engine.close()

    return up


@contextmanager
def served(engines: Engines, config: Config) -> Iterator[Served]:
    """A gateway before engines; afterwards it and they have ended."""
    started = threading.Event()
    box: list[Served | BaseException] = []

    async def live() -> None:
        stop = asyncio.Event()
        async with engines(config) as state:
            one = Served(state, asyncio.get_running_loop(), stop)
            state.log = one.log

            def up() -> None:
                box.append(one)
                started.set()

            with bind(config.gateway) as listening:
                await serve(state, listening, stop=stop, ready=up)

    def run() -> None:
        try:
            asyncio.run(live())
        except BaseException as error:  # noqa: BLE001  passed to the waiting thread
            box.append(error)
            started.set()

    thread = threading.Thread(target=run, name="gateway")
    thread.start()
    assert started.wait(LIMIT_S)
    if isinstance(box[0], BaseException):
        thread.join(LIMIT_S)
        raise box[0]
    gateway = box[0]
    try:
        yield gateway
    finally:
        gateway.close_clients()
        gateway.tell_to_stop()
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    if len(box) > 1 and isinstance(box[1], BaseException):
        raise box[1]
