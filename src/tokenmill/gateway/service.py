"""`tokenmill.serve`: a gateway in the background of a script or a notebook.

The gateway runs in an event loop on a background thread (`api/background.py`) and its engines in separate processes,
so `serve` can be called from any thread, even one with a running event loop. `tokenmill serve` runs the same gateway
(`prepare.py`, `serving.py`) in the foreground. The packages of the extra `serve` are imported when `serve` is called.
"""

import asyncio
import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

from tokenmill.api.background import Background, BackgroundTask, Emit
from tokenmill.api.display import display
from tokenmill.api.options import EngineArguments, engine_options
from tokenmill.api.planning.plan import configuration
from tokenmill.api.progress import OnProgress, Progress, log
from tokenmill.config import Config

if TYPE_CHECKING:
    from tokenmill.gateway.prepare import PreparedGateway
    from tokenmill.gateway.serving import Gateway

_requests = log.getChild("requests")


def serve(
    model: str | Path | None = None,
    *,
    host: str | None = None,
    name: str | None = None,
    digests: Sequence[str | Path] = (),
    config: Config | str | Path | None = None,
    on_progress: OnProgress | None = None,
    **options: Unpack[EngineArguments],
) -> "Server":
    """Load a model and serve it over an OpenAI-compatible API; returns when the server is ready.

    `model`: as for `tokenmill.load`; default: the engines of the configuration, or smollm2 if it lists none.
    `host`, `port=`: the address to listen on; default: the configuration's, or 127.0.0.1 and 8181. Port 0 picks a
    free port. Any other host needs an API key (`tokenmill keys add`). `name`: the engine's name; default: the model's.
    `digests`: files whose text is the system message of many requests; they are computed before the server is ready
    and stay cached. The other options are those of `tokenmill.plan`. `on_progress` receives `tokenmill.api.progress`
    events in the calling thread; default: a progress bar if stderr is a terminal or a notebook. The logger
    `tokenmill.requests` logs every request.

    Raises UsageError if the port is taken, and DoesNotFit if the plan does not fit. A load that fails or is interrupted
    leaves no process behind.
    """
    from tokenmill.gateway.prepare import ServeOptions, prepare  # noqa: PLC0415  slow to import

    asked = ServeOptions(host, name, tuple(map(Path, digests)), engine_options(options))
    with nullcontext(on_progress) if on_progress is not None else display() as report:
        prepared = prepare(None if model is None else str(model), asked, configuration(config), report)
        return _start(prepared, report)


class Server:
    """A server that runs in the background; created by `tokenmill.serve`.

    Use it as a context manager, or call `close`. A server that is not closed stops when it is garbage-collected or when
    Python exits.
    """

    def __init__(self, ready: "_Ready", background: Background, task: BackgroundTask[None]) -> None:
        """Use `serve`."""
        state = ready.gateway.state
        self._url = f"{state.url}/v1"
        self._models = tuple(model.id for model in state.routes.models())
        self._task = task
        self._stopped = threading.Event()
        task.when_done(self._stopped.set)
        self._close = weakref.finalize(self, _close, ready, background, task, os.getpid())
        self._close.atexit = False  # when Python exits, the supervisors stop the engines

    @property
    def url(self) -> str:
        """The base URL for OpenAI clients, such as http://127.0.0.1:8181/v1."""
        return self._url

    @property
    def models(self) -> tuple[str, ...]:
        """The names of the models that it serves."""
        return self._models

    def wait(self) -> None:
        """Block until the server stops; raises the engine's error if all engines failed permanently.

        Ctrl-C stops the server as `close` does and raises KeyboardInterrupt.
        """
        try:
            self._stopped.wait()
        except BaseException:
            self.close()
            raise
        self.close()
        self._task.result()

    def close(self) -> None:
        """Wait up to `gateway.grace_s` seconds for requests in flight, then stop the server and its engines."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", stopped" if self._stopped.is_set() else ""
        return f"<tokenmill.Server {self.url}: {', '.join(self.models)}{state}>"


@dataclass(frozen=True, slots=True)
class _Ready:
    gateway: "Gateway"
    loop: asyncio.AbstractEventLoop


def _start(prepared: "PreparedGateway", on_progress: OnProgress) -> Server:
    """Load and serve in the background; returns when the server is ready."""
    background = Background().start()
    try:
        events: SimpleQueue[Progress | _Ready | None] = SimpleQueue()
        task = background.submit(_serve(prepared, events.put))
        task.when_done(lambda: events.put(None))
        ready = _wait_until_ready(events, task, on_progress)
        return Server(ready, background, task)
    except BaseException:
        background.close()
        raise


def _wait_until_ready(
    events: "SimpleQueue[Progress | _Ready | None]", task: BackgroundTask[None], on_progress: OnProgress
) -> _Ready:
    """Report progress in the calling thread until the server is ready; raises the error of a failed load.

    An exception in the calling thread, such as KeyboardInterrupt, cancels the load and waits for its cleanup.
    """
    try:
        while (event := events.get()) is not None:
            if isinstance(event, _Ready):
                return event
            on_progress(event)
    except BaseException:
        task.cancel()
        raise
    task.result()
    raise AssertionError("a gateway ended before it was ready")


async def _serve(prepared: "PreparedGateway", emit: Emit["Progress | _Ready"]) -> None:
    from tokenmill.gateway.http.request_log import request_log  # noqa: PLC0415  an extra
    from tokenmill.gateway.serving import loaded_gateway  # noqa: PLC0415

    loop = asyncio.get_running_loop()
    requests = request_log(prepared.config.gateway.log, _requests.info)
    with prepared.resources:
        async with loaded_gateway(prepared.engines, prepared.config, emit, requests) as gateway:
            await gateway.serve(prepared.listening, ready=lambda: emit(_Ready(gateway, loop)))
    if gateway.failure is not None:
        raise gateway.failure


def _close(ready: _Ready, background: Background, task: BackgroundTask[None], pid: int) -> None:
    if os.getpid() != pid:  # a forked process does not own the server
        return
    if not task.done:
        ready.loop.call_soon_threadsafe(ready.gateway.stop)
    if _runs_here(ready.loop):  # a garbage collection in the loop's thread cannot wait
        task.when_done(background.close)
        return
    try:
        task.wait()
    finally:
        background.close()


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
