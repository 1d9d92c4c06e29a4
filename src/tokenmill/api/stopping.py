"""Graceful shutdown of long work, from another thread or from a signal handler."""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar

from tokenmill.jobs.store.backend import Shutdown

T = TypeVar("T")
E = TypeVar("E")
_CLOCK_S = 10.0  # between two looks at the clock
_INTERRUPTED = 130  # the exit code of a command that SIGINT ended


class Stop:
    """A request to stop one run.

    `request` sets `event`, which the worker watches. While the engine is loading, it also cancels the task that called
    `begin`. `end_by` does the same at a time, without setting `requested`.
    """

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.shutdown = Shutdown()  # aborts waits for an unreachable database server
        self.requested = False
        self.time_up = False  # a time limit ended the work in the current event loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loading: asyncio.Task[object] | None = None

    def begin(self) -> None:
        """Register the current task as the loading task; call it in the event loop of the run.

        May be called again in another event loop, for the next part of the same run.
        """
        self._loop = asyncio.get_running_loop()
        self._loading = asyncio.current_task()
        self.event = asyncio.Event()
        self.time_up = False
        if self.requested:
            self._loop.call_soon(self._stop)

    def loaded(self) -> None:
        """Report that the engine is loaded; from now on a stop only sets `event`."""
        self._loading = None

    def cancel_loading(self) -> None:
        """Cancel the loading task, if the engine is not loaded yet."""
        if self._loading is not None:
            self._loading.cancel()

    async def end_by(self, until_s: float) -> None:
        """End the work at a Unix time; returns then. The clock is read often, because it can be set or sleep."""
        while (left_s := until_s - time.time()) > 0:
            await asyncio.sleep(min(left_s, _CLOCK_S))
        self.time_up = True
        self._stop()

    async def wait_until(self, until_s: float) -> None:
        """Wait until a Unix time, or until a stop is requested; call `begin` before."""
        self.loaded()
        ending = asyncio.create_task(self.end_by(until_s))
        try:
            await self.event.wait()
        finally:
            ending.cancel()

    def request(self, code: int = _INTERRUPTED) -> None:
        """Request the stop, from any thread. `code`: the exit code of the process."""
        self.requested = True
        self.shutdown.request(code)
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: the run is over
                self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        self.event.set()
        self.cancel_loading()


def in_thread(work: Callable[[Callable[[E], None]], T], stop: Stop, on_event: Callable[[E], None]) -> T:
    """Run blocking work in a separate thread and return its result.

    The caller's thread may have a running event loop, as in Jupyter. `on_event` is called in the caller's thread. An
    exception there, such as KeyboardInterrupt, requests the stop and is raised when the work has stopped; a second
    KeyboardInterrupt is raised immediately.
    """
    queue: SimpleQueue[tuple[E] | None] = SimpleQueue()
    result: list[T] = []
    error: list[BaseException] = []

    def target() -> None:
        try:
            result.append(work(lambda event: queue.put((event,))))
        except BaseException as raised:  # noqa: BLE001  raised again in the waiting thread
            error.append(raised)
        finally:
            queue.put(None)

    thread = threading.Thread(target=target, name="tokenmill-run", daemon=True)
    thread.start()
    try:
        while (item := queue.get()) is not None:
            on_event(item[0])
    except BaseException:
        stop.request()
        thread.join()
        raise
    if error:
        raise error[0]
    return result[0]
