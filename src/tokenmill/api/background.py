"""Blocking calls into asyncio code, from any thread: an event loop on a thread of its own.

    run(coroutine)           wait for its result
    report(work, callback)   the same, for work that reports events; the callback runs in the calling thread
    events(work)             the events as a generator
    submit(coroutine)        start it without waiting; `Task.result` waits

An exception in the calling thread while it waits, such as KeyboardInterrupt, cancels the coroutine, waits until its
cleanup is done and is then raised; a second Ctrl-C does not wait. It makes no difference whether the calling thread
runs an event loop itself, as Jupyter's does.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

from tokenmill.errors import EngineError

T = TypeVar("T")
E = TypeVar("E")
Emit = Callable[[E], None]


class BackgroundTask(Generic[T]):
    """A coroutine that runs in the background."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        """Create the task; a separate `start` lets the caller cancel it whenever an exception arrives."""
        self._work = work
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[T] | None = None
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    def start(self, loop: asyncio.AbstractEventLoop) -> Self:
        """Run it in the event loop of another thread; further calls do nothing."""
        self._loop = loop
        loop.call_soon_threadsafe(self._start)
        return self

    @property
    def done(self) -> bool:
        """Whether it has ended, including its cleanup."""
        return self._done.is_set()

    def result(self) -> T:
        """Wait for its result; EngineError if it was cancelled."""
        self._done.wait()
        if self._task is None or self._task.cancelled():
            raise EngineError("the call was cancelled because the engine was closed")
        return self._task.result()

    def wait(self) -> None:
        """Wait for its end, however it ends."""
        self._done.wait()

    def cancel(self) -> None:
        """Cancel it and wait for its cleanup; does nothing if it has ended."""
        self.request_cancel()
        if self._loop is not None and not _runs_here(self._loop):  # garbage collection in the loop cannot wait
            self._done.wait()

    def request_cancel(self) -> None:
        """Cancel it without waiting."""
        if self._loop is None:
            self._work.close()
        elif not self.done:
            self._loop.call_soon_threadsafe(self._cancel)

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call back in the background thread when it ends, or immediately if it has ended."""
        with self._lock:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback()

    def _start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._work)
            self._task.add_done_callback(self._ended)

    def _cancel(self) -> None:
        if self._task is None:  # an exception arrived before it was started
            self._work.close()
            self._finish()
        elif not self._task.cancelling():  # a second time would cancel the cleanup
            self._task.cancel()

    def _ended(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # marks it as retrieved: otherwise asyncio logs it if the result is never read
        self._finish()

    def _finish(self) -> None:
        with self._lock:
            self._done.set()
        for callback in self._callbacks:
            callback()


class Background:
    """An event loop on a daemon thread, for all threads of the process that started it."""

    def __init__(self) -> None:
        """`start` starts the thread."""
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: Callable[[], None] = lambda: None
        self._thread: threading.Thread | None = None
        self._tasks: set[BackgroundTask[Any]] = set()
        self._ending: BackgroundTask[None] | None = None
        self._pid = os.getpid()

    def start(self) -> Self:
        """Start the thread."""
        ready: SimpleQueue[tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = SimpleQueue()
        self._thread = threading.Thread(target=_run_loop, args=(ready,), name="tokenmill", daemon=True)
        self._thread.start()
        self._loop, self._stop = ready.get()
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, work: Coroutine[Any, Any, T]) -> BackgroundTask[T]:
        """Start a coroutine; EngineError if this is closed or was started in another process."""
        task = BackgroundTask(work)
        try:
            return self._started(task)
        except BaseException:
            task.cancel()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine."""
        task = BackgroundTask(work)
        try:
            return self._started(task).result()
        finally:
            task.cancel()

    def report(self, work: Callable[[Emit[E]], Coroutine[Any, Any, T]], callback: Callable[[E], None]) -> T:
        """The result of a coroutine; calls `callback` with its events, in order, in the calling thread."""
        events = self.events(work)
        try:
            while True:
                try:
                    event = next(events)
                except StopIteration as end:
                    return cast(T, end.value)
                callback(event)
        finally:
            events.close()

    def events(self, work: Callable[[Emit[E]], Coroutine[Any, Any, T]]) -> Generator[E, None, T]:
        """Yield the events of a coroutine, and return its result. Closing the generator cancels the coroutine."""
        queue: SimpleQueue[tuple[E] | None] = SimpleQueue()
        task = BackgroundTask(work(lambda event: queue.put((event,))))
        task.when_done(lambda: queue.put(None))
        try:
            self._started(task)
            while (item := queue.get()) is not None:
                yield item[0]
        finally:
            task.cancel()
        return task.result()

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Cancel all tasks, run `last` to its end, and stop the thread; further calls only wait for that.

        KeyboardInterrupt is raised after `last`; a second one is raised immediately.
        """
        if os.getpid() != self._pid:  # a forked child does not have the thread
            return
        try:
            self._close(last)
        except KeyboardInterrupt:
            self._close(last)  # continues where it was interrupted
            raise

    def _close(self, last: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        with self._lock:
            loop = self._loop
            if loop is None:
                return
            if self._ending is None:
                self._ending = BackgroundTask(self._end(last))
            ending = self._ending
        if not ending.done:
            ending.start(loop)
        if _runs_here(loop):  # a garbage collection in the loop's thread cannot wait
            ending.when_done(self._stop)
            return
        ending.wait()
        if self._thread is not None and threading.main_thread().is_alive():
            with suppress(RuntimeError):  # it has been stopped by another call
                loop.call_soon_threadsafe(self._stop)  # not at exit: ending a loop can need a new thread
            self._thread.join()
        ending.result()

    def _started(self, task: BackgroundTask[T]) -> BackgroundTask[T]:
        if os.getpid() != self._pid:
            raise EngineError(
                f"process {self._pid} loaded this engine, and a forked process cannot use it",
                hint="load the engine in the process that uses it",
            )
        with self._lock:
            if self._loop is None or self._ending is not None:
                raise EngineError("the engine is closed", hint="load it again with tokenmill.load")
            self._tasks.add(task)
            task.when_done(lambda: self._tasks.discard(task))
            return task.start(self._loop)

    async def _end(self, last: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        tasks = tuple(self._tasks)
        for task in tasks:
            task._cancel()
        running = [task._task for task in tasks if task._task is not None]
        await asyncio.gather(*running, return_exceptions=True)
        if last is not None:
            await last()


def _run_loop(ready: "SimpleQueue[tuple[asyncio.AbstractEventLoop, Callable[[], None]]]") -> None:
    async def wait() -> None:
        stop = asyncio.Event()
        ready.put((asyncio.get_running_loop(), stop.set))
        await stop.wait()

    asyncio.run(wait())


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
