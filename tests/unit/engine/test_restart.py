"""An engine that dies is restarted, and fails permanently after too many deaths."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest

from tokenmill.engine.engine import (
    Answer,
    Capabilities,
    Counters,
    Engine,
    EngineStatus,
    HttpApi,
    Identity,
    Piece,
    Prompt,
    Request,
    Usage,
    answer,
)
from tokenmill.engine.forward import ForwardingEngine
from tokenmill.engine.restart import HOUR_S, RestartingEngine, delay_s
from tokenmill.engine.server.request import capabilities_of
from tokenmill.errors import EngineDied, EngineError, EngineTimeout


class OneLife(Engine):
    """A test engine: answers immediately, or holds a stream open until it dies."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.slots = 1
        self.streaming, self.closed = asyncio.Event(), False

    @property
    def identity(self) -> Identity:
        return Identity("url", "m", "id", f"life {self.number}", None, self.slots, "nowhere")

    @property
    def capabilities(self) -> Capabilities:
        return capabilities_of(HttpApi("url", "m"), reports_cached=False)

    async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        self.streaming.set()
        if request.prompt == "hold":
            raise await asyncio.shield(self.ended)
        yield Answer(f"life {self.number}", "stop", Usage(1, 1, None))

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        return (self.number,)

    async def set_slots(self, slots: int) -> None:
        self.slots = slots

    async def status(self) -> EngineStatus:
        return EngineStatus("ready", self.identity, Counters())

    async def close(self) -> None:
        self.closed = True

    def die(self) -> None:
        self.ended.set_result(EngineDied(f"life {self.number} ended"))


def no_delay(*_: object) -> float | None:
    return 0.0


def run(scene: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(10):
            await scene()

    asyncio.run(limited())


def test_a_stream_dies_with_its_engine_and_the_next_finds_another() -> None:
    async def scene() -> None:
        lives = [OneLife(0)]

        async def again() -> OneLife:
            lives.append(OneLife(len(lives)))
            return lives[-1]

        restarting = RestartingEngine(lives[0], again, delay=no_delay)
        held = asyncio.create_task(answer(restarting, Request("hold")))
        await lives[0].streaming.wait()
        lives[0].die()
        with pytest.raises(EngineDied, match="life 0 ended"):
            await held
        assert (await answer(restarting, Request("x"))).text == "life 1"
        assert restarting.identity.build == "life 1"
        assert await restarting.tokenize("x") == (1,)
        assert (await restarting.status()).counters.restarts == 1
        assert lives[0].closed
        assert restarting.inner is lives[1]
        await restarting.close()
        assert lives[1].closed

    run(scene)


def test_while_it_restarts_requests_wait() -> None:
    async def scene() -> None:
        go, asked = asyncio.Event(), asyncio.Event()

        async def again() -> OneLife:
            asked.set()
            await go.wait()
            return OneLife(1)

        first = OneLife()
        restarting = RestartingEngine(first, again, delay=no_delay)
        first.die()
        await asked.wait()
        status = await restarting.status()
        assert (status.state, status.detail) == ("restarting", "life 0 ended")
        with pytest.raises(EngineTimeout, match="life 0 ended"):
            await answer(restarting, Request("x", timeout_s=0.01))
        waiting = asyncio.create_task(answer(restarting, Request("x")))
        go.set()
        assert (await waiting).text == "life 1"
        await restarting.close()

    run(scene)


def test_it_fails_after_too_many_deaths() -> None:
    async def scene() -> None:
        tries = 0

        async def never() -> OneLife:
            nonlocal tries
            tries += 1
            raise EngineError(f"failed start {tries}", hint="look")

        first = OneLife()
        waits = iter([0.0, 0.0, 0.0, None])
        restarting = RestartingEngine(first, never, most_restarts=3, delay=lambda *_: next(waits))
        first.die()
        failure = await restarting.ended
        assert "4 times within an hour: failed start 3" in str(failure)
        assert failure.hint == "look"
        assert tries == 3
        with pytest.raises(EngineError, match="failed start 3"):
            await answer(restarting, Request("x"))
        assert (await restarting.status()).state == "failed"
        await restarting.close()

    run(scene)


def test_callers_see_a_restart_through_the_engine_interface() -> None:
    async def scene() -> None:
        go, asked = asyncio.Event(), asyncio.Event()

        async def again() -> OneLife:
            asked.set()
            await go.wait()
            return OneLife(1)

        first = OneLife()
        restarting = RestartingEngine(first, again, delay=no_delay)
        exited = restarting.exited
        assert (restarting.liveness, restarting.generation, restarting.last_error) == ("up", 0, None)
        assert restarting.capabilities.restarts
        first.die()
        assert restarting.liveness == "restarting"  # before the supervisor has run
        assert exited.done()
        await asked.wait()
        assert (restarting.liveness, restarting.generation) == ("restarting", 1)
        assert str(restarting.last_error) == "life 0 ended"
        with pytest.raises(EngineDied, match="life 0 ended"):
            await restarting.set_slots(2)
        go.set()
        await restarting.tokenize("x")
        assert (restarting.liveness, restarting.generation) == ("up", 1)
        assert restarting.exited is not exited
        await restarting.set_slots(2)
        assert restarting.identity.slots == 2
        assert not restarting.ended.done()
        await restarting.close()

    run(scene)


def test_an_engine_refuses_what_it_does_not_support() -> None:
    async def scene() -> None:
        engine = OneLife()
        with pytest.raises(EngineError, match="life 0 does not support"):
            await engine.set_threads(1, 1)
        with pytest.raises(EngineError, match="life 0 does not support"):
            await RestartingEngine(engine, engine_never).pin_prefix("x")

    run(scene)


async def engine_never() -> Engine:
    raise AssertionError


def test_every_optional_operation_is_forwarded() -> None:
    own = {"stop", "reconnect"}  # of the life cycle, which each wrapper defines
    operations = {
        name
        for name, method in vars(Engine).items()
        if inspect.iscoroutinefunction(method)
        and not name.startswith("_")
        and not hasattr(method, "__isabstractmethod__")
    }
    assert {"set_slots", "embed"} <= operations
    assert operations - own <= vars(ForwardingEngine).keys()


def test_closed_while_it_restarts() -> None:
    async def scene() -> None:
        asked = asyncio.Event()

        async def forever() -> OneLife:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

        first = OneLife()
        restarting = RestartingEngine(first, forever, delay=no_delay)
        first.die()
        await asked.wait()
        await restarting.close()

    run(scene)


@pytest.mark.parametrize(
    ("deaths", "now", "most", "wait"),
    [
        ([0.0], 0.0, 5, 1.0),
        ([0.0, 5.0], 5.0, 5, 2.0),
        ([0.0, 5.0, 9.0], 9.0, 5, 4.0),
        ([0.0] * 5, 9.0, 5, 16.0),
        ([0.0] * 6, 9.0, 5, None),
        ([0.0] * 20, 9.0, 100, 60.0),
        ([0.0] * 5 + [HOUR_S + 1], HOUR_S + 1, 5, 1.0),
        ([0.0], 0.0, 0, None),
    ],
)
def test_waits_double_up_to_a_minute(deaths: list[float], now: float, most: int, wait: float | None) -> None:
    assert delay_s(deaths, now, most) == wait
