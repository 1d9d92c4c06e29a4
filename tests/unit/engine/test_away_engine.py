"""An engine on another machine as its driver sees it."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from support.away_hosts import FakeHost, NearLine
from tokenmill.engine.engine import Answer, Piece, Request, Runtime, Status, answer
from tokenmill.engine.ray_cluster.engine import AwayEngine
from tokenmill.engine.ray_cluster.faults import Fault, fault_of
from tokenmill.engine.ray_cluster.host import Facts
from tokenmill.engine.ray_cluster.line import Lost
from tokenmill.errors import EngineDied, EngineError, TooLong

LIMIT_S = 60.0


def with_engine(
    work: Callable[[AwayEngine, NearLine, FakeHost], Awaitable[None]], host: Any = None, **more: Any
) -> None:
    async def run() -> None:
        there = host or FakeHost()
        line = NearLine(there)
        facts = await line.call("start")
        async with asyncio.timeout(LIMIT_S):
            await work(AwayEngine(line, facts, name="alpha", **more), line, there)

    asyncio.run(run())


def from_outside(engine: AwayEngine) -> bool | None:
    error = engine.ended.result()
    assert isinstance(error, EngineDied)
    return error.from_outside


def test_an_answer_comes_whole_with_its_tokens_in_one_piece() -> None:
    async def work(engine: AwayEngine, line: NearLine, host: FakeHost) -> None:
        piece, last = [event async for event in engine.stream(Request("river"))]
        assert isinstance(piece, Piece)
        assert isinstance(last, Answer)
        assert piece == Piece(last.text, last.usage.completion_tokens)
        assert last.text == "river: 0 1 2 3"
        assert engine.identity.address == "alpha"
        assert await engine.tokenize("ab") == (97, 98)
        assert (await engine.status()).state == "ready"

    with_engine(work)


def test_leaving_a_stream_cancels_it_there() -> None:
    async def work(engine: AwayEngine, line: NearLine, host: FakeHost) -> None:
        asking = asyncio.create_task(answer(engine, Request("slow")))
        await host.engine.changed.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await line.sent[-1]
        assert host.cancelled == [1]

    with_engine(work)


class Refusing(FakeHost):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self._fault = fault

    async def ask(self, number: int, request: Request) -> Any:
        return self._fault


def test_a_refusal_is_raised_here_and_nothing_else_happens() -> None:
    async def work(engine: AwayEngine, line: NearLine, host: FakeHost) -> None:
        with pytest.raises(TooLong, match="9 too many"):
            await answer(engine, Request("x"))
        assert not engine.ended.done()

    with_engine(work, Refusing(fault_of(TooLong("9 too many", needed_tokens=9, context_tokens=1))))


def test_an_engine_that_will_not_come_back_has_died() -> None:
    async def work(engine: AwayEngine, line: NearLine, host: FakeHost) -> None:
        with pytest.raises(EngineError, match="died 6 times"):
            await answer(engine, Request("x"))
        assert engine.ended.result().message == "on alpha, the engine died 6 times"
        assert not from_outside(engine)

    with_engine(work, Refusing(fault_of(EngineError("the engine died 6 times"), over=True)))


def test_a_lost_machine_ends_every_stream_and_blames_none() -> None:
    async def work(engine: AwayEngine, line: NearLine, host: FakeHost) -> None:
        asked = [asyncio.create_task(answer(engine, Request(f"slow {number}"))) for number in range(3)]
        while len(host.engine.at_work) < 3:
            await host.engine.changed.wait()
            host.engine.changed.clear()
        line.cut.set_result(Lost("the power is out", for_good=True))
        for each in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(each, EngineDied)
            assert each.from_outside
        assert engine.ended.result().message == "alpha is lost: the power is out"
        status = await engine.status()
        assert (status.state, status.detail) == ("failed", "alpha is lost: the power is out")

    with_engine(work)


def test_a_machine_that_cannot_be_reached_for_a_moment_is_not_lost() -> None:
    async def work(engine: AwayEngine, line: NearLine, host: FakeHost) -> None:
        line.unreachable = True
        with pytest.raises(EngineDied) as caught:
            await answer(engine, Request("river"))
        assert caught.value.from_outside
        assert (await engine.status()).state == "failed"
        assert not engine.ended.done()
        line.unreachable = False
        assert (await answer(engine, Request("river"))).text

    with_engine(work)


def test_a_machine_that_cannot_be_reached_for_long_is_lost() -> None:
    async def work(engine: AwayEngine, line: NearLine, host: FakeHost) -> None:
        line.unreachable = True
        while not engine.ended.done():
            await engine.status()
        assert from_outside(engine)

    with_engine(work, silent_s=0.01)


@pytest.mark.parametrize("cut", [False, True])
def test_closing_ends_the_host_whatever_it_says(cut: bool) -> None:
    async def work(engine: AwayEngine, line: NearLine, host: FakeHost) -> None:
        if cut:
            line.cut.set_result(Lost("the power is out", for_good=True))
        await engine.close()
        await engine.close()
        assert line.ended
        assert host.closed is not cut
        assert not engine.ended.done()

    with_engine(work)


class Native(FakeHost):
    async def start(self) -> Facts:
        can = replace(self.engine.capabilities, max_slots=16, changes_kv_layout=True, changes_threads=True)
        return Facts(self.engine.identity, can, 0.5, Runtime(2, 2))

    async def set_slots(self, slots: int) -> Facts:
        self.engine = type(self.engine)(lanes=slots)
        return await self.start()


def test_only_a_native_engine_can_be_widened() -> None:
    async def run() -> None:
        line = NearLine(Native())
        engine = AwayEngine(line, await line.call("start"), name="alpha")
        assert (engine.capabilities.max_slots, engine.runtime, engine.identity.lanes) == (16, Runtime(2, 2), 4)
        await engine.set_slots(9)
        assert engine.identity.lanes == 9
        status: Status = await engine.status()
        assert status.identity == engine.identity
        other = NearLine(FakeHost())
        fixed = AwayEngine(other, await other.call("start"), name="beta")
        assert (fixed.capabilities.max_slots, fixed.runtime) == (None, None)
        assert not engine.capabilities.changes_threads  # not offered between machines
        with pytest.raises(EngineError, match="does not support"):
            await engine.set_threads(1, 1)

    asyncio.run(run())
