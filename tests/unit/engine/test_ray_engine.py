"""The driver's view of an engine on a Ray node."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from support.fake_engine import FakeEngine
from support.fake_nodes import FakeActor, FakeHandle
from tokenmill.engine.engine import Answer, Capabilities, EngineStatus, Piece, Request, Runtime, answer
from tokenmill.engine.ray.actors import NodeLost
from tokenmill.engine.ray.engine import RayEngine
from tokenmill.errors import EngineDied, EngineError, TooLong

LIMIT_S = 60.0
GONE = NodeLost("the power is out", for_good=True)


def with_engine(
    work: Callable[[RayEngine, FakeHandle, FakeActor], Awaitable[None]], actor: FakeActor | None = None, **more: Any
) -> None:
    async def run() -> None:
        there = actor or FakeActor()
        handle = FakeHandle(there)
        facts = await handle.call("load")
        async with asyncio.timeout(LIMIT_S):
            await work(RayEngine(handle, facts, name="alpha", **more), handle, there)

    asyncio.run(run())


def from_outside(error: EngineError) -> bool | None:
    assert isinstance(error, EngineDied)
    return error.from_outside


def test_an_answer_comes_whole_with_its_tokens_in_one_piece() -> None:
    async def work(engine: RayEngine, handle: FakeHandle, actor: FakeActor) -> None:
        piece, last = [event async for event in engine.stream(Request("river"))]
        assert isinstance(piece, Piece)
        assert isinstance(last, Answer)
        assert piece == Piece(last.text, last.usage.completion_tokens)
        assert last.text == "river: 0 1 2 3"
        assert engine.identity.address == "alpha"
        assert await engine.tokenize("ab") == (97, 98)
        assert (await engine.status()).state == "ready"

    with_engine(work)


def test_leaving_a_stream_cancels_its_call() -> None:
    async def work(engine: RayEngine, handle: FakeHandle, actor: FakeActor) -> None:
        asking = asyncio.create_task(answer(engine, Request("slow")))
        await actor.fake.changed.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert handle.cancelled == ["answer"]

    with_engine(work)


class Refusing(FakeEngine):
    async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        if request.prompt == "x":
            raise TooLong("9 too many", needed_tokens=9, context_tokens=1)
        async for event in super().stream(request):
            yield event


def test_a_refusal_is_raised_here_and_nothing_else_happens() -> None:
    async def work(engine: RayEngine, handle: FakeHandle, actor: FakeActor) -> None:
        with pytest.raises(TooLong) as caught:
            await answer(engine, Request("x"))
        assert (caught.value.needed_tokens, caught.value.context_tokens) == (9, 1)
        assert not engine.ended.done()

    with_engine(work, FakeActor(engine=Refusing()))


def test_an_engine_that_will_not_be_restarted_has_ended() -> None:
    async def work(engine: RayEngine, handle: FakeHandle, actor: FakeActor) -> None:
        actor.fake.ended.set_result(EngineError("the engine died 6 times"))
        error = await asyncio.shield(engine.ended)
        assert error.message == "on alpha, the engine died 6 times"
        assert from_outside(error) is None
        with pytest.raises(EngineDied):
            await answer(engine, Request("x"))

    with_engine(work)


def test_a_lost_node_ends_every_stream_and_blames_none() -> None:
    async def work(engine: RayEngine, handle: FakeHandle, actor: FakeActor) -> None:
        asked = [asyncio.create_task(answer(engine, Request(f"slow {number}"))) for number in range(3)]
        while len(actor.fake.at_work) < 3:
            await actor.fake.changed.wait()
            actor.fake.changed.clear()
        handle.lost.set_result(GONE)
        for each in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(each, EngineDied)
            assert each.from_outside
        assert engine.ended.result().message == "alpha is lost: the power is out"
        status = await engine.status()
        assert (status.state, status.detail) == ("failed", "alpha is lost: the power is out")

    with_engine(work)


def test_a_node_that_is_lost_while_nothing_is_asked_of_it_is_noticed() -> None:
    async def work(engine: RayEngine, handle: FakeHandle, actor: FakeActor) -> None:
        await asyncio.sleep(0)
        handle.lost.set_result(GONE)
        assert from_outside(await asyncio.shield(engine.ended))

    with_engine(work)


def test_a_node_that_cannot_be_reached_for_a_moment_is_not_lost() -> None:
    async def work(engine: RayEngine, handle: FakeHandle, actor: FakeActor) -> None:
        handle.unreachable.set()
        with pytest.raises(EngineDied) as caught:
            await answer(engine, Request("river"))
        assert caught.value.from_outside
        assert (await engine.status()).state == "failed"
        assert not engine.ended.done()
        handle.unreachable.clear()
        assert (await answer(engine, Request("river"))).text

    with_engine(work)


def test_a_node_that_cannot_be_reached_for_long_is_lost() -> None:
    async def work(engine: RayEngine, handle: FakeHandle, actor: FakeActor) -> None:
        handle.unreachable.set()
        while not engine.ended.done():
            await engine.status()
        assert from_outside(engine.ended.result())

    with_engine(work, unreachable_timeout_s=0.01)


@pytest.mark.parametrize("lost", [False, True])
def test_closing_ends_the_actor_whatever_it_says(lost: bool) -> None:
    async def work(engine: RayEngine, handle: FakeHandle, actor: FakeActor) -> None:
        if lost:
            handle.lost.set_result(GONE)
        await engine.close()
        await engine.close()
        assert handle.killed
        assert actor.closed is not lost
        assert not engine.ended.done()

    with_engine(work)


class Native(FakeEngine):
    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, max_slots=16, changes_kv_layout=True, changes_threads=True)

    @property
    def runtime(self) -> Runtime:
        return Runtime(2, 2)

    async def set_slots(self, slots: int) -> None:
        self.slots = slots


def test_slots_can_be_changed_where_the_engine_can() -> None:
    async def run() -> None:
        native = Native()
        handle = FakeHandle(FakeActor(engine=native))
        engine = RayEngine(handle, await handle.call("load"), name="alpha")
        assert (engine.capabilities.max_slots, engine.runtime) == (16, Runtime(2, 2))
        await engine.set_slots(9)
        assert native.slots == 9
        status: EngineStatus = await engine.status()
        assert status.identity == engine.identity
        assert not engine.capabilities.changes_threads  # not offered from another machine
        with pytest.raises(EngineError, match="does not support"):
            await engine.set_threads(1, 1)
        other = FakeHandle(FakeActor())
        fixed = RayEngine(other, await other.call("load"), name="beta")
        assert (fixed.capabilities.max_slots, fixed.runtime) == (None, None)
        with pytest.raises(EngineError, match="does not support"):
            await fixed.set_slots(9)

    asyncio.run(run())
