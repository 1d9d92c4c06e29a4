"""The admission gate: interactive requests first, a bounded queue, and no lost place when a request is cancelled."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tokenmill.gateway.backends.admission import AdmissionGate, AdmissionGates
from tokenmill.gateway.http.faults import Busy
from tokenmill.gateway.monitoring.recorder import PriorityClass


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(20):
            await work()

    asyncio.run(limited())


async def turns(times: int = 20) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


class Guests:
    """Requests that stay admitted until they are released."""

    def __init__(self, gate: AdmissionGate) -> None:
        self.gate = gate
        self.entered: list[str] = []
        self.leave: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, name: str, lane: PriorityClass = "interactive") -> None:
        self.leave[name] = asyncio.Event()

        async def visit() -> None:
            async with self.gate.enter(lane):
                self.entered.append(name)
                await self.leave[name].wait()

        self.tasks[name] = asyncio.create_task(visit())
        await turns()

    async def go(self, name: str) -> None:
        self.leave[name].set()
        await self.tasks[name]
        await turns()


def test_order_and_bound() -> None:
    async def work() -> None:
        guests = Guests(AdmissionGate(slots=1, max_streams=1, queue=2))
        await guests.come("a", "batch")
        await guests.come("b", "batch")
        await guests.come("c", "batch")
        await guests.come("i")
        assert guests.entered == ["a"]
        assert (guests.gate.running, guests.gate.waiting("batch"), guests.gate.waiting("interactive")) == (1, 2, 1)
        with pytest.raises(Busy) as caught:
            async with guests.gate.enter("batch"):
                pass
        assert caught.value.code == "queue_full"
        assert caught.value.retry_after_s is not None
        assert caught.value.retry_after_s >= 1
        for name in "aibc":
            await guests.go(name)
        assert guests.entered == ["a", "i", "b", "c"]
        assert guests.gate.running == 0
        assert guests.gate.mean_s is not None

    run(work)


def test_leaving_while_waiting_and_with_the_place_in_hand() -> None:
    async def work() -> None:
        gate = AdmissionGate(slots=1, max_streams=1, queue=5)
        guests = Guests(gate)
        for name in "abc":
            await guests.come(name)
        guests.tasks["b"].cancel()
        await turns()
        assert gate.waiting("interactive") == 1
        guests.leave["a"].set()
        await asyncio.sleep(0)  # a has left, the place is c's, and c does not know yet
        guests.tasks["c"].cancel()
        await turns()
        assert gate.running == 0
        await guests.come("d")
        assert guests.entered[-1] == "d"
        await guests.go("d")
        await asyncio.gather(*guests.tasks.values(), return_exceptions=True)

    run(work)


def test_an_engine_that_orders_by_itself_gets_all_up_to_the_bound() -> None:
    async def work() -> None:
        gates = AdmissionGates(queue=2)
        gate = gates.open("native", slots=2, interactive_first=True)
        guests = Guests(gate)
        for name in "abcd":
            await guests.come(name)
        assert guests.entered == list("abcd")
        assert gate.queued("interactive") == 2
        with pytest.raises(Busy):
            async with gate.enter("interactive"):
                pass
        await guests.come("e", "batch")  # another priority class has a queue of its own
        assert guests.entered[-1] == "e"
        for name in "abcde":
            await guests.go(name)

    run(work)


def test_a_queue_of_none_still_lets_work_be_done() -> None:
    async def work() -> None:
        gate = AdmissionGates(queue=0).open("x", slots=1, interactive_first=False)
        async with gate.enter("interactive"):
            with pytest.raises(Busy):
                async with gate.enter("interactive"):
                    pass
        async with gate.enter("interactive"):
            pass

    run(work)


def test_an_engine_with_an_unknown_number_of_slots() -> None:
    async def work() -> None:
        gate = AdmissionGates(queue=0).open("url", slots=None, interactive_first=False)
        async with gate.enter("interactive"), gate.enter("batch"):
            assert gate.running == 2

    run(work)
