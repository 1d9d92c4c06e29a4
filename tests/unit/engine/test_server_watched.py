"""An engine that dies is started again, waited for, and given up when it dies too often."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest

from tokenmill.engine.engine import (
    Answer,
    Capabilities,
    Counters,
    Identity,
    Piece,
    Prompt,
    Request,
    Status,
    Usage,
    answer,
)
from tokenmill.engine.server_bodies import Speech, capabilities_of
from tokenmill.engine.watched import HOUR_S, Watched, delay_s
from tokenmill.errors import EngineDied, EngineError, EngineTimeout


class OneLife:
    """An engine for faults alone: answers at once, or holds a stream until it dies."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.died: asyncio.Future[EngineDied] = asyncio.get_running_loop().create_future()
        self.streaming, self.closed = asyncio.Event(), False

    @property
    def identity(self) -> Identity:
        return Identity("url", "m", "id", f"life {self.number}", None, None, "nowhere")

    @property
    def capabilities(self) -> Capabilities:
        return capabilities_of(Speech("url", "m"), reports_cached=False)

    async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        self.streaming.set()
        if request.prompt == "hold":
            raise await asyncio.shield(self.died)
        yield Answer(f"life {self.number}", "stop", Usage(1, 1, None))

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        return (self.number,)

    async def status(self) -> Status:
        return Status("ready", self.identity, Counters())

    async def close(self) -> None:
        self.closed = True

    def die(self) -> None:
        self.died.set_result(EngineDied(f"life {self.number} ended"))


def at_once(*_: object) -> float | None:
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

        watched = Watched(lives[0], again, delay=at_once)
        held = asyncio.create_task(answer(watched, Request("hold")))
        await lives[0].streaming.wait()
        lives[0].die()
        with pytest.raises(EngineDied, match="life 0 ended"):
            await held
        assert (await answer(watched, Request("x"))).text == "life 1"
        assert watched.identity.build == "life 1"
        assert await watched.tokenize("x") == (1,)
        assert (await watched.status()).counters.restarts == 1
        assert lives[0].closed
        assert watched.current is lives[1]
        await watched.close()
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
        watched = Watched(first, again, delay=at_once)
        first.die()
        await asked.wait()
        status = await watched.status()
        assert (status.state, status.detail) == ("restarting", "life 0 ended")
        with pytest.raises(EngineTimeout, match="life 0 ended"):
            await answer(watched, Request("x", timeout_s=0.01))
        waiting = asyncio.create_task(answer(watched, Request("x")))
        go.set()
        assert (await waiting).text == "life 1"
        await watched.close()

    run(scene)


def test_it_gives_up() -> None:
    async def scene() -> None:
        tries = 0

        async def never() -> OneLife:
            nonlocal tries
            tries += 1
            raise EngineError(f"no luck {tries}", hint="look")

        first = OneLife()
        waits = iter([0.0, 0.0, 0.0, None])
        watched = Watched(first, never, most_restarts=3, delay=lambda *_: next(waits))
        first.die()
        failure = await watched.failed
        assert "4 times within an hour: no luck 3" in str(failure)
        assert failure.hint == "look"
        assert tries == 3
        with pytest.raises(EngineError, match="no luck 3"):
            await answer(watched, Request("x"))
        assert (await watched.status()).state == "failed"
        await watched.close()

    run(scene)


def test_closed_while_it_restarts() -> None:
    async def scene() -> None:
        asked = asyncio.Event()

        async def forever() -> OneLife:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

        first = OneLife()
        watched = Watched(first, forever, delay=at_once)
        first.die()
        await asked.wait()
        await watched.close()

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
