"""Blocking calls into asyncio code."""

import asyncio
import gc
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from tokenmill.api.background import Background, Emit
from tokenmill.errors import EngineError, UsageError


@pytest.fixture
def background() -> Iterator[Background]:
    with Background() as started:
        yield started


class Waiting:
    """Work that never ends, and takes a while to clean up when it is cancelled."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.cleaned = False

    async def work(self, _emit: Emit[int] | None = None) -> None:
        self.started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            self.cleaned = True


async def double(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


async def refuse() -> None:
    raise UsageError("no")


def test_results_and_errors_come_back(background: Background) -> None:
    assert background.run(double(4)) == 8
    with pytest.raises(UsageError):
        background.run(refuse())


def test_a_running_event_loop_does_not_matter(background: Background) -> None:
    async def inside() -> int:
        return background.run(double(4))

    assert asyncio.run(inside()) == 8


def test_several_threads_at_the_same_time(background: Background) -> None:
    meeting = asyncio.Barrier(4)

    async def meet(number: int) -> int:
        async with asyncio.timeout(60):
            await meeting.wait()
        return number

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda number: background.run(meet(number)), range(4))) == [0, 1, 2, 3]


def test_ctrl_c_cancels_the_work_and_waits_for_its_cleanup(background: Background) -> None:
    waiting = Waiting()
    main = threading.get_ident()

    async def interrupted() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        await waiting.work()

    with pytest.raises(KeyboardInterrupt):
        background.run(interrupted())
    assert waiting.cleaned
    assert background.run(double(1)) == 2


@contextmanager
def interrupted_at(line: int) -> Iterator[None]:
    """Raise KeyboardInterrupt before the given line of background.py that this thread executes, counted from 0."""
    passed = -1
    latest: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal passed
        if not frame.f_code.co_filename.endswith("api/background.py"):
            return None
        if event != "line" or frame.f_lineno < latest.get(frame, 0):  # the end of a `with`: no signal is handled there
            return trace
        latest[frame] = frame.f_lineno
        passed += 1
        if passed == line:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        sys.settrace(before)
        latest.clear()


@pytest.mark.parametrize("line", range(16))
def test_ctrl_c_at_any_moment_cancels_the_work(background: Background, line: int) -> None:
    waiting = Waiting()
    work = waiting.work()
    with interrupted_at(line):
        background.run(work)
    work.close()
    assert waiting.cleaned == waiting.started.is_set()
    assert background.run(double(1)) == 2


@pytest.mark.filterwarnings("ignore:coroutine 'Background._end' was never awaited")  # interrupted as it is made
@pytest.mark.parametrize("line", range(16))
def test_ctrl_c_at_any_moment_does_not_prevent_closing(line: int) -> None:
    background = Background().start()
    ended = threading.Event()

    async def last() -> None:
        await asyncio.sleep(0.05)
        ended.set()

    with interrupted_at(line):
        background.close(last)
    assert ended.is_set() == (line > 1)  # before that, nothing has begun
    background.close(last)
    assert ended.is_set()
    gc.collect()  # a coroutine that was interrupted as it was made warns here, not in another test


async def count_to_three(emit: Emit[int]) -> str:
    for number in range(3):
        emit(number)
        await asyncio.sleep(0)
    return "end"


def test_events_arrive_in_order_in_the_calling_thread(background: Background) -> None:
    seen: list[tuple[int, int]] = []
    result = background.report(count_to_three, lambda number: seen.append((number, threading.get_ident())))
    assert result == "end"
    assert seen == [(number, threading.get_ident()) for number in range(3)]


def test_an_error_in_the_callback_cancels_the_work(background: Background) -> None:
    waiting = Waiting()

    async def work(emit: Emit[int]) -> None:
        emit(1)
        await waiting.work()

    def callback(_number: int) -> None:
        raise StopIteration("from the callback")

    with pytest.raises(StopIteration):
        background.report(work, callback)
    assert waiting.cleaned == waiting.started.is_set()


def test_closing_the_generator_cancels_the_work(background: Background) -> None:
    waiting = Waiting()

    async def work(emit: Emit[int]) -> None:
        emit(1)
        await waiting.work()

    events = background.events(work)
    assert next(events) == 1
    assert waiting.started.wait(60)
    events.close()
    assert waiting.cleaned


def test_close_cancels_what_others_wait_for_and_then_runs_the_last_work() -> None:
    background = Background().start()
    waiting = Waiting()
    order: list[bool] = []

    async def last() -> None:
        order.append(waiting.cleaned)

    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(background.run, waiting.work())
        assert waiting.started.wait(60)
        background.close(last)
        assert isinstance(other.exception(60), EngineError)
    assert order == [True]
    background.close(last)
    assert order == [True]
    with pytest.raises(EngineError):
        background.run(double(1))


def test_ctrl_c_while_closing_is_raised_after_the_last_work() -> None:
    background = Background().start()
    main = threading.get_ident()
    ended = threading.Event()

    async def last() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        await asyncio.sleep(0.05)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        background.close(last)
    assert ended.is_set()


def test_an_error_of_the_last_work_is_raised() -> None:
    with pytest.raises(UsageError):
        Background().start().close(refuse)


def test_another_process_is_refused(background: Background, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as forked:
        forked.setattr("os.getpid", lambda: -1)
        with pytest.raises(EngineError):
            background.run(double(1))
        background.close()  # a forked child's garbage collection must not wait for a thread that it does not have
    assert background.run(double(1)) == 2
